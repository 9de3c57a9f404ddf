"""The results printed in the paper ("Listen to the Layers", Subbalakshmi et al., 2026).

``paper_figures.csv`` contains the results of its tables on TruthfulQA, NQ and NQ-Swap, SAMSum and XSum, MBPP and GSM8K.
They are from the detailed tables, and where these have no value, from the main tables and from those on gating, alpha
and layers.

- CoCoA-SIG on Qwen-2.5-7b is left out, because its alpha is not given. FActScore is left out, because it is not
  measured here.
- The greedy results on NQ-Swap are from the detailed table. The main table has the same truth (%) and different values
  of the other metrics.
- On SAMSum, the ConMLDS rows of Mistral-7B repeat those of Llama-3-8B in the paper.
- The table on layers is headed ConMLDS, alpha = 1, but its row of layers 10-21 is that of fMLDS in the detailed table,
  and is left out. The paper does not say which layers are "all".
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


def choose_model(task: str, name: str, wanted: str | None = None, metrics: Collection[str] = ()) -> str | None:
    """The model of the paper to compare with, or ``None`` if the paper does not have the task.

    Args:
        task: the name of the task.
        name: the model of the run. The most similar model by family and size is chosen, or else the first.
        wanted: choose this model.
        metrics: consider only models with results for at least one of these metrics. Ignored with ``wanted``.

    Raises:
        ConfigError: the paper has no results of the wanted model for this task.
    """
    models = _results().get(task, {})
    if wanted is not None:
        found = {model.lower(): model for model in models}.get(wanted.lower())
        if found is None:
            raise ConfigError(unknown([wanted], models, what=f"model of the paper for {task}"))
        return found
    parts = set(_parts(name))
    shown = set(metrics)
    having = [model for model, rows in models.items() if not shown or any(shown & row.keys() for row in rows.values())]
    return max(having, key=lambda model: len(parts & set(_parts(model))), default=None)


def paper_results(task: str, model: str, arm: Arm, layers: Sequence[int] | None = None) -> Mapping[str, float]:
    """The paper's results for an arm, by metric; empty if there are none.

    Args:
        task: the name of the task.
        model: a model of the paper.
        arm: the arm.
        layers: first and last of the middle layers, if they were set.
    """
    if not arm.alpha:  # without a penalty, the layers have no effect
        arm, layers = arm._replace(metric=None), None
    return _results().get(task, {}).get(model, {}).get((arm, _window(layers, NUM_LAYERS[model])), {})


def _window(layers: Sequence[int] | None, num_layers: int) -> str:
    """Middle layers in the notation of the paper's table; empty for the default, the middle third."""
    from cocoa_engine.equations import middle_layers  # loads torch, which is not needed to refuse bad input

    if layers is None or tuple(layers) == middle_layers(num_layers):
        return ""
    first, last = layers
    return "all" if first <= 1 and last >= num_layers - 1 else f"{first}-{last}"


def _parts(name: str) -> list[str]:
    """Words, numbers and sizes in the name of a model: ``qwen``, ``2.5``, ``7b`` for ``Qwen/Qwen2.5-7B``."""
    return re.findall(r"[a-z]+|\d+b|\d+(?:\.\d+)?", name.lower().rpartition("/")[2])


@cache
def _results() -> dict[str, dict[str, dict[tuple[Arm, str], dict[str, float]]]]:
    """The results by task, model, and arm with its layers."""
    results: dict[str, dict[str, dict[tuple[Arm, str], dict[str, float]]]] = {}
    with Path(__file__).with_name("paper_figures.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            arm = Arm(row["method"], row["metric"] or None, float(row["alpha"]) if row["alpha"] else None)
            of_model = results.setdefault(row["task"], {}).setdefault(row["model"], {})
            of_model.setdefault((arm, row["layers"]), {})[row["figure"]] = float(row["value"])
    return results
