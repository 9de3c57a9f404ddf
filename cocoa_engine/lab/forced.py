"""Labelled answers fed to a model: their profiles, spans and labels, and their cache."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.lab.cache import AnswerCache, CacheFolder
from cocoa_engine.lab.data import LabelledText
from cocoa_engine.scoring.text_profile import LayerProfile, Profiler, TokenProfile

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine


@dataclass(frozen=True)
class TeacherForced:
    """A labelled answer that was fed to the model (teacher forcing).

    Attributes:
        record: the answer.
        profile: the statistics of its tokens.
        ends: for each token, the offset after its last character in the record's text.
        without_source: the same tokens after the prompt without its source, if requested.
    """

    record: LabelledText
    profile: TokenProfile
    ends: list[int]
    without_source: TeacherForced | None = None


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of an answer as one span.

    Attributes:
        forced: the answer.
        start, end: the range of tokens, the end exclusive.
        layers: the disagreements of the mean-pooled span.
        hallucinated, supported: the number of such characters, without white space. For a whole answer with one label,
            1 and 0 or 0 and 1.
    """

    forced: TeacherForced
    start: int
    end: int
    layers: LayerProfile
    hallucinated: int
    supported: int


def force(
    engine: CocoaEngine,
    records: Iterable[LabelledText],
    config: CocoaConfig,
    *,
    chat: bool = False,
    without_source: bool = False,
    cache: ProfileCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[TeacherForced]:
    """Feed labelled answers to a model, each after its prompt. Consecutive answers share the encoding of their prompt.

    Args:
        engine: the engine with the model.
        records: the labelled answers.
        config: the settings. ``gamma`` and ``max_candidates`` define which tokens compete.
        chat: ask through the model's chat template instead of as text to continue.
        without_source: also feed each answer after its prompt without the source.
        cache: answers that were fed before are taken from here, and others are added.
        advance: called with the number of answers fed since the last call.

    Raises:
        PromptError: an answer does not fit the context window after its prompt.
    """
    calibrator = engine.calibrator_for(config)
    profiler = Profiler(engine.session, config, None if calibrator is None else calibrator.heads)
    for _, same in groupby(records, key=lambda record: record.prompt):
        batch = list(same)
        known = {record: None if cache is None else cache.get(record) for record in batch}
        if missing := [record for record, forced in known.items() if forced is None]:
            for forced in _fed(engine, profiler, missing, chat=chat, without_source=without_source):
                known[forced.record] = forced
                if cache is not None:
                    cache.add(forced)
        yield from (forced for forced in map(known.get, batch) if forced is not None)
        advance(len(batch))


def _fed(
    engine: CocoaEngine, profiler: Profiler, batch: Sequence[LabelledText], *, chat: bool, without_source: bool
) -> list[TeacherForced]:
    """Feed answers to one prompt."""
    prompt = _prompt(engine, batch[0], chat)
    # a plain prompt ends with a colon, so a space has to follow; offsets count from the answer's first letter
    leads = ["" if chat or record.text[0].isspace() else " " for record in batch]
    texts = [lead + record.text for lead, record in zip(leads, batch, strict=True)]
    profiles = profiler(prompt, texts)
    ids = [profile.token_ids for profile in profiles]
    sourceless: Sequence[TokenProfile | None] = [None] * len(batch)
    if without_source:
        sourceless = profiler(_prompt(engine, batch[0].without_source(), chat), ids)
    found = []
    for record, lead, text, profile, other in zip(batch, leads, texts, profiles, sourceless, strict=True):
        dropped = text[0].isspace() and not profile.text[:1].isspace()  # by the tokenizer
        shift = len(lead) - dropped
        ends = [min(max(end - shift, 0), len(record.text)) for end in profile.ends]
        forced_other = None if other is None else TeacherForced(record, other, ends)
        found.append(TeacherForced(record, profile, ends, forced_other))
    return found


def _prompt(engine: CocoaEngine, record: LabelledText, chat: bool) -> str | list[int]:
    return engine.encode_chat([{"role": "user", "content": record.question}]) if chat else record.prompt


def answer(forced: TeacherForced) -> Segment:
    """The whole answer as one segment, with its label as a whole."""
    count = len(forced.profile.token_ids)
    label = bool(forced.record.label)
    return Segment(forced, 0, count, forced.profile.span(0, count), int(label), int(not label))


def spans(forced: TeacherForced) -> Iterator[Segment]:
    """The answer divided at its risk points. Spans of white space are left out.

    Decoding ends a span at the latest of its candidates' next risk points. A given text has no other candidates, so a
    span ends at its own next risk point. It also ends before a token that is not the most probable one, because
    branches continue with the most probable token.
    """
    for start, end in span_ranges(forced.profile):
        hallucinated, supported = _characters(forced, start, end)
        if hallucinated + supported:
            yield Segment(forced, start, end, forced.profile.span(start, end), hallucinated, supported)


def span_ranges(profile: TokenProfile) -> list[tuple[int, int]]:
    """The tokens of each span, the end exclusive; see :func:`spans`. Together the spans cover the text."""
    count = len(profile.token_ids)
    # several tokens compete, or the text's token is not the most probable one
    begins = [profile.competing[at] > 1 or profile.gaps[at] > 0 or at == 0 for at in range(count)]
    cuts = [at for at, begin in enumerate(begins) if begin]
    return list(zip(cuts, [*cuts[1:], count], strict=True))


def _characters(forced: TeacherForced, start: int, end: int) -> tuple[int, int]:
    first, last = forced.ends[start - 1] if start else 0, forced.ends[end - 1]
    labels = zip(forced.record.hallucinated_at(first, last), forced.record.text[first:last], strict=True)
    visible = [label for label, character in labels if not character.isspace()]
    return sum(visible), len(visible) - sum(visible)


def token_labels(forced: TeacherForced) -> Sequence[tuple[int, int]]:
    """For each token, the number of its hallucinated and of its supported characters, without white space."""
    return [_characters(forced, at, at + 1) for at in range(len(forced.ends))]


Range = tuple[int, int]
_LISTS = [field.name for field in fields(TokenProfile)]


@dataclass(frozen=True, kw_only=True)
class KeptProfile(TokenProfile):
    """The statistics of a text whose hidden states were compared before, for some spans only.

    Attributes:
        of_tokens: the disagreements of each token as a span of its own.
        ranges: the spans by their range of tokens, each with its place in ``of_spans`` and ``states``.
        of_spans: the disagreements of the mean-pooled spans.
        states: the mean state of each span at one layer, ``[spans, d]``, if it was kept.
    """

    of_tokens: LayerProfile
    ranges: dict[Range, int]
    of_spans: LayerProfile
    states: Tensor | None

    @property
    def tokens(self) -> LayerProfile:
        """The disagreements of each token as a span of its own."""
        return self.of_tokens

    def span(self, start: int, end: int) -> LayerProfile:
        """The disagreements of a span, which must be one of those that were kept."""
        at = self.ranges[start, end]
        return LayerProfile(*(values[:, at : at + 1].contiguous() for values in self.of_spans.arrays))

    def mean_state(self, layer: int, start: int, end: int) -> Tensor:
        """The mean state of a span that was kept, at the layer that was kept."""
        assert self.states is not None
        return self.states[self.ranges[start, end]]

    @classmethod
    def read(cls, values: dict[str, Any]) -> KeptProfile:
        """The profile of :func:`_plain_profile`."""
        return cls(
            **{name: values[name] for name in _LISTS},
            of_tokens=LayerProfile(*map(_tensor, values["of_tokens"])),
            ranges={(start, end): at for at, (start, end) in enumerate(values["ranges"])},
            of_spans=LayerProfile(*map(_tensor, values["of_spans"])),
            states=None if values["states"] is None else _tensor(values["states"]),
        )


def _plain_profile(profile: TokenProfile, ranges: Sequence[Range], layer: int | None) -> dict[str, Any]:
    """The profile as plain values, with its spans and, if a layer is given, their mean states at this layer."""
    of_spans = zip(*(profile.span(*ends).arrays for ends in ranges), strict=True)
    states = None if layer is None else torch.stack([profile.mean_state(layer, *ends) for ends in ranges])
    return {
        **{name: getattr(profile, name) for name in _LISTS},
        "ranges": ranges,
        "of_tokens": [_plain(values) for values in profile.tokens.arrays],
        "of_spans": [_plain(torch.cat(same, dim=1)) for same in of_spans],
        "states": None if states is None else _plain(states),
    }


class ProfileCache:
    """Teacher-forced answers that were fed before.

    An answer has the same spans again, because they follow from the settings. Labels are those of the data.

    Args:
        folder: the folder of the cache.
        engine: the engine that measures.
        config: the settings.
        chat: whether the answers follow a chat prompt.
        without_source: whether they are also fed without their source.
        layer: the layer whose states are kept, for a probe.

    Raises:
        ConfigError: as for :class:`.AnswerCache`.
    """

    def __init__(
        self,
        folder: CacheFolder,
        engine: CocoaEngine,
        config: CocoaConfig,
        *,
        chat: bool,
        without_source: bool = False,
        layer: int | None = None,
    ) -> None:
        competing = {"gamma": config.gamma, "max_candidates": config.max_candidates}
        settings = {**competing, "chat": chat, "without_source": without_source, "layer": layer}
        self._answers = AnswerCache(folder, "fed", engine, config, settings)
        self._layer = layer
        self.file = self._answers.file

    def get(self, record: LabelledText) -> TeacherForced | None:
        """An answer; `None` if it was not fed before."""
        values = self._answers.get(_identity(record))
        if values is None:
            return None
        first, *other = [TeacherForced(record, KeptProfile.read(value), values["ends"]) for value in values["profiles"]]
        return TeacherForced(record, first.profile, first.ends, *other)

    def add(self, forced: TeacherForced) -> None:
        """Keep an answer, unless it is there."""
        if self._answers.get(_identity(forced.record)) is not None:
            return
        ranges = list(dict.fromkeys([(0, len(forced.ends)), *span_ranges(forced.profile)]))
        both = [forced, *([] if forced.without_source is None else [forced.without_source])]
        profiles = [_plain_profile(fed.profile, ranges, self._layer) for fed in both]
        self._answers.add(_identity(forced.record), {"ends": list(forced.ends), "profiles": profiles})


def _identity(record: LabelledText) -> list[str | None]:
    return [record.prompt, record.question, record.text, record.source]


def _plain(values: Tensor) -> list[Any]:
    array = values.numpy().astype("<f4")
    return [list(array.shape), b64encode(array.tobytes()).decode()]


def _tensor(plain: Sequence[Any]) -> Tensor:
    shape, text = plain
    return torch.from_numpy(np.frombuffer(b64decode(text), "<f4").reshape(shape).astype(np.float32))
