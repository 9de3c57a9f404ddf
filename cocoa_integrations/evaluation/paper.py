"""The figures that the paper prints ("Listen to the Layers", Subbalakshmi et al., 2026), as printed.

``paper_figures.csv`` holds those of its tables on TruthfulQA (the detailed one; what that one lacks comes from the main
one and from those on gating and alpha), NQ and NQ-Swap, SAMSum and XSum, MBPP and GSM8K. CoCoA-SIG on Qwen-2.5-7b is
left out: its alpha is not given. On SAMSum, the ConMLDS rows of Mistral-7B repeat those of Llama-3-8B in the paper.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cocoa_engine.errors import ConfigError
from cocoa_engine.faults import unknown
from cocoa_integrations.evaluation.arms import Arm


def choose_model(task: str, name: str, wanted: str | None = None) -> str | None:
    """The model of the paper to compare with; none if the paper does not have the task.

    Args:
        name: the model of the run; the most alike is taken, by family and size, or else the first.
        wanted: take this one.

    Raises:
        ConfigError: the paper has no figures of the wanted model for this task.
    """
    models = list(_figures().get(task, {}))
    if wanted is not None:
        found = {model.lower(): model for model in models}.get(wanted.lower())
        if found is None:
            raise ConfigError(unknown([wanted], models, what=f"model of the paper for {task}"))
        return found
    parts = set(_parts(name))
    return max(models, key=lambda model: len(parts & set(_parts(model))), default=None)


def figures_of(task: str, model: str, arm: Arm) -> Mapping[str, float]:
    """The paper's figures for an arm, by metric; none where it has none."""
    return _figures().get(task, {}).get(model, {}).get(arm, {})


def _parts(name: str) -> list[str]:
    """Words, numbers and sizes of a model's name: ``Qwen/Qwen2.5-7B`` is ``qwen``, ``2.5``, ``7b``."""
    return re.findall(r"[a-z]+|\d+b|\d+(?:\.\d+)?", name.lower().rpartition("/")[2])


@cache
def _figures() -> dict[str, dict[str, dict[Arm, dict[str, float]]]]:
    figures: dict[str, dict[str, dict[Arm, dict[str, float]]]] = {}
    with Path(__file__).with_name("paper_figures.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            arm = Arm(row["method"], row["metric"] or None, float(row["alpha"]) if row["alpha"] else None)
            of_arm = figures.setdefault(row["task"], {}).setdefault(row["model"], {}).setdefault(arm, {})
            of_arm[row["figure"]] = float(row["value"])
    return figures
