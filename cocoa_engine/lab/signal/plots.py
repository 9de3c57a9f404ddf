"""Plots of the signal study: how well each score ranks, and the distribution of scores in either class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cocoa_engine.config import CocoaConfig
from cocoa_engine.lab.record import Level, LevelRecord, SignalRecord, plot_names
from cocoa_engine.lab.signal.indicators import Layers, composites
from cocoa_engine.lab.signal.items import Items
from cocoa_engine.optional import need
from cocoa_engine.output_files import draft_of


def draw(record: SignalRecord, items: Mapping[Level, Items], config: CocoaConfig, folder: Path) -> list[Path]:
    """Draw the plots into a folder, and return their files.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    need("matplotlib", extra="risk", what="drawing")
    files = []
    for level, one in record["levels"].items():
        ranking, *scores = (folder / name for name in plot_names(level))
        _ranking(level, one, ranking)
        for path in scores:
            _scores(items[level], config, path)
        files += [ranking, *scores]
    return files


def _ranking(level: str, one: LevelRecord, path: Path) -> None:
    """The AUROC of each score with its bootstrap interval."""
    from matplotlib.figure import Figure

    rows = list(one["ranking"].items())[::-1]
    figure = Figure(figsize=(7, 0.32 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    for height, (_, row) in enumerate(rows):
        low, high = row["auroc"]["low"], row["auroc"]["high"]
        if low is not None and high is not None:
            axes.plot([low, high], [height, height], color="tab:blue", linewidth=3)
        axes.plot(row["auroc"]["estimate"], height, "o", color="black", markersize=4)
    axes.axvline(0.5, color="grey", linestyle=":")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_xlabel(f"AUROC by {level}, 95 % bootstrap interval over prompts")
    with draft_of(path) as draft:
        figure.savefig(draft, format=path.suffix[1:])


def _scores(items: Items, config: CocoaConfig, path: Path) -> None:
    """Histograms of the four composite scores for supported and hallucinated items."""
    from matplotlib.figure import Figure

    values = composites(items, Layers.of(config, items.num_layers), config.alpha, config.span_log_prob)
    figure = Figure(figsize=(9, 6), layout="constrained")
    for axes, (name, score) in zip(figure.subplots(2, 2).flat, values.items(), strict=True):
        bins = np.linspace(float(np.quantile(score, 0.01)), float(score.max()), 40)
        for label, weight in (("supported", items.supported), ("hallucinated", items.hallucinated)):
            axes.hist(score, bins=bins, weights=weight / weight.sum(), alpha=0.5, label=label)
        axes.set_title(name)
        axes.set_xlabel("score")
        axes.set_ylabel(f"share of {items.level}s")
    figure.axes[0].legend()
    with draft_of(path) as draft:
        figure.savefig(draft, format=path.suffix[1:])
