"""What may tell hallucinated items from supported ones: the paper's scores, and the rivals they must beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import SpanLogProb, cocoa, cocoa_sig, middle_layers
from cocoa_engine.errors import ConfigError
from cocoa_engine.model.hidden_states import FinalLayer
from cocoa_engine.studies.signal.items import Floats, Items


@dataclass(frozen=True)
class Layers:
    """Which layers are compared: m..n, both inclusive, with each other or with the final state."""

    window: tuple[int, int]
    final: FinalLayer

    @classmethod
    def of(cls, config: CocoaConfig, num_layers: int) -> Layers:
        """Those of the settings.

        Raises:
            ConfigError: the window includes the last layer, or lies beyond it.
        """
        window = config.middle_layers or middle_layers(num_layers)
        if window[1] >= num_layers:
            raise ConfigError(
                f"middle_layers: n={window[1]} is not below the model's {num_layers} layers; here it must be."
            )
        return cls(window, config.final_layer)


def composites(items: Items, layers: Layers, alpha: float, length: SpanLogProb = "sum") -> dict[str, Floats]:
    """The paper's four scores of each item, higher is better, ``[n]`` each."""
    log_prob = items.log_prob if length == "sum" else items.log_prob / items.tokens
    con, f = items.con_mlds(layers.window), items.f_mlds(layers.window, layers.final)
    return {
        "CoCoA, ConMLDS": cocoa(log_prob, con, alpha),
        "CoCoA, fMLDS": cocoa(log_prob, f, alpha),
        "CoCoA-SIG, ConMLDS": cocoa_sig(log_prob, con, alpha),
        "CoCoA-SIG, fMLDS": cocoa_sig(log_prob, f, alpha),
    }


def parts(items: Items, layers: Layers) -> dict[str, Floats]:
    """What the composites are made of, each alone, higher is better: log p_S, and less disagreement."""
    return {
        "log p alone": items.log_prob,
        "-ConMLDS alone": -items.con_mlds(layers.window),
        "-fMLDS alone": -items.f_mlds(layers.window, layers.final),
    }


def indicators(items: Items, layers: Layers, alpha: float, length: SpanLogProb = "sum") -> dict[str, Floats]:
    """Risk of each item by everything there is, higher is riskier: the method's figures first, then the rivals."""
    found = {name: -score for name, score in composites(items, layers, alpha, length).items()}
    found["ConMLDS"] = items.con_mlds(layers.window)
    found["fMLDS"] = items.f_mlds(layers.window, layers.final)
    found["-log p"] = -items.log_prob
    found["-mean log p"] = -items.log_prob / items.tokens
    found["-min log p"] = -items.min_log_prob
    found["mean entropy"] = items.mean_entropy
    found["-mean margin"] = -items.mean_margin
    if items.level == "span":
        found["first entropy"] = items.first_entropy
        found["-first margin"] = -items.first_margin
    if items.level == "answer":
        found["length in tokens"] = items.tokens
    else:
        found["position in tokens"] = items.position
        found["position as a share of the answer"] = items.place
    if items.bare is not None:
        found |= _lifts(items, items.bare, layers)
    if items.level == "character":  # of a single token these are the same
        for name in ("-mean log p", "-min log p"):
            del found[name]
    return found


def _lifts(items: Items, bare: Items, layers: Layers) -> dict[str, Floats]:
    """What the source changed: less of log p, or more disagreement, as the riskier; and log p without the source."""
    lift = items.log_prob - bare.log_prob
    found = {"-context lift": -lift}
    if items.level != "character":
        found["-mean context lift"] = -lift / items.tokens
    found["lift of ConMLDS"] = items.con_mlds(layers.window) - bare.con_mlds(layers.window)
    found["lift of fMLDS"] = items.f_mlds(layers.window, layers.final) - bare.f_mlds(layers.window, layers.final)
    found["-log p without the source"] = -bare.log_prob
    return found


def layer_choices(num_layers: int, own: Layers) -> dict[str, Layers]:
    """The choices that are compared, by name: the settings' own, and windows before and after the final norm."""
    windows = {
        "first third": (0, num_layers // 3),
        "middle third (the paper)": middle_layers(num_layers),
        **{f"middle {n - m + 1} layers": (m, n) for m, n in shrinking_windows(num_layers)},
        "upper half": (num_layers // 2, num_layers - 1),
        "last third": (2 * num_layers // 3, num_layers - 1),
        "all": (0, num_layers - 1),
    }
    if own.window not in windows.values():
        windows["as set"] = own.window
    finals: tuple[FinalLayer, ...] = ("post_norm", "pre_norm")
    return {f"{name}, {final}": Layers(window, final) for name, window in windows.items() for final in finals}


def shrinking_windows(num_layers: int) -> list[tuple[int, int]]:
    """Windows m..n in the midst of the middle third, ever smaller, the smallest of 3 layers; none if that is too small.

    Their widths are 4, 3, 2 and 1 fifths of its own: of 32 layers they are those of the paper's ablation, 11..19,
    12..18, 13..17 and 14..16.
    """
    m, n = middle_layers(num_layers)
    middle, reach = (m + n) // 2, (n - m) // 2
    smaller = dict.fromkeys(round(reach * fifths / 5) for fifths in (4, 3, 2, 1))
    return [(middle - one, middle + one) for one in smaller if 0 < one < reach]


def pairs(items: Items) -> list[tuple[list[int], list[int]]]:
    """What is compared in pairs, as numbers of items: the supported side and the hallucinated one.

    Of each prompt, its first supported and its first hallucinated answer; of each answer, its supported and its
    hallucinated spans.
    """
    by: dict[str, tuple[list[int], list[int]]] = {}
    for number, name in enumerate(items.groups if items.level == "answer" else items.answers):
        by.setdefault(name, ([], []))[0 if items.supported[number] > 0 else 1].append(number)
    most = 1 if items.level == "answer" else None
    return [(good[:most], bad[:most]) for good, bad in by.values() if good and bad]


def means(values: Floats, members: list[list[int]]) -> list[float]:
    """The mean value of each set of items."""
    return [float(np.mean(values[numbers])) for numbers in members]
