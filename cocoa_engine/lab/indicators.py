"""Items of a signal study, and the scores that may separate hallucinated from supported ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import SpanLogProb, cocoa, cocoa_sig, con_mlds_of, f_mlds_of, length_penalty, middle_layers
from cocoa_engine.errors import ConfigError
from cocoa_engine.lab.forced import Segment, TeacherForced, answer, spans, token_labels
from cocoa_engine.model.hidden_states import FinalLayer
from cocoa_engine.risk.features import MARGIN_CAP
from cocoa_engine.scoring.text_profile import LayerProfile

Level = Literal["answer", "span", "character"]
"""What the signal study ranks."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Items:
    """Items of one level. An item of the level ``"character"`` is a token that stands for its characters.

    Attributes:
        groups: the prompt of each item.
        answers: the id of the answer of each item.
        hallucinated, supported: the weight of each item in either class, ``[n]``.
        log_prob: the sum of log p over its tokens.
        tokens: its number of tokens.
        position: the number of the answer's tokens before it.
        relative_position: the position as a share of the answer's tokens.
        candidates, spread: the number of tokens that competed at its first token, and log p of the best minus log p of
            the last of them.
        source_attention: the mean source attention of its tokens; NaN if it was not measured.
        consecutive, to_pre_norm, to_post_norm: ``[n, L]``, as in :class:`.LayerProfile`.
        without_source: the same items after the prompt without its source, if measured.
    """

    level: Level
    groups: list[str]
    answers: list[str]
    hallucinated: Floats
    supported: Floats
    log_prob: Floats
    tokens: Floats
    min_log_prob: Floats
    mean_entropy: Floats
    mean_margin: Floats
    first_entropy: Floats
    first_margin: Floats
    position: Floats
    relative_position: Floats
    candidates: Floats
    spread: Floats
    source_attention: Floats
    consecutive: Floats
    to_pre_norm: Floats
    to_post_norm: Floats
    without_source: Items | None = None

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return int(self.consecutive.shape[1])

    @property
    def both_classes(self) -> bool:
        """Whether there are hallucinated and supported items."""
        return bool(len(self.groups) and self.hallucinated.any() and self.supported.any())

    def con_mlds(self, window: tuple[int, int]) -> Floats:
        """The ConMLDS of each item for layers m..n, ``[n]``."""
        return con_mlds_of(self.consecutive.T, window)

    def f_mlds(self, window: tuple[int, int], final: FinalLayer) -> Floats:
        """The fMLDS of each item for layers m..n with n < L, ``[n]``."""
        return f_mlds_of((self.to_pre_norm if final == "pre_norm" else self.to_post_norm).T, window)


_ARRAYS = [field.name for field in fields(Items) if field.type == "Floats"]

Range = tuple[int, int]


def _items(
    level: Level, forced: TeacherForced, ranges: Sequence[Range], weights: Sequence[Range], layers: list[LayerProfile]
) -> Items:
    """The items of one answer.

    Args:
        level: the level of the items.
        forced: the answer.
        ranges: the tokens of each item, the end exclusive.
        weights: the weight of each item as hallucinated and as supported.
        layers: the disagreements of the items, in order.
    """
    profile, other = forced.profile, forced.without_source
    count, first = len(profile.token_ids), [start for start, _ in ranges]
    margins = np.minimum(profile.margins, MARGIN_CAP)
    attention = profile.source_attention or [float("nan")] * count

    def each(values: Any, of_part: Callable[[Any], Any] = np.mean) -> Floats:
        return np.array([of_part(values[start:end]) for start, end in ranges], dtype=np.float64)

    if other is not None:
        same = [other.profile.tokens] if level == "character" else [other.profile.span(*ends) for ends in ranges]
    return Items(
        level=level,
        groups=[forced.record.group] * len(ranges),
        answers=[forced.record.id] * len(ranges),
        hallucinated=np.array([weight for weight, _ in weights], dtype=np.float64),
        supported=np.array([weight for _, weight in weights], dtype=np.float64),
        log_prob=each(profile.log_probs, sum),
        tokens=each(profile.token_ids, len),
        min_log_prob=each(profile.log_probs, min),
        mean_entropy=each(profile.entropies),
        mean_margin=each(margins),
        first_entropy=np.array(profile.entropies)[first],
        first_margin=margins[first],
        position=np.array(first, dtype=np.float64),
        relative_position=np.array(first) / count,
        candidates=np.array(profile.competing, dtype=np.float64)[first],
        spread=np.array(profile.spreads)[first],
        source_attention=each(attention),
        consecutive=_stacked([layer.consecutive for layer in layers]),
        to_pre_norm=_stacked([layer.to_pre_norm for layer in layers]),
        to_post_norm=_stacked([layer.to_post_norm for layer in layers]),
        without_source=None if other is None else _items(level, other, ranges, weights, same),
    )


def _stacked(profiles: Sequence[Tensor]) -> Floats:
    """``[L, items]`` of each profile, put together as ``[n, L]``."""
    return np.concatenate([profile.numpy().T for profile in profiles]).astype(np.float64)


def _joined(level: Level, answers: Sequence[Items]) -> Items:
    """The items of several answers."""
    if not answers:
        return Items(level, [], [], **dict.fromkeys(_ARRAYS, np.zeros((0, 0))))  # type: ignore[arg-type]
    others = [items.without_source for items in answers if items.without_source is not None]
    return Items(
        level=level,
        groups=[group for items in answers for group in items.groups],
        answers=[answer for items in answers for answer in items.answers],
        without_source=_joined(level, others) if others else None,
        **{name: np.concatenate([getattr(items, name) for items in answers]) for name in _ARRAYS},
    )


def collect(answers: Iterable[TeacherForced]) -> dict[Level, Items]:
    """The items of every labelled level: answers labelled as a whole, spans, and characters."""
    found: dict[Level, list[Items]] = {"answer": [], "span": [], "character": []}
    for forced in answers:
        segments: dict[Level, list[Segment]] = {"answer": [], "span": []}
        if forced.record.label is not None:
            segments["answer"] = [answer(forced)]
        if forced.record.spans is not None:
            segments["span"] = list(spans(forced))
            tokens = [(at, at + 1) for at in range(len(forced.ends))]
            found["character"].append(
                _items("character", forced, tokens, token_labels(forced), [forced.profile.tokens])
            )
        for level, parts in segments.items():
            # an item is hallucinated if any part of it is
            weights = [(int(part.hallucinated > 0), int(not part.hallucinated)) for part in parts]
            ranges = [(part.start, part.end) for part in parts]
            if parts:
                found[level].append(_items(level, forced, ranges, weights, [part.layers for part in parts]))
    return {level: _joined(level, items) for level, items in found.items()}


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
