"""The settings that a calibrator is valid for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import middle_layers
from cocoa_engine.methods import METHODS
from cocoa_engine.risk.part import Part


class Settings(Part):
    """The settings that a calibrator is valid for: the layers, which tokens compete, and where spans end.

    Given texts are always divided where tokens compete, whatever ``span_boundary`` is.
    """

    final_layer: Literal["post_norm", "pre_norm"]
    middle_layers: tuple[int, int]
    gamma: float
    max_candidates: int
    max_span_tokens: int = 16
    span_boundary: Literal["right", "left", "own", "fixed"] = "right"
    branches: bool = Field(True, description="Whether the decoding method grows candidates at risk points.")

    @classmethod
    def of(cls, config: CocoaConfig, num_layers: int) -> Settings:
        """The settings of a config, for a model with ``num_layers`` layers."""
        return cls(
            final_layer=config.final_layer,
            middle_layers=config.middle_layers or middle_layers(num_layers),
            gamma=config.gamma,
            max_candidates=config.max_candidates,
            max_span_tokens=config.max_span_tokens,
            span_boundary=config.span_boundary,
            branches=METHODS[config.method].branches,
        )
