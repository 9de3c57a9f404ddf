"""The figures that the paper prints ("Listen to the Layers", Subbalakshmi et al., 2026), as printed.

``paper_figures.csv`` holds those of its tables on TruthfulQA, NQ and NQ-Swap, SAMSum and XSum, MBPP and GSM8K: of the
detailed tables, and what these lack, of the main ones and of those on gating, alpha and layers.

- CoCoA-SIG on Qwen-2.5-7b is left out: its alpha is not given. So is FActScore, which is not measured here.
- The greedy figures on NQ-Swap are those of the detailed table; the main one has others beside the same truth.
- On SAMSum, the ConMLDS rows of Mistral-7B repeat those of Llama-3-8B in the paper.
- The table on layers is headed ConMLDS, alpha = 1, but its row of layers 10-21 is that of fMLDS in the detailed table,
  and left out. Which layers are "all" is not said.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path

from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import unknown
from cocoa_integrations.evaluation.arms import Arm

NUM_LAYERS = {"CodeLlama-7b": 32, "Llama-3-8b": 32, "Mistral-7b": 32}
NUM_LAYERS |= {"Qwen-2.5-7b": 28, "Qwen-2.5-14b": 48, "Qwen-2.5-32b": 64}


def choose_model(task: str, name: str, wanted: str | None = None, figures: Collection[str] = ()) -> str | None:
    """The model of the paper to compare with; none if the paper does not have the task.

    Args:
        name: the model of the run; the most alike is taken, by family and size, or else the first.
        wanted: take this one.
        figures: unless one is wanted, only models of which the paper has some of these come into question.

    Raises:
        ConfigError: the paper has no figures of the wanted model for this task.
    """
    models = _figures().get(task, {})
    if wanted is not None:
        found = {model.lower(): model for model in models}.get(wanted.lower())
        if found is None:
            raise ConfigError(unknown([wanted], models, what=f"model of the paper for {task}"))
        return found
    parts = set(_parts(name))
    shown = set(figures)
    having = [model for model, rows in models.items() if not shown or any(shown & row.keys() for row in rows.values())]
    return max(having, key=lambda model: len(parts & set(_parts(model))), default=None)


def figures_of(task: str, model: str, arm: Arm, layers: Sequence[int] | None = None) -> Mapping[str, float]:
    """The paper's figures for an arm, by metric; none where it has none.

    Args:
        layers: first and last of the middle layers, if they were set.
    """
    if not arm.alpha:  # disagreement does not count, in whatever layers
        arm, layers = arm._replace(metric=None), None
    return _figures().get(task, {}).get(model, {}).get((arm, _window(layers, NUM_LAYERS[model])), {})


def _window(layers: Sequence[int] | None, num_layers: int) -> str:
    """Middle layers as the paper's table writes them; nothing for its usual ones, the middle third."""
    from cocoa_engine.equations import middle_layers  # which loads torch: bad input is refused without it

    if layers is None or tuple(layers) == middle_layers(num_layers):
        return ""
    first, last = layers
    return "all" if first <= 1 and last >= num_layers - 1 else f"{first}-{last}"


def _parts(name: str) -> list[str]:
    """Words, numbers and sizes of a model's name: ``Qwen/Qwen2.5-7B`` is ``qwen``, ``2.5``, ``7b``."""
    return re.findall(r"[a-z]+|\d+b|\d+(?:\.\d+)?", name.lower().rpartition("/")[2])


@cache
def _figures() -> dict[str, dict[str, dict[tuple[Arm, str], dict[str, float]]]]:
    """By task, model, and arm with its layers."""
    figures: dict[str, dict[str, dict[tuple[Arm, str], dict[str, float]]]] = {}
    with Path(__file__).with_name("paper_figures.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            arm = Arm(row["method"], row["metric"] or None, float(row["alpha"]) if row["alpha"] else None)
            of_model = figures.setdefault(row["task"], {}).setdefault(row["model"], {})
            of_model.setdefault((arm, row["layers"]), {})[row["figure"]] = float(row["value"])
    return figures
