"""Protocols of the data that renderers read. Result types can call renderers, since these import no result type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from cocoa_engine.config import CocoaConfig
from cocoa_engine.risk import Check, Unit
from cocoa_engine.spans import RiskSource, Span, Usage


class Answer(Protocol):
    """An answer with its spans; :class:`~cocoa_engine.results.Generation` is one."""

    @property
    def text(self) -> str: ...

    @property
    def spans(self) -> Sequence[Span]: ...

    @property
    def config(self) -> CocoaConfig: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def model_name(self) -> str | None: ...

    @property
    def answer_risk(self) -> float | None: ...

    @property
    def risk_source(self) -> RiskSource | None: ...

    @property
    def calibrated_on(self) -> str | None: ...

    @property
    def answer_out_of_domain(self) -> bool: ...

    @property
    def words(self) -> Sequence[Unit]: ...

    @property
    def sentences(self) -> Sequence[Unit]: ...

    def check_these(self, most: int = 3) -> Sequence[Check]: ...

    @property
    def max_risk(self) -> float: ...

    @property
    def mean_risk(self) -> float: ...

    def model_dump_json(self) -> str: ...


class LayerDisagreement(Protocol):
    """The disagreement about one span, layer by layer; :class:`~cocoa_engine.results.LayerCurve` is one."""

    @property
    def text(self) -> str: ...

    @property
    def consecutive(self) -> Sequence[float]: ...

    @property
    def to_final(self) -> Sequence[float]: ...

    @property
    def middle_layers(self) -> tuple[int, int]: ...

    @property
    def final_layer(self) -> Literal["post_norm", "pre_norm"]: ...
