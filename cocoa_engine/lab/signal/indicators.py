"""Scores that may separate hallucinated from supported items: the paper's, and the baselines they must beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import SpanLogProb, cocoa, cocoa_sig, length_penalty, middle_layers
from cocoa_engine.errors import ConfigError
from cocoa_engine.lab.signal.items import Floats, Items
from cocoa_engine.model.hidden_states import FinalLayer


@dataclass(frozen=True)
class Layers:
    """The layers of the MLDS: the window (m, n), both inclusive, and the final state they are compared with."""

    window: tuple[int, int]
    final: FinalLayer

    @classmethod
    def of(cls, config: CocoaConfig, num_layers: int) -> Layers:
        """The layers of some settings.

        Raises:
            ConfigError: the window is not below the last layer.
        """
        window = config.middle_layers or middle_layers(num_layers)
        if window[1] >= num_layers:
            raise ConfigError(f"middle_layers: n={window[1]} must be below the model's {num_layers} layers here.")
        return cls(window, config.final_layer)


def composites(items: Items, layers: Layers, alpha: float, length: SpanLogProb = "sum") -> dict[str, Floats]:
    """The paper's four scores of each item, ``[n]`` each, higher is better."""
    log_prob = items.log_prob / length_penalty(items.tokens, length)
    con, f = items.con_mlds(layers.window), items.f_mlds(layers.window, layers.final)
    return {
        "CoCoA, ConMLDS": cocoa(log_prob, con, alpha),
        "CoCoA, fMLDS": cocoa(log_prob, f, alpha),
        "CoCoA-SIG, ConMLDS": cocoa_sig(log_prob, con, alpha),
        "CoCoA-SIG, fMLDS": cocoa_sig(log_prob, f, alpha),
    }


def parts(items: Items, layers: Layers) -> dict[str, Floats]:
    """The components of the composite scores: log p_S and the negated MLDS, higher is better."""
    return {
        "log p alone": items.log_prob,
        "-ConMLDS alone": -items.con_mlds(layers.window),
        "-fMLDS alone": -items.f_mlds(layers.window, layers.final),
    }


def indicators(items: Items, layers: Layers, alpha: float, length: SpanLogProb = "sum") -> dict[str, Floats]:
    """Every score of each item, higher is riskier: the method's scores first, then the baselines."""
    found = {name: -score for name, score in composites(items, layers, alpha, length).items()}
    found["ConMLDS"] = items.con_mlds(layers.window)
    found["fMLDS"] = items.f_mlds(layers.window, layers.final)
    found["-log p"] = -items.log_prob
    found["-mean log p"] = -items.log_prob / items.tokens
    found["-min log p"] = -items.min_log_prob
    found["mean entropy"] = items.mean_entropy
    found["-mean margin"] = -items.mean_margin
    if not np.isnan(items.source_attention).any():
        found["-source attention"] = -items.source_attention
    if items.level == "span":
        found["first entropy"] = items.first_entropy
        found["-first margin"] = -items.first_margin
    if items.level == "answer":
        found["length in tokens"] = items.tokens
    else:
        found["position in tokens"] = items.position
        found["position as a share of the answer"] = items.relative_position
    if items.without_source is not None:
        found |= _lifts(items, items.without_source, layers)
    if items.level == "character":  # for single tokens these equal -log p
        for name in ("-mean log p", "-min log p"):
            del found[name]
    return found


def _lifts(items: Items, without_source: Items, layers: Layers) -> dict[str, Floats]:
    """The effect of the source: a smaller rise of log p, or a larger rise of disagreement, is riskier."""
    lift = items.log_prob - without_source.log_prob
    found = {"-context lift": -lift}
    if items.level != "character":
        found["-mean context lift"] = -lift / items.tokens
    window, final = layers.window, layers.final
    found["lift of ConMLDS"] = items.con_mlds(window) - without_source.con_mlds(window)
    found["lift of fMLDS"] = items.f_mlds(window, final) - without_source.f_mlds(window, final)
    found["-log p without the source"] = -without_source.log_prob
    return found


def layer_choices(num_layers: int, configured: Layers) -> dict[str, Layers]:
    """The choices of layers that are compared, by name: several windows, each before and after the final norm.

    The configured window is added if it is not among them.
    """
    windows = {
        "first third": (0, num_layers // 3),
        "middle third (the paper)": middle_layers(num_layers),
        **{f"middle {n - m + 1} layers": (m, n) for m, n in shrinking_windows(num_layers)},
        "upper half": (num_layers // 2, num_layers - 1),
        "last third": (2 * num_layers // 3, num_layers - 1),
        "all": (0, num_layers - 1),
    }
    if configured.window not in windows.values():
        windows["as set"] = configured.window
    finals: tuple[FinalLayer, ...] = ("post_norm", "pre_norm")
    return {f"{name}, {final}": Layers(window, final) for name, window in windows.items() for final in finals}


def shrinking_windows(num_layers: int) -> list[tuple[int, int]]:
    """Windows m..n centred in the middle third, from 4/5 to 1/5 of its width, with at least 3 layers.

    For 32 layers they are those of the paper's ablation: 11..19, 12..18, 13..17 and 14..16. For models with few layers
    the list may be empty.
    """
    m, n = middle_layers(num_layers)
    middle, reach = (m + n) // 2, (n - m) // 2
    smaller = dict.fromkeys(round(reach * fifths / 5) for fifths in (4, 3, 2, 1))
    return [(middle - one, middle + one) for one in smaller if 0 < one < reach]


def pairs(items: Items) -> list[tuple[list[int], list[int]]]:
    """The pairs of the paired test, as indices of items: supported ones and hallucinated ones.

    Answers: the first supported and the first hallucinated answer of each prompt. Spans: all supported and all
    hallucinated spans of each answer.
    """
    by: dict[str, tuple[list[int], list[int]]] = {}
    for number, name in enumerate(items.groups if items.level == "answer" else items.answers):
        by.setdefault(name, ([], []))[0 if items.supported[number] > 0 else 1].append(number)
    most = 1 if items.level == "answer" else None
    return [(good[:most], bad[:most]) for good, bad in by.values() if good and bad]


def means(values: Floats, members: list[list[int]]) -> list[float]:
    """The mean value of each set of items."""
    return [float(np.mean(values[numbers])) for numbers in members]
