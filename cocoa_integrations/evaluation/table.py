"""The results of a run as tables in the layout of the paper, beside the paper's results.

``paper_figures.csv`` contains the results of the tables of "Listen to the Layers" (Subbalakshmi et al., 2026) on
TruthfulQA, NQ and NQ-Swap, SAMSum and XSum, MBPP and GSM8K. They are from the detailed tables, and where these have no
value, from the main tables and from those on gating, alpha and layers.

- CoCoA-SIG on Qwen-2.5-7b is left out, because its alpha is not given. FActScore is left out, because it is not
  measured here.
- The greedy results on NQ-Swap are from the detailed table. The main table has the same truth (%) and different values
  of the other metrics.
- On SAMSum, the ConMLDS rows of Mistral-7B repeat those of Llama-3-8B in the paper.
- The table on layers is headed ConMLDS, alpha = 1, but its row of layers 10-21 is that of fMLDS in the detailed table,
  and is left out. The paper does not say which layers are "all".
"""

import csv
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError, safe, short_repr, unknown
from cocoa_engine.lab.statistics import FEW_GROUPS, Interval
from cocoa_engine.rendering.terminal import inline, table
from cocoa_integrations.evaluation.metrics import beyond_noise
from cocoa_integrations.evaluation.tasks import Arm, Column, EvalTask

NUM_LAYERS = {"CodeLlama-7b": 32, "Llama-3-8b": 32, "Mistral-7b": 32}
NUM_LAYERS |= {"Qwen-2.5-7b": 28, "Qwen-2.5-14b": 48, "Qwen-2.5-32b": 64}


def choose_model(task: str, name: str, wanted: str | None = None, metrics: Collection[str] = ()) -> str | None:
    """The model of the paper to compare with: ``wanted``, or that most similar to ``name`` by family and size.

    The second is one with results for any of the ``metrics``. `None` if the paper does not have the task.
    """
    models = _results().get(task, {})
    if wanted is not None:
        model = {model.lower(): model for model in models}.get(wanted.lower())
        if model is None:
            raise ConfigError(unknown([wanted], models, what=f"model of the paper for {task}"))
        return model

    def parts(name: str) -> set[str]:  # qwen, 2.5, 7b of Qwen/Qwen2.5-7B
        return set(re.findall(r"[a-z]+|\d+b|\d+(?:\.\d+)?", name.lower().rpartition("/")[2]))

    shown = set(metrics)
    having = [model for model, rows in models.items() if not shown or any(shown & row.keys() for row in rows.values())]
    return max(having, key=lambda model: len(parts(name) & parts(model)), default=None)


def paper_results(task: str, model: str, arm: Arm, layers: Sequence[int] | None = None) -> Mapping[str, float]:
    """The results of a model of the paper for an arm, by metric; empty if there are none.

    ``layers`` are the first and last of the middle layers, if they were set.
    """
    from cocoa_engine.equations import middle_layers  # loads torch, which is not needed to refuse bad input

    if not arm.alpha:  # without a penalty, the layers have no effect
        arm, layers = arm._replace(metric=None), None
    window, num_layers = "", NUM_LAYERS[model]  # as the paper's table writes it: nothing for the middle third
    if layers is not None and tuple(layers) != middle_layers(num_layers):
        first, last = layers
        window = "all" if first <= 1 and last >= num_layers - 1 else f"{first}-{last}"
    return _results().get(task, {}).get(model, {}).get((arm, window), {})


@cache
def _results() -> dict[str, dict[str, dict[tuple[Arm, str], dict[str, float]]]]:
    results: dict[str, dict[str, dict[tuple[Arm, str], dict[str, float]]]] = {}
    with Path(__file__).with_name("paper_figures.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            arm = Arm(row["method"], row["metric"] or None, float(row["alpha"]) if row["alpha"] else None)
            of_model = results.setdefault(row["task"], {}).setdefault(row["model"], {})
            of_model.setdefault((arm, row["layers"]), {})[row["figure"]] = float(row["value"])
    return results


_NAMES = {"greedy": "Baseline (greedy)", "cocoa": "CoCoA", "cocoa-sig": "CoCoA-SIG"}
_NAMES |= {"dola": "DoLa", "diver": "Diver", "decore": "DeCoRe", "sample": "Sampling"}
_LEFT_OUT = {"middle_layers", "max_new_tokens", "stop", "seed", "decore_heads"}  # noted elsewhere, or set by the task


def report(
    task: EvalTask, results: Mapping[str, Any], paper_model: str | None = None, notes: Iterable[str] = ()
) -> str:
    """The table of means, the table of differences to the first method, and notes, as Markdown.

    A value is bold if it is better than that of the first method beyond noise: the 95 % interval of the paired
    difference excludes 0. ``notes`` are further lines.

    Raises:
        ConfigError: the paper has no results of ``paper_model`` for the task.
    """

    def heading(column: Column) -> str:
        return f"{column.heading} {'↑' if column.better == 'more' else '↓'}"

    measured: Sequence[Mapping[str, Any]] = results["arms"]
    arms = [Arm(arm["method"], arm["metric"], arm["alpha"]) for arm in measured]
    name = str(results["settings"]["model"]["name"])
    decoding = results["settings"]["decoding"]
    model = choose_model(task.name, name, paper_model, [column.metric for column in task.columns])
    paper = [paper_results(task.name, model, arm, decoding["middle_layers"]) for arm in arms] if model else []
    compared = [column for column in task.columns if any(column.metric in row for row in paper)]
    counted = [] if task.multiple_choice else [kind for kind in ("empty", "rejected") if kind in measured[0]]

    labels = [[_NAMES.get(arm.method, arm.method), arm.mode] for arm in arms]
    headings = ["Decoding method", "Mode", *map(heading, task.columns)]
    columns = [[_mean(column, **arm["metrics"][column.metric]) for arm in measured] for column in task.columns]
    columns += [[_shown(column, row.get(column.metric)) for row in paper] for column in compared]
    columns += [[str(arm[kind]) for arm in measured] for kind in counted]
    lines = [
        f"**{inline(task.name)}**, {inline(name)}, {results['samples']} samples",
        "",
        *table(
            [*headings, *(f"paper: {heading(column)}" for column in compared), *map(str.capitalize, counted)],
            [[*label, *cells] for label, *cells in zip(labels, *columns, strict=True)],
            left=2,
        ),
        "",
    ]
    if any("difference" in arm["metrics"][column.metric] for arm in measured for column in task.columns):
        differences = [
            [*label, *(_difference(column, **arm["metrics"][column.metric]) for column in task.columns)]
            for label, arm in zip(labels[1:], measured[1:], strict=True)
        ]
        lines += [
            f"Difference to {labels[0][0]}, with its 95 % interval (paired bootstrap over samples):",
            "",
            *table(headings, differences, left=2),
            "",
            "Bold: better than the first method beyond noise, which means that the interval of the difference excludes "
            f"0, over at least {FEW_GROUPS} samples. ± is the standard error.",
        ]
    lines.append("↑ more is better, ↓ less is better.")
    if model and compared:
        lines.append(f"The paper's results are those of {model} on the paper's samples.")
    sentences = []
    if decoding["middle_layers"] is not None and any(arm.alpha for arm in arms):
        compared_by = (
            ""
            if model is None
            else ": arms with a disagreement penalty are compared with the paper's results for these of its "
            f"{NUM_LAYERS[model]} layers, if there are any"
        )
        sentences.append("Middle layers are set to {} to {}{}.".format(*decoding["middle_layers"], compared_by))
    own = CocoaConfig.paper().model_dump(mode="json", exclude=_LEFT_OUT)
    others = [
        f"{setting} {_setting(decoding[setting])} ({_setting(value)})"
        for setting, value in own.items()
        if decoding.get(setting, value) != value
    ]
    if others:
        brackets = "Settings that differ from `CocoaConfig.paper()`, whose values are in brackets"
        sentences.append(f"{brackets}: {', '.join(others)}.")
    return "\n".join([*lines, *map(safe, [*sentences, *notes])]) + "\n"


def _setting(value: object) -> str:
    return "none" if value is None else short_repr(value) if isinstance(value, (list, dict)) else str(value)


def _mean(
    column: Column, mean: float | None, standard_error: float | None = None, difference: Mapping[str, Any] | None = None
) -> str:
    shown = _shown(column, None if mean is None else mean * column.scale)
    if standard_error is not None:
        shown += f" ± {_shown(column, standard_error * column.scale)}"
    return _bold(column, difference, shown)


def _difference(column: Column, difference: Mapping[str, Any] | None = None, **_: Any) -> str:
    if difference is None:
        return "–"
    scaled: Any = [None if difference[name] is None else difference[name] * column.scale for name in Interval._fields]
    return _bold(column, difference, Interval(*scaled).shown(f"+.{column.decimals}f"))


def _bold(column: Column, difference: Mapping[str, Any] | None, shown: str) -> str:
    improves = difference is not None and (difference["estimate"] > 0) == (column.better == "more")
    return f"**{shown}**" if difference is not None and improves and beyond_noise(difference) else shown


def _shown(column: Column, value: float | None) -> str:
    return "–" if value is None else f"{value:.{column.decimals}f}"
