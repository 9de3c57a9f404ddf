"""The tables of the performance page about GGUF files, from ``gguf.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.markdown import comparison, table
from benchmarks.measure import BLOCKS, FLOAT32
from cocoa_engine.lab.timing import Spread

Records = Mapping[str, Any]

PARTS = ("speed", "process", "large")


def speed(records: Records) -> str:
    """Time per token beside llama.cpp, and whether the answers are those of float32."""
    part = records["gguf"]["speed"]
    found, equal = part["llama_cpp"], part["equal_answers"]
    answers = ", ".join(f"{same} of {of} ({name})" for name, (same, of) in equal.items())
    return (
        f"{comparison(part['comparison'])}\n\n"
        f"llama.cpp is that of llama-cpp-python {found['version']}. Answers on {BLOCKS} that are equal to those in "
        f"{FLOAT32}: {answers}."
    )


def process(records: Records) -> str:
    """Time and memory of a new process."""
    part = records["gguf"]["process"]
    found = {name: Spread(each["median"], each["lowest"], each["highest"]) for name, each in part["processes"].items()}
    seconds = {
        "the engine is loaded, after": "load",
        "the first span is there, after": "first_token",
    }
    bytes_ = {
        "memory of a process that imported torch": "torch",
        "memory of a process that imported torch and transformers' Llama": "transformers",
        "memory after loading": "after_load",
        "memory after an answer": "after_answer",
    }
    rows = [[what, _unit(found[name], "s", 1, 2)] for what, name in seconds.items()]
    rows += [["the file", f"{part['file_bytes'] / 1e6:,.0f} MB"]]
    rows += [[what, _unit(found[name], "MB", 1e-6, 0)] for what, name in bytes_.items()]
    return table(["a new process", ""], iter(rows))


def large(records: Records) -> str:
    """A model of the size that people run."""
    part = records["gguf"]["large"]
    before, after = part["read_gb_per_s"]
    bound = [1000 * part["file_bytes"] / (speed * 1e9) for speed in (before, after)]
    return (
        f"{comparison(part['comparison'])}\n\n"
        f"The file has {part['file_bytes'] / 1e9:.1f} GB and was loaded in {part['load_seconds']:.1f} s. The highest "
        f"memory of the process was {part['peak_bytes'] / 1e9:.1f} GB. torch's threads read the file once in "
        f"{bound[0]:.0f} ms at {before:.0f} GB/s, their speed before, and in {bound[1]:.0f} ms at {after:.0f} GB/s, "
        "that after."
    )


def _unit(found: Spread, unit: str, factor: float, digits: int) -> str:
    median, lowest, highest = (f"{factor * value:,.{digits}f}" for value in found)
    return f"{median} {unit} ({lowest} – {highest})"


TABLES: dict[str, Callable[[Records], str]] = {"gguf_speed": speed, "gguf_process": process, "gguf_large": large}
