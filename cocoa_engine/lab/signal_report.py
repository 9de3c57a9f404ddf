"""The signal study: its measurements, record, tables and plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import SpanLogProb, rule_without_rivals
from cocoa_engine.lab.indicators import (
    Floats,
    Items,
    Layers,
    Level,
    composites,
    indicators,
    layer_choices,
    means,
    pairs,
    parts,
)
from cocoa_engine.lab.ranking import (
    Bootstrap,
    Interval,
    PairedTest,
    Ranked,
    caution,
    paired_test,
)
from cocoa_engine.optional import need
from cocoa_engine.output_files import draft_of
from cocoa_engine.safe_text import safe

if TYPE_CHECKING:
    from cocoa_engine.model.hidden_states import FinalLayer


def plot_names(level: Level) -> list[str]:
    """The files of a level's plots. The scores of characters are not drawn: there are too many."""
    return [f"auroc-{level}.svg", *([] if level == "character" else [f"scores-{level}.svg"])]


IntervalRecord = dict[str, Any]
"""An :class:`~cocoa_engine.lab.ranking.Interval` as plain data."""

PairedRecord = dict[str, Any]
"""A :class:`~cocoa_engine.lab.ranking.PairedTest` as plain data."""


class RankingRow(TypedDict):
    """How well a score ranks. ``less`` is its AUROC minus that of each baseline."""

    auroc: IntervalRecord
    auprc: IntervalRecord
    less: dict[str, IntervalRecord]


class LayerRow(TypedDict):
    """One choice of layers: the AUROC of several scores, and the paired test of -fMLDS."""

    middle_layers: list[int]
    final_layer: FinalLayer
    auroc: dict[str, IntervalRecord]
    paired_f_mlds: PairedRecord | None


class LevelRecord(TypedDict):
    """All values of one level. ``rivals`` are the baselines; ``ranking`` and ``paired`` are by score."""

    items: int
    prompts: int
    hallucinated: float
    supported: float
    share_hallucinated: float
    middle_layers: list[int]
    final_layer: FinalLayer
    rivals: list[str]
    ranking: dict[str, RankingRow]
    paired: dict[str, PairedRecord]
    layers: dict[str, LayerRow]


class About(TypedDict):
    """What was measured."""

    data: str
    format: str
    model: str
    answers: int
    prompts: int
    chat: bool
    command: str


class SignalRecord(TypedDict):
    """The whole record. ``left_out`` has the reason for each level that cannot be measured."""

    about: About
    alpha: float
    span_log_prob: SpanLogProb
    draws: int
    seed: int
    levels: dict[Level, LevelRecord]
    left_out: dict[Level, str]


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


LENGTH_RULES: tuple[SpanLogProb, ...] = ("sum", "mean")

BASELINES = ("-log p", "-mean log p")
"""The baselines that every score is compared with: -log p_S, which is part of every composite score, and its mean per
token. If context lift is measured, fMLDS is added."""


def measure(
    about: About, items: Mapping[Level, Items], config: CocoaConfig, *, draws: int = 1000, seed: int = 0
) -> SignalRecord:
    """All values of the report, as plain data.

    Args:
        about: what is measured.
        items: the items of each level.
        config: the settings; layers, alpha and the rule for log p_S are used.
        draws: draws of the bootstrap.
        seed: seed of the bootstrap.
    """
    levels: dict[Level, LevelRecord] = {}
    left_out: dict[Level, str] = {}
    for level, level_items in items.items():
        if level_items.both_classes:
            levels[level] = _level(level_items, Layers.of(config, level_items.num_layers), config, draws, seed)
        elif level_items.groups:
            left_out[level] = f"all are {'hallucinated' if level_items.hallucinated.any() else 'supported'}"
        else:
            left_out[level] = "they are not labelled"
    return {
        "about": about,
        "alpha": config.alpha,
        "span_log_prob": rule_without_rivals(config.span_log_prob),
        "draws": draws,
        "seed": seed,
        "levels": levels,
        "left_out": left_out,
    }


def _level(items: Items, layers: Layers, config: CocoaConfig, draws: int, seed: int) -> LevelRecord:
    bootstrap = Bootstrap(items.groups, draws, seed)
    ranked = {
        name: Ranked(values, items.hallucinated, items.supported)
        for name, values in indicators(items, layers, config.alpha, config.span_log_prob).items()
    }
    candidates = BASELINES if items.without_source is None else (*BASELINES, "fMLDS")
    baselines = [name for name in candidates if name in ranked]
    rows: dict[str, RankingRow] = {
        name: {
            "auroc": bootstrap.interval(one, "auroc")._asdict(),
            "auprc": bootstrap.interval(one, "auprc")._asdict(),
            "less": {name: bootstrap.difference(one, ranked[name], "auroc")._asdict() for name in baselines},
        }
        for name, one in ranked.items()
    }
    positive, negative = float(items.hallucinated.sum()), float(items.supported.sum())
    return {
        "items": len(items.groups),
        "prompts": len(set(items.groups)),
        "hallucinated": positive,
        "supported": negative,
        "share_hallucinated": positive / (positive + negative),
        "middle_layers": list(layers.window),
        "final_layer": layers.final,
        "rivals": baselines,
        "ranking": rows,
        "paired": _paired(items, layers, config),
        "layers": {} if items.level == "character" else _layers(items, layers, config, bootstrap),
    }


def _paired(items: Items, layers: Layers, config: CocoaConfig) -> dict[str, PairedRecord]:
    sides = [] if items.level == "character" else pairs(items)
    if len(sides) < 2:
        return {}
    values = {**composites(items, layers, config.alpha, config.span_log_prob), **parts(items, layers)}
    values["mean log p alone"] = items.log_prob / items.tokens
    return {name: _test(score, sides)._asdict() for name, score in values.items()}


def _test(score: Floats, sides: list[tuple[list[int], list[int]]]) -> PairedTest:
    return paired_test(means(score, [good for good, _ in sides]), means(score, [bad for _, bad in sides]))


def _layers(items: Items, configured: Layers, config: CocoaConfig, bootstrap: Bootstrap) -> dict[str, LayerRow]:
    """The AUROC of both MLDS, and of CoCoA-SIG with both rules for log p_S, for each choice of layers."""
    sides = pairs(items)
    rows: dict[str, LayerRow] = {}
    for name, layers in layer_choices(items.num_layers, configured).items():
        f = items.f_mlds(layers.window, layers.final)
        values = {"ConMLDS": items.con_mlds(layers.window), "fMLDS": f}
        for length in LENGTH_RULES:
            values[f"CoCoA-SIG, fMLDS, {length}"] = -composites(items, layers, config.alpha, length)["CoCoA-SIG, fMLDS"]
        rows[name] = {
            "middle_layers": list(layers.window),
            "final_layer": layers.final,
            "auroc": {
                score: bootstrap.interval(Ranked(risk, items.hallucinated, items.supported), "auroc")._asdict()
                for score, risk in values.items()
            },
            "paired_f_mlds": _test(-f, sides)._asdict() if len(sides) > 1 else None,
        }
    return rows


def to_markdown(record: SignalRecord) -> str:
    """The record as Markdown tables."""
    about = record["about"]
    lines = [
        f"# Does the signal work? On {about['format']}",
        "",
        f"{about['model']}, {about['answers']} answers to {about['prompts']} prompts ({about['data']}), "
        f"{'as a chat' if about['chat'] else 'plain prompts'}; alpha {record['alpha']:g}, log p of a span as the "
        f"{record['span_log_prob']} over its tokens. "
        f"Intervals: 95 % bootstrap over prompts, {record['draws']} draws.",
        "",
        f"`{about['command']}`",
    ]
    for level, one in record["levels"].items():
        m, n = one["middle_layers"]
        lines += [
            "",
            f"## By {level}",
            "",
            f"{one['items']} {'tokens' if level == 'character' else level + 's'} of {one['prompts']} prompts, "
            f"{100 * one['share_hallucinated']:.1f} % hallucinated{' characters' if level == 'character' else ''}; "
            f"layers {m}..{n}, {one['final_layer']}.",
            *([] if (warning := caution(one["prompts"])) is None else ["", f"**{warning}**"]),
            "",
            f"| higher is riskier | AUROC | AUPRC | {' | '.join(f'AUROC less that of `{r}`' for r in one['rivals'])} |",
            f"| {' | '.join(['---'] * (3 + len(one['rivals'])))} |",
        ]
        for name, row in one["ranking"].items():
            less = " | ".join(_shown(interval, "+.3f") for interval in row["less"].values())
            lines.append(f"| {name} | {_shown(row['auroc'])} | {_shown(row['auprc'])} | {less} |")
        if one["paired"]:
            lines += _paired_table(level, one["paired"])
        if one["layers"]:
            lines += _layer_table(one["layers"])
    lines += [
        line
        for level, why in record["left_out"].items()
        for line in ("", f"{level.capitalize()}s are left out: {why}.")
    ]
    return safe("\n".join([*lines, ""]))


def _paired_table(level: str, paired: Mapping[str, PairedRecord]) -> list[str]:
    what = "first supported and first hallucinated answer" if level == "answer" else "supported and hallucinated spans"
    lines = [
        "",
        f"Wilcoxon signed-rank test, {what} of each {'prompt' if level == 'answer' else 'answer'}. Z above 0: the "
        "supported side scores higher, as it should.",
        "",
        "| score | pairs | supported higher | Z | r = abs(Z)/√N | p, two-sided | p, one-sided (right direction) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, test in paired.items():
        lines.append(
            f"| {name} | {test['pairs']} | {100 * test['right']:.1f} % | {test['z']:+.2f} | "
            f"{test['effect_size']:.3f} | {test['p_two_sided']:.1e} | {test['p_right']:.1e} |"
        )
    return lines


def _layer_table(layers: Mapping[str, LayerRow]) -> list[str]:
    scores = list(next(iter(layers.values()))["auroc"])
    lines = [
        "",
        "AUROC by choice of layers and length rule (ConMLDS does not use the final layer):",
        "",
        f"| layers | m..n | {' | '.join(scores)} | -fMLDS alone, paired: Z, r |",
        f"| {' | '.join(['---'] * (len(scores) + 3))} |",
    ]
    for name, row in layers.items():
        m, n = row["middle_layers"]
        test = row["paired_f_mlds"]
        paired = f"{test['z']:+.2f}, {test['effect_size']:.3f}" if test else "–"
        cells = " | ".join(_shown(row["auroc"][score]) for score in scores)
        lines.append(f"| {name} | {m}..{n} | {cells} | {paired} |")
    return lines


def _shown(interval: IntervalRecord, form: str = ".3f") -> str:
    return Interval(**interval).shown(form)
