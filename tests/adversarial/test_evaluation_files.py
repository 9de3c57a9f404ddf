"""The data of an evaluation, and the files of its folder, changed by hand: a value, or one short error."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("rouge_score")

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from cocoa_engine import CocoaError
from cocoa_integrations.evaluation.harness import new_run
from cocoa_integrations.evaluation.judge import factscore_run, judge_run
from cocoa_integrations.evaluation.tasks import TASKS, load_samples
from cocoa_integrations.ray.jobs import _finished
from tests.helpers.eval_data import RUN_ARMS, run_rows, run_settings
from tests.helpers.mutations import broken_json, broken_lines, fuzz, outcome, survives

PIGS = {"question": "Can pigs fly?", "best_answer": "No", "correct_answers": ["No", "Never"]}
RECORDS: dict[str, dict[str, Any]] = {
    "truthfulqa_gen": {**PIGS, "incorrect_answers": ["Yes"]},
    "nq": {"id": "a", "question": "Who?", "ctxs": [{"text": "He."}], "answers": ["he", "him"]},
    "nq_swap": {"question": "Who?", "sub_context": "She.", "sub_answer": ["she"], "org_answer": ["he"]},
    "samsum": {"id": "1", "dialogue": "A: hi\nB: hi", "summary": "They greet."},
    "xsum": {"id": 2, "document": "It rains.", "summary": "Rain."},
    "mbpp": {"task_id": 3, "text": "Add.", "code": "def f(a, b):\n    return a + b", "test_list": ["assert f(1, 2)"]},
    "gsm8k": {"question": "1 + 1?", "answer": "It is 2. #### 2"},
}


@pytest.mark.parametrize("task", RECORDS)
def test_data_of_tasks(task: str, tmp_path: Path) -> None:
    other = {key: f"{value} 1" if isinstance(value, str) else value for key, value in RECORDS[task].items()}
    records = [RECORDS[task], {**other, "id": "other", "task_id": 4}]
    file = tmp_path / f"{task}.jsonl"

    def measured() -> Any:
        """Read the samples, and measure an answer to each, unless that would run the code in it."""
        samples = load_samples(task, file)
        if TASKS[task].runs_code:
            return samples
        return [TASKS[task].measure(sample, "An answer: 3") for sample in samples]

    file.write_bytes(lines_of(records))
    assert len(measured()) == 2
    survives(file, broken_lines(records), measured, lambda values: isinstance(values, list), 15)


ROWS = run_rows({(str(arm), key): f"No, {key}." for arm in RUN_ARMS for key in "01"}, {"0": "Can pigs fly?", "1": "?"})
SETTINGS = {"format": 1, **run_settings("truthfulqa_gen"), "decoding": {"middle_layers": [2, 4], "stop": ["a"]}}
JUDGE = "a judge"
LINES = [
    {"judge": JUDGE, "key": "k", "verdict": True, "reply": "yes", "error": None, "tokens": {"input_tokens": 3}},
    {"judge": JUDGE, "key": "l", "verdict": None, "reply": "?", "error": "no verdict in the reply", "tokens": None},
    {"judge": "another", "key": "k", "verdict": False, "reply": "no", "error": None, "tokens": {}},
]


def judge() -> GenericFakeChatModel:
    return GenericFakeChatModel(messages=iter([AIMessage('{"verdict": "Correct"}'), AIMessage("yes")] * 1000))


def lines_of(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def prepared(folder: Path, task: str, **changed: bytes) -> Path:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    for old in run.iterdir():
        old.unlink()
    files = {
        "settings.json": json.dumps({**SETTINGS, "task": task}).encode(),
        "samples.jsonl": lines_of(ROWS),
        **{name.replace("__", "."): data for name, data in changed.items()},
    }
    for name, data in files.items():
        (run / name).write_bytes(data)
    return run


RUN_FILES: dict[str, tuple[str, Any, bytes, st.SearchStrategy[bytes]]] = {
    "samples__jsonl": ("truthfulqa_gen", judge_run, lines_of(ROWS), broken_lines(ROWS)),
    "judgements__jsonl": ("truthfulqa_gen", judge_run, lines_of(LINES), broken_lines(LINES)),
    "factscore__jsonl": ("samsum", factscore_run, lines_of(LINES), broken_lines(LINES)),
    "settings__json": ("truthfulqa_gen", judge_run, json.dumps(SETTINGS).encode(), broken_json(SETTINGS)),
}


@pytest.mark.parametrize("name", RUN_FILES)
def test_files_of_a_run(name: str, tmp_path: Path) -> None:
    task, measure, good, files = RUN_FILES[name]

    def measured(data: bytes) -> Any:
        run = prepared(tmp_path, task, **{name: data})
        return measure(run, judge(), name=JUDGE, attempts=1, concurrency=1)

    assert len(measured(good)["arms"]) == 2

    @fuzz(20)
    @given(files)
    def check(data: bytes) -> None:
        found = outcome(lambda: measured(data))
        assert isinstance(found, (dict, CocoaError))
        json.dumps(found if isinstance(found, dict) else None, allow_nan=False)
        if name == "settings__json":
            run = prepared(tmp_path, task, settings__json=data)
            with suppress(CocoaError), new_run(run, {**SETTINGS, "format": 2}):
                pass

    check()


def test_finished_rows_of_a_cluster(tmp_path: Path) -> None:
    settings = {"model": "tiny", "rows": "0" * 64}
    rows = [{"number": 0, "line": "{}", "failed": False}, {"number": 1, "line": '{"error": "a"}', "failed": True}]
    file = tmp_path / "out.jsonl.partial"

    file.write_bytes(lines_of([settings, *rows]))
    assert _finished(file, settings) == {0: ("{}", False), 1: ('{"error": "a"}', True)}
    bad, worst = broken_lines([settings, *rows]), [lines_of([settings, {**rows[0], "number": float("inf")}])]
    survives(file, bad, lambda: _finished(file, settings), lambda found: isinstance(found, dict), 60, worst)
