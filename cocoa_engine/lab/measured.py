"""Features and labels of spans and answers of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.speculation import preceding
from cocoa_engine.errors import CalibrationError
from cocoa_engine.lab.cache import AnswerCache, answered
from cocoa_engine.lab.data import Question
from cocoa_engine.lab.fit import Floats32, LabelledFeatures
from cocoa_engine.lab.forced import Segment, TeacherForced, answer, spans
from cocoa_engine.lab.indicators import Layers
from cocoa_engine.methods import METHODS
from cocoa_engine.model.prompts import Prompt
from cocoa_engine.results import Generation
from cocoa_engine.risk.features import (
    ANSWER_FEATURES,
    PROBE_FEATURE,
    SOURCE_FEATURES,
    SPAN_FEATURES,
    Level,
    answer_features,
    contested_features,
    extreme_token_features,
    preceding_features,
    source_features,
    token_features,
)

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine

LEVELS: tuple[Level, ...] = ("span", "answer")
FEATURES: dict[Level, tuple[str, ...]] = {"span": SPAN_FEATURES, "answer": ANSWER_FEATURES}


def probe_layer(num_layers: int) -> int:
    """The layer that probes read, 2L/3: the last of the middle layers."""
    return 2 * num_layers // 3


def labelled_features(
    answers: Iterable[TeacherForced], config: CocoaConfig, num_layers: int, *, states: bool = False
) -> dict[Level, LabelledFeatures]:
    """The features and labels of every labelled span, and of every answer labelled as a whole.

    Answers are divided by :func:`.spans`. A span is hallucinated if any of its characters is, except white space.
    Source attention is not a feature if it was not measured.

    Args:
        answers: teacher-forced answers.
        config: the settings of the features.
        num_layers: the number of layers of the model.
        states: also keep the mean hidden state of each span that a probe reads.
    """
    layers, branches = Layers.of(config, num_layers), METHODS[config.method].branches
    found: dict[Level, Rows] = {level: Rows() for level in LEVELS}
    read = probe_layer(num_layers)
    for forced in answers:
        group = forced.record.group
        if forced.record.label is not None:
            features = [
                *_shared_features(answer(forced), layers),
                *contested_features(forced.profile.margins),
                math.log1p(len(forced.profile.prompt)),
                *_source_features(forced, 0, len(forced.profile.token_ids)),
            ]
            found["answer"].add(features, forced.record.label, group)
        if forced.record.spans is not None:
            for segment in spans(forced):
                state = forced.profile.mean_state(read, segment.start, segment.end).numpy() if states else None
                found["span"].add(_span_features(segment, layers, branches), segment.hallucinated > 0, group, state)
    return {level: rows.labelled(level) for level, rows in found.items() if rows.labels}


def own_answers(
    engine: CocoaEngine,
    questions: Sequence[Question],
    config: CocoaConfig,
    *,
    cache: AnswerCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> LabelledFeatures:
    """The features of a model's own answers to questions. An answer that contains no known answer is hallucinated.

    Questions are asked as a chat if the model has a template, otherwise as text to continue.

    Args:
        engine: the engine with the model.
        questions: the questions.
        config: the settings of the decodes.
        cache: answers to questions that were asked before.
        advance: called with the number of questions answered since the last call.
    """
    prompts = question_prompts(engine, questions)
    return labelled_answers(answered(engine, questions, prompts, config, answer_values, cache=cache, advance=advance))


def answer_values(generation: Generation) -> dict[str, Any]:
    """The text and the features of an answer, as plain values. An empty answer has no features."""
    return {"text": generation.text, "features": answer_features(generation) if generation.spans else None}


def labelled_answers(answers: Iterable[tuple[Question, Mapping[str, Any]]]) -> LabelledFeatures:
    """The features of answers to questions. An answer that contains no known answer is hallucinated.

    Args:
        answers: each question with the :func:`answer_values` of its answer. Empty answers are left out.

    Raises:
        CalibrationError: all answers are empty.
    """
    rows = Rows()
    for question, values in answers:
        if values["features"] is not None:
            rows.add(values["features"], not question.is_right(values["text"]), question.group)
    if not rows.labels:
        raise CalibrationError("all answers of the model are empty, so nothing can be fitted or evaluated on them.")
    return rows.labelled("answer")


def question_prompts(engine: CocoaEngine, questions: Sequence[Question]) -> list[Prompt]:
    """The prompt of each question."""
    return [request_prompt(engine, question.request) for question in questions]


def request_prompt(engine: CocoaEngine, request: str) -> Prompt:
    """The prompt of a request: a chat if the model has a template, otherwise a text to continue."""
    if not engine.has_chat_template:
        return f"{request}\nAnswer:"
    return engine.encode_chat([{"role": "user", "content": request}])


class Rows:
    """Collects labelled features."""

    def __init__(self) -> None:
        self.features: list[list[float]] = []
        self.labels: list[bool] = []
        self.groups: list[str] = []
        self.states: list[Floats32] = []

    def add(self, features: list[float], label: bool, group: str, state: Floats32 | None = None) -> None:
        self.features.append(features)
        self.labels.append(label)
        self.groups.append(group)
        if state is not None:
            self.states.append(state)

    def labelled(self, level: Level) -> LabelledFeatures:
        """The items. Features that were measured for none of them are left out."""
        features = np.array(self.features, dtype=np.float64)
        missing = {PROBE_FEATURE}  # it is fitted later
        columns = dict(zip(FEATURES[level], features.T, strict=True))
        for name in SOURCE_FEATURES:
            if name in columns and np.isnan(columns[name]).all():
                missing.add(name)
            elif name in columns:
                columns[name][np.isnan(columns[name])] = 0.0  # a prompt of one token has no source
        names = [name for name in FEATURES[level] if name not in missing]
        return LabelledFeatures(
            names,
            np.stack([columns[name] for name in names], axis=1),
            np.array(self.labels, dtype=bool),
            self.groups,
            np.stack(self.states) if self.states else None,
        )


def _span_features(segment: Segment, layers: Layers, branches: bool) -> list[float]:
    profile, start, tokens = segment.forced.profile, segment.start, slice(segment.start, segment.end)
    contested = branches and profile.competing[start] > 1
    return [
        *_shared_features(segment, layers),
        *extreme_token_features(profile.token_ids[tokens], profile.entropies[tokens], profile.margins[tokens]),
        *((float(profile.competing[start]), profile.spreads[start]) if contested else (1.0, 0.0)),
        *preceding_features(preceding(profile.log_probs[:start], profile.entropies[:start], profile.copied[:start])),
        _source_features(segment.forced, start, segment.end)[0],
        math.nan,
    ]


def _source_features(forced: TeacherForced, start: int, end: int) -> list[float]:
    return source_features(forced.profile.source_attention[start:end])


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
