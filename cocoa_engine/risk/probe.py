"""The probe of a calibrator: one direction of a model's hidden states, whose projection is a feature of a span."""

from __future__ import annotations

from pydantic import Field, model_validator

from cocoa_engine.risk.packed import Floats32
from cocoa_engine.risk.part import Part


class Probe(Part):
    """The direction of a layer's states that separates hallucinated from supported spans best.

    score = w . H[S, l] + b, where H[S, l] is the mean state of the span's tokens after layer l. After SAPLMA (Azaria
    and Mitchell, 2023) and probes of hallucinated entities (Obeso et al., 2025).

    Attributes:
        layer: l; layer 0 is the embedding.
        model_name: the model that it was fitted on. The states of another model have other directions.
        dtype: the data type of that model's weights, such as ``"float32"``.
        weights: w, ``[d]``.
        intercept: b.
    """

    layer: int = Field(ge=0)
    model_name: str
    dtype: str
    weights: Floats32
    intercept: float

    @model_validator(mode="after")
    def _finite(self) -> Probe:
        if not self.weights:
            raise ValueError("the probe has no weights")
        if max(map(abs, (*self.weights, self.intercept))) > MOST:
            raise ValueError(f"a weight of the probe is above {MOST:g}: the risk would not be finite")
        return self

    def obstacle(self, model_name: str, dtype: str, num_layers: int, hidden_size: int) -> str | None:
        """Why the probe cannot be used with a model; `None` if it can."""
        if (model_name, dtype) != (self.model_name, self.dtype):
            return f"it was fitted on the states of {self.model_name} in {self.dtype}, not of {model_name} in {dtype}"
        if self.layer > num_layers or len(self.weights) != hidden_size:
            return (
                f"it reads {len(self.weights)} numbers after layer {self.layer}; {model_name} has {num_layers} layers "
                f"of {hidden_size} numbers"
            )
        return None


MOST = 1e6
"""The largest weight of a probe."""
