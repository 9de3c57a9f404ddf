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
from cocoa_engine.lab.records import LabelledText
from cocoa_engine.scoring.text_profile import LayerProfile, Profiler, TokenProfile

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine


@dataclass(frozen=True)
class TeacherForced:
    """A labelled answer that was fed to the model (teacher forcing).

    Attributes:
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
    without_source: bool = False,
    cache: ProfileCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[TeacherForced]:
    """Feed labelled answers to a model, each after its prompt. Consecutive answers share the encoding of their prompt.

    ``gamma`` and ``max_candidates`` of the settings define which tokens compete. With ``chat``, answers follow the
    record's question as a chat; with ``without_source``, they are also fed after the prompt without its source.
    ``advance`` is called with the number of answers fed since the last call.

    Raises:
        PromptError: an answer does not fit the context window after its prompt.
    """
    calibrator = engine.calibrator_for(config)
    profiler = Profiler(engine.session, config, None if calibrator is None else calibrator.heads)

    def profiles_of(record: LabelledText, texts: Sequence[str | Sequence[int]]) -> Sequence[TokenProfile]:
        asked = engine.encode_chat([{"role": "user", "content": record.question}]) if chat else record.prompt
        return profiler(asked, texts)

    for _, same in groupby(records, key=lambda record: record.prompt):
        batch = list(same)
        by_record = {record: None if cache is None else cache.get(record) for record in batch}
        if missing := [record for record, forced in by_record.items() if forced is None]:
            # a plain prompt ends with a colon, so a space has to follow; offsets count from the answer's first letter
            texts = [record.text if chat or record.text[0].isspace() else f" {record.text}" for record in missing]
            profiles = profiles_of(missing[0], texts)
            others: Sequence[TokenProfile | None] = [None] * len(missing)
            if without_source:
                others = profiles_of(missing[0].without_source(), [profile.token_ids for profile in profiles])
            for record, text, profile, other in zip(missing, texts, profiles, others, strict=True):
                dropped = text[0].isspace() and not profile.text[:1].isspace()  # by the tokenizer
                shift = len(text) - len(record.text) - dropped
                ends = [min(max(end - shift, 0), len(record.text)) for end in profile.ends]
                sourceless = None if other is None else TeacherForced(record, other, ends)
                by_record[record] = forced = TeacherForced(record, profile, ends, sourceless)
                if cache is not None:
                    cache.add(forced)
        advance(len(batch))
        yield from (forced for forced in map(by_record.get, batch) if forced is not None)


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
    segments = (_segment(forced, start, end) for start, end in span_ranges(forced.profile))
    return (segment for segment in segments if segment.hallucinated + segment.supported)


def span_ranges(profile: TokenProfile) -> list[tuple[int, int]]:
    """The tokens of each span, the end exclusive; see :func:`spans`. Together the spans cover the text."""
    count = len(profile.token_ids)
    # several tokens compete, or the text's token is not the most probable one
    cuts = [at for at in range(count) if profile.competing[at] > 1 or profile.gaps[at] > 0 or at == 0]
    return list(zip(cuts, [*cuts[1:], count], strict=True))


def _segment(forced: TeacherForced, start: int, end: int) -> Segment:
    first, last = forced.ends[start - 1] if start else 0, forced.ends[end - 1]
    labels = zip(forced.record.hallucinated_at(first, last), forced.record.text[first:last], strict=True)
    visible = [label for label, character in labels if not character.isspace()]
    return Segment(forced, start, end, sum(visible), len(visible) - sum(visible))


Range = tuple[int, int]
_LISTS = [field.name for field in fields(TokenProfile)]


@dataclass(frozen=True, kw_only=True)
class KeptProfile(TokenProfile):
    """The statistics of a text whose hidden states were compared before, for some spans only.

    ``ranges`` has the place of each in ``of_spans`` and ``states``, the mean states at one layer, ``[spans, d]``.
    """

    ranges: dict[Range, int]
    of_tokens: LayerProfile
    of_spans: LayerProfile
    states: Tensor | None

    @property
    def tokens(self) -> LayerProfile:
        return self.of_tokens

    def span(self, start: int, end: int) -> LayerProfile:
        at = self.ranges[start, end]
        return LayerProfile(*(values[:, at : at + 1].contiguous() for values in self.of_spans.arrays))

    def mean_state(self, layer: int, start: int, end: int) -> Tensor:
        assert self.states is not None
        return self.states[self.ranges[start, end]]


class ProfileCache:
    """Teacher-forced answers that were fed before, in an :class:`.AnswerCache`.

    An answer has the same spans again, because they follow from the settings. Labels are those of the data. With a
    ``layer``, its states are kept, for a probe.
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
        profiles = [
            KeptProfile(
                **{name: profile[name] for name in _LISTS},
                ranges={(start, end): at for at, (start, end) in enumerate(profile["ranges"])},
                of_tokens=LayerProfile(*map(_tensor, profile["of_tokens"])),
                of_spans=LayerProfile(*map(_tensor, profile["of_spans"])),
                states=None if profile["states"] is None else _tensor(profile["states"]),
            )
            for profile in values["profiles"]
        ]
        first, *other = [TeacherForced(record, profile, values["ends"]) for profile in profiles]
        return TeacherForced(record, first.profile, first.ends, *other)

    def add(self, forced: TeacherForced) -> None:
        """Keep an answer, unless it is there."""
        if self._answers.get(_identity(forced.record)) is not None:
            return
        ranges = list(dict.fromkeys([(0, len(forced.ends)), *span_ranges(forced.profile)]))
        profiles = []
        for profile in (fed.profile for fed in (forced, forced.without_source) if fed is not None):
            of_spans = zip(*(profile.span(*ends).arrays for ends in ranges), strict=True)
            layer = self._layer
            states = None if layer is None else torch.stack([profile.mean_state(layer, *ends) for ends in ranges])
            profiles.append(
                {
                    **{name: getattr(profile, name) for name in _LISTS},
                    "ranges": ranges,
                    "of_tokens": list(map(_plain, profile.tokens.arrays)),
                    "of_spans": [_plain(torch.cat(same, dim=1)) for same in of_spans],
                    "states": None if states is None else _plain(states),
                }
            )
        self._answers.add(_identity(forced.record), {"ends": list(forced.ends), "profiles": profiles})


def _identity(record: LabelledText) -> list[str | None]:
    return [record.prompt, record.question, record.text, record.source]


def _plain(values: Tensor) -> list[Any]:
    array = values.numpy().astype("<f4")
    return [list(array.shape), b64encode(array.tobytes()).decode()]


def _tensor(plain: Sequence[Any]) -> Tensor:
    shape, text = plain
    return torch.from_numpy(np.frombuffer(b64decode(text), "<f4").reshape(shape).astype(np.float32))
