"""The results of a run as a Markdown table in the layout of the paper, beside the paper's results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cocoa_engine import CocoaConfig
from cocoa_integrations.evaluation.arms import Arm
from cocoa_integrations.evaluation.paper import NUM_LAYERS, choose_model, paper_results
from cocoa_integrations.evaluation.tasks import Column, EvalTask

_NAMES = {"greedy": "Baseline (greedy)", "cocoa": "CoCoA", "cocoa-sig": "CoCoA-SIG"}
_NAMES |= {"dola": "DoLa", "diver": "Diver", "decore": "DeCoRe"}
_NONE = "–"
_LEFT_OUT = {"middle_layers", "max_new_tokens", "stop", "seed", "decore_heads"}  # noted elsewhere, or set by the task


def markdown(task: EvalTask, results: Mapping[str, Any], paper_model: str | None = None) -> str:
    """The table and its notes. Of the measured results, the best is bold and the second best underlined.

    Args:
        task: the task.
        results: the result of :func:`~cocoa_integrations.evaluation.run.evaluate`.
        paper_model: a model of the paper. Default: the most similar one.

    Raises:
        ConfigError: the paper has no results of this model for the task.
    """
    arms = [Arm(one["method"], one["metric"], one["alpha"]) for one in results["arms"]]
    name = str(results["settings"]["model"]["name"])
    decoding = results["settings"]["decoding"]
    model = choose_model(task.name, name, paper_model, [column.metric for column in task.columns])
    paper = [paper_results(task.name, model, arm, decoding["middle_layers"]) for arm in arms] if model else []
    compared = [column for column in task.columns if any(column.metric in row for row in paper)]

    headings = ["Decoding method", "Mode", *(_heading(column) for column in task.columns)]
    headings += [f"paper: {_heading(column)}" for column in compared]
    columns = [_marked(column, results["arms"]) for column in task.columns]
    columns += [[_shown(column, row.get(column.metric)) for row in paper] for column in compared]
    rows = [
        [_NAMES.get(arm.method, arm.method), arm.mode, *(column[number] for column in columns)]
        for number, arm in enumerate(arms)
    ]
    lines = [f"**{task.name}**, {name}, {results['samples']} samples", ""]
    lines += [_row(headings), _row(["---", "---", *("---:" for _ in headings[2:])]), *map(_row, rows), ""]
    lines.append("Best in bold, second best underlined; ↑ more is better, ↓ less is better.")
    errors, empty = (sum(one[kind] for one in results["arms"]) for kind in ("errors", "empty"))
    if errors:
        lines.append(f"Samples that could not be answered, and count as wrong: {errors} across all arms.")
    if empty > errors:
        lines.append(f"Empty answers: {empty - errors} across all arms.")
    if model and compared:
        lines.append(f"The paper's results are those of {model} on the paper's samples.")
    lines += _differences(decoding, arms, model)
    return "\n".join(lines) + "\n"


def _differences(decoding: Mapping[str, Any], arms: Sequence[Arm], model: str | None) -> Iterator[str]:
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
    return "none" if value is None else str(value)


def _heading(column: Column) -> str:
    return f"{column.heading} {'↑' if column.better == 'more' else '↓'}"


def _marked(column: Column, arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells of one column. Equal cells are marked alike."""
    means = [one["metrics"][column.metric]["mean"] for one in arms]
    shown = [_shown(column, None if mean is None else mean * column.scale) for mean in means]
    ranking = sorted({text for text in shown if text != _NONE}, key=float, reverse=column.better == "more")
    marks = dict(zip(ranking, ("**{}**", "<u>{}</u>"), strict=False)) if len(ranking) > 1 else {}
    return [marks.get(text, "{}").format(text) for text in shown]


def _shown(column: Column, value: float | None) -> str:
    return _NONE if value is None else f"{value:.{column.decimals}f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
