"""The plots of ``docs/explanation/performance.md``, from the JSON of the measurements.

python -m benchmarks.plots
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
from cocoa_engine.studies.timing import Spread

matplotlib.use("Agg")
# text as text, and the same bytes from the same figures
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "cocoa", "font.size": 10})

COLOURS = {BASE: "#7f7f7f", GREEDY: "#1f77b4", COCOA_SIG: "#d62728"}


def draw_all(results: Path, folder: Path) -> None:
    """Every plot whose measurement there is, as SVG."""
    records = read(results)
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Figure] = {}
    if record := records.get("single_stream"):
        drawn["single_stream"] = _bars({**record["rivals"]["ways"], **_without_base(record["further"])})
    if record := records.get("prompt_length"):
        drawn["prompt_length"] = _grown(record["lengths"], "prompt, tokens")
    if record := records.get("batch"):
        drawn["batch"] = _grown(record["sizes"], "prompts answered together")
    if record := records.get("candidates"):
        drawn["candidates"] = _by_candidates(record["candidates"]["ways"])
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def _bars(ways: Mapping[str, Record]) -> Figure:
    """One bar for each way, its ratio to the base."""
    figure = Figure(figsize=(8, 0.32 * len(ways) + 1), layout="constrained")
    axes = figure.subplots()
    names = list(ways)[::-1]
    spreads = [Spread(**ways[name]["ratio"]) for name in names]
    colours = [_colour(name) for name in names]
    axes.barh(names, [spread.median for spread in spreads], color=colours, xerr=_whiskers(spreads), ecolor="#333333")
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("time per token, ratio to HF generate greedy\n(whiskers: lowest and highest round)")
    return figure


def _grown(races: Mapping[str, Record], what: str) -> Figure:
    """Time per token beside its ratio to the base, over a size."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    times, ratios = figure.subplots(1, 2)
    sizes = [int(size) for size in races]
    for name, colour in COLOURS.items():
        ways = [race["ways"][name] for race in races.values()]
        milliseconds = [1000 * Spread.of(way["seconds"]).median for way in ways]
        times.plot(sizes, milliseconds, marker="o", color=colour, label=name)
        _with_whiskers(ratios, sizes, [Spread(**way["ratio"]) for way in ways], colour, name)
    times.set_ylabel("ms per kept token")
    ratios.set_ylabel("ratio to HF generate greedy")
    ratios.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    for axes in (times, ratios):
        _from_zero(axes)
        _label_sizes(axes, sizes, what)
    times.legend(frameon=False)
    return figure


def _by_candidates(ways: Mapping[str, Record]) -> Figure:
    """CoCoA-SIG's ratio to greedy beside the tokens it feeds, over the number of candidates."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    ratios, fed = figure.subplots(1, 2)
    counts = [int(count) for count in ways]
    _with_whiskers(ratios, counts, [Spread(**way["ratio"]) for way in ways.values()], COLOURS[COCOA_SIG], COCOA_SIG)
    ratios.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    ratios.set_ylabel("time per token, ratio to greedy")
    for name, label, colour in (
        ("fed_tokens", "tokens fed", "#9467bd"),
        ("forward_passes", "forward passes", "#2ca02c"),
    ):
        fed.plot(counts, [way["per_kept_token"][name] for way in ways.values()], marker="o", color=colour, label=label)
    fed.set_ylabel("per kept token")
    fed.legend(frameon=False)
    for axes in (ratios, fed):
        _from_zero(axes)
        axes.set_xlabel("max_candidates")
        axes.set_xticks(counts)
    return figure


def _without_base(race: Record) -> dict[str, Record]:
    return {name: way for name, way in race["ways"].items() if name != race["base"]}


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
