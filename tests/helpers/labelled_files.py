"""A small file of each format of labelled data. Those of DiaSumFact and XSum are abridged."""

import json
from typing import Any

TRUTHFULQA = (
    "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\n"
    'Adversarial,History,Who flew first?,The Wrights,"The Wrights; Orville; ",Lindbergh; Earhart,x\n'
)


def _sentence(text: str, **errors: str) -> dict[str, Any]:
    """A sentence with the kinds of its errors and the text of each."""
    annotation = [{"error_class": kind.replace("_", " "), "error_span": span} for kind, span in errors.items()]
    return {"sentence": text, "annotation": annotation}


SENTENCES = [
    _sentence("it was fifty euros.", No_Error=""),
    _sentence("it was more expensive than a remote.", PredE="more expensive", EntE="not in it"),
    _sentence("therefore it was cheap.", LinkE="therefore"),
]
PREDICTION = "it was fifty euros. it was more expensive than a remote. therefore it"
DIASUMFACT: dict[str, Any] = {
    "1-5": {
        "utterances": ["industrial designer: M about fifty Euros .", "user interface: yeah ."],
        "query": "What did Industrial Designer propose?",
        "annotations": {"bart": {"model_prediction": PREDICTION, "sentence_annotations": SENTENCES}},
    }
}

# The first lines of BERTS2S.
XSUM = {
    "docid": "34687720\n21267591\n",
    "source": "France's Dubuisson carded a 67.\nSheikh Ali Salman told the BBC.\n",
    "target": "rory mcilroy will take\nbahrain\\'s main party has said\n",
    "label": "1 1 0 1\n0 0 0 0 0\n",
}

MUSHROOM: dict[str, Any] = {
    "id": "val-en-1",
    "model_input": "What did Petra van Staveren win a gold medal for?",
    "model_output_text": "She won silver in 2008.",
    "hard_labels": [[18, 22], [8, 14]],
}

FAITHBENCH: dict[str, Any] = {
    "samples": [
        {
            "sample_id": 3,
            "source": "A film of 2014.",
            "summary": "A film of 2016, a good one.",
            "annotations": [
                {"label": ["Unwanted", "Unwanted.Intrinsic"], "summary_start": 10, "summary_end": 14},
                {"label": ["Benign"], "summary_start": 16, "summary_end": 26},
            ],
        }
    ]
}

OWN: list[dict[str, Any]] = [
    {"id": 1, "prompt": "Who?", "text": "Herbert, 1865.", "spans": [[9, 13]]},
    {"id": "2", "prompt": "Who?", "text": "Herbert.", "spans": []},
    {"id": "3", "prompt": "When?", "text": "1965.", "label": False, "group": "g"},
]


def json_lines(rows: list[Any]) -> str:
    """Rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)
