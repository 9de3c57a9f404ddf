"""Draws the plots of ``docs/explanation/performance.md`` from the JSON of the measurements.

Run it with ``python -m benchmarks.plots``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.bars import Record
from benchmarks.measure import BASE, COCOA_SIG, GREEDY
from benchmarks.report import read
from benchmarks.settings import DOCS, RESULTS
from cocoa_engine.lab.timing import Spread

matplotlib.use("Agg")
# text stays text, and equal data gives equal bytes
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "cocoa", "font.size": 10})

COLOURS = {BASE: "#7f7f7f", GREEDY: "#1f77b4", COCOA_SIG: "#d62728"}


def draw_all(results: Path, folder: Path) -> None:
    """Draw every plot whose measurement exists, as SVG.

    Args:
        results: the folder of the JSON files.
        folder: the folder of the plots. It is created.
    """
    records = read(results)
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Figure] = {}
    if record := records.get("single_stream"):
        drawn["single_stream"] = _bars({**record["comparison"]["competitors"], **_without_base(record["further"])})
    if record := records.get("prompt_length"):
        drawn["prompt_length"] = _grown(record["lengths"], "prompt, tokens")
    if record := records.get("batch"):
        drawn["batch"] = _grown(record["sizes"], "prompts answered together")
    if record := records.get("candidates"):
        drawn["candidates"] = _by_candidates(record["candidates"]["competitors"])
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def _bars(decoders: Mapping[str, Record]) -> Figure:
    """A bar chart of the ratio of each decoder to the base."""
    figure = Figure(figsize=(8, 0.32 * len(decoders) + 1), layout="constrained")
    axes = figure.subplots()
    names = list(decoders)[::-1]
    spreads = [Spread(**decoders[name]["ratio"]) for name in names]
    colours = [_colour(name) for name in names]
    axes.barh(names, [spread.median for spread in spreads], color=colours, xerr=_whiskers(spreads), ecolor="#333333")
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("time per token, ratio to HF generate greedy\n(whiskers: lowest and highest round)")
    return figure


def _grown(comparisons: Mapping[str, Record], what: str) -> Figure:
    """Two plots over a size, such as the prompt length: time per token, and its ratio to the base."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    times, ratios = figure.subplots(1, 2)
    sizes = [int(size) for size in comparisons]
    for name, colour in COLOURS.items():
        measured = [comparison["competitors"][name] for comparison in comparisons.values()]
        milliseconds = [1000 * Spread.of(one["seconds"]).median for one in measured]
        times.plot(sizes, milliseconds, marker="o", color=colour, label=name)
        _with_whiskers(ratios, sizes, [Spread(**one["ratio"]) for one in measured], colour, name)
    times.set_ylabel("ms per kept token")
    ratios.set_ylabel("ratio to HF generate greedy")
    ratios.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    for axes in (times, ratios):
        _from_zero(axes)
        _label_sizes(axes, sizes, what)
    times.legend(frameon=False)
    return figure


def _by_candidates(by_count: Mapping[str, Record]) -> Figure:
    """Two plots over ``max_candidates``: the ratio to greedy, and the fed tokens and forward passes."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    ratios, fed = figure.subplots(1, 2)
    counts = [int(count) for count in by_count]
    spreads = [Spread(**measured["ratio"]) for measured in by_count.values()]
    _with_whiskers(ratios, counts, spreads, COLOURS[COCOA_SIG], COCOA_SIG)
    ratios.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    ratios.set_ylabel("time per token, ratio to greedy")
    for name, label, colour in (
        ("fed_tokens", "tokens fed", "#9467bd"),
        ("forward_passes", "forward passes", "#2ca02c"),
    ):
        costs = [measured["per_kept_token"][name] for measured in by_count.values()]
        fed.plot(counts, costs, marker="o", color=colour, label=label)
    fed.set_ylabel("per kept token")
    fed.legend(frameon=False)
    for axes in (ratios, fed):
        _from_zero(axes)
        axes.set_xlabel("max_candidates")
        axes.set_xticks(counts)
    return figure


def _without_base(comparison: Record) -> dict[str, Record]:
    return {name: one for name, one in comparison["competitors"].items() if name != comparison["base"]}


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.grid(axis="y", alpha=0.3)


def _colour(name: str) -> str:
    if name.startswith("HF"):
        return COLOURS[BASE]
    return COLOURS[GREEDY] if name.startswith(GREEDY) else COLOURS[COCOA_SIG]


def _with_whiskers(axes: Axes, sizes: Sequence[int], spreads: Sequence[Spread], colour: str, label: str) -> None:
    medians = [spread.median for spread in spreads]
    axes.errorbar(sizes, medians, yerr=_whiskers(spreads), marker="o", capsize=3, color=colour, label=label)


def _whiskers(spreads: Sequence[Spread]) -> Any:
    below = [spread.median - spread.lowest for spread in spreads]
    above = [spread.highest - spread.median for spread in spreads]
    return [below, above]


def _label_sizes(axes: Axes, sizes: Sequence[int], what: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xlabel(what)


if __name__ == "__main__":
    draw_all(RESULTS, DOCS / "performance")
