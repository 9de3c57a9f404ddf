"""The report of the benchmark suite, from JSON to tables and plots. No test asserts a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.progress import Progress

from benchmarks import candidates, embedded_calibrator, prompt_length
from benchmarks.bars import BARS, check
from benchmarks.decoding import decoding_statistics, needed, own_boundary, where_fed
from benchmarks.gguf import process
from benchmarks.measure import (
    Bench,
    child,
    record,
    rounds_of_parts,
    write,
)
from benchmarks.peak import peak_bytes
from benchmarks.plots import draw_all
from benchmarks.probe import probe
from benchmarks.prompt_length import steps
from benchmarks.prompts import (
    PASSAGES,
    QUESTIONS,
    SCORED_ANSWERS,
    context_questions,
    long_context_questions,
    long_prompt,
    questions,
    untuned_questions,
)
from benchmarks.report import (
    MARKED,
    NOT_MEASURED,
    PERFORMANCE,
    README,
    STATE_OF,
    TABLES,
    filled,
    read,
    write_report,
    written,
)
from benchmarks.serving.__main__ import main as measure_serving
from benchmarks.settings import DOCS, RESULTS, Settings
from cocoa_engine import CocoaEngine, Runtime
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


def test_every_table_of_times_shows_the_state_of_the_machine(records: dict[str, Any]) -> None:
    state = {"machine_state": [{"gb_per_s": 9.6, "gflop_per_s": 70.4}] * 2}
    parts = {
        "serving_load": "load",
        "serving_load_memory": "load_memory",
        "serving_rival": "rival",
        "serving_faults": "readers",
        "gguf_process": "process",
    }
    places = {name: records[source] for name, source in STATE_OF.items()}
    places |= {name: records["gguf" if "gguf" in name else "serving"][part] for name, part in parts.items()}
    assert places.keys() <= TABLES.keys()
    for name, place in places.items():
        place.pop("machine_state", None)
        assert written(name, records).endswith("\n\nState of the machine: not recorded.")
        place.update(state)
        shown = written(name, records).rpartition("State of the machine")[2]
        assert "before and after: a copy at 10 GB/s, a matrix product at 70 GFLOP/s" in shown


@pytest.mark.slow
def test_measurements_of_other_processes_record_the_state_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.serving.rival.measure", lambda *_: {"rounds": 1})
    threads = str(torch.get_num_threads())
    monkeypatch.setattr("sys.argv", ["serving", "--only", "rival", "--threads", threads, "--out", str(tmp_path)])
    measure_serving()
    before, after = json.loads((tmp_path / "serving.json").read_text())["rival"]["machine_state"]
    assert before.keys() == after.keys() == {"gb_per_s", "gflop_per_s"}

    monkeypatch.setattr(process, "child", lambda *_: {"load": 1.0})
    monkeypatch.setattr(process, "encode_question", lambda *_: [1])
    bench: Any = SimpleNamespace(settings=Settings(rounds=1), loaded=None, progress=Progress())
    (tmp_path / "model.gguf").touch()
    before, after = process.measure(bench, tmp_path / "model.gguf")["machine_state"]
    assert before.keys() == after.keys() == {"gb_per_s", "gflop_per_s"}


def test_the_probe_measures_this_machine() -> None:
    found = probe()
    assert found.keys() == {"gb_per_s", "gflop_per_s"}
    assert all(0.01 < value < 1e6 for value in found.values())


def test_bars_are_checked(records: dict[str, Any]) -> None:
    checked = list(check(records))
    assert [each.bar.what for each in checked] == [bar.what for bar in BARS]
    missed = sum(not each.bar.met(each.found) for each in checked)
    table = written("bars", records)
    assert (table.count("**no**"), table.count("| yes |")) == (missed, len(BARS) - missed)
    assert written("bars", scaled(records)).count("**no**") > missed


def test_limits_of_the_bars() -> None:
    """The limits are repeated here, so that none is relaxed by accident."""
    assert {bar.what: (bar.limit, bar.at_least) for bar in BARS} == {
        "CoCoA-SIG, forward passes per kept token, without drafts": (1.05, False),
        "CoCoA-SIG / HF `generate` greedy, through HF's modules": (0.80, False),
        "CoCoA-SIG / HF `generate` greedy, lean forward pass": (0.62, False),
        "CoCoA-SIG / CoCoA engine greedy, through HF's modules, both without drafts": (1.10, False),
        "CoCoA-SIG / CoCoA engine greedy, through HF's modules, both with drafts": (1.10, False),
        "CoCoA-SIG / CoCoA engine greedy, lean forward pass, both without drafts": (1.10, False),
        "CoCoA-SIG / CoCoA engine greedy, lean forward pass, both with drafts": (1.10, False),
        "CoCoA engine greedy / HF `generate` greedy, through HF's modules": (0.75, False),
        "CoCoA engine greedy / HF `generate` greedy, lean forward pass": (0.75, False),
        "CoCoA-SIG / CoCoA engine greedy, time per forward pass after a prompt of 4,096": (1.10, False),
        "CoCoA-SIG / CoCoA engine greedy, memory of keys and values at a prompt of 4,096": (1.02, False),
        "CoCoA-SIG / CoCoA engine greedy, peak memory of the process at a prompt of 4,096": (1.02, False),
        "CoCoA-SIG / HF `generate` greedy, beside two busy processes": (0.60, False),
        "CoCoA-SIG / CoCoA engine greedy, the benchmark's questions, float32": (1.15, False),
        "CoCoA-SIG / CoCoA engine greedy, the benchmark's questions, float32, no drafts": (1.15, False),
        "CoCoA-SIG / CoCoA engine greedy, the benchmark's questions, bfloat16 copy": (1.15, False),
        "CoCoA-SIG / CoCoA engine greedy, the benchmark's questions, bfloat16 copy, no drafts": (1.15, False),
        "CoCoA-SIG / CoCoA engine greedy, questions on which nothing was tuned, float32": (1.15, False),
        "CoCoA-SIG / CoCoA engine greedy, questions on which nothing was tuned, float32, no drafts": (1.15, False),
        "CoCoA-SIG / CoCoA engine greedy, questions on which nothing was tuned, bfloat16 copy": (1.15, False),
        "CoCoA-SIG / CoCoA engine greedy, questions on which nothing was tuned, bfloat16 copy, no drafts": (
            1.15,
            False,
        ),
        "CoCoA-SIG / HF `generate` greedy, batch of 4": (0.70, False),
        "CoCoA-SIG / HF `generate` greedy, batch of 8": (1.00, False),
        "capture of hidden states, with / without, lean forward pass": (1.02, False),
        "capture of hidden states, with / without, through HF's modules": (1.02, False),
        "source attention, with / without, at the worst length of the prompt and forward pass": (1.03, False),
        "scoring 100 answers: times the prompt is read": (1.0, False),
        "scoring 100 answers: times faster than one by one": (3.0, True),
        "GGUF file: CoCoA-SIG / llama.cpp greedy": (1.25, False),
        "GGUF file: CoCoA engine greedy / llama.cpp greedy": (1.00, False),
        "GGUF file: CoCoA engine greedy on blocks / in float32": (0.60, False),
        "GGUF file: CoCoA-SIG / CoCoA engine greedy, both on blocks": (1.35, False),
        "GGUF file: memory after loading, less that of torch / size of the file": (1.30, False),
        "GGUF file: seconds from the start of a process to the first span": (3.0, False),
        "cocoa serve, greedy: times as fast as transformers serve, 1 at once": (2.0, True),
        "cocoa serve, greedy: times as fast as transformers serve, 8 at once": (2.0, True),
        "cocoa serve, greedy: times as fast as transformers serve, 32 at once": (2.0, True),
        "cocoa serve, cocoa-sig: times as fast as transformers serve, 1 at once": (2.0, True),
        "cocoa serve, cocoa-sig: times as fast as transformers serve, 8 at once": (2.0, True),
        "cocoa serve, cocoa-sig: times as fast as transformers serve, 32 at once": (2.0, True),
        "cocoa serve, greedy: times as fast as transformers serve, continuous batching, 1 at once": (2.0, True),
        "cocoa serve, greedy: times as fast as transformers serve, continuous batching, 8 at once": (2.0, True),
        "cocoa serve, greedy: times as fast as transformers serve, continuous batching, 32 at once": (2.0, True),
        "cocoa serve, cocoa-sig: times as fast as transformers serve, continuous batching, 1 at once": (2.0, True),
        "cocoa serve, cocoa-sig: times as fast as transformers serve, continuous batching, 8 at once": (2.0, True),
        "cocoa serve, cocoa-sig: times as fast as transformers serve, continuous batching, 32 at once": (2.0, True),
        "64 streams: cocoa serve / engine without a server, time per token": (1.05, False),
        "64 streams: share of answers without an error; 429 is none": (1.0, True),
        "64 streams: share of answers with the text of the request alone": (1.0, True),
    }
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


def test_documents_agree_with_the_committed_results() -> None:
    records = read(RESULTS)
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert filled(text, records) == text, f"run python -m benchmarks.report: {path.name} is out of date"
    for plot in PLOTS:
        assert (DOCS / "performance" / f"{plot}.svg").exists() == (plot in records)


def test_every_table_occurs_once() -> None:
    names = [name for path in DOCUMENTS for _, name, _ in MARKED.findall(path.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(TABLES)


@pytest.fixture(scope="module")
def small_engine(engine: CocoaEngine) -> CocoaEngine:
    """Random weights with the tokenizer of the real model, which the questions of the benchmarks are made for."""
    model = tiny_model("llama", vocab_size=len(engine.tokenizer), max_position_embeddings=8192)
    return CocoaEngine(model, engine.tokenizer)


def test_a_measurement_from_end_to_end(
    small_engine: CocoaEngine, records: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny run of ``candidates`` is recorded as JSON and reported."""
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **__: small_engine)
    settings = replace(Settings(threads=torch.get_num_threads(), tokens=6).quick(), prompts=2)
    bench = Bench(settings, Progress(disable=True))
    document = record(bench, candidates.measure(bench))
    write(tmp_path / "candidates.json", document)
    found = read(tmp_path)
    assert found == {"candidates": json.loads(json.dumps(document))}
    competitors = found["candidates"]["candidates"]["competitors"]
    assert list(competitors) == ["1", "3"]
    assert competitors["1"]["per_kept_token"]["risk_points"] == 0
    assert competitors["3"]["per_kept_token"]["fed_tokens"] > competitors["1"]["per_kept_token"]["fed_tokens"]
    assert "| 3 |" in written("candidates", found)


@pytest.mark.parametrize(
    "name",
    ["ratio", "fed_tokens", "context", "prompt_length", "leaves", "batch", "capture", "source_attention", "scoring"],
)
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


def test_decoding_statistics(engine: CocoaEngine) -> None:
    prompt = "Once upon a time, in a village by the sea, there lived"
    greedy, cocoa_sig = (
        engine.generate(prompt, method=method, max_new_tokens=12) for method in ("greedy", "cocoa-sig")
    )
    statistics = decoding_statistics([cocoa_sig], [greedy])
    assert statistics["tokens"] == 12
    assert statistics["risk_points_per_token"] == cocoa_sig.usage.risk_points / 12
    same = decoding_statistics([greedy], [greedy])
    assert same["prompts_apart_from_greedy"] == same["tokens_apart_from_greedy"] == 0
    assert same["candidates_per_risk_point"] is None


def test_every_fed_token_is_counted_once(engine: CocoaEngine) -> None:
    """Without drafts there are no guesses; rivals that have lost by the bound have lost."""
    spans = 0
    for drafts in (0, 4):
        one = CocoaEngine(engine.model, engine.tokenizer, runtime=Runtime(draft_tokens=drafts, prefix_cache_mb=0))
        answers = [one.generate(prompt, max_new_tokens=20) for prompt in questions(engine, 2)]
        counts = where_fed(answers)
        fed, kept = (sum(getattr(each.usage, name) for each in answers) for name in ("fed_tokens", "completion_tokens"))
        assert counts["kept"] == 1
        assert sum(list(counts.values())[:5]) == pytest.approx(fed / kept)
        assert (counts["wrong_guesses"] == pytest.approx(0)) == (drafts == 0)
        assert counts["last_of_rivals"] <= counts["to_own_risk_point"] + counts["to_common_boundary"]
        for span in (span for answer in answers for span in answer.spans if span.chosen is not None):
            best = span.candidates[span.chosen].score
            for rival in span.candidates:
                own = own_boundary(rival, 0.3)
                count = needed(rival, own, best)
                assert 1 <= own <= count <= len(rival.token_ids)
                assert count in (own, len(rival.token_ids)) or rival.score < best
            assert max(own_boundary(each, 0.3) for each in span.candidates) == max(
                len(each.token_ids) for each in span.candidates
            )
            spans += 1
    assert spans > 4


def test_prompts(engine: CocoaEngine) -> None:
    assert len(set(QUESTIONS)) >= 16
    assert len(PASSAGES) >= 8
    untuned = untuned_questions(engine, 40)
    assert len(set(map(tuple, untuned))) == 40
    assert not set(map(tuple, untuned)) & set(map(tuple, questions(engine, 100)))
    assert len(set(SCORED_ANSWERS)) == 100
    assert [len(long_prompt(engine, length)) for length in (64, 129, 1000)] == [64, 129, 1000]
    long = long_context_questions(engine, 300, 8)
    assert [len(prompt) for prompt in long] == [300] * 8
    assert all(prompt[-60:] == short[-60:] for prompt, short in zip(long, context_questions(engine, 8), strict=True))
    assert rounds_of_parts([[[1]], [[2]], [[3]]], 2) == [[[[1]], [[3]]], [[[2]]]]
    assert len(rounds_of_parts([[[1]]], 4)) == 1


def test_the_steps_of_an_answer_follow_from_its_spans(engine: CocoaEngine) -> None:
    plain = CocoaEngine(engine.model, engine.tokenizer, runtime=Runtime(draft_tokens=0, prefix_cache_mb=0))
    for prompt in context_questions(engine, 3):
        for method in ("greedy", "cocoa-sig"):
            answer = plain.generate(prompt, method=method, max_new_tokens=24)
            assert sum(map(steps, answer.spans)) == answer.usage.forward_passes - 1  # one pass is the prefill


def test_commands_of_the_embedded_calibrator_say_which_option_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, option in (("parts", "--xsum"), ("fit", "--out"), ("compare", "--out")):
        monkeypatch.setattr("sys.argv", ["embedded_calibrator", command, "--cache", str(tmp_path)])
        with pytest.raises(SystemExit):
            embedded_calibrator.main()
        assert option in capsys.readouterr().err.splitlines()[-1]
