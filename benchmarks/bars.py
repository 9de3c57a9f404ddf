"""The targets: a limit for each measured quantity, and where its value is in the JSON of its measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

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
)
from benchmarks.serving.names import AT_ONCE, OURS, OURS_SIG, RIVAL, RIVAL_BATCHES
from cocoa_engine.lab.timing import Spread, ratio

Record = Mapping[str, Any]


class Bar(NamedTuple):
    """One target.

    Attributes:
        what: the quantity, as in the table.
        limit: the highest accepted value.
        source: the measurement whose record ``find`` reads.
        find: extracts the value. A :class:`KeyError` means that it was not measured.
        at_least: the limit is the lowest accepted value instead.
    """

    what: str
    limit: float
    source: str
    find: Callable[[Record], Spread]
    at_least: bool = False

    def met(self, found: Spread) -> bool:
        """Whether the median meets the limit."""
        return found.median >= self.limit if self.at_least else found.median <= self.limit


class Checked(NamedTuple):
    """A target and the measured value."""

    bar: Bar
    found: Spread

    @property
    def met(self) -> bool:
        return self.bar.met(self.found)


def compared(comparison: Record, competitor: str, base: str) -> Spread:
    """The ratio of two competitors of a comparison."""
    return ratio(comparison["competitors"][competitor]["seconds"], comparison["competitors"][base]["seconds"])


def _single_stream(competitor: str, base: str) -> Callable[[Record], Spread]:
    return lambda record: compared(record["comparison"], competitor, base)


def _ratio(group: str, setup: str) -> Callable[[Record], Spread]:
    return lambda record: compared(record["groups"][group]["comparison"], f"{COCOA_SIG}, {setup}", f"{GREEDY}, {setup}")


def _passes(record: Record) -> Spread:
    competitor = record["comparison"]["competitors"][f"{COCOA_SIG}, {LEAN}, {NO_DRAFTS}"]
    return Spread.of([competitor["per_kept_token"]["forward_passes"]])


def _long_step(record: Record) -> Spread:
    return Spread(**record["lengths"]["4096"]["cocoa_sig_to_greedy"]["per_step"])


def _long_memory(kind: str) -> Callable[[Record], Spread]:
    def find(record: Record) -> Spread:
        if record["memory"]["length"] != 4096:
            raise KeyError("4096")
        return Spread(**record["memory"]["cocoa_sig_to_greedy"][kind])

    return find


def _batch(size: int) -> Callable[[Record], Spread]:
    return lambda record: Spread(**record["sizes"][str(size)]["competitors"][COCOA_SIG]["ratio"])


def _capture(forward: str) -> Callable[[Record], Spread]:
    return lambda record: Spread(**record["forwards"][forward]["with_to_without"])


def _source_attention(record: Record) -> Spread:
    """At the length where it costs most."""
    return max((Spread(**found["with_to_without"]) for found in record["lengths"].values()), key=lambda one: one.median)


def _busy(record: Record) -> Spread:
    return Spread(**record["states"]["busy"]["competitors"][COCOA_SIG]["ratio"])


def _gguf(competitor: str, base: str) -> Callable[[Record], Spread]:
    return lambda record: compared(record["speed"]["comparison"], competitor, base)


def _file_memory(record: Record) -> Spread:
    """Memory after loading, less that of a process that imported torch, by the size of the file."""
    sizes = record["process"]["processes"]
    pairs = zip(sizes["after_load"]["values"], sizes["torch"]["values"], strict=True)
    return Spread.of([(loaded - empty) / record["process"]["file_bytes"] for loaded, empty in pairs])


def _first_token(record: Record) -> Spread:
    return Spread.of(record["process"]["processes"]["first_token"]["values"])


def _served(count: int, ours: str, other: str) -> Callable[[Record], Spread]:
    def find(record: Record) -> Spread:
        servers = record["rival"]["at_once"][str(count)]
        return Spread.of([servers[ours]["tokens_per_second"] / servers[other]["tokens_per_second"]])

    return find


def _overhead(record: Record) -> Spread:
    return Spread(**{name: 1 + value for name, value in record["load"]["overhead"].items()})


def _without_errors(record: Record) -> Spread:
    long = record["load"]["long"]
    return Spread.of([long["answers"] / (long["answers"] + long["failures"])])


def _equal_texts(record: Record) -> Spread:
    long = record["load"]["long"]
    return Spread.of([1 - long["other_texts"] / long["answers"]])


def _hundred(record: Record) -> Record:
    if record["answers"] != 100:
        raise KeyError("100")
    return record


BARS = (
    Bar("CoCoA-SIG, forward passes per kept token, without drafts", 1.05, "single_stream", _passes),
    Bar(
        "CoCoA-SIG / HF `generate` greedy, through HF's modules",
        0.80,
        "single_stream",
        _single_stream(f"{COCOA_SIG}, {MODULES}", BASE),
    ),
    Bar(
        "CoCoA-SIG / HF `generate` greedy, lean forward pass",
        0.62,
        "single_stream",
        _single_stream(f"{COCOA_SIG}, {LEAN}", BASE),
    ),
    *(
        Bar(
            f"CoCoA-SIG / CoCoA engine greedy, {described}{drafts}",
            1.10,
            "single_stream",
            _single_stream(f"{COCOA_SIG}, {setup}", f"{GREEDY}, {setup}"),
        )
        for forward, described in ((MODULES, "through HF's modules"), (LEAN, "lean forward pass"))
        for setup, drafts in ((f"{forward}, {NO_DRAFTS}", ", both without drafts"), (forward, ", both with drafts"))
    ),
    Bar(
        "CoCoA engine greedy / HF `generate` greedy, through HF's modules",
        0.75,
        "single_stream",
        _single_stream(f"{GREEDY}, {MODULES}", BASE),
    ),
    Bar(
        "CoCoA engine greedy / HF `generate` greedy, lean forward pass",
        0.75,
        "single_stream",
        _single_stream(f"{GREEDY}, {LEAN}", BASE),
    ),
    Bar(
        "CoCoA-SIG / CoCoA engine greedy, time per forward pass after a prompt of 4,096",
        1.10,
        "prompt_length",
        _long_step,
    ),
    Bar(
        "CoCoA-SIG / CoCoA engine greedy, memory of keys and values at a prompt of 4,096",
        1.02,
        "prompt_length",
        _long_memory("key_value_bytes"),
    ),
    Bar(
        "CoCoA-SIG / CoCoA engine greedy, peak memory of the process at a prompt of 4,096",
        1.02,
        "prompt_length",
        _long_memory("peak_bytes"),
    ),
    Bar("CoCoA-SIG / HF `generate` greedy, beside two busy processes", 0.60, "contention", _busy),
    *(
        Bar(f"CoCoA-SIG / CoCoA engine greedy, {group}, {setup}", 1.15, "ratio", _ratio(group, setup))
        for group in ("the benchmark's questions", "questions on which nothing was tuned")
        for setup in RATIO_SETUPS
    ),
    Bar("CoCoA-SIG / HF `generate` greedy, batch of 4", 0.70, "batch", _batch(4)),
    Bar("CoCoA-SIG / HF `generate` greedy, batch of 8", 1.00, "batch", _batch(8)),
    Bar("capture of hidden states, with / without, lean forward pass", 1.02, "capture", _capture("lean")),
    Bar("capture of hidden states, with / without, through HF's modules", 1.02, "capture", _capture(MODULES)),
    Bar(
        "source attention, with / without, at the worst length of the prompt and forward pass",
        1.03,
        "source_attention",
        _source_attention,
    ),
    Bar(
        "scoring 100 answers: times the prompt is read",
        1.0,
        "scoring",
        lambda record: Spread.of([_hundred(record)["prompt_reads"]]),
    ),
    Bar(
        "scoring 100 answers: times faster than one by one",
        3.0,
        "scoring",
        lambda record: Spread(**_hundred(record)["times_faster"]),
        at_least=True,
    ),
    Bar("GGUF file: CoCoA-SIG / llama.cpp greedy", 1.25, "gguf", _gguf(f"{COCOA_SIG}, {BLOCKS}", LLAMA_CPP)),
    Bar("GGUF file: CoCoA engine greedy / llama.cpp greedy", 1.00, "gguf", _gguf(f"{GREEDY}, {BLOCKS}", LLAMA_CPP)),
    Bar(
        "GGUF file: CoCoA engine greedy on blocks / in float32",
        0.60,
        "gguf",
        _gguf(f"{GREEDY}, {BLOCKS}", f"{GREEDY}, {FLOAT32}"),
    ),
    Bar(
        "GGUF file: CoCoA-SIG / CoCoA engine greedy, both on blocks",
        1.35,
        "gguf",
        _gguf(f"{COCOA_SIG}, {BLOCKS}", f"{GREEDY}, {BLOCKS}"),
    ),
    Bar("GGUF file: memory after loading, less that of torch / size of the file", 1.30, "gguf", _file_memory),
    Bar("GGUF file: seconds from the start of a process to the first span", 3.0, "gguf", _first_token),
    *(
        Bar(f"{ours}: times as fast as {other}, {count} at once", 2.0, "serving", _served(count, ours, other), True)
        for other in (RIVAL, RIVAL_BATCHES)
        for ours in (OURS, OURS_SIG)
        for count in AT_ONCE
    ),
    Bar("64 streams: cocoa serve / engine without a server, time per token", 1.05, "serving", _overhead),
    Bar("64 streams: share of answers without an error; 429 is none", 1.0, "serving", _without_errors, True),
    Bar("64 streams: share of answers with the text of the request alone", 1.0, "serving", _equal_texts, True),
)


def check(records: Mapping[str, Record]) -> Iterator[Checked]:
    """Every target whose value was measured."""
    for bar in BARS:
        try:
            yield Checked(bar, bar.find(records[bar.source]))
        except KeyError:
            continue
