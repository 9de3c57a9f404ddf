"""Readers of labelled sets: what they make of a file, and what they say of a bad one."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cocoa_engine import DataError
from cocoa_engine.cli.labelled import read_documents
from cocoa_engine.cli.prompting import read_sources
from cocoa_engine.lab import data
from cocoa_engine.lab.data import LabelledText, _errors, read_labelled, sample

HEADER = "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\n"
ROW = 'Adversarial,History,Who flew first?,The Wrights,"The Wrights; Orville; ",Lindbergh; Earhart,x\n'

# An abridged sample of DiaSumFact (MIT licence).
DIALOGUE: dict[str, Any] = {
    "1-5": {
        "utterances": ["industrial designer: M about fifty Euros .", "user interface: yeah ."],
        "query": "What did Industrial Designer propose?",
        "annotations": {
            "bart": {
                "model_prediction": "it was fifty euros. it was more expensive than a remote. therefore it",
                "sentence_annotations": [
                    {
                        "sentence": "it was fifty euros.",
                        "annotation": [{"error_class": "No Error", "error_span": ""}],
                    },
                    {
                        "sentence": "it was more expensive than a remote.",
                        "annotation": [
                            {"error_class": "PredE", "error_span": "more expensive"},
                            {"error_class": "EntE", "error_span": "not in it"},
                        ],
                    },
                    {
                        "sentence": "therefore it was cheap.",
                        "annotation": [{"error_class": "LinkE", "error_span": "therefore"}],
                    },
                ],
            }
        },
    }
}

# The first line of xsum_token's BERTS2S, shortened (MIT licence).
XSUM = {
    "docid": "34687720\n21267591\n",
    "source": "France's Dubuisson carded a 67.\nSheikh Ali Salman told the BBC.\n",
    "target": "rory mcilroy will take\nbahrain\\'s main party has said\n",
    "label": "1 1 0 1\n0 0 0 0 0\n",
}

MUSHROOM = {
    "id": "val-en-1",
    "model_input": "What did Petra van Staveren win a gold medal for?",
    "model_output_text": "She won silver in 2008.",
    "hard_labels": [[18, 22], [8, 14]],
}

SAMPLE = {
    "sample_id": 3,
    "source": "A film of 2014.",
    "summary": "A film of 2016, a good one.",
    "annotations": [
        {"label": ["Unwanted", "Unwanted.Intrinsic"], "summary_start": 10, "summary_end": 14},
        {"label": ["Benign"], "summary_start": 16, "summary_end": 26},
    ],
}


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def parts(record: LabelledText) -> list[tuple[str, str, bool]]:
    assert record.spans is not None
    return [(record.text[span.start : span.end], span.kind, span.hallucinated) for span in record.spans]


def test_truthfulqa(tmp_path: Path) -> None:
    records = read_labelled(write(tmp_path / "a.csv", "\ufeff" + HEADER + ROW))
    assert [(record.text, record.label) for record in records] == [
        ("The Wrights", False),
        ("Orville", False),
        ("Lindbergh", True),
        ("Earhart", True),
    ]
    assert len({record.id for record in records}) == 4
    assert {record.prompt for record in records} == {"Question: Who flew first?\nAnswer:"}
    assert all(record.spans is None for record in records)


def test_truthfulqa_in_a_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "TruthfulQA.csv", HEADER + ROW)
    assert read_labelled(tmp_path) == read_labelled(tmp_path, "truthfulqa") == read_labelled(file)


def test_mushroom_file_and_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "val" / "mushroom.jsonl", json.dumps(MUSHROOM) + "\n\n")
    for where in (path, path.parent):
        (record,) = read_labelled(where)
        assert parts(record) == [("silver", "hallucinated", True), ("2008", "hallucinated", True)]
        assert record.label
        assert record.question == MUSHROOM["model_input"]


def test_faithbench(tmp_path: Path) -> None:
    (record,) = read_labelled(write(tmp_path / "batch_1.json", json.dumps({"samples": [SAMPLE]})).parent)
    assert parts(record) == [("2016", "Unwanted", True), ("a good one", "Benign", False)]
    assert record.id == "batch_1/3"
    assert "A film of 2014." in record.prompt
    bare = record.without_source()
    assert bare.prompt == "Passage: \n\nSummary:"
    assert "A film of 2014." in record.question
    assert "A film of 2014." not in bare.question
    assert (bare.text, bare.spans, bare.id) == (record.text, record.spans, record.id)


def test_diasumfact(tmp_path: Path) -> None:
    (record,) = read_labelled(write(tmp_path / "annotations.json", json.dumps(DIALOGUE)))
    assert parts(record) == [
        ("it was more expensive than a remote.", "EntE", True),  # the span is not found: the sentence counts
        ("more expensive", "PredE", True),
        ("therefore", "LinkE", True),  # of a sentence that the summary cuts short
    ]
    assert record.label
    assert "What did Industrial Designer propose?" in record.prompt
    assert record.without_source().prompt == record.prompt[record.prompt.index("\n\n") :]


def test_diasumfact_reads_a_long_summary_once() -> None:
    read: list[str] = []

    class Summary(str):
        def __getitem__(self, key: Any) -> str:
            read.append(part := super().__getitem__(key))
            return part

    count = 2000
    sentences = [{"sentence": " a.", "annotation": []}] * count + [{"sentence": "a. b c", "annotation": []}]
    assert _errors(Summary("a. " * (count + 1) + "b \n"), sentences, "file") == []
    assert sum(map(len, read)) < 10 * count


def test_diasumfact_with_too_many_errors_in_a_long_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [{"error_class": "EntE", "error_span": f"X{number}"} for number in range(20)]
    sentences = [{"sentence": "a" * 100, "annotation": errors}]
    assert len(_errors("a" * 100, sentences, "file")) == 1
    monkeypatch.setattr(data, "SEARCH_LIMIT", 1999)
    with pytest.raises(DataError, match=r"^file, sentence 0 is too long for its number of errors\.$"):
        _errors("a" * 100, sentences, "file")


@pytest.mark.parametrize("whole", [True, False])
def test_xsum_token(tmp_path: Path, whole: bool) -> None:
    for name, content in XSUM.items():
        write(tmp_path / "BERTS2S" / f"BERTS2S.{name}", content)
    first, second = read_labelled(tmp_path if whole else tmp_path / "BERTS2S")
    assert [text for text, _, _ in parts(first)] == ["rory mcilroy", "take"]
    assert (first.label, second.label) == (True, False)
    assert second.text == "bahrain's main party has said"
    assert first.id == "BERTS2S/34687720"


def test_ones_own(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "prompt": "Who?", "text": "Herbert, 1865.", "spans": [[9, 13]]},
        {"id": "2", "prompt": "Who?", "text": "Herbert.", "spans": [], "source": "Who"},
        {"id": "3", "prompt": "When?", "text": "1965.", "label": False, "group": "g"},
    ]
    one, two, three = read_labelled(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert parts(one) == [("1865", "hallucinated", True)]
    assert (one.label, two.label, three.label) == (True, False, False)
    assert one.group == two.group != three.group == "g"
    assert three.spans is None
    assert (one.source, two.without_source().prompt) == (None, "?")


def own(**changes: Any) -> str:
    first = {"id": "1", "prompt": "p", "text": "good", "label": False}
    second = {"id": "2", "prompt": "p", "text": "bad", "label": True, **changes}
    return "\n".join(json.dumps({k: v for k, v in row.items() if v is not None}) for row in (first, second))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", HEADER.replace("Best Answer,", "") + "a,b,c,d,e,f\n", "lacks the column Best Answer"),
        ("a.csv", HEADER.replace("Question", "Q").replace("Correct Answers,Inc", "C,Inc"), "columns Question, Correct"),
        ("a.csv", HEADER + ROW.replace("Lindbergh; Earhart", ";"), "line 2: the column 'Incorrect Answers' is empty"),
        ("a.csv", HEADER + ROW.replace("The Wrights,", ",", 1), "'Best Answer' is empty"),
        ("a.csv", HEADER + "a,b\n", "shorter than the header"),
        ("a.csv", HEADER + ROW + ROW[:-1] + ",y,z\n", "line 3: the row is longer than the header: 9 fields, not 7"),
        ("a.csv", HEADER + ROW + ROW.replace("Orville", "O" * 140_000), "line 3 is not valid CSV: .* field limit"),
        ("a.csv", "a" * 140_000, "line 1 is not valid CSV: .* field limit"),
        ("a.csv", HEADER, "has no answers"),
        ("a.csv", (HEADER + ROW).encode("utf-16"), "not UTF-8"),
        ("a.csv", (HEADER + ROW.replace("flew", "fl\xe9w")).encode("latin-1"), "not UTF-8 .byte 102 is 0xe9"),
        ("a.jsonl", own(id="1"), "the id '1' is repeated"),
        ("a.jsonl", own(text="  "), "the answer of '2' is empty"),
        ("a.jsonl", own(prompt=""), "the prompt of '2' is empty"),
        ("a.jsonl", own(text="good"), "line 2: the same answer to the same prompt has the other label"),
        ("a.jsonl", own(text="a \ud83d b"), r"line 2: a string contains '\\ud83d', half of a surrogate pair"),
        ("a.jsonl", own() + "\n" + "[" * 100_000, "line 3: the JSON is nested too deeply"),
        ("a.jsonl", own(label=False), "every label is 'supported'"),
        ("a.jsonl", own().splitlines()[1], "every label is 'hallucinated'"),
        ("a.jsonl", own(text=None), "line 2: the field 'text' is missing; there are id, prompt"),
        ("a.jsonl", own(label="yes"), "'label' must be bool, not str"),
        ("a.jsonl", own(label=None, spans=[[1, 9]]), "1..9 of '2' is empty or lies outside"),
        ("a.jsonl", own(label=None, spans=[[2, 2]]), "2..2 of '2' is empty"),
        ("a.jsonl", own(label=None, spans=[1, 2]), r"must be \[start, end\]"),
        ("a.jsonl", own() + "\n{", "line 3 is not JSON"),
        ("a.jsonl", own(source="P"), "the source of '2' is not in its prompt"),
        ("a.jsonl", "[1]\n", "expected a JSON object, found list"),
        ("a.jsonl", json.dumps({**MUSHROOM, "hard_labels": [[1]]}), r"must be \[start, end\], not \[1\]"),
        ("batch_1.json", json.dumps({"samples": [{**SAMPLE, "summary": 1}]}), "'summary' must be str"),
        (
            "a.json",
            json.dumps(DIALOGUE).replace("it was fifty euros.", "it was", 1),
            "sentence 0 is not in the summary",
        ),
        ("a.txt", "", "format of .* is not known; name one of truthfulqa"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_labelled(write(tmp_path / name, content))


@pytest.mark.skipif(not hasattr(sys, "get_int_max_str_digits"), reason="this Python reads a number of any length")
def test_a_number_of_too_many_digits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2 cannot be read as JSON: Exceeds the limit"):
        read_labelled(write(tmp_path / "a.jsonl", own(id=7).replace("7", "7" * 5000)))


def test_one_class_is_enough_where_labels_do_not_count(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", own(label=False))
    assert [record.label for record in read_labelled(path, both_classes=False)] == [False, False]


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    _, bad = read_labelled(write(tmp_path / "a.jsonl", own(text="a \U0001f600 b")))
    assert bad.text == "a \U0001f600 b"


def test_bad_paths_and_formats(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        read_labelled(tmp_path / "nothing.csv")
    with pytest.raises(DataError, match="not known"):
        read_labelled(tmp_path)
    with pytest.raises(DataError, match="did you mean 'truthfulqa'"):
        read_labelled(write(tmp_path / "a.csv", HEADER + ROW), "truthfulQA")
    write(tmp_path / "S" / "S.label", "1\n")
    with pytest.raises(DataError, match=r"S\.docid cannot be read"):
        read_labelled(tmp_path)


def test_labels_and_words_must_match(tmp_path: Path) -> None:
    for name, content in {**XSUM, "label": "1 1 0\n0 0 0 0 0\n"}.items():
        write(tmp_path / f"B.{name}", content)
    with pytest.raises(DataError, match="line 1: 4 words need as many labels 0 or 1, found 3"):
        read_labelled(tmp_path)
    write(tmp_path / "B.label", "1 1 0 1\n")
    with pytest.raises(DataError, match="different numbers of lines"):
        read_labelled(tmp_path)


def test_a_sample_keeps_the_answers_to_a_prompt_together() -> None:
    records = [LabelledText(f"{n}", "p", "t", "q", bool(n % 2), None, group=str(n % 7)) for n in range(70)]
    some = sample(records, 3, seed=1)
    assert len(some) == 30
    assert len({record.group for record in some}) == 3
    assert [record.group for record in some] == sorted((record.group for record in some), key="0123456".index)
    assert some == sample(records, 3, seed=1) != sample(records, 3, seed=2)
    assert len(sample(records)) == 70


def test_documents_and_passages_have_no_byte_order_mark(tmp_path: Path) -> None:
    plain, compressed = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    plain.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    compressed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_sources([plain, compressed]) == ["one\ntwo\nthree"] * 2
    assert read_documents(plain) == read_documents(compressed) == ["one\ntwo\nthree\n"]
