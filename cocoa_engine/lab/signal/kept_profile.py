"""Teacher-forced answers, kept in a folder without their hidden states."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.lab.answer_cache import AnswerCache, CacheFolder
from cocoa_engine.lab.data import LabelledText
from cocoa_engine.lab.signal.segments import TeacherForced, span_ranges
from cocoa_engine.scoring.text_profile import LayerProfile, TokenProfile

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine

Range = tuple[int, int]
_LISTS = [field.name for field in fields(TokenProfile)]


@dataclass(frozen=True, kw_only=True)
class KeptProfile(TokenProfile):
    """The statistics of a text whose hidden states were compared before, for some spans only.

    Attributes:
        of_tokens: the disagreements of each token as a span of its own.
        of_spans: those of each mean-pooled span, by its range of tokens.
        states: the mean state of each span at one layer, ``[d]``; empty if it was not kept.
        layer: the number of this layer; `None` if no states were kept.
    """

    of_tokens: LayerProfile
    of_spans: dict[Range, LayerProfile]
    states: dict[Range, Tensor]
    layer: int | None

    @classmethod
    def of(cls, profile: TokenProfile, ranges: Iterable[Range], layer: int | None) -> KeptProfile:
        """Compare the states of a profile.

        Args:
            profile: the profile.
            ranges: the spans.
            layer: the layer whose states are kept.
        """
        wanted = list(dict.fromkeys(ranges))
        return cls(
            **{name: getattr(profile, name) for name in _LISTS},
            of_tokens=profile.tokens,
            of_spans={one: profile.span(*one) for one in wanted},
            states={} if layer is None else {one: profile.mean_state(layer, *one) for one in wanted},
            layer=layer,
        )

    @property
    def tokens(self) -> LayerProfile:
        """The disagreements of each token as a span of its own."""
        return self.of_tokens

    def span(self, start: int, end: int) -> LayerProfile:
        """The disagreements of a span, which must be one of those that were kept."""
        return self.of_spans[start, end]

    def mean_state(self, layer: int, start: int, end: int) -> Tensor:
        """The mean state of a span that was kept, at the layer that was kept."""
        assert layer == self.layer
        return self.states[start, end]

    def plain(self) -> dict[str, Any]:
        """The profile as plain values."""
        ranges = list(self.of_spans)
        of_spans = zip(*(self.of_spans[one].arrays for one in ranges), strict=True)
        return {
            **{name: getattr(self, name) for name in _LISTS},
            "ranges": ranges,
            "of_tokens": [_plain(values) for values in self.of_tokens.arrays],
            "of_spans": [_plain(torch.cat(same, dim=1)) for same in of_spans],
            "states": _plain(torch.stack([self.states[one] for one in ranges])) if self.states else None,
            "layer": self.layer,
        }

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> KeptProfile:
        """The profile of plain values."""
        ranges = [(start, end) for start, end in values["ranges"]]
        of_spans = [_tensor(one) for one in values["of_spans"]]
        states = None if values["states"] is None else _tensor(values["states"])
        return cls(
            **{name: values[name] for name in _LISTS},
            of_tokens=LayerProfile(*map(_tensor, values["of_tokens"])),
            of_spans={
                one: LayerProfile(*(values[:, at : at + 1].contiguous() for values in of_spans))
                for at, one in enumerate(ranges)
            },
            states={} if states is None else {one: states[at] for at, one in enumerate(ranges)},
            layer=values["layer"],
        )


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

    @property
    def file(self) -> Path:
        """The file of the answers."""
        return self._answers.file

    def get(self, record: LabelledText) -> TeacherForced | None:
        """An answer; `None` if it was not fed before.

        Raises:
            ConfigError: the file is required and cannot be read.
        """
        values = self._answers.get(identity(record))
        if values is None:
            return None
        profiles = [KeptProfile.from_plain(one) for one in values["profiles"]]
        first, *other = [TeacherForced(record, profile, values["ends"]) for profile in profiles]
        return TeacherForced(record, first.profile, first.ends, *other)

    def add(self, forced: TeacherForced) -> None:
        """Keep an answer, unless it is there.

        Raises:
            ConfigError: the file is required and cannot be written to.
        """
        if self._answers.get(identity(forced.record)) is not None:
            return
        ranges = [(0, len(forced.ends)), *span_ranges(forced.profile)]
        found = [forced.profile, *([] if forced.without_source is None else [forced.without_source.profile])]
        profiles = [KeptProfile.of(one, ranges, self._layer).plain() for one in found]
        self._answers.add(identity(forced.record), {"ends": list(forced.ends), "profiles": profiles})


def identity(record: LabelledText) -> Sequence[str | None]:
    """What identifies an answer in a cache."""
    return [record.prompt, record.question, record.text, record.source]


def _plain(values: Tensor) -> list[Any]:
    array = values.numpy().astype("<f4")
    return [list(array.shape), b64encode(array.tobytes()).decode()]


def _tensor(plain: Sequence[Any]) -> Tensor:
    shape, text = plain
    return torch.from_numpy(np.frombuffer(b64decode(text), "<f4").reshape(shape).astype(np.float32))
