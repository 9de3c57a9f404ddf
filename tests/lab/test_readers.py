"""Readers of labelled sets: what they make of a file, and what they say of a bad one."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from cocoa_engine import DataError
from cocoa_engine.cli.options import read_source
from cocoa_engine.lab import data
from cocoa_engine.lab.data import FORMATS, LabelledText, Question, read_labelled, read_questions, sample
from tests.helpers.labelled_files import DIASUMFACT, FAITHBENCH, MUSHROOM, OWN, TRUTHFULQA, XSUM, json_lines

HEADER, ROW = TRUTHFULQA.splitlines(keepends=True)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def parts(record: LabelledText) -> list[tuple[str, str, bool]]:
    return [(record.text[span.start : span.end], span.kind, span.hallucinated) for span in record.spans]


def test_truthfulqa(tmp_path: Path) -> None:
    file = write(tmp_path / "TruthfulQA.csv", "\ufeff" + TRUTHFULQA)
    records = read_labelled(file)
    labels = {record.text: record.label for record in records}
    assert labels == {"The Wrights": False, "Orville": False, "Lindbergh": True, "Earhart": True}
    assert list(labels) == ["The Wrights", "Orville", "Lindbergh", "Earhart"]
    assert len({record.id for record in records}) == 4
    assert {record.prompt for record in records} == {"Question: Who flew first?\nAnswer:"}
    assert all(record.spans is None for record in records)
    assert read_labelled(tmp_path) == read_labelled(tmp_path, "truthfulqa") == records
    spaced = write(tmp_path / "b.csv", f"\n\n{HEADER}\n{ROW}\n")  # empty lines are skipped
    assert read_labelled(spaced) == records


def test_mushroom_file_and_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "val" / "mushroom.jsonl", json.dumps(MUSHROOM) + "\n\n")
    for where in (path, path.parent):
        (record,) = read_labelled(where)
        assert parts(record) == [("silver", "hallucinated", True), ("2008", "hallucinated", True)]
        assert record.label
        assert record.question == MUSHROOM["model_input"]


def test_faithbench(tmp_path: Path) -> None:
    (record,) = read_labelled(write(tmp_path / "batch_1.json", json.dumps(FAITHBENCH)).parent)
    assert parts(record) == [("2016", "Unwanted", True), ("a good one", "Benign", False)]
    assert record.id == "batch_1/3"
    assert record.prompt == "Passage: A film of 2014.\n\nSummary:"
    assert "A film of 2014." in record.question


def test_diasumfact(tmp_path: Path) -> None:
    (record,) = read_labelled(write(tmp_path / "annotations.json", json.dumps(DIASUMFACT)))
    assert parts(record) == [
        ("it was more expensive than a remote.", "EntE", True),  # the span is not found: the sentence counts
        ("more expensive", "PredE", True),
        ("therefore", "LinkE", True),  # of a sentence that the summary cuts short
    ]
    assert record.label
    assert "What did Industrial Designer propose?" in record.prompt


def dialogue(text: str, sentences: list[Any]) -> str:
    summary = {"model_prediction": text, "sentence_annotations": sentences}
    return json.dumps({"d": {"utterances": ["u"], "query": "", "annotations": {"m": summary}}})


@pytest.mark.slow
@pytest.mark.timeout(20)
def test_diasumfact_with_a_long_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read once, and errors are searched in sentences of so many characters."""
    sentences = [{"sentence": " a.", "annotation": []}] * 50_000 + [{"sentence": "a. b c", "annotation": []}]
    path = write(tmp_path / "a.json", dialogue("a. " * 50_001 + "b \n", sentences))
    assert parts(*FORMATS["diasumfact"](path)) == []
    errors = [{"error_class": "EntE", "error_span": f"X{number}"} for number in range(20)]
    path = write(tmp_path / "a.json", dialogue("a" * 100, [{"sentence": "a" * 100, "annotation": errors}]))
    assert len(parts(*FORMATS["diasumfact"](path))) == 1
    monkeypatch.setattr(data, "SEARCH_LIMIT", 1999)
    with pytest.raises(DataError, match="sentence 0 is too long"):
        read_labelled(path)


@pytest.mark.parametrize("whole", [True, False])
def test_xsum_token(tmp_path: Path, whole: bool) -> None:
    for name, content in XSUM.items():
        write(tmp_path / "BERTS2S" / f"BERTS2S.{name}", content)
    first, second = read_labelled(tmp_path if whole else tmp_path / "BERTS2S")
    assert [text for text, _, _ in parts(first)] == ["rory mcilroy", "take"]
    assert (first.label, second.label) == (True, False)
    assert second.text == "bahrain's main party has said"
    assert first.id == "BERTS2S/34687720"
    folder = tmp_path / "BERTS2S"
    write(folder / "BERTS2S.label", "1 1 0\n0 0 0 0 0\n")
    with pytest.raises(DataError, match="line 1: 4 words need as many labels"):
        read_labelled(folder)
    write(folder / "BERTS2S.label", "1 1 0 1\n")
    with pytest.raises(DataError, match="different numbers of lines"):
        read_labelled(folder)
    (folder / "BERTS2S.docid").unlink()
    with pytest.raises(DataError, match=r"BERTS2S\.docid cannot be read"):
        read_labelled(folder)


def test_ones_own(tmp_path: Path) -> None:
    one, two, three = read_labelled(write(tmp_path / "a.jsonl", json_lines(OWN)))
    assert parts(one) == [("1865", "hallucinated", True)]
    assert (one.label, two.label, three.label) == (True, False, False)
    assert one.group == two.group != three.group == "g"
    assert three.spans is None
    # one class is enough where labels do not count, and a whole surrogate pair is a character
    path = write(tmp_path / "a.jsonl", own(label=False, text="a \U0001f600 b"))
    records = FORMATS["jsonl"](path)
    assert [(record.label, record.text) for record in records] == [(False, "good"), (False, "a \U0001f600 b")]


def own(**changes: Any) -> str:
    first = {"id": "1", "prompt": "p", "text": "good", "label": False}
    second = {"id": "2", "prompt": "p", "text": "bad", "label": True, **changes}
    return json_lines([{k: v for k, v in row.items() if v is not None} for row in (first, second)])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", HEADER.replace("Best Answer,", "") + "a,b,c,d,e,f\n", "line 2: Best Answer: Field required"),
        ("a.csv", HEADER + ROW.replace("Lindbergh; Earhart", ";"), "line 2: Incorrect Answers: "),
        ("a.csv", HEADER + "a,b\n", "shorter than the header"),
        ("a.csv", HEADER + ROW + ROW[:-1] + ",y,z\n", "line 3: the row is longer than the header"),
        ("a.csv", HEADER + ROW + ROW.replace("Orville", "O" * 140_000), "line 3 is not valid CSV: .* field limit"),
        ("a.csv", "a" * 140_000, "line 1 is not valid CSV: .* field limit"),
        ("a.csv", HEADER, "has no answers"),
        ("a.csv", TRUTHFULQA.encode("utf-16"), "not UTF-8"),
        ("a.csv", TRUTHFULQA.replace("flew", "fl\xe9w").encode("latin-1"), "not UTF-8 .byte 102 is 0xe9"),
        ("a.jsonl", own(id="1"), "the id '1' is repeated"),
        ("a.jsonl", own(text="  "), "the answer of '2' is empty"),
        ("a.jsonl", own(prompt=""), "the prompt of '2' is empty"),
        ("a.jsonl", own(text="good"), "line 2: the same answer to the same prompt has the other label"),
        ("a.jsonl", own(text="a \ud83d b"), r"line 2 cannot be read as JSON: .*\\ud83d"),
        ("a.jsonl", own() + "[" * 100_000, "line 3 cannot be read as JSON: .*recursion"),
        ("a.jsonl", own(id=7).replace("7", "7" * 5000), "line 2 cannot be read as JSON: Exceeds the limit"),
        ("a.jsonl", own(label=False), "every label is 'supported'"),
        ("a.jsonl", own().splitlines()[1], "every label is 'hallucinated'"),
        ("a.jsonl", own(text=None), "line 2: text: Field required"),
        ("a.jsonl", own(label="yes"), "line 2: label: .* boolean"),
        ("a.jsonl", own(label=None), "line 2: the answer has neither a label nor spans"),
        ("a.jsonl", own(label=None, spans=[[1, 9]]), "1..9 of '2' is empty or lies outside"),
        ("a.jsonl", own(label=None, spans=[[2, 2]]), "2..2 of '2' is empty"),
        ("a.jsonl", own(label=None, spans=[1, 2]), "spans.0: "),
        ("a.jsonl", own() + "{", "line 3 cannot be read as JSON"),
        ("a.jsonl", "[1]\n", "expected an object, found list"),
        ("a.jsonl", json.dumps({**MUSHROOM, "hard_labels": [[1]]}), "hard_labels.0.1: Field required"),
        ("batch_1.json", json.dumps(FAITHBENCH).replace('"A film of 2016, a good one."', "1"), "samples.0.summary: "),
        ("a.json", json.dumps(DIASUMFACT).replace("it was fifty euros.", "it was", 1), "sentence 0 is not in"),
        ("a.json", json.dumps(DIASUMFACT).replace("error_span", "span"), "sentence .: an error has no error_span"),
        ("a.txt", "", "format of .* is not known; name one of truthfulqa"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_labelled(write(tmp_path / name, content))


def test_bad_paths_and_formats(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="no file or folder"):
        read_labelled(tmp_path / "nothing.csv")
    with pytest.raises(DataError, match="not known"):
        read_labelled(tmp_path)
    with pytest.raises(DataError, match="did you mean 'truthfulqa'"):
        read_labelled(write(tmp_path / "a.csv", TRUTHFULQA), "truthfulQA")
    for format, file in (("truthfulqa", "TruthfulQA.csv"), ("diasumfact", "annotations.json")):
        with pytest.raises(DataError, match=f"{file} cannot be read"):
            read_labelled(tmp_path / "folder", format)


def test_a_sample_keeps_the_answers_to_a_prompt_together() -> None:
    records = [LabelledText(f"{n}", "p", "t", "q", bool(n % 2), None, group=str(n % 7)) for n in range(70)]
    some = sample(records, 3, seed=1)
    assert len(some) == 30
    assert len({record.group for record in some}) == 3
    assert [record.group for record in some] == sorted((record.group for record in some), key="0123456".index)
    assert some == sample(records, 3, seed=1) != sample(records, 3, seed=2)
    assert len(sample(records)) == 70


def test_a_passage_has_no_byte_order_mark(tmp_path: Path) -> None:
    plain, compressed = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    plain.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    compressed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_source(plain) == read_source(compressed) == "one\ntwo\nthree"


ROWS = [
    {"question": "Who wrote Dune?", "context": "Dune is a novel by Frank Herbert.", "answers": ["Frank Herbert"]},
    {"question": "What is 2 + 2?", "answers": ["4", "four"], "group": "sums"},
]


def test_json_lines(tmp_path: Path) -> None:
    dune, total = read_questions(write(tmp_path / "q.jsonl", json_lines([*ROWS, ROWS[0]])))
    assert (dune.group, total.group) == ("Who wrote Dune?", "sums")
    assert dune.request.startswith("Passage: Dune is a novel")
    assert dune.request.endswith("Question: Who wrote Dune?")
    assert "Passage" not in total.request
    assert sample([dune, total], 1) in ([dune], [total])


def test_the_gold_passage_of_nq_is_the_context(tmp_path: Path) -> None:
    passages = [{"title": "Dune", "text": "By Frank Herbert."}, {"text": "By Bo Ek."}]
    rows = [{"question": "who wrote dune", "answers": ["Frank Herbert"], "ctxs": passages}]
    unanswered = {**rows[0], "question": "who sang it", "answers": []}
    one, other = read_questions(write(tmp_path / "q.jsonl", json_lines([*rows, unanswered])))
    assert one.context == other.context == "By Frank Herbert."
    (none,) = read_questions(write(tmp_path / "q.jsonl", json_lines([{**rows[0], "ctxs": []}])))
    assert none.context is None


def test_nq_swap_as_published(tmp_path: Path) -> None:
    """Each question with its own passage, and once with a swapped answer."""
    row = {"question": "who wrote dune", "org_context": "By Frank Herbert.", "org_answer": ["Frank Herbert"]}
    rows = [{**row, "sub_context": f"By {name}.", "sub_answer": [name]} for name in ("Ann Lee", "Bo Ek")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dev.parquet")
    own, swapped = read_questions(tmp_path / "dev.parquet")
    assert (own.context, own.answers) == ("By Frank Herbert.", ("Frank Herbert",))
    assert (swapped.context, swapped.answers) == ("By Ann Lee.", ("Ann Lee",))
    assert own.group == swapped.group


def test_an_answer_is_right_if_it_holds_a_known_one() -> None:
    question = Question("Who wrote Dune?", None, ("Frank Herbert", "F. H."), "")
    right = ["It was Frank Herbert.", "frank  HERBERT", "Frank Herberts", "Herbert", ""]
    assert [question.is_right(answer) for answer in right] == [True, True, False, False, False]
    unanswered = replace(question, context="By an unknown author.", answers=())
    answers = ["The passage does not say.", "Frank Herbert", ""]
    assert [unanswered.is_right(answer) for answer in answers] == [True, False, False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, "has no questions"),
        ({"question": "Who?"}, "answers: Field required"),
        ({"question": "Who?", "answers": []}, "Only a question with a context may have no answers"),
        ({"question": "Who?", "answers": [1]}, "answers.0: .* valid string"),
        ({"question": "Who?", "answers": ["the"]}, "none of its answers contains a word"),
        ({"question": " ", "answers": ["a b"]}, "the question is empty"),
        ({"question": "Who?", "answers": ["x"], "context": 3}, "context: .* valid string"),
        ({"question": "Who?", "answers": ["x"], "ctxs": [{}]}, r"ctxs\.0\.text: Field"),
    ],
)
def test_what_is_no_question(row: dict[str, object] | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_questions(write(tmp_path / "q.jsonl", json_lines([row] if row else [])))
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_questions(write(tmp_path / "q.parquet", json_lines(ROWS)))
