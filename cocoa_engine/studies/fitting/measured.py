"""Labelled spans and answers to fit on: from given answers, or from the model's own answers to known questions."""

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
FEATURES: dict[Level, tuple[str, ...]] = {"span": SPAN_FEATURES, "answer": ANSWER_FEATURES}


def labelled_features(
    answers: Iterable[TeacherForced], config: CocoaConfig, num_layers: int
) -> dict[Level, LabelledFeatures]:
    """The features and labels of every labelled span, and of every answer labelled as a whole.

    Answers are divided by :func:`.spans`. A span is hallucinated if any of its characters is, except white space.

    Args:
        answers: teacher-forced answers with candidates (``force(..., grow=True)``).
        config: the settings of the features.
        num_layers: the number of layers of the model.
    """
    layers = Layers.of(config, num_layers)
    found: dict[Level, _Rows] = {level: _Rows() for level in LEVELS}
    for forced in answers:
        group = forced.record.group
        assert forced.candidates is not None
        if forced.record.label is not None:
            features = [
                *_shared_features(answer(forced), layers),
                *contested_features(forced.profile.margins),
                *competition_features(competition(risk_points(forced.candidates))),
            ]
            found["answer"].add(features, forced.record.label, group)
        if forced.record.spans is not None:
            for segment in spans(forced):
                features = _span_features(segment, forced.candidates[segment.start], layers)
                found["span"].add(features, segment.hallucinated > 0, group)
    return {level: rows.labelled(level) for level, rows in found.items() if rows.labels}


def own_answers(
    engine: CocoaEngine,
    questions: Sequence[Question],
    config: CocoaConfig,
    *,
    advance: Callable[[int], None] = lambda count: None,
) -> LabelledFeatures:
    """The features of a model's own answers to questions. An answer that contains no known answer is hallucinated.

    Questions are asked as a chat if the model has a template, otherwise as text to continue.

    Args:
        engine: the engine with the model.
        questions: the questions.
        config: the settings of the decodes.
        advance: called with the number of questions answered since the last call.
    """
    rows = _Rows()
    config = config.replace(max_risk=None)  # only complete answers can be judged
    batch_size = engine.runtime.max_batch_size
    for start in range(0, len(questions), batch_size):
        batch = questions[start : start + batch_size]
        generations = engine.generate_batch(question_prompts(engine, batch), config=config)
        for question, generation in zip(batch, generations, strict=True):
            rows.add(answer_features(generation), not question.is_right(generation.text), question.group)
        advance(len(batch))
    return rows.labelled("answer")


def question_prompts(engine: CocoaEngine, questions: Sequence[Question]) -> list[str | list[int]]:
    """The prompt of each question: a chat if the model has a template, otherwise a text to continue."""
    if not engine.has_chat_template:
        return [f"{question.request}\nAnswer:" for question in questions]
    return [engine.encode_chat([{"role": "user", "content": question.request}]) for question in questions]


class _Rows:
    """Collects labelled features."""

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
        return LabelledFeatures(FEATURES[level], features, np.array(self.labels, dtype=bool), self.groups)


def _span_features(segment: Segment, candidates: Sequence[Candidate], layers: Layers) -> list[float]:
    profile, start, tokens = segment.forced.profile, segment.start, slice(segment.start, segment.end)
    return [
        *_shared_features(segment, layers),
        *extreme_token_features(profile.token_ids[tokens], profile.entropies[tokens], profile.margins[tokens]),
        *candidate_features(candidates),
        *preceding_features(preceding(profile.log_probs[:start], profile.entropies[:start], profile.copied[:start])),
    ]


def _shared_features(segment: Segment, layers: Layers) -> list[float]:
    """The features that spans and answers share. An answer counts as one span, as in ``engine.score``."""
    profile, tokens = segment.forced.profile, slice(segment.start, segment.end)
    return [
        float(segment.layers.con_mlds(layers.window)),
        float(segment.layers.f_mlds(layers.window, layers.final)),
        *token_features(
            profile.token_ids[tokens],
            profile.log_probs[tokens],
            profile.entropies[tokens],
            profile.margins[tokens],
            profile.copied[tokens],
        ),
    ]
