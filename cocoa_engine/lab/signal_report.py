"""The signal study: its measurements, record, tables and plots."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import rule_without_rivals
from cocoa_engine.errors import safe
from cocoa_engine.files import draft_of
from cocoa_engine.lab.indicators import Items, Level, indicators, layer_choices
from cocoa_engine.lab.measured import Layers
from cocoa_engine.lab.statistics import Bootstrap, Interval, Ranked, caution
from cocoa_engine.rendering.terminal import table

Record = dict[str, Any]
"""Measured values as plain data, with the fields of :class:`.Interval`."""


def plot_name(level: Level) -> str:
    """The file of a level's plot."""
    return f"auroc-{level}.svg"


def draw(record: Record, folder: Path) -> list[Path]:
    """Draw the plot of each level into a folder, and return the files. Needs matplotlib."""
    files = []
    for level, values in record["levels"].items():
        files.append(folder / plot_name(level))
        with draft_of(files[-1]) as draft:
            _ranking(level, values["ranking"]).savefig(draft, format="svg")
    return files


def _ranking(level: str, ranking: Mapping[str, Record]) -> Any:
    """The AUROC of each score with its bootstrap interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.32 * len(ranking) + 1.2), layout="constrained")
    axes = figure.subplots()
    names = list(ranking)[::-1]
    for height, row in enumerate(ranking[name] for name in names):
        estimate, low, high = row["auroc"].values()
        if low is not None and high is not None:
            axes.plot([low, high], [height, height], color="tab:blue", linewidth=3)
        axes.plot(estimate, height, "o", color="black", markersize=4)
    axes.axvline(0.5, color="grey", linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel(f"AUROC by {level}, 95 % bootstrap interval over prompts")
    return figure


BASELINES = ("-log p", "-mean log p")
"""The baselines that every score is compared with: -log p_S, which is part of every composite score, and its mean per
token."""


def measure(
    about: Record, items: Mapping[Level, Items], config: CocoaConfig, *, draws: int = 1000, seed: int = 0
) -> Record:
    """All values of the report, as plain data. Layers, alpha and the rule for log p_S are those of the settings.

    ``about`` is what is measured: ``data``, ``format``, ``model``, ``answers``, ``prompts``, ``chat`` and ``command``.
    ``left_out`` of the record has the reason for each level that cannot be measured.
    """
    levels: dict[Level, Record] = {}
    left_out: dict[Level, str] = {}
    for level, of_level in items.items():
        if of_level.both_classes:
            levels[level] = _level(of_level, Layers.of(config, of_level.num_layers), config, draws, seed)
        elif of_level.groups:
            left_out[level] = f"all are {'hallucinated' if of_level.hallucinated.any() else 'supported'}"
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


def _level(items: Items, layers: Layers, config: CocoaConfig, draws: int, seed: int) -> Record:
    """The values of one level. ``rivals`` are the baselines; ``ranking`` is by score."""
    bootstrap = Bootstrap(items.groups, draws, seed)
    ranked = {
        name: Ranked(values, items.hallucinated, items.supported)
        for name, values in indicators(items, layers, config.alpha, config.span_log_prob).items()
    }
    baselines = [name for name in BASELINES if name in ranked]
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
        "ranking": {
            name: {
                "auroc": bootstrap.interval(score, "auroc")._asdict(),
                "auprc": bootstrap.interval(score, "auprc")._asdict(),
                "less": {rival: bootstrap.difference(score, ranked[rival], "auroc")._asdict() for rival in baselines},
            }
            for name, score in ranked.items()
        },
        "layers": {} if items.level == "character" else _layers(items, layers, config, bootstrap),
    }


def _layers(items: Items, configured: Layers, config: CocoaConfig, bootstrap: Bootstrap) -> Record:
    """The AUROC of both MLDS and of CoCoA-SIG, for each choice of layers."""
    rows: Record = {}
    for choice, layers in layer_choices(items.num_layers, configured).items():
        scores = indicators(items, layers, config.alpha, config.span_log_prob)
        rows[choice] = {
            "middle_layers": list(layers.window),
            "final_layer": layers.final,
            "auroc": {
                name: bootstrap.interval(Ranked(scores[name], items.hallucinated, items.supported), "auroc")._asdict()
                for name in ("ConMLDS", "fMLDS", "CoCoA-SIG, fMLDS")
            },
        }
    return rows


def to_markdown(record: Record) -> str:
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
    for level, values in record["levels"].items():
        m, n = values["middle_layers"]
        rivals = [f"AUROC less that of `{rival}`" for rival in values["rivals"]]
        rows = [
            [name, _shown(row["auroc"]), _shown(row["auprc"]), *(_shown(less, "+.3f") for less in row["less"].values())]
            for name, row in values["ranking"].items()
        ]
        lines += [
            "",
            f"## By {level}",
            "",
            f"{values['items']} {'tokens' if level == 'character' else level + 's'} of {values['prompts']} prompts, "
            f"{100 * values['share_hallucinated']:.1f} % hallucinated{' characters' if level == 'character' else ''}; "
            f"layers {m}..{n}, {values['final_layer']}.",
            *([] if (warning := caution(values["prompts"])) is None else ["", f"**{warning}**"]),
            "",
            *table(["higher is riskier", "AUROC", "AUPRC", *rivals], rows),
        ]
        if values["layers"]:
            lines += _layer_table(values["layers"])
    for level, why in record["left_out"].items():
        lines += ["", f"{level.capitalize()}s are left out: {why}."]
    return safe("\n".join([*lines, ""]))


def _layer_table(layers: Mapping[str, Record]) -> list[str]:
    rows = []
    for name, row in layers.items():
        m, n = row["middle_layers"]
        rows.append([name, f"{m}..{n}", *map(_shown, row["auroc"].values())])
    headings = ["layers", "m..n", *next(iter(layers.values()))["auroc"]]
    about = "AUROC by choice of layers (ConMLDS does not use the final layer):"
    return ["", about, "", *table(headings, rows)]


def _shown(interval: Record, form: str = ".3f") -> str:
    return Interval(**interval).shown(form)
