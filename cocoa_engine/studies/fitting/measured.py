"""Labelled spans and answers to fit on: of answers that were fed to a model, or of its own to known questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cocoa_engine.calibration.calibrator import Level
from cocoa_engine.calibration.features import (
    ANSWER_FEATURES,
    SPAN_FEATURES,
    answer_features,
    candidate_features,
    competition,
    competition_features,
    contested_features,
    extreme_token_features,
    preceding_features,
    token_features,
)
from cocoa_engine.config import CocoaConfig
from cocoa_engine.datasets import Question
from cocoa_engine.decoding.answer_history import preceding
from cocoa_engine.scoring.candidates import risk_points
from cocoa_engine.spans import Candidate
from cocoa_engine.studies.fitting.fit import LabelledFeatures
from cocoa_engine.studies.signal.indicators import Layers
from cocoa_engine.studies.signal.segments import Segment, TeacherForced, answer, spans

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine


LEVELS: tuple[Level, ...] = ("span", "answer")
NAMES: dict[Level, tuple[str, ...]] = {"span": SPAN_FEATURES, "answer": ANSWER_FEATURES}


def labelled_features(
    answers: Iterable[TeacherForced], config: CocoaConfig, num_layers: int
) -> dict[Level, LabelledFeatures]:
    """The features and labels of every span, and of every answer as a whole, as far as they are labelled.

    A span, a part between risk points, is hallucinated if a character of it is, white space aside.

    Args:
        answers: fed with ``grow``.
    """
    layers = Layers.of(config, num_layers)
    found: dict[Level, _Rows] = {level: _Rows() for level in LEVELS}
    for forced in answers:
        group = forced.record.group
        assert forced.candidates is not None
        if forced.record.label is not None:
            features = [
                *_shared(answer(forced), layers),
                *contested_features(forced.profile.margins),
                *competition_features(competition(risk_points(forced.candidates))),
            ]
            found["answer"].add(features, forced.record.label, group)
        if forced.record.spans is not None:
            for segment in spans(forced):
                features = _of_span(segment, forced.candidates[segment.start], layers)
                found["span"].add(features, segment.hallucinated > 0, group)
    return {level: rows.labelled(level) for level, rows in found.items() if rows.labels}


def own_answers(
    engine: CocoaEngine,
    questions: Sequence[Question],
    config: CocoaConfig,
    *,
    advance: Callable[[int], None] = lambda count: None,
) -> LabelledFeatures:
    """The features of a model's own answers to questions, and whether each is wrong: holds no known answer.

    Asked as a chat where the model has a template, else as a text to continue.

    Args:
        advance: told how many questions were answered.
    """
    rows = _Rows()
    config = config.replace(max_risk=None)  # answers are judged whole
    together = engine.runtime.max_batch_size
    for start in range(0, len(questions), together):
        some = questions[start : start + together]
        generations = engine.generate_batch(_prompts(engine, some), config=config)
        for question, generation in zip(some, generations, strict=True):
            rows.add(answer_features(generation), not question.is_right(generation.text), question.group)
        advance(len(some))
    return rows.labelled("answer")


def _prompts(engine: CocoaEngine, questions: Sequence[Question]) -> list[str | list[int]]:
    if not engine.has_chat_template:
        return [f"{question.request}\nAnswer:" for question in questions]
    return [engine.encode_chat([{"role": "user", "content": question.request}]) for question in questions]


class _Rows:
    """Labelled features in the making."""

    def __init__(self) -> None:
        self.features: list[list[float]] = []
        self.labels: list[bool] = []
        self.groups: list[str] = []

    def add(self, features: list[float], label: bool, group: str) -> None:
        self.features.append(features)
        self.labels.append(label)
        self.groups.append(group)

    def labelled(self, level: Level) -> LabelledFeatures:
        features = np.array(self.features, dtype=np.float64)
        return LabelledFeatures(NAMES[level], features, np.array(self.labels, dtype=bool), self.groups)


def _of_span(segment: Segment, candidates: Sequence[Candidate], layers: Layers) -> list[float]:
    one, start, which = segment.forced.profile, segment.start, slice(segment.start, segment.end)
    return [
        *_shared(segment, layers),
        *extreme_token_features(one.token_ids[which], one.entropies[which], one.margins[which]),
        *candidate_features(candidates),
        *preceding_features(preceding(one.log_probs[:start], one.entropies[:start], one.copied[:start])),
    ]


def _shared(segment: Segment, layers: Layers) -> list[float]:
    """What spans and answers share; an answer is one span, as ``engine.score`` gives it."""
    one, which = segment.forced.profile, slice(segment.start, segment.end)
    return [
        float(segment.layers.con_mlds(layers.window)),
        float(segment.layers.f_mlds(layers.window, layers.final)),
        *token_features(
            one.token_ids[which], one.log_probs[which], one.entropies[which], one.margins[which], one.copied[which]
        ),
    ]
