"""The results of the study of length rules: means, paired differences to greedy decoding, and tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cocoa_engine.studies.signal.ranking import Interval, interval
from cocoa_integrations.evaluation import metrics
from cocoa_integrations.evaluation.table_text import Cell, Report, Table
from cocoa_integrations.evaluation.tasks import EvalTask

DRAWS = 10_000
BASELINE = "greedy"

Rows = Mapping[tuple[str, str], Mapping[str, Any]]


def paired_difference(values: Sequence[float], baseline: Sequence[float], *, seed: int = 0) -> Interval:
    """The mean difference of paired values, with its 95 % percentile bootstrap interval over pairs.

    Args:
        values, baseline: one value for each prompt, in the same order.
        seed: seed of the draws.
    """
    differences = np.subtract(values, baseline, dtype=np.float64)
    count = len(differences)
    if count < 2:
        return Interval(float(differences.mean()), None, None)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    return interval(float(differences.mean()), draws @ differences / count)


def summarise(task: EvalTask, arms: Sequence[str], rows: Rows) -> dict[str, Any]:
    """The results of a task over the prompts that every arm has answered.

    Args:
        arms: the names of the arms; the first is the baseline.
        rows: by arm and sample id, from :mod:`cocoa_integrations.evaluation.length_rules`.

    Returns:
        ``prompts``, ``errors`` and ``arms``: by arm, for each metric the ``mean`` and the paired ``difference`` to the
        baseline, the numbers of answers that are ``empty``, that are ``lost`` (empty, and the baseline's is not), that
        are ``rejected``, and that ``differ`` from the baseline's, and the mean number of ``tokens``.
    """
    answered = [{key for name, key in rows if name == arm} for arm in arms]
    prompts = sorted(set.intersection(*answered))
    first = [rows[arms[0], key] for key in prompts]
    result: dict[str, Any] = {"prompts": len(prompts), "errors": sum("error" in row for row in first), "arms": {}}
    for arm in arms if prompts else ():
        own = [rows[arm, key] for key in prompts]
        result["arms"][arm] = {
            "metrics": {
                column.metric: {
                    "mean": float(np.mean([row["metrics"][column.metric] for row in own])),
                    "difference": paired_difference(
                        [row["metrics"][column.metric] for row in own], [row["metrics"][column.metric] for row in first]
                    ).record(),
                }
                for column in task.columns
            },
            "empty": sum(not row["answer"] for row in own),
            "lost": sum(bool(other["answer"]) and not row["answer"] for row, other in zip(own, first, strict=True)),
            "rejected": sum(int(metrics.rejected(row["answer"])) for row in own),
            "differ": sum(row["answer"] != other["answer"] for row, other in zip(own, first, strict=True)),
            "tokens": float(np.mean([row["tokens"] for row in own])),
        }
    return result


def answers_csv(rows: Mapping[str, Rows]) -> str:
    """One line of CSV for each answer: its metrics, whether it is empty or rejects the question, and its tokens.

    Args:
        rows: by task, the rows of :func:`summarise`.
    """
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(("task", "id", "arm", "metrics", "empty", "rejected", "tokens", "decoded_tokens", "finish_reason"))
    for task, of_task in rows.items():
        for (arm, key), row in of_task.items():
            measured = " ".join(f"{name}={value:.6g}" for name, value in row["metrics"].items())
            judged = int(not row["answer"]), int(metrics.rejected(row["answer"]))
            cost = (row[name] for name in ("tokens", "decoded_tokens", "finish_reason"))
            lines.writerow((task, key, arm, measured, *judged, *cost))
    return written.getvalue()


def report(results: Mapping[str, Any]) -> Report:
    """The results as one table for each task."""
    tables = [_task_table(name, found) for name, found in results["tasks"].items()]
    return Report("length rules", "each method with each rule, and greedy decoding", tables)


def _task_table(name: str, found: Mapping[str, Any]) -> Table:
    from cocoa_integrations.evaluation.tasks import TASKS

    columns = TASKS[name].columns
    headings = [part for column in columns for part in (column.heading, "minus greedy (95 %)")]
    rows = []
    for arm, values in found["arms"].items():
        cells = []
        for column in columns:
            of_metric = values["metrics"][column.metric]
            difference = of_metric["difference"]
            low, high = (_scaled(difference[end], column.scale) for end in ("low", "high"))
            shown = Interval(column.scale * difference["estimate"], low, high)
            mean = column.scale * of_metric["mean"]
            cells += [f"{mean:.{column.decimals}f}", "" if arm == BASELINE else shown.shown(f"+.{column.decimals}f")]
        cells += [str(values[key]) for key in ("empty", "lost", "rejected", "differ")]
        rows.append([Cell(text) for text in (arm, *cells, format(values["tokens"], ".1f"))])
    return Table(
        ["arm", *headings, "empty", "only here", "rejected", "not greedy's answer", "tokens"],
        rows,
        f"{name}, {found['prompts']} prompts",
        left=1,
    )


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else scale * value
