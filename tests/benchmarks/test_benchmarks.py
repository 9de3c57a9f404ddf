"""The benchmark suite, its report, the GPU measurement on a tiny model, and the client of a server under load."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from rich.progress import Progress

from benchmarks import gpu, prompt_length, report
from benchmarks.bars import BARS, check
from benchmarks.measure import Bench, child, record, write
from benchmarks.peak import peak_bytes
from benchmarks.plots import draw
from benchmarks.serving.client import PATH, ask_all
from benchmarks.serving.load import percentile
from benchmarks.settings import DOCS, RESULTS, Settings
from cocoa_engine import CocoaEngine
from cocoa_engine.lab.timing import Spread
from cocoa_integrations.server import create_app
from tests.helpers.live_server import served
from tests.helpers.reasoning_models import speaker
from tests.helpers.served import HELLO
from tests.helpers.tiny_models import tiny_model

DOCUMENTS = (report.PERFORMANCE, report.README)


@pytest.fixture
def records() -> dict[str, Any]:
    """The committed record of every measurement."""
    return report.read(RESULTS)


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


@pytest.mark.parametrize("name", report.TABLES)
def test_every_table_shows_its_record(name: str, records: dict[str, Any]) -> None:
    tables = report.written(name, records)
    assert tables != report.NOT_MEASURED
    for table in tables.split("\n\n"):
        widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(widths) <= 1  # all rows have the same number of cells
    if name in ("context", "prompt_length", "candidates", "precision", "contention"):
        unshown = [1.0] if name == "prompt_length" else []  # the base has no column of its ratio there
        assert all(f"{median:.2f}" in tables for median in medians(records[name]) if median not in unshown)
    if name != "machine":  # which has whole numbers
        assert report.written(name, scaled(records)) != tables


def test_bars_are_checked(records: dict[str, Any]) -> None:
    checked = list(check(records))
    assert [each.bar.what for each in checked] == [bar.what for bar in BARS]
    missed = sum(not each.bar.met(each.found) for each in checked)
    table = report.targets(records)
    assert (table.count("**no**"), table.count("| yes |")) == (missed, len(BARS) - missed)
    assert report.targets(scaled(records)).count("**no**") > missed
    assert f"{len(BARS) - missed} of {len(BARS)} targets" in (page := report.written("missed", records))
    assert [bar.what for bar in BARS if bar.what in page] == [one.bar.what for one in checked if not one.met]
    assert all(bar.met(Spread(bar.limit, bar.limit, bar.limit)) for bar in BARS)
    for bar in BARS:
        worse = bar.limit * (0.99 if bar.at_least else 1.01)
        assert not bar.met(Spread(worse, bar.limit, bar.limit))


def test_missing_measurements_are_reported(records: dict[str, Any]) -> None:
    assert report.written("batch", {}) == report.NOT_MEASURED
    assert (
        report.written("machine", {})
        == report.written("conditions", {})
        == report.written("serving_load", {})
        == report.NOT_MEASURED
    )
    assert report.written("gguf_large", {"gguf": {}}) == report.NOT_MEASURED
    assert report.written("serving_rival", {"serving": {}}) == report.NOT_MEASURED
    assert report.targets({}).count("not measured") == len(BARS)
    before = report.targets(records).count("not measured")
    del records["prompt_length"]["lengths"]["4096"]
    assert report.targets(records).count("not measured") == before + 1


def test_the_peak_of_a_child_process_excludes_its_parent() -> None:
    """A large process starts a small one and one that allocates memory."""
    program = "import json\nfrom benchmarks.peak import peak_bytes\n{}\nprint(json.dumps(peak_bytes()))"
    small = child("-c", program.format("pass"))
    large = child("-c", program.format("held = b'x' * 100 * 2**20"))
    assert small + 100 * 2**20 <= large + 2**20
    assert small < 100 * 2**20 < peak_bytes()  # torch alone takes more


def test_only_text_between_markers_changes(records: dict[str, Any]) -> None:
    text = "before\n<!-- measured: startup -->\nold\n<!-- end -->\nafter\n"
    new = report.filled(text, records)
    assert new.startswith("before\n<!-- measured: startup -->\n| step |")
    assert new.endswith(" |\n<!-- end -->\nafter\n")
    assert report.filled(new, records) == new


def test_report_in_another_folder_does_not_change_the_documents(records: dict[str, Any], tmp_path: Path) -> None:
    before = [path.read_bytes() for path in DOCUMENTS]
    table = report.write_report(folder(tmp_path, records), in_place=False)
    assert len(table.splitlines()) == 2 + len(BARS)
    assert table == report.targets(records)
    assert report.NOT_MEASURED not in (tmp_path / report.PERFORMANCE.name).read_text(encoding="utf-8")
    assert [path.read_bytes() for path in DOCUMENTS] == before


@pytest.mark.slow
def test_the_plot_is_reproducible(records: dict[str, Any], tmp_path: Path) -> None:
    results = folder(tmp_path / "results", records)
    for name in ("first", "second"):
        draw(results, tmp_path / name)
    first, second = ((tmp_path / name / "single_stream.svg").read_bytes() for name in ("first", "second"))
    assert b"ratio" in first
    assert first == second


def test_documents_have_each_table_once_and_agree_with_the_committed_results() -> None:
    records = report.read(RESULTS)
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert report.filled(text, records) == text, f"run python -m benchmarks.report: {path.name} is out of date"
    assert (DOCS / "performance" / "single_stream.svg").exists()
    names = [name for path in DOCUMENTS for _, name, _ in report.MARKED.findall(path.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(report.TABLES)


@pytest.fixture(scope="module")
def small(engine: CocoaEngine) -> CocoaEngine:
    """Random weights with the tokenizer of the real model, which the questions of the benchmarks are made for."""
    model = tiny_model("llama", vocab_size=len(engine.tokenizer), max_position_embeddings=8192)
    return CocoaEngine(model, engine.tokenizer)


RUN = ("ratio", "candidates", "context", "prompt_length", "batch", "capture", "source_attention", "scoring")


@pytest.mark.parametrize("name", RUN)
def test_measurements_run(name: str, small: CocoaEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny runs of the measurements that do not load a model again, without the memory of new processes."""
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **__: small)
    monkeypatch.setattr(prompt_length, "peaks", lambda *_: {})
    settings = replace(Settings(threads=torch.get_num_threads()).quick(), tokens=4)
    bench = Bench(settings, Progress(disable=True))
    write(tmp_path / f"{name}.json", record(bench, import_module(f"benchmarks.{name}").measure(bench)))
    assert not report.written(name, report.read(tmp_path)).startswith(report.NOT_MEASURED)


# --- a GPU, and a server under load


@pytest.mark.slow
def test_decoders_on_a_gpu(tmp_path: Path) -> None:
    """Every decoder is timed, and follows the script of its rate; targets do not apply to a tiny model."""
    out = tmp_path / "gpu.json"
    gpu.main(f"--tiny --device cpu --tokens 40 --prompt-tokens 8 --rounds 2 --out {out}".split())
    measured = json.loads(out.read_text(encoding="utf-8"))
    decoders = measured["decoders"]
    assert list(decoders)[:2] == [gpu.HUGGING_FACE, gpu.GREEDY]
    assert len(decoders) == 2 + len(gpu.RATES)
    for decoder in decoders.values():
        times = decoder["ms_per_token"]
        assert 0 < times["lowest"] <= times["median"] <= times["highest"]
        assert len(decoder["rounds_ms"]) == 2
    assert decoders[gpu.GREEDY]["ratio_to_greedy"]["median"] == 1
    assert list(measured["step_ms"]) == [str(width) for width in gpu.WIDTHS]
    assert measured["machine"]["torch"] == torch.__version__
    assert measured["bandwidth_bound_ms"] == pytest.approx(measured["bytes_read_per_step"] / 4.8e9)
    for rate in gpu.RATES:
        (decoding,) = [decoder["decoding"] for name, decoder in decoders.items() if name.endswith(f" {rate}")]
        assert decoding["risk_points_per_token"] == rate
        # the prefill, then one pass for each token; the branches at the end grow on to their boundary
        assert 41 <= round(40 * decoding["forward_passes_per_token"]) <= 41 + 16
        assert decoding["candidates_per_risk_point"] == pytest.approx(2.8, abs=0.2)
        assert decoding["fed_per_token"] > 1 + rate / 2
    assert [target["met"] for target in measured["targets"]] == [None] * 2 * len(gpu.RATES)
    made_up = {gpu.GREEDY: {}, "x": {"ms_per_token": {"median": 4.0}, "ratio_to_greedy": {"median": 1.2}}}
    assert [target["met"] for target in gpu.targets(made_up, applies=True)] == [True, False]


BODY = {"messages": HELLO, "max_tokens": 6, "stream_options": {"include_usage": True}}


async def test_answers_of_the_server() -> None:
    engine = speaker(ends=False)
    expected = engine.chat(HELLO, max_new_tokens=6)
    with served(create_app(engine)) as url:
        answers = await ask_all(url, [BODY, BODY, {**BODY, "max_tokens": -1}], at_once=2)
    good = [one for one in answers if one.number < 2]
    assert [(one.text, one.tokens, one.failure) for one in good] == [(expected.text, 6, None)] * 2
    assert all(one.to_first > 0 and len(one.between) == len(one.pieces) - 1 for one in good)
    [bad] = [one for one in answers if one.number == 2]
    assert bad.status == 400
    assert "max_tokens" in str(bad.failure)


async def test_a_refused_call_is_repeated_and_a_cut_stream_is_an_error() -> None:
    app, calls = FastAPI(), []

    @app.post(PATH)
    async def chat() -> Response:
        calls.append(None)
        if len(calls) == 1:
            return Response(status_code=429, headers={"retry-after": "0"})
        return StreamingResponse(iter([b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n']))

    with served(app) as url:
        [answer] = await ask_all(url, [BODY], at_once=1)
    assert (answer.refusals, answer.text, answer.failure) == (1, "half", "the stream has no end")
    [refused] = await ask_all(url, [BODY], at_once=1)
    assert "ClientConnector" in str(refused.failure)


def test_percentiles() -> None:
    assert [percentile(range(1, 101), share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 51, 100, 100]
