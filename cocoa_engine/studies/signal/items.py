"""What was measured of many answers, spans or tokens, as arrays; n items, L layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cocoa_engine.equations import con_mlds_of, f_mlds_of
from cocoa_engine.model.hidden_states import FinalLayer
from cocoa_engine.scoring.text_profile import LayerProfile
from cocoa_engine.studies.signal.segments import TeacherForced, answer, spans, token_labels

Floats = NDArray[np.float64]
Level = Literal["answer", "span", "character"]

MARGIN_CAP = 20.0
"""Margins above it, in nats, count as this; an infinite one (a single allowed token) has no mean."""


@dataclass(frozen=True)
class Items:
    """Items of one level. An item of the level ``"character"`` is a token, which stands for its characters.

    Attributes:
        groups: what prompt each belongs to.
        answers: the id of the answer each belongs to.
        hallucinated, supported: the weight of each in either class, ``[n]``.
        log_prob: sum of log p over its tokens.
        tokens: how many those are.
        position: tokens of the answer before it.
        place: those as a share of the answer's tokens.
        candidates, spread: how many tokens competed at its first token, and log p of the best less that of the last.
        consecutive, to_pre_norm, to_post_norm: ``[n, L]``, as in :class:`.LayerProfile`.
        bare: the same items after the prompt without its source, if they were fed so too.
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
    place: Floats
    candidates: Floats
    spread: Floats
    consecutive: Floats
    to_pre_norm: Floats
    to_post_norm: Floats
    bare: Items | None = None

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.consecutive.shape[1])

    @property
    def both_classes(self) -> bool:
        """Whether there are hallucinated and supported ones."""
        return bool(len(self.groups) and self.hallucinated.any() and self.supported.any())

    def con_mlds(self, window: tuple[int, int]) -> Floats:
        """ConMLDS of each for layers m..n, ``[n]``."""
        return con_mlds_of(self.consecutive.T, window)

    def f_mlds(self, window: tuple[int, int], final: FinalLayer) -> Floats:
        """fMLDS of each for layers m..n, ``[n]``; n < L."""
        return f_mlds_of((self.to_pre_norm if final == "pre_norm" else self.to_post_norm).T, window)


class _Rows:
    """Items in the making."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.groups: list[str] = []
        self.answers: list[str] = []
        self.columns: list[list[float]] = []
        self.layers: list[LayerProfile] = []
        self.bare: _Rows | None = None

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
        count = end - start
        self.groups.append(forced.record.group)
        self.answers.append(forced.record.id)
        self.columns.append(
            [
                hallucinated,
                supported,
                sum(log_probs),
                count,
                min(log_probs),
                sum(profile.entropies[start:end]) / count,
                sum(margins) / count,
                profile.entropies[start],
                margins[0],
                start,
                start / len(profile.token_ids),
                profile.competing[start],
                profile.spreads[start],
            ]
        )
        if layers is not None:
            self.layers.append(layers)
        if forced.bare is not None:
            self.bare = self.bare or _Rows(self.level)
            same = None if layers is None else forced.bare.profile.span(start, end)
            self.bare.add(forced.bare, start, end, same, hallucinated, supported)

    def add_tokens(self, forced: TeacherForced) -> None:
        """Each token of an answer."""
        for at, (hallucinated, supported) in enumerate(token_labels(forced)):
            self.add(forced, at, at + 1, None, hallucinated, supported)
        self.layers.append(forced.profile.tokens)
        if forced.bare is not None and self.bare is not None:
            self.bare.layers.append(forced.bare.profile.tokens)

    def items(self) -> Items:
        columns = np.array(self.columns, dtype=np.float64).reshape(len(self.columns), 13)
        layers = (
            np.concatenate([getattr(layer, name).numpy().T for layer in self.layers]).astype(np.float64)
            if self.layers
            else np.zeros((0, 0))
            for name in ("consecutive", "to_pre_norm", "to_post_norm")
        )
        items = Items(self.level, self.groups, self.answers, *columns.T, *layers)
        return items if self.bare is None else replace(items, bare=self.bare.items())


def collect(answers: Iterable[TeacherForced]) -> dict[Level, Items]:
    """The items of every level that the labels allow: answers that are labelled as a whole, spans and characters."""
    rows: dict[Level, _Rows] = {level: _Rows(level) for level in ("answer", "span", "character")}
    for forced in answers:
        if forced.record.label is not None:
            whole = answer(forced)
            rows["answer"].add(forced, 0, whole.end, whole.layers, whole.hallucinated, whole.supported)
        if forced.record.spans is None:
            continue
        for span in spans(forced):
            # one label for a span: hallucinated if a part of it is
            label = int(span.hallucinated > 0)
            rows["span"].add(forced, span.start, span.end, span.layers, label, 1 - label)
        rows["character"].add_tokens(forced)
    return {level: one.items() for level, one in rows.items()}
