"""Draws the plot of ``docs/explanation/performance.md`` from the JSON of the measurements.

Run it with ``python -m benchmarks.plots``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.bars import Record
from benchmarks.measure import GREEDY
from benchmarks.report import read
from benchmarks.settings import DOCS, RESULTS
from cocoa_engine.lab.timing import Spread

matplotlib.use("Agg")
# text stays text, and equal data gives equal bytes
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "cocoa", "font.size": 10})

COLOURS = {"HF": "#7f7f7f", GREEDY: "#1f77b4"}
"""Colours of decoders by the beginning of their names."""
OTHERS = "#d62728"


def draw(results: Path, folder: Path) -> None:
    """Draw the decoders of the single-stream measurement, if it exists, as SVG.

    Args:
        results: the folder of the JSON files.
        folder: the folder of the plot. It is created.
    """
    if record := read(results).get("single_stream"):
        folder.mkdir(parents=True, exist_ok=True)
        figure = _bars({**record["comparison"]["competitors"], **record["further"]["competitors"]})
        figure.savefig(folder / "single_stream.svg", metadata={"Date": None})


def _bars(decoders: Mapping[str, Record]) -> Figure:
    """A bar chart of the ratio of each decoder to the base."""
    figure = Figure(figsize=(8, 0.32 * len(decoders) + 1), layout="constrained")
    axes = figure.subplots()
    names = list(decoders)[::-1]
    spreads = [Spread(**decoders[name]["ratio"]) for name in names]
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.lowest for spread in spreads]
    above = [spread.highest - spread.median for spread in spreads]
    axes.barh(names, medians, color=[_colour(name) for name in names], xerr=[below, above], ecolor="#333333")
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("time per token, ratio to HF generate greedy\n(whiskers: lowest and highest round)")
    return figure


def _colour(name: str) -> str:
    return next((colour for beginning, colour in COLOURS.items() if name.startswith(beginning)), OTHERS)


if __name__ == "__main__":
    draw(RESULTS, DOCS / "performance")
