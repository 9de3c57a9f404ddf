"""Items of a signal study, and the scores that may separate hallucinated from supported ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import SpanLogProb, cocoa, cocoa_sig, con_mlds_of, f_mlds_of, length_penalty, middle_layers
from cocoa_engine.errors import ConfigError
from cocoa_engine.lab.forced import TeacherForced, answer, spans, token_labels
from cocoa_engine.model.hidden_states import FinalLayer
from cocoa_engine.risk.features import MARGIN_CAP
from cocoa_engine.scoring.text_profile import LayerProfile

Level = Literal["answer", "span", "character"]
"""What the signal study ranks."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """The statistics of one item; :class:`Items` describes them."""

    hallucinated: float
    supported: float
    log_prob: float
    tokens: float
    min_log_prob: float
    mean_entropy: float
    mean_margin: float
    first_entropy: float
    first_margin: float
    position: float
    relative_position: float
    candidates: float
    spread: float
    source_attention: float


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


class _Rows:
    """Collects items."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.groups: list[str] = []
        self.answers: list[str] = []
        self.statistics: list[Statistics] = []
        self.layers: list[LayerProfile] = []
        self.without_source: _Rows | None = None

    def add(
        self,
        forced: TeacherForced,
        start: int,
        end: int,
        layers: LayerProfile | None,
        hallucinated: int,
        supported: int,
    ) -> None:
        profile = forced.profile
        log_probs = profile.log_probs[start:end]
        margins = [min(margin, MARGIN_CAP) for margin in profile.margins[start:end]]
        source = profile.source_attention[start:end]
        count = end - start
        self.groups.append(forced.record.group)
        self.answers.append(forced.record.id)
        self.statistics.append(
            Statistics(
                hallucinated=hallucinated,
                supported=supported,
                log_prob=sum(log_probs),
                tokens=count,
                min_log_prob=min(log_probs),
                mean_entropy=sum(profile.entropies[start:end]) / count,
                mean_margin=sum(margins) / count,
                first_entropy=profile.entropies[start],
                first_margin=margins[0],
                position=start,
                relative_position=start / len(profile.token_ids),
                candidates=profile.competing[start],
                spread=profile.spreads[start],
                source_attention=sum(source) / count if source else float("nan"),
            )
        )
        if layers is not None:
            self.layers.append(layers)
        if forced.without_source is not None:
            self.without_source = self.without_source or _Rows(self.level)
            same = None if layers is None else forced.without_source.profile.span(start, end)
            self.without_source.add(forced.without_source, start, end, same, hallucinated, supported)

    def add_tokens(self, forced: TeacherForced) -> None:
        """Add each token of an answer."""
        for at, (hallucinated, supported) in enumerate(token_labels(forced)):
            self.add(forced, at, at + 1, None, hallucinated, supported)
        self.layers.append(forced.profile.tokens)
        if forced.without_source is not None and self.without_source is not None:
            self.without_source.layers.append(forced.without_source.profile.tokens)

    def items(self) -> Items:
        columns = {
            field.name: np.array([getattr(statistic, field.name) for statistic in self.statistics], dtype=np.float64)
            for field in fields(Statistics)
        }
        layers = self.layers
        return Items(
            level=self.level,
            groups=self.groups,
            answers=self.answers,
            **columns,
            consecutive=_stacked([layer.consecutive for layer in layers]),
            to_pre_norm=_stacked([layer.to_pre_norm for layer in layers]),
            to_post_norm=_stacked([layer.to_post_norm for layer in layers]),
            without_source=None if self.without_source is None else self.without_source.items(),
        )


def _stacked(profiles: Sequence[Tensor]) -> Floats:
    """``[L, items]`` of each profile, put together as ``[n, L]``."""
    if not profiles:
        return np.zeros((0, 0))
    return np.concatenate([profile.numpy().T for profile in profiles]).astype(np.float64)


def collect(answers: Iterable[TeacherForced]) -> dict[Level, Items]:
    """The items of every labelled level: answers labelled as a whole, spans, and characters."""
    rows: dict[Level, _Rows] = {level: _Rows(level) for level in ("answer", "span", "character")}
    for forced in answers:
        if forced.record.label is not None:
            whole = answer(forced)
            rows["answer"].add(forced, 0, whole.end, whole.layers, whole.hallucinated, whole.supported)
        if forced.record.spans is None:
            continue
        for span in spans(forced):
            # a span is hallucinated if any part of it is
            label = int(span.hallucinated > 0)
            rows["span"].add(forced, span.start, span.end, span.layers, label, 1 - label)
        rows["character"].add_tokens(forced)
    return {level: one.items() for level, one in rows.items()}


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
