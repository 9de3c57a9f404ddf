"""Measurements as Markdown: a table, a ratio with its range, a comparison of decoders, the state of the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.bars import Record
from cocoa_engine.lab.timing import Spread


def table(headings: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """A table with a heading above each column."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def spread(found: Spread, digits: int = 2) -> str:
    """The median, with lowest and highest in brackets if they differ."""
    median, lowest, highest = (_number(value, digits) for value in found)
    return median if lowest == highest else f"{median} ({lowest} – {highest})"


def _number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if value < 10 else f"{value:,.1f}"


def ratio_of(measured: Record) -> str:
    """A competitor's ratio to the base of its comparison."""
    return spread(Spread(**measured["ratio"]))


def milliseconds(measured: Record) -> str:
    """A competitor's median time per token."""
    return f"{1000 * Spread.of(measured['seconds']).median:.1f}"


def cost(measured: Record, *names: str) -> list[str]:
    """A competitor's counts per kept token; empty for competitors that count nothing."""
    return [f"{measured['per_kept_token'][name]:.2f}" if "per_kept_token" in measured else "" for name in names]


def comparison(compared: Record, heading: str = "decoder") -> str:
    """A table with a row for each competitor."""

    def rows() -> Iterator[Sequence[str]]:
        for name, one in compared["competitors"].items():
            yield [name, milliseconds(one), ratio_of(one), *cost(one, "forward_passes", "fed_tokens")]

    ratio = f"ratio to {compared['base']}"
    return table([heading, "ms per token", ratio, "forward passes per token", "tokens fed per token"], rows())


def state(measured: Record) -> list[str]:
    """The processor, and GB/s of a copy, GFLOP/s of a matrix product and load before and after a measurement."""
    machine = measured["machine"]
    speeds = [[round(one[name]) for one in measured["machine_state"]] for name in ("gb_per_s", "gflop_per_s")]
    ranges = [*speeds, measured.get("load_average", [machine["load_average"]])]
    return [machine["processor"], *(" to ".join(f"{value:,g}" for value in dict.fromkeys(each)) for each in ranges)]
