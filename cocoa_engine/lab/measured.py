"""Features and labels of spans and answers of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.speculation import preceding
from cocoa_engine.errors import CalibrationError
from cocoa_engine.lab.cache import AnswerCache, answered
from cocoa_engine.lab.fit import Floats32, LabelledFeatures
from cocoa_engine.lab.forced import Segment, TeacherForced, answer, spans
from cocoa_engine.lab.indicators import Layers
from cocoa_engine.lab.records import Question
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
    span_features,
)

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine

FEATURES: dict[Level, tuple[str, ...]] = {"span": SPAN_FEATURES, "answer": ANSWER_FEATURES}
LEVELS: tuple[Level, ...] = tuple(FEATURES)


def probe_layer(num_layers: int) -> int:
    """The layer that probes read, 2L/3: the last of the middle layers."""
    return 2 * num_layers // 3


def labelled_features(
    answers: Iterable[TeacherForced], config: CocoaConfig, num_layers: int, *, states: bool = False
) -> dict[Level, LabelledFeatures]:
    """The features and labels of every labelled span, and of every answer labelled as a whole.

    Answers are divided by :func:`.spans`. A span is hallucinated if any of its characters is, except white space.
    Source attention is not a feature if it was not measured. ``states``: also keep the mean hidden state of each span
    that a probe reads.
    """
    layers, branches = Layers.of(config, num_layers), METHODS[config.method].branches
    rows: dict[Level, list[Row]] = {level: [] for level in LEVELS}
    read = probe_layer(num_layers)
    for forced in answers:
        profile, group = forced.profile, forced.record.group
        if forced.record.label is not None:  # an answer counts as one span, as in ``engine.score``
            usage, span = SimpleNamespace(prompt_tokens=len(profile.prompt)), answer(forced)
            whole: Any = SimpleNamespace(spans=[_statistics(span, layers, branches)], usage=usage)
            rows["answer"].append((answer_features(whole), forced.record.label, group, None))
        for segment in spans(forced) if forced.record.spans is not None else ():
            state = profile.mean_state(read, segment.start, segment.end).numpy() if states else None
            features = span_features(_statistics(segment, layers, branches))
            rows["span"].append((features, segment.hallucinated > 0, group, state))
    return {level: _labelled(level, items) for level, items in rows.items() if items}


def own_answers(
    engine: CocoaEngine,
    questions: Sequence[Question],
    config: CocoaConfig,
    *,
    cache: AnswerCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> LabelledFeatures:
    """The features of a model's own answers to questions, not all of them empty. A wrong one is hallucinated."""
    prompts = question_prompts(engine, questions)
    return labelled_answers(answered(engine, questions, prompts, config, answer_values, cache=cache, advance=advance))


def answer_values(generation: Generation) -> dict[str, Any]:
    """The text and the features of an answer, as plain values. An empty answer has no features."""
    return {"text": generation.text, "features": answer_features(generation) if generation.spans else None}


def labelled_answers(answers: Iterable[tuple[Question, Mapping[str, Any]]]) -> LabelledFeatures:
    """The features of answers to questions, from their :func:`answer_values`; see :func:`own_answers`."""
    rows: list[Row] = [
        (values["features"], not question.is_right(values["text"]), question.group, None)
        for question, values in answers
        if values["features"] is not None
    ]
    if not rows:
        raise CalibrationError("all answers of the model are empty, so nothing can be fitted or evaluated on them.")
    return _labelled("answer", rows)


def question_prompts(engine: CocoaEngine, questions: Sequence[Question]) -> list[Prompt]:
    """The prompt of each question."""
    return [request_prompt(engine, question.request) for question in questions]


def request_prompt(engine: CocoaEngine, request: str) -> Prompt:
    """A chat if the model has a template, otherwise a text to continue."""
    if not engine.has_chat_template:
        return f"{request}\nAnswer:"
    return engine.encode_chat([{"role": "user", "content": request}])


Row = tuple[list[float], bool, str, Floats32 | None]
"""The features of an item, whether it is hallucinated, its group, and its mean hidden state for a probe."""


def _labelled(level: Level, rows: Sequence[Row]) -> LabelledFeatures:
    """The items. Features that were measured for none of them are left out."""
    features, labels, groups, states = zip(*rows, strict=True)
    columns = dict(zip(FEATURES[level], np.array(features, dtype=np.float64).T, strict=True))
    columns.pop(PROBE_FEATURE, None)  # it is fitted later
    for name in columns.keys() & SOURCE_FEATURES:
        if np.isnan(columns[name]).all():
            del columns[name]
        else:
            columns[name] = np.nan_to_num(columns[name])  # a prompt of one token has no source
    return LabelledFeatures(
        list(columns),
        np.stack(list(columns.values()), axis=1),
        np.array(labels, dtype=bool),
        list(groups),
        np.stack(states) if states[0] is not None else None,
    )


def _statistics(segment: Segment, layers: Layers, branches: bool) -> Any:
    """The statistics of a segment, by their names in a :class:`~cocoa_engine.Span`."""
    profile, start, part = segment.forced.profile, segment.start, slice(segment.start, segment.end)
    disagreement = profile.span(start, segment.end)
    competing = profile.competing[start] if branches else 1
    # only the highest and the lowest log p of the candidates' first tokens count
    first = [0.0] + [-profile.spreads[start]] * (competing - 1) if competing > 1 else []
    return SimpleNamespace(
        con_mlds=float(disagreement.con_mlds(layers.window)),
        f_mlds=float(disagreement.f_mlds(layers.window, layers.final)),
        token_ids=profile.token_ids[part],
        token_log_probs=profile.log_probs[part],
        token_entropies=profile.entropies[part],
        token_margins=profile.margins[part],
        token_copied=profile.copied[part],
        token_source_attention=profile.source_attention[part],
        preceding=preceding(profile.log_probs[:start], profile.entropies[:start], profile.copied[:start]),
        candidates=[SimpleNamespace(token_log_probs=[log_prob]) for log_prob in first],
        probe=None,
    )
