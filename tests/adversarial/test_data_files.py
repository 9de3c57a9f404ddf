"""Any bytes in a data file, or in the folder of an evaluation, end in a value or in one short error of the package."""

import gzip
import io
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from pyarrow import parquet

from cocoa_engine import CocoaConfig, CocoaEngine, CocoaError, ConfigError, DataError
from cocoa_engine.cli.score import score_rows
from cocoa_engine.lab.cache import AnswerCache, CacheFolder
from cocoa_engine.lab.data import read_labelled, read_questions
from cocoa_engine.lab.files import read_document
from cocoa_engine.lab.stopping import read_own_prompts
from cocoa_integrations.evaluation.harness import new_run
from cocoa_integrations.evaluation.judge import factscore_run, judge_run
from cocoa_integrations.evaluation.tasks import TASKS, load_samples
from cocoa_integrations.ray.jobs import _finished
from tests.helpers.eval_data import RUN_ARMS, run_rows, run_settings
from tests.helpers.labelled_files import DIASUMFACT, FAITHBENCH, MUSHROOM, OWN, TRUTHFULQA, XSUM, json_lines
from tests.helpers.mutations import broken, broken_json, broken_lines, fuzz, outcome, survives
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

QUESTIONS = [
    {"question": "Who wrote Dune?", "context": "Dune is by Frank Herbert.", "answers": ["Frank Herbert"]},
    {"question": "Why?", "ctxs": [{"text": "Because."}], "answers": ["because", "so"], "group": "w"},
]
PROMPTS = [
    {"prompt": "Write a haiku."},
    {"question": "Who?", "context": "He.", "answer": "he"},
    {
        "text": "Frank.",
        "spans": [{"text": "Frank.", "risk": 0.4, "risk_source": "raw"}, {"risk": None, "flagged": False}],
        "answer_risk": 0.3,
        "references": ["Frank"],
    },
]


def is_list(value: Any) -> bool:
    return isinstance(value, list)


LABELLED: dict[str, tuple[str, bytes, st.SearchStrategy[bytes]]] = {
    "truthfulqa": ("a.csv", TRUTHFULQA.encode(), broken(TRUTHFULQA.encode())),
    "diasumfact": ("a.json", json.dumps(DIASUMFACT).encode(), broken_json(DIASUMFACT)),
    "faithbench": ("a.json", json.dumps(FAITHBENCH).encode(), broken_json(FAITHBENCH)),
    "mushroom": ("a.jsonl", json_lines([MUSHROOM]).encode(), broken_lines([MUSHROOM])),
    "jsonl": ("a.jsonl", json_lines(OWN).encode(), broken_lines(OWN)),
}
COMPRESSED = gzip.compress(json_lines(OWN).encode())
FILES: dict[str, tuple[Callable[[Path], Any], str, bytes, st.SearchStrategy[bytes]]] = {
    **{
        f"{name}, {'named' if format else 'detected'}": (partial(read_labelled, format=format), *files)
        for name, files in LABELLED.items()
        for format in (name, None)
    },
    "compressed": (partial(read_labelled, format="jsonl"), "a.jsonl.gz", COMPRESSED, broken(COMPRESSED)),
    "questions": (read_questions, "a.jsonl", json_lines(QUESTIONS).encode(), broken_lines(QUESTIONS)),
    "prompts": (read_own_prompts, "a.jsonl", json_lines(PROMPTS).encode(), broken_lines(PROMPTS)),
    "lines": (read_own_prompts, "a.txt", b"One\nTwo\n", broken(b"One\nTwo\n")),
    "documents": (lambda path: [read_document(path)], "a.txt", b"A text.", broken(b"A text.")),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_data(name: str, tmp_path: Path) -> None:
    read, file, good, files = FILES[name]
    (tmp_path / file).write_bytes(good)
    survives(tmp_path / file, files, lambda: read(tmp_path / file), is_list, refusal=DataError)


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_is_does_not_depend_on_case_or_compression(name: str, tmp_path: Path) -> None:
    read, file, good, _ = FILES[name]
    (plain := tmp_path / file).write_bytes(good)
    stem, suffix = file.split(".", 1)
    (upper := tmp_path / f"{stem}.{suffix.upper()}").write_bytes(good)
    (packed := tmp_path / f"{file}.GZ").write_bytes(gzip.compress(good))
    for other in (upper,) if suffix.endswith("gz") else (upper, packed):
        assert len(read(other)) == len(read(plain))


@pytest.mark.parametrize("part", XSUM)
def test_labels_of_words(part: str, tmp_path: Path) -> None:
    for name, text in XSUM.items():
        (tmp_path / f"s.{name}").write_text(text)
    bad = broken(XSUM[part].encode())
    survives(tmp_path / f"s.{part}", bad, lambda: read_labelled(tmp_path), is_list, 10, refusal=DataError)


def test_parquet(tmp_path: Path) -> None:
    row = {"question": "Who?", "org_context": "He.", "org_answer": ["he"], "sub_context": "She.", "sub_answer": ["she"]}
    file, empty = tmp_path / "a.parquet", io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    assert len(read_questions(file)) == 2
    parquet.ParquetWriter(empty, pyarrow.schema([("question", pyarrow.string())])).close()
    bad, worst = broken(file.read_bytes()), [empty.getvalue()]
    survives(file, bad, lambda: read_questions(file), is_list, worst=worst, refusal=DataError)


def test_rows_to_score(tmp_path: Path) -> None:
    """A row that cannot be scored gets an error, and the others their risk."""
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    rows = [{"prompt": "The source. Why?", "text": "So it is.", "source": "The source."}, {"prompt": "a", "text": "b"}]
    file, out = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"

    def scored() -> list[Any]:
        score_rows(engine, file, out, CocoaConfig())
        return [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]]

    file.write_text(json_lines(rows))
    assert all("risk" in row for row in scored())
    each_has_one = lambda scores: all(("risk" in row) != ("error" in row) for row in scores)  # noqa: E731
    survives(file, broken_lines(rows), scored, each_has_one, 15, refusal=DataError)


@pytest.mark.parametrize("required", [True, False])
def test_caches_of_answers(tmp_path: Path, required: bool) -> None:
    """What is found is what was kept. A broken line ends in one error, or is measured again."""
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer(), model_name="tiny")
    kept = {"one": {"value": 1.5, "text": "ä"}, "two": {"value": None, "ends": [1, 2]}}

    def opened() -> AnswerCache:
        return AnswerCache(CacheFolder(tmp_path / f"cache-{required}", required), "any", engine, CocoaConfig(), {})

    cache = opened()
    for name, values in kept.items():
        cache.add(name, values)
    assert {name: opened().get(name) for name in kept} == kept
    good = cache.file.read_bytes()
    rows = [json.loads(line) for line in good.splitlines()]

    def found(data: bytes) -> Any:
        cache.file.write_bytes(data)
        again = opened()
        return {name: again.get(name) for name in kept}

    opened_before = opened()
    opened_before.file.write_bytes(b"[" * 100_000 + b"\n")
    changed = outcome(lambda: opened_before.get("one"))
    assert isinstance(changed, ConfigError) if required else changed is None

    @fuzz(60)
    @given(st.one_of(broken(good), broken_lines(rows)))
    @example(b"[" * 100_000 + b"\n")
    @example(b"".join(json.dumps({**row, "values": {}}).encode() + b"\n" for row in rows))
    def check(data: bytes) -> None:
        values = outcome(lambda: found(data))
        if isinstance(values, ConfigError):
            assert required
        else:
            assert all(values[name] in (None, kept[name]) for name in kept)

    check()


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
