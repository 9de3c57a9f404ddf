"""Statistics of many answers, spans or tokens as arrays, for n items and L layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cocoa_engine.equations import con_mlds_of, f_mlds_of
from cocoa_engine.lab.record import Level
from cocoa_engine.lab.signal.segments import TeacherForced, answer, spans, token_labels
from cocoa_engine.model.hidden_states import FinalLayer
from cocoa_engine.risk.features import MARGIN_CAP
from cocoa_engine.scoring.text_profile import LayerProfile

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
            field.name: np.array([getattr(one, field.name) for one in self.statistics], dtype=np.float64)
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
