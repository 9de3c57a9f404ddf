"""The report of the benchmark suite, from JSON to tables and plots. No test asserts a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress

from benchmarks import prompt_length
from benchmarks.bars import BARS, check
from benchmarks.measure import Bench, child, record, write
from benchmarks.peak import peak_bytes
from benchmarks.plots import draw_all
from benchmarks.report import MARKED, NOT_MEASURED, PERFORMANCE, README, TABLES, filled, read, write_report, written
from benchmarks.settings import DOCS, RESULTS, Settings
from cocoa_engine import CocoaEngine
from cocoa_engine.lab.timing import Spread
from tests.helpers.tiny_models import tiny_model

PLOTS = ("single_stream", "prompt_length", "batch", "candidates")
DOCUMENTS = (PERFORMANCE, README)


@pytest.fixture
def records() -> dict[str, Any]:
    """The committed record of every measurement."""
    return read(RESULTS)


def medians(record: Any) -> Iterator[float]:
    """Every median ratio in a record."""
    if isinstance(record, Mapping):
        if isinstance(record.get("ratio"), Mapping):
            yield record["ratio"]["median"]
        for value in record.values():
            yield from medians(value)


def scaled(record: Any, factor: float = 1.5) -> Any:
    """A record whose times, sizes and shares are larger, each by another factor."""
    if isinstance(record, Mapping):
        return {key: scaled(value, factor + 0.1 * at) for at, (key, value) in enumerate(record.items())}
    if isinstance(record, list):
        return [scaled(value, factor) for value in record]
    return record * factor if isinstance(record, float) else record


def folder(path: Path, records: Mapping[str, Any]) -> Path:
    for name, document in records.items():
        write(path / f"{name}.json", document)
    return path


@pytest.mark.parametrize("name", TABLES)
def test_every_table_shows_its_record(name: str, records: dict[str, Any]) -> None:
    tables = written(name, records)
    assert tables != NOT_MEASURED
    for table in tables.split("\n\n"):
        widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(widths) <= 1  # all rows have the same number of cells
    if name in ("context", "prompt_length", "candidates", "precision", "contention"):
        assert all(f"{median:.2f}" in tables for median in medians(records[name]))
    if name not in ("machine", "serving_first_text"):  # which have whole numbers
        assert written(name, scaled(records)) != tables


def test_bars_are_checked(records: dict[str, Any]) -> None:
    checked = list(check(records))
    assert [each.bar.what for each in checked] == [bar.what for bar in BARS]
    missed = sum(not each.bar.met(each.found) for each in checked)
    table = written("bars", records)
    assert (table.count("**no**"), table.count("| yes |")) == (missed, len(BARS) - missed)
    assert written("bars", scaled(records)).count("**no**") > missed
    assert all(bar.met(Spread(bar.limit, bar.limit, bar.limit)) for bar in BARS)
    for bar in BARS:
        worse = bar.limit * (0.99 if bar.at_least else 1.01)
        assert not bar.met(Spread(worse, bar.limit, bar.limit))


def test_missing_measurements_are_reported(records: dict[str, Any]) -> None:
    assert written("batch", {}) == NOT_MEASURED
    assert written("machine", {}) == written("serving_load", {}) == NOT_MEASURED
    assert written("gguf_large", {"gguf": {}}) == NOT_MEASURED
    assert written("serving_rival", {"serving": {}}) == NOT_MEASURED
    assert written("bars", {}).count("not measured") == len(BARS)
    before = written("bars", records).count("not measured")
    del records["prompt_length"]["lengths"]["4096"]
    assert written("bars", records).count("not measured") == before + 1


def test_the_peak_of_a_child_process_excludes_its_parent() -> None:
    """A large process starts a small one and one that allocates memory."""
    program = "import json\nfrom benchmarks.peak import peak_bytes\n{}\nprint(json.dumps(peak_bytes()))"
    small = child("-c", program.format("pass"))
    large = child("-c", program.format("held = b'x' * 100 * 2**20"))
    assert small + 100 * 2**20 <= large + 2**20
    assert small < 100 * 2**20 < peak_bytes()  # torch alone takes more


def test_only_text_between_markers_changes(records: dict[str, Any]) -> None:
    text = "before\n<!-- measured: startup -->\nold\n<!-- end -->\nafter\n"
    new = filled(text, records)
    assert new.startswith("before\n<!-- measured: startup -->\n| step |")
    assert new.endswith(".\n<!-- end -->\nafter\n")
    assert filled(new, records) == new


def test_report_in_another_folder_does_not_change_the_documents(records: dict[str, Any], tmp_path: Path) -> None:
    before = [path.read_bytes() for path in DOCUMENTS]
    table = write_report(folder(tmp_path, records), in_place=False)
    assert len(table.splitlines()) == 2 + len(BARS)
    assert table.count("| **no** |") == written("bars", records).count("| **no** |")
    assert NOT_MEASURED not in (tmp_path / PERFORMANCE.name).read_text(encoding="utf-8")
    assert [path.read_bytes() for path in DOCUMENTS] == before


@pytest.mark.slow
def test_plots_are_reproducible(records: dict[str, Any], tmp_path: Path) -> None:
    results = folder(tmp_path / "results", records)
    for name in ("first", "second"):
        draw_all(results, tmp_path / name)
    for plot in PLOTS:
        first, second = ((tmp_path / name / f"{plot}.svg").read_bytes() for name in ("first", "second"))
        assert b"ratio" in first
        assert first == second


def test_documents_have_each_table_once_and_agree_with_the_committed_results() -> None:
    records = read(RESULTS)
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert filled(text, records) == text, f"run python -m benchmarks.report: {path.name} is out of date"
    for plot in PLOTS:
        assert (DOCS / "performance" / f"{plot}.svg").exists() == (plot in records)
    names = [name for path in DOCUMENTS for _, name, _ in MARKED.findall(path.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(TABLES)


@pytest.fixture(scope="module")
def small_engine(engine: CocoaEngine) -> CocoaEngine:
    """Random weights with the tokenizer of the real model, which the questions of the benchmarks are made for."""
    model = tiny_model("llama", vocab_size=len(engine.tokenizer), max_position_embeddings=8192)
    return CocoaEngine(model, engine.tokenizer)


RUN = ("ratio", "fed_tokens", "candidates", "context", "prompt_length", "leaves", "batch", "capture")


@pytest.mark.parametrize("name", [*RUN, "source_attention", "scoring"])
def test_measurements_run(
    name: str, small_engine: CocoaEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny runs of the measurements that do not load a model again, without the memory of new processes."""
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **__: small_engine)
    monkeypatch.setattr(prompt_length, "peaks", lambda *_: {})
    settings = replace(Settings(threads=torch.get_num_threads()).quick(), tokens=4)
    bench = Bench(settings, Progress(disable=True))
    write(tmp_path / f"{name}.json", record(bench, import_module(f"benchmarks.{name}").measure(bench)))
    assert not written(name, read(tmp_path)).startswith(NOT_MEASURED)
    draw_all(tmp_path, tmp_path)
    assert (tmp_path / f"{name}.svg").exists() == (name in PLOTS)
