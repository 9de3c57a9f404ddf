"""The results of a run as tables in the layout of the paper, beside the paper's results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cocoa_engine import CocoaConfig
from cocoa_engine.lab.ranking import FEW_GROUPS
from cocoa_engine.safe_text import short_repr
from cocoa_integrations.evaluation.arms import Arm
from cocoa_integrations.evaluation.paper import NUM_LAYERS, choose_model, paper_results
from cocoa_integrations.evaluation.statistics import beyond_noise
from cocoa_integrations.evaluation.table_text import Cell, Report, Table
from cocoa_integrations.evaluation.tasks import Column, EvalTask

_NAMES = {"greedy": "Baseline (greedy)", "cocoa": "CoCoA", "cocoa-sig": "CoCoA-SIG"}
_NAMES |= {"dola": "DoLa", "diver": "Diver", "decore": "DeCoRe", "sample": "Sampling"}
_NONE = "–"
_LEFT_OUT = {"middle_layers", "max_new_tokens", "stop", "seed", "decore_heads"}  # noted elsewhere, or set by the task


def report(task: EvalTask, results: Mapping[str, Any], paper_model: str | None = None) -> Report:
    """The table of means, the table of differences to the first method, and notes.

    A value is bold if it is better than that of the first method beyond noise: the 95 % interval of the paired
    difference excludes 0.

    Args:
        task: the task.
        results: the result of :func:`~cocoa_integrations.evaluation.harness.evaluate`.
        paper_model: a model of the paper. Default: the most similar one.

    Raises:
        ConfigError: the paper has no results of this model for the task.
    """
    measured: Sequence[Mapping[str, Any]] = results["arms"]
    arms = [Arm(one["method"], one["metric"], one["alpha"]) for one in measured]
    name = str(results["settings"]["model"]["name"])
    decoding = results["settings"]["decoding"]
    model = choose_model(task.name, name, paper_model, [column.metric for column in task.columns])
    paper = [paper_results(task.name, model, arm, decoding["middle_layers"]) for arm in arms] if model else []
    compared = [column for column in task.columns if any(column.metric in row for row in paper)]
    counted = [] if task.multiple_choice else [kind for kind in ("empty", "rejected") if kind in measured[0]]

    labels = [[Cell(_NAMES.get(arm.method, arm.method)), Cell(arm.mode)] for arm in arms]
    headings = ["Decoding method", "Mode", *map(_heading, task.columns)]
    columns = [[_mean(column, one["metrics"][column.metric]) for one in measured] for column in task.columns]
    columns += [[Cell(_shown(column, row.get(column.metric))) for row in paper] for column in compared]
    columns += [[Cell(str(one[kind])) for one in measured] for kind in counted]
    means = Table(
        [*headings, *(f"paper: {_heading(column)}" for column in compared), *map(str.capitalize, counted)],
        [[*label, *cells] for label, *cells in zip(labels, *columns, strict=True)],
    )
    tables, notes = [means], []
    if any("difference" in one["metrics"][column.metric] for one in measured for column in task.columns):
        tables.append(
            Table(
                headings,
                [
                    [*label, *(_difference(column, one["metrics"][column.metric]) for column in task.columns)]
                    for label, one in zip(labels[1:], measured[1:], strict=True)
                ],
                f"Difference to {labels[0][0].text}, with its 95 % interval (paired bootstrap over samples):",
            )
        )
        notes.append(
            "Bold (* on a terminal): better than the first method beyond noise, which means that the interval of the "
            f"difference excludes 0, over at least {FEW_GROUPS} samples. ± is the standard error."
        )
    notes.append("↑ more is better, ↓ less is better.")
    if model and compared:
        notes.append(f"The paper's results are those of {model} on the paper's samples.")
    notes += _settings(decoding, arms, model)
    return Report(task.name, f"{name}, {results['samples']} samples", tables, notes)


def _settings(decoding: Mapping[str, Any], arms: Sequence[Arm], model: str | None) -> Iterator[str]:
    """Sentences about the settings that differ from the paper."""
    if decoding["middle_layers"] is not None and any(arm.alpha for arm in arms):
        first, last = decoding["middle_layers"]
        compared = (
            ""
            if model is None
            else ": arms with a disagreement penalty are compared with the paper's results for these of its "
            f"{NUM_LAYERS[model]} layers, if there are any"
        )
        yield f"Middle layers are set to {first} to {last}{compared}."
    paper = CocoaConfig.paper().model_dump(mode="json", exclude=_LEFT_OUT)
    others = {name: value for name, value in paper.items() if decoding.get(name, value) != value}
    if others:
        listed = ", ".join(f"{name} {_setting(decoding[name])} ({_setting(value)})" for name, value in others.items())
        yield f"Settings that differ from `CocoaConfig.paper()`, whose values are in brackets: {listed}."


def _setting(value: object) -> str:
    return "none" if value is None else short_repr(value) if isinstance(value, (list, dict)) else str(value)


def _heading(column: Column) -> str:
    return f"{column.heading} {'↑' if column.better == 'more' else '↓'}"


def _mean(column: Column, statistics: Mapping[str, Any]) -> Cell:
    """The mean of a metric, with its standard error if it is known."""
    mean, error, difference = (statistics.get(name) for name in ("mean", "standard_error", "difference"))
    shown = _shown(column, None if mean is None else mean * column.scale)
    if error is not None:
        shown += f" ± {_shown(column, error * column.scale)}"
    return Cell(shown, difference is not None and _is_better(column, difference))


def _difference(column: Column, statistics: Mapping[str, Any]) -> Cell:
    """The paired difference of a metric to the first method, with its interval."""
    difference = statistics.get("difference")
    if difference is None:
        return Cell(_NONE)
    estimate, low, high = (
        None if difference[name] is None else f"{difference[name] * column.scale:+.{column.decimals}f}"
        for name in ("estimate", "low", "high")
    )
    shown = str(estimate) if low is None else f"{estimate} ({low} – {high})"
    return Cell(shown, _is_better(column, difference))


def _is_better(column: Column, difference: Mapping[str, Any]) -> bool:
    """Whether a difference is an improvement beyond noise."""
    return beyond_noise(difference) and (difference["estimate"] > 0) == (column.better == "more")


def _shown(column: Column, value: float | None) -> str:
    return _NONE if value is None else f"{value:.{column.decimals}f}"
