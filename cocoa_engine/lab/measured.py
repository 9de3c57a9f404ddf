"""Answers that a model was fed by teacher forcing, and the features and labels of spans and answers."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.speculation import preceding
from cocoa_engine.equations import middle_layers
from cocoa_engine.errors import CalibrationError, ConfigError
from cocoa_engine.lab.cache import AnswerCache, CacheFolder, answered
from cocoa_engine.lab.data import LabelledText, Question
from cocoa_engine.lab.fit import Floats32, LabelledFeatures
from cocoa_engine.methods import METHODS
from cocoa_engine.model.language_model import FinalLayer
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
from cocoa_engine.scoring.text_profile import LayerProfile, Profiler, TokenProfile, span_ranges

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine


@dataclass(frozen=True)
class TeacherForced:
    """A labelled answer that was fed to the model (teacher forcing).

    Attributes:
        ends: for each token, the offset after its last character in the record's text.
    """

    record: LabelledText
    profile: TokenProfile
    ends: list[int]


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of an answer as one span.

    Attributes:
        start, end: the range of tokens, the end exclusive.
        hallucinated, supported: the number of such characters, without white space. For a whole answer with one label,
            1 and 0 or 0 and 1.
    """

    forced: TeacherForced
    start: int
    end: int
    hallucinated: int
    supported: int


def force(
    engine: CocoaEngine,
    records: Iterable[LabelledText],
    config: CocoaConfig,
    *,
    chat: bool = False,
    layers: Sequence[int] = (),
    cache: CacheFolder | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[TeacherForced]:
    """Feed labelled answers to a model, each after its prompt. Consecutive answers share the encoding of their prompt.

    ``gamma`` and ``max_candidates`` of the settings define which tokens compete. With ``chat``, answers follow the
    record's question as a chat. The mean states after ``layers`` are measured, for a probe. ``cache`` keeps what is
    measured, but no labels. ``advance`` is called with the number of answers fed since the last call.

    Raises:
        PromptError: an answer does not fit the context window after its prompt.
        ConfigError: the cache is required, and cannot be read or written.
    """
    calibrator = engine.calibrator_for(config)
    profiler = Profiler(engine.session, config, None if calibrator is None else calibrator.heads, layers)
    settings = {"chat": chat, "layers": list(layers)}
    settings |= config.model_dump(include={"gamma", "max_candidates"})
    kept = None if cache is None else AnswerCache(cache, "fed", engine, config, settings)

    def prompt_of(record: LabelledText) -> Prompt:
        return engine.encode_chat([{"role": "user", "content": record.question}]) if chat else record.prompt

    for _, same in groupby(records, key=lambda record: record.prompt):
        batch = list(same)
        by_record = {record: None if kept is None else _from_plain(record, kept) for record in batch}
        if missing := [record for record, forced in by_record.items() if forced is None]:
            # a plain prompt ends with a colon, so a space has to follow; offsets count from the answer's first letter
            texts = [record.text if chat or record.text[0].isspace() else f" {record.text}" for record in missing]
            profiles = profiler(prompt_of(missing[0]), texts)
            for record, text, profile in zip(missing, texts, profiles, strict=True):
                dropped = text[0].isspace() and not profile.text[:1].isspace()  # by the tokenizer
                shift = len(text) - len(record.text) - dropped
                ends = [min(max(end - shift, 0), len(record.text)) for end in profile.ends]
                by_record[record] = TeacherForced(record, profile, ends)
                if kept is not None and kept.get(_identity(record)) is None:
                    kept.add(_identity(record), {"ends": ends, "profile": _plain(profile)})
        advance(len(batch))
        yield from (forced for forced in map(by_record.get, batch) if forced is not None)


def _identity(record: LabelledText) -> list[str]:
    return [record.prompt, record.question, record.text]


_TENSORS = ("ranges", "of_tokens", "of_spans", "states", "text_states")
_LISTS = [field.name for field in fields(TokenProfile) if field.name not in _TENSORS]


def _plain(profile: TokenProfile) -> dict[str, Any]:
    """A profile as plain values."""

    def of_array(values: Tensor) -> list[Any]:
        array = values.numpy().astype("<f4")
        return [list(array.shape), b64encode(array.tobytes()).decode()]

    return {
        **{name: getattr(profile, name) for name in _LISTS},
        "ranges": list(profile.ranges),
        "of_tokens": list(map(of_array, profile.of_tokens)),
        "of_spans": list(map(of_array, profile.of_spans)),
        "states": None if profile.states is None else of_array(profile.states),
        "text_states": None if profile.text_states is None else of_array(profile.text_states),
    }


def _from_plain(record: LabelledText, kept: AnswerCache) -> TeacherForced | None:
    """An answer whose profile was kept; `None` if it was not fed before."""

    def array(plain: Sequence[Any]) -> Tensor:
        shape, text = plain
        return torch.from_numpy(np.frombuffer(b64decode(text), "<f4").reshape(shape).astype(np.float32))

    if (values := kept.get(_identity(record))) is None:
        return None
    plain = values["profile"]
    profile = TokenProfile(
        **{name: plain[name] for name in _LISTS},
        ranges={(start, end): at for at, (start, end) in enumerate(plain["ranges"])},
        of_tokens=LayerProfile(*map(array, plain["of_tokens"])),
        of_spans=LayerProfile(*map(array, plain["of_spans"])),
        states=None if plain["states"] is None else array(plain["states"]),
        text_states=None if plain["text_states"] is None else array(plain["text_states"]),
    )
    return TeacherForced(record, profile, values["ends"])


def answer(forced: TeacherForced) -> Segment:
    """The whole answer as one segment, with its label as a whole."""
    label = bool(forced.record.label)
    return Segment(forced, 0, len(forced.ends), int(label), int(not label))


def tokens(forced: TeacherForced) -> Iterator[Segment]:
    """Each token as a segment."""
    return (_segment(forced, at, at + 1) for at in range(len(forced.ends)))


def spans(forced: TeacherForced) -> Iterator[Segment]:
    """The answer divided at its risk points. Spans of white space are left out.

    Decoding ends a span at the latest of its candidates' next risk points. A given text has no other candidates, so a
    span ends at its own next risk point. It also ends before a token that is not the most probable one, because
    branches continue with the most probable token.
    """
    segments = (
        _segment(forced, start, end) for start, end in span_ranges(forced.profile.competing, forced.profile.gaps)
    )
    return (segment for segment in segments if segment.hallucinated + segment.supported)


def _segment(forced: TeacherForced, start: int, end: int) -> Segment:
    first, last = forced.ends[start - 1] if start else 0, forced.ends[end - 1]
    labels = zip(forced.record.hallucinated_at(first, last), forced.record.text[first:last], strict=True)
    visible = [label for label, character in labels if not character.isspace()]
    return Segment(forced, start, end, sum(visible), len(visible) - sum(visible))


@dataclass(frozen=True)
class Layers:
    """The layers of the MLDS: the window (m, n), both inclusive, and the final state they are compared with."""

    window: tuple[int, int]
    final: FinalLayer

    @classmethod
    def of(cls, config: CocoaConfig, num_layers: int) -> Layers:
        """The layers of some settings; a ConfigError if the window is not below the last layer."""
        window = config.middle_layers or middle_layers(num_layers)
        if window[1] >= num_layers:
            raise ConfigError(f"middle_layers: n={window[1]} must be below the model's {num_layers} layers here.")
        return cls(window, config.final_layer)


FEATURES: dict[Level, tuple[str, ...]] = {"span": SPAN_FEATURES, "answer": ANSWER_FEATURES}
LEVELS: tuple[Level, ...] = tuple(FEATURES)


def probe_layers(num_layers: int) -> list[int]:
    """The layers that a probe may read, 2L/3, 7L/12 and L/2. That of spans reads the first."""
    return [2 * num_layers // 3, 7 * num_layers // 12, num_layers // 2]


def labelled_features(
    answers: Iterable[TeacherForced], config: CocoaConfig, num_layers: int
) -> dict[Level, LabelledFeatures]:
    """The features and labels of every labelled span, and of every answer labelled as a whole.

    Answers are divided by :func:`.spans`. A span is hallucinated if any of its characters is, except white space.
    Source attention is not a feature if it was not measured. The items have the states for a probe that were measured.
    """
    layers, branches = Layers.of(config, num_layers), METHODS[config.method].branches
    rows: dict[Level, list[Row]] = {level: [] for level in LEVELS}
    for forced in answers:
        profile, group = forced.profile, forced.record.group
        if forced.record.label is not None:  # an answer counts as one span, as in ``engine.score``
            usage, span = SimpleNamespace(prompt_tokens=len(profile.prompt)), answer(forced)
            whole: Any = SimpleNamespace(spans=[_statistics(span, layers, branches)], usage=usage)
            states = None if profile.text_states is None else profile.text_states.numpy()
            rows["answer"].append((answer_features(whole), forced.record.label, group, states))
        for segment in spans(forced) if forced.record.spans is not None else ():
            features = span_features(_statistics(segment, layers, branches))
            rows["span"].append((features, segment.hallucinated > 0, group, _state(segment)))
    return {level: _labelled(level, items) for level, items in rows.items() if items}


def answer_values(generation: Generation) -> dict[str, Any]:
    """The text, the tokens and the features of an answer, as plain values. An empty answer has no features."""
    features = answer_features(generation) if generation.spans else None
    return {"text": generation.text, "token_ids": generation.token_ids, "features": features}


def mean_state(profiler: Profiler, prompt: Prompt, values: Mapping[str, Any]) -> dict[str, Floats32]:
    """The mean ``states`` of an answer, ``[k, d]``, that is fed again after its prompt; nothing for an empty answer."""
    if not values["token_ids"]:
        return {}
    (profile,) = profiler(prompt, [values["token_ids"]])
    assert profile.text_states is not None
    return {"states": profile.text_states.numpy()}


def labelled_answers(answers: Iterable[tuple[Question, Mapping[str, Any]]]) -> LabelledFeatures:
    """The features of answers to questions, not all of them empty, from their :func:`answer_values`.

    A wrong one is hallucinated. With the :func:`mean_state` of each, they have states for a probe.
    """
    rows: list[Row] = [
        (values["features"], not question.is_right(values["text"]), question.group, values.get("states"))
        for question, values in answers
        if values["features"] is not None
    ]
    if not rows:
        raise CalibrationError("all answers of the model are empty, so nothing can be fitted or evaluated on them.")
    return _labelled("answer", rows)


def request_prompt(engine: CocoaEngine, request: str) -> Prompt:
    """A chat if the model has a template, otherwise a text to continue."""
    if not engine.has_chat_template:
        return f"{request}\nAnswer:"
    return engine.encode_chat([{"role": "user", "content": request}])


EXAMPLES = "What do bees make?\nAnswer: Honey\n\nHow many days does a week have?\nAnswer: 7\n\n"


def question_prompt(engine: CocoaEngine, question: str) -> Prompt:
    """Like :func:`request_prompt`; a model without a chat template reads two examples of short answers first."""
    return request_prompt(engine, question if engine.has_chat_template else EXAMPLES + question)


def question_config(engine: CocoaEngine, config: CocoaConfig) -> CocoaConfig:
    """The settings of a :func:`question_prompt`: a model without a chat template ends its answer with the line."""
    return config if engine.has_chat_template or config.stop else config.replace(stop=("\n",))


def own_answers(
    engine: CocoaEngine,
    questions: Sequence[Question],
    config: CocoaConfig,
    *,
    layers: Sequence[int] = (),
    cache: AnswerCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> LabelledFeatures:
    """The features of a model's own answers to questions.

    With ``layers``, each answer is fed again after its prompt, and its mean states are measured, for a probe.
    ``cache`` has what was asked before. ``advance`` is called with the number of questions answered since its last
    call.

    Raises:
        CalibrationError: all answers are empty.
    """
    config = question_config(engine, config)
    profiler = Profiler(engine.session, config, (), layers) if layers else None
    prompts = [question_prompt(engine, question.request) for question in questions]
    answers = answered(engine, questions, prompts, config, answer_values, cache=cache, advance=advance)
    return labelled_answers(
        (question, values if profiler is None else {**values, **mean_state(profiler, prompt, values)})
        for prompt, (question, values) in zip(prompts, answers, strict=True)
    )


Row = tuple[list[float], bool, str, Floats32 | None]
"""The features of an item, whether it is hallucinated, its group, and its mean states for a probe, ``[k, d]``."""


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


def _state(segment: Segment) -> Floats32 | None:
    """The mean state of a span, ``[1, d]``."""
    profile = segment.forced.profile
    return None if profile.states is None else profile.states[profile.ranges[segment.start, segment.end]].numpy()[None]


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
        answer_probe=None,
    )
