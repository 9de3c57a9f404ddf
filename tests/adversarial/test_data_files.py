"""Any bytes in a data file end in a value or in one short error of the package."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, DataError
from cocoa_engine.cli.calibrate import read_documents
from cocoa_engine.cli.score import score_rows
from cocoa_engine.lab.cache import AnswerCache, CacheFolder
from cocoa_engine.lab.data import read_labelled, read_questions
from cocoa_engine.lab.stopping import read_own_prompts
from tests.helpers.labelled_files import DIASUMFACT, FAITHBENCH, MUSHROOM, OWN, TRUTHFULQA, XSUM, json_lines
from tests.helpers.mutations import broken, broken_json, broken_lines, fuzz, outcome
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def read_with(folder: Path, read: Callable[[Path], Any], name: str, data: bytes) -> Any:
    file = folder / name
    file.write_bytes(data)
    return outcome(lambda: read(file))


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
    "documents": (read_documents, "a.txt", b"A text.", broken(b"A text.")),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_data(name: str, folder: Path) -> None:
    read, file, good, files = FILES[name]
    assert not isinstance(read_with(folder, read, file, good), Exception)

    @fuzz()
    @given(files)
    def check(data: bytes) -> None:
        assert isinstance(read_with(folder, read, file, data), (list, DataError))

    check()


@fuzz()
@given(st.sampled_from(list(XSUM)).flatmap(lambda part: st.tuples(st.just(part), broken(XSUM[part].encode()))))
def test_labels_of_words(tmp_path_factory: pytest.TempPathFactory, change: tuple[str, bytes]) -> None:
    folder = tmp_path_factory.getbasetemp() / "xsum"
    folder.mkdir(exist_ok=True)
    for part, text in XSUM.items():
        (folder / f"s.{part}").write_bytes(change[1] if part == change[0] else text.encode())
    assert isinstance(outcome(lambda: read_labelled(folder)), (list, DataError))


def test_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {"question": "Who?", "org_context": "He.", "org_answer": ["he"], "sub_context": "She.", "sub_answer": ["she"]}
    written = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([row]), written)
    assert len(read_with(folder, read_questions, "a.parquet", written.getvalue())) == 2
    with io.BytesIO() as empty:
        parquet.ParquetWriter(empty, pyarrow.schema([("question", pyarrow.string())])).close()
        assert isinstance(read_with(folder, read_questions, "b.parquet", empty.getvalue()), (list, DataError))

    @fuzz()
    @given(broken(written.getvalue()))
    def check(data: bytes) -> None:
        assert isinstance(read_with(folder, read_questions, "a.parquet", data), (list, DataError))

    check()


def test_rows_to_score(folder: Path) -> None:
    """A row that cannot be scored gets an error, and the others their risk."""
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    rows = [{"prompt": "The source. Why?", "text": "So it is.", "source": "The source."}, {"prompt": "a", "text": "b"}]
    out = folder / "scored.jsonl"

    def score(path: Path) -> list[Any]:
        score_rows(engine, path, out, CocoaConfig())
        return [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]]

    assert all("risk" in row for row in read_with(folder, score, "rows.jsonl", json_lines(rows).encode()))

    @fuzz(15)
    @given(broken_lines(rows))
    def check(data: bytes) -> None:
        scored = read_with(folder, score, "rows.jsonl", data)
        assert isinstance(scored, DataError) or all(("risk" in row) != ("error" in row) for row in scored)

    check()


# --- what is measured of answers


@pytest.mark.parametrize("required", [True, False])
def test_caches_of_answers(folder: Path, required: bool) -> None:
    """What is found is what was kept. A broken line ends in one error, or is measured again."""
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer(), model_name="tiny")
    kept = {"one": {"value": 1.5, "text": "ä"}, "two": {"value": None, "ends": [1, 2]}}

    def opened() -> AnswerCache:
        return AnswerCache(CacheFolder(folder / f"cache-{required}", required), "any", engine, CocoaConfig(), {})

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
