"""The bars: what each figure must reach. A figure is looked up in the JSON of its measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.measure import BASE, COCOA_SIG, GREEDY, LEAN, MODULES, NO_DRAFTS
from cocoa_engine.studies.timing import Spread, ratio

Record = Mapping[str, Any]


class Bar(NamedTuple):
    """One bar.

    Attributes:
        source: the measurement whose record ``find`` reads; a :class:`KeyError` means that the figure is not there.
        at_least: the limit is the least, not the most.
    """

    what: str
    limit: float
    source: str
    find: Callable[[Record], Spread]
    at_least: bool = False

    def met(self, found: Spread) -> bool:
        """By the median."""
        return found.median >= self.limit if self.at_least else found.median <= self.limit


class Checked(NamedTuple):
    """A bar and what was measured."""

    bar: Bar
    found: Spread

    @property
    def met(self) -> bool:
        return self.bar.met(self.found)


def compared(race: Record, way: str, base: str) -> Spread:
    """The ratio of two ways of a race, whatever its own base."""
    return ratio(race["ways"][way]["seconds"], race["ways"][base]["seconds"])


def _single_stream(way: str, base: str) -> Callable[[Record], Spread]:
    return lambda record: compared(record["rivals"], way, base)


def _passes(record: Record) -> Spread:
    way = record["rivals"]["ways"][f"{COCOA_SIG}, {LEAN}, {NO_DRAFTS}"]
    return Spread.of([way["per_kept_token"]["forward_passes"]])


def _long_step(record: Record) -> Spread:
    return Spread(**record["lengths"]["4096"]["cocoa_sig_to_our_greedy"]["per_step"])


def _long_memory(kind: str) -> Callable[[Record], Spread]:
    def find(record: Record) -> Spread:
        if record["memory"]["length"] != 4096:
            raise KeyError("4096")
        return Spread(**record["memory"]["cocoa_sig_to_greedy"][kind])

    return find


def _batch(size: int) -> Callable[[Record], Spread]:
    return lambda record: Spread(**record["sizes"][str(size)]["ways"][COCOA_SIG]["ratio"])


def _capture(forward: str) -> Callable[[Record], Spread]:
    return lambda record: Spread(**record["forwards"][forward]["with_to_without"])


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
            f"CoCoA-SIG / our greedy, {said}{drafts}",
            1.10,
            "single_stream",
            _single_stream(f"{COCOA_SIG}, {way}", f"{GREEDY}, {way}"),
        )
        for forward, said in ((MODULES, "through HF's modules"), (LEAN, "lean forward pass"))
        for way, drafts in ((f"{forward}, {NO_DRAFTS}", ", both without drafts"), (forward, ", both with drafts"))
    ),
    Bar(
        "our greedy / HF `generate` greedy, through HF's modules",
        0.75,
        "single_stream",
        _single_stream(f"{GREEDY}, {MODULES}", BASE),
    ),
    Bar(
        "our greedy / HF `generate` greedy, lean forward pass",
        0.75,
        "single_stream",
        _single_stream(f"{GREEDY}, {LEAN}", BASE),
    ),
    Bar("CoCoA-SIG / our greedy, time per forward pass after a prompt of 4,096", 1.10, "prompt_length", _long_step),
    Bar(
        "CoCoA-SIG / our greedy, memory of keys and values at a prompt of 4,096",
        1.02,
        "prompt_length",
        _long_memory("key_value_bytes"),
    ),
    Bar(
        "CoCoA-SIG / our greedy, peak memory of the process at a prompt of 4,096",
        1.02,
        "prompt_length",
        _long_memory("peak_bytes"),
    ),
    Bar("CoCoA-SIG / HF `generate` greedy, batch of 4", 0.70, "batch", _batch(4)),
    Bar("CoCoA-SIG / HF `generate` greedy, batch of 8", 1.00, "batch", _batch(8)),
    Bar("capture of hidden states, with / without, lean forward pass", 1.02, "capture", _capture("lean")),
    Bar("capture of hidden states, with / without, through HF's modules", 1.02, "capture", _capture(MODULES)),
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
)


def check(records: Mapping[str, Record]) -> Iterator[Checked]:
    """Every bar whose figure was measured."""
    for bar in BARS:
        try:
            yield Checked(bar, bar.find(records[bar.source]))
        except KeyError:
            continue
