"""The report of the benchmark suite, from JSON to tables and plots. No test asserts a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from benchmarks.decoding import KINDS, decoding_statistics, needed, own_boundary, where_fed
from benchmarks.gguf import process
from benchmarks.measure import (
    BASE,
    BLOCKS,
    COCOA_SIG,
    FLOAT32,
    GREEDY,
    LEAN,
    LLAMA_CPP,
    MODULES,
    NO_DRAFTS,
    RATIO_SETUPS,
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
from benchmarks.serving.names import OURS, OURS_SIG, RIVAL, RIVAL_BATCHES
from benchmarks.settings import DOCS, MEASUREMENTS, RESULTS, Settings
from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.lab.timing import Spread, ratio
from tests.helpers.tiny_models import tiny_model

PLOTS = ("single_stream", "prompt_length", "batch", "candidates")
DOCUMENTS = (PERFORMANCE, README)


def comparison(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The record of a comparison with made-up times; the first competitor is the base."""
    base = next(iter(seconds))
    return {
        "base": base,
        "competitors": {
            name: {
                "ratio": ratio(values, seconds[base])._asdict(),
                "seconds": list(values),
                **(
                    {}
                    if name.startswith("HF")
                    else {"per_kept_token": {"forward_passes": 1.02, "fed_tokens": 2.5, "risk_points": 0.3}}
                ),
            }
            for name, values in seconds.items()
        },
    }


THREE = {BASE: [0.050, 0.060], GREEDY: [0.030, 0.036], COCOA_SIG: [0.031, 0.037]}


@pytest.fixture
def records() -> dict[str, Any]:
    """A made-up record of every measurement."""
    spread = Spread(1.01, 1.0, 1.02)._asdict()
    measured: dict[str, dict[str, Any]] = {
        "single_stream": {
            "comparison": comparison(
                {
                    BASE: [0.050, 0.060],
                    f"{GREEDY}, {MODULES}": [0.040, 0.048],
                    f"{COCOA_SIG}, {MODULES}": [0.041, 0.049],
                    f"{GREEDY}, {LEAN}": [0.030, 0.036],
                    f"{COCOA_SIG}, {LEAN}": [0.030, 0.037],
                    f"{GREEDY}, {MODULES}, {NO_DRAFTS}": [0.040, 0.048],
                    f"{COCOA_SIG}, {MODULES}, {NO_DRAFTS}": [0.041, 0.049],
                    f"{GREEDY}, {LEAN}, {NO_DRAFTS}": [0.030, 0.036],
                    f"{COCOA_SIG}, {LEAN}, {NO_DRAFTS}": [0.030, 0.037],
                }
            ),
            "further": comparison({BASE: [0.05], "HF generate, 5 beams": [0.12]}),
            "decoding": {
                "prompts": 8,
                "tokens": 500,
                "risk_points_per_token": 0.3,
                "candidates_per_risk_point": 2.8,
                "first_candidate_kept": 0.7,
                "span_tokens_mean": 3.2,
                "span_tokens_p95": 10,
                "forward_passes_per_kept_token": 1.02,
                "fed_per_kept_token": 2.5,
                "prompts_apart_from_greedy": 0.75,
                "tokens_apart_from_greedy": 0.4,
            },
        },
        "ratio": {
            "groups": {
                name: {
                    "questions": count,
                    "machine_state": [
                        {"gb_per_s": 20.4, "gflop_per_s": 130.0},
                        {"gb_per_s": 15.2, "gflop_per_s": 130.4},
                    ],
                    "comparison": comparison(
                        {
                            f"{decoder}, {setup}": [time, 1.1 * time]
                            for setup in RATIO_SETUPS
                            for decoder, time in ((GREEDY, 0.010), (COCOA_SIG, 0.012 if count == 40 else 0.011))
                        }
                    ),
                }
                for name, count in (("the benchmark's questions", 8), ("questions on which nothing was tuned", 40))
            }
        },
        "fed_tokens": {"fed": {name: dict.fromkeys(KINDS, 0.25) for name in ("drafts", NO_DRAFTS)}},
        "context": {"draft_tokens": 4, "comparison": comparison(THREE)},
        "prompt_length": {
            "lengths": {
                size: {
                    **comparison(THREE),
                    "cocoa_sig_to_greedy": {"per_step": spread, "steps_per_token": {COCOA_SIG: 1.01}},
                }
                for size in ("128", "4096")
            },
            "memory": {
                "length": 4096,
                "methods": {
                    "greedy": {"key_value_bytes": [100 * 2**20], "peak_bytes": [1000 * 2**20]},
                    "cocoa-sig": {"key_value_bytes": [101 * 2**20], "peak_bytes": [1030 * 2**20]},
                },
                "cocoa_sig_to_greedy": {
                    "key_value_bytes": Spread(1.01, 1.01, 1.01)._asdict(),
                    "peak_bytes": Spread(1.03, 1.03, 1.03)._asdict(),
                },
            },
        },
        "leaves": {
            "lengths": {
                size: {"seconds": {"1": [0.01], "2": [0.0102]}, "to_one_leaf": {"1": spread, "2": spread}}
                for size in ("128", "4096")
            }
        },
        "batch": {"sizes": {size: comparison(THREE) for size in ("1", "4", "8")}},
        "candidates": {"candidates": comparison({"1": [0.030, 0.031], "8": [0.033, 0.034]})},
        "capture": {
            "forwards": {
                name: {"seconds": {"with capture": [0.03], "without": [0.03]}, "with_to_without": spread}
                for name in (LEAN, MODULES)
            }
        },
        "source_attention": {
            "lengths": {
                size: {"seconds": {"with source attention": [0.03], "without": [0.03]}, "with_to_without": spread}
                for size in ("256", "2048", "256, HF modules")
            }
        },
        "precision": {
            "comparison": comparison({"float32": [0.030, 0.031], "bfloat16": [0.020, 0.021], "int8": [0.060, 0.062]}),
            "change": {
                name: {
                    "texts_alike": alike,
                    "tokens_before_the_first_other_one": 40.5,
                    "f_mlds_apart": 0.002,
                    "con_mlds_apart": 0.001,
                    "log_prob_per_token_apart": 0.01,
                }
                for name, alike in (("bfloat16", 0.5), ("int8", 0.25))
            },
        },
        "scoring": {
            "answers": 100,
            "prompt_tokens": 90,
            "prompt_reads": 1,
            "seconds": {"one call": [0.02], "a call for each": [0.2]},
            "times_faster": Spread(10.0, 9.0, 11.0)._asdict(),
        },
        "startup": {"steps": {"load": {"seconds": [1.0], **Spread(1.0, 1.0, 1.0)._asdict()}}},
        "contention": {
            "busy_processes": 2,
            "base": BASE,
            "states": {
                state: {
                    "competitors": {name: {"seconds": [0.1], "ratio": one._asdict()} for name in (BASE, COCOA_SIG)},
                    "machine_speed": {"gb_per_s": one._asdict(), "gflop_per_s": one._asdict()},
                }
                for state, one in {"idle": Spread(0.4, 0.4, 0.4), "busy": Spread(0.5, 0.4, 0.6)}.items()
            },
        },
    }
    common = {
        "model": "M",
        "dtype": "float32",
        "forward": "lean",
        "linears": "packed",
        "settings": {"tokens": 64},
        "machine": {
            "processor": "P",
            "cores": 2,
            "memory_gib": 8,
            "torch_threads": 2,
            "gpu": None,
            "python": "3",
            "torch": "2",
            "transformers": "5",
            "cocoa-integrations": "0",
        },
    }
    assert sorted(measured) == sorted(MEASUREMENTS)
    return {
        **{name: {**common, **own} for name, own in measured.items()},
        "serving": serving(common["machine"]),
        "gguf": gguf(common["machine"]),
    }


def serving(machine: Any) -> dict[str, Any]:
    """A made-up record of the server under load."""
    common = {"machine": machine, "load_average": [0.5, 2.0]}
    times = {"median": 0.5, "p99": 1.25}
    overhead = Spread(0.04, -0.01, 0.06)._asdict()
    long = {
        "seconds": 300.4,
        "answers": 1200,
        "failures": 0,
        "refusals": 3,
        "other_texts": 1,
        "tokens_per_second": 123.4,
        "server_cores": 1.8,
        "client_cores": 0.05,
        "to_first": times,
        "between": times,
    }
    sizes = {"streams": 64, "max_batch_size": 8, "threads": 2}
    sampled = {"fifths": [880.0, 900.0, 901.0, 902.0, 1905.0], "highest": 1910.0}
    one = {"to_first": 1.0, "tokens": 64, "failures": 0}
    speeds = {OURS: 25.0, OURS_SIG: 20.0, RIVAL: 10.0, RIVAL_BATCHES: 12.0}
    servers = {name: {**one, "tokens_per_second": speed} for name, speed in speeds.items()}
    at_once = dict.fromkeys(["1", "8", "32"], servers)
    return {
        "load": {**common, **sizes, "long": long, "overhead": overhead, "processor_overhead": overhead},
        "load_memory": {
            **common,
            **sizes,
            "max_tokens": 16,
            "allocators": {"one arena": {"answers": 200, "seconds": 300.4, "memory_mib": sampled}},
            "speed": overhead,
            "processor_time": overhead,
        },
        "rival": {
            **common,
            "not_run": {"other serve": "no memory"},
            "at_once": at_once,
        },
        "first_text": {
            "machine": machine,
            OURS: {"passes": [2, 3], "tokens": [2, 4]},
            OURS_SIG: {"passes": [1, 3], "tokens": [2, 5]},
            RIVAL: {"passes": [0, 0], "tokens": [1, 1]},
        },
        "memory": {
            "machine": machine,
            "streams": 64,
            "max_tokens": 16,
            "threads": 1,
            "curves": {
                "256 MiB": [
                    {"answers": 1100, "unique_mib": 1234.5, "prefix_cache_mib": 70, "handed_out_mib": 3, "free_mib": 4}
                ]
            },
        },
        "kill": {**common, "streams": 16, "saw_an_error": 16, "seconds_to_ready": 9.0, "served_after": True},
        "readers": {
            **common,
            "silent": 8,
            "failures": 0,
            "seconds_without": 4.0,
            "seconds_beside": 4.1,
            "slow_reader_complete": False,
        },
    }


def gguf(machine: Any) -> dict[str, Any]:
    """A made-up record of a GGUF file beside llama.cpp."""
    seconds = {
        LLAMA_CPP: 0.010,
        f"{GREEDY}, {BLOCKS}": 0.009,
        f"{COCOA_SIG}, {BLOCKS}": 0.011,
        f"{GREEDY}, {FLOAT32}": 0.020,
        f"{COCOA_SIG}, {FLOAT32}": 0.022,
    }
    comparison = {
        "base": LLAMA_CPP,
        "competitors": {
            name: {"seconds": [one], "ratio": Spread(one / 0.01, one / 0.01, one / 0.01)._asdict()}
            for name, one in seconds.items()
        },
    }
    processes = {"torch": 200e6, "transformers": 300e6, "after_load": 320e6, "after_answer": 330e6}
    processes |= {"load": 2.0, "first_token": 2.5}
    state = [{"gb_per_s": 40.0, "gflop_per_s": 200.0}] * 2
    rival = {"version": "0.3", "prompt_tokens": 50.0, "prompt_seconds": 0.1, "seconds_per_later_token": 0.005}
    return {
        "speed": {
            "machine": machine,
            "comparison": comparison,
            "llama_cpp": rival,
            "equal_answers": {GREEDY: [7, 8]},
            "machine_state": state,
        },
        "process": {
            "machine": machine,
            "file_bytes": 100e6,
            "processes": {
                name: {"values": [one], "median": one, "lowest": one, "highest": one} for name, one in processes.items()
            },
        },
        "large": {
            "machine": machine,
            "comparison": comparison,
            "file_bytes": 4e9,
            "load_seconds": 0.5,
            "peak_bytes": 6e9,
            "read_gb_per_s": [80.0, 40.0],
        },
    }


def folder(path: Path, records: Mapping[str, Any]) -> Path:
    for name, document in records.items():
        write(path / f"{name}.json", document)
    return path


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_written(name: str, records: dict[str, Any]) -> None:
    tables = written(name, records)
    assert tables != NOT_MEASURED
    for table in tables.split("\n\n"):
        widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(widths) <= 1  # all rows have the same number of cells


def test_tables_show_the_values(records: dict[str, Any]) -> None:
    assert f"| {COCOA_SIG}, {MODULES} | 45.0 | 0.82 | 1.02 | 2.50 |" in written("single_stream", records)
    assert "| 4,096 | 55.0 | 33.0 | 34.0 |" in written("prompt_length", records)
    assert "| CoCoA-SIG, float32 weights | 0.61 (0.60 – 0.62) |" in written("readme", records)
    assert "| keys and values | 100.0 | 101.0 | 1.010 |" in written("memory", records)
    precision = written("precision", records)
    assert "| int8 | 61.0 | 2.00 |" in precision
    assert "| change from float32 | bfloat16 | int8 |" in precision
    assert "| share of answers with the same tokens | 0.5000 | 0.2500 |" in precision
    assert "M, float32" in written("machine", records)
    load = written("serving_load", records)
    assert "| 64 streams, 8 decoded together, 2 threads |" in load
    assert "| time to the first span: median, 99th percentile | 0.50 s, 1.25 s |" in load
    assert "| +4% (-1% – +6%) |" in load
    assert "Load average before and after: 0.5, 2.0." in load
    memory = written("serving_load_memory", records)
    assert "| one arena | 880 | 900 | 901 | 902 | 1,905 | 1,910 | 200 in 300 s |" in memory
    assert "tokens per second 0.04 (-0.01 – 0.06) times" in memory
    assert "Load average before and after: 0.5, 2.0." in memory
    rival = written("serving_rival", records)
    assert "| 1 | cocoa serve, greedy | 25.0 | 2.5 | 1.00 | 64 | 0 |" in rival
    assert "other serve did not run." in rival
    assert written("serving_rival_in_words", records) == (
        "Against `transformers serve` as it starts by default, greedy decoding is 2.5 / 2.5 / 2.5 times as fast with "
        "1 / 8 / 32 requests at once, and CoCoA-SIG is 2.0 / 2.0 / 2.0 times as fast. Against its continuous batching, "
        "greedy decoding is 2.1 / 2.1 / 2.1 times as fast with 1 / 8 / 32 requests at once, and CoCoA-SIG is 1.7 / 1.7 "
        "/ 1.7 times as fast."
    )
    assert "| 256 MiB | 1,100 | 1,234 | 70 | 3 | 4 |" in written("serving_memory", records)
    first = written("serving_first_text", records)
    assert "3.0 tokens on average with greedy decoding and 3.5 with CoCoA-SIG" in first
    assert "2.5 and 2.0 forward passes after the prompt's own" in first
    assert "the other's 1.0 token comes after 0.0." in first
    assert "| 0; **no** |" in written("serving_faults", records)
    speed = written("gguf_speed", records)
    assert "| cocoa-sig, blocks | 11.0 | 1.10 |" in speed
    assert "100 ms for a prompt of 50 tokens" in speed
    assert "equal to those in float32: 7 of 8 (CoCoA engine, greedy)." in speed
    assert "| memory after loading | 320 MB (320 – 320) |" in written("gguf_process", records)
    assert "takes 50 and 100 ms." in written("gguf_large", records)
    ratios = written("ratio", records)
    assert "| float32 | 10.5 | 12.6 | 1.20 | 2.50 | 2.50 | 1.02 |" in ratios
    assert ratios.count("a copy at 20 to 15 GB/s, a matrix product at 130 GFLOP/s.") == 2
    assert "| kept in the answer | 0.25 | 0.25 |" in written("fed_tokens", records)


def test_every_table_of_times_shows_the_state_of_the_machine(records: dict[str, Any]) -> None:
    state = {"machine_state": [{"gb_per_s": 9.6, "gflop_per_s": 70.4}] * 2}
    for name, source in STATE_OF.items():
        before = written(name, records)
        assert before.endswith("\n\nState of the machine: not recorded.")
        after = written(name, {**records, source: {**records[source], **state}})
        assert "machine" in records[source]
        assert after.endswith(
            "\n\nState of the machine (P) before and after: a copy at 10 GB/s, a matrix product at 70 GFLOP/s."
        )
    assert STATE_OF.keys() <= TABLES.keys()
    parts = {
        "serving_load": "load",
        "serving_load_memory": "load_memory",
        "serving_rival": "rival",
        "serving_faults": "readers",
        "gguf_process": "process",
    }
    for name, part in parts.items():
        source = "gguf" if name == "gguf_process" else "serving"
        assert written(name, records).endswith("\n\nState of the machine: not recorded.")
        records[source][part].update(state)
        assert written(name, records).endswith("a copy at 10 GB/s, a matrix product at 70 GFLOP/s.")


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
    checked = {each.bar.what: each for each in check(records)}
    assert list(checked) == [bar.what for bar in BARS]
    assert {what for what, each in checked.items() if not each.met} == {
        "CoCoA-SIG / HF `generate` greedy, through HF's modules",  # 0.82 > 0.80
        "CoCoA engine greedy / HF `generate` greedy, through HF's modules",  # 0.80 > 0.75
        "CoCoA-SIG / CoCoA engine greedy, peak memory of the process at a prompt of 4,096",  # 1.03 > 1.02
        "CoCoA-SIG / CoCoA engine greedy, questions on which nothing was tuned, float32",  # 1.20 > 1.15
        "CoCoA-SIG / CoCoA engine greedy, questions on which nothing was tuned, float32, no drafts",
        "CoCoA-SIG / CoCoA engine greedy, questions on which nothing was tuned, bfloat16 copy",
        "CoCoA-SIG / CoCoA engine greedy, questions on which nothing was tuned, bfloat16 copy, no drafts",
        *(f"cocoa serve, cocoa-sig: times as fast as {RIVAL_BATCHES}, {count} at once" for count in (1, 8, 32)),  # 1.67
        "64 streams: share of answers with the text of the request alone",  # 1 of 1200 has another
    }
    table = written("bars", records)
    assert table.count("**no**") == 11
    assert table.count("| yes |") == len(BARS) - 11


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
    del records["prompt_length"]["lengths"]["4096"]
    assert written("bars", records).count("not measured") == 1


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
    assert new.endswith("|\n\nState of the machine: not recorded.\n<!-- end -->\nafter\n")
    assert filled(new, records) == new


def test_report_in_another_folder_does_not_change_the_documents(records: dict[str, Any], tmp_path: Path) -> None:
    before = [path.read_bytes() for path in DOCUMENTS]
    table = write_report(folder(tmp_path, records), in_place=False)
    assert len(table.splitlines()) == 2 + len(BARS)
    assert table.count("| **no** |") == 11
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
