"""Divides the hidden states that a step captures: those of the MLDS, and the one that a calibrator's probe reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.risk import RiskCalibrator


@dataclass(frozen=True)
class StateReader:
    """Reads captured states of W tokens, or of W pooled spans, ``[captured layers + 1, W, d]``.

    Attributes:
        window: the rows of the MLDS's layers m..n; `None` if no other layers are captured.
        row: the row that the probe reads.
        weights: the probe's weights, ``[d]`` float32; `None` without a probe.
        intercept: the probe's intercept.
    """

    window: slice | None = None
    row: int = 0
    weights: Tensor | None = None
    intercept: float = 0.0

    @classmethod
    def of(cls, spec: CaptureSpec, calibrator: RiskCalibrator | None) -> StateReader:
        """The reader of the states that ``spec`` captures, with the calibrator's probe."""
        window = None
        if spec.window is not None:
            m, n = spec.window
            window = slice(m - spec.first, n - spec.first + 1)
        probe = None if calibrator is None else calibrator.probe
        if probe is None:
            return cls(window)
        return cls(window, probe.layer - spec.first, torch.tensor(probe.weights), probe.intercept)

    def of_mlds(self, states: Tensor) -> Tensor:
        """The states of layers m..n, then of the final layer: ``[N + 1, W, d]``."""
        return states if self.window is None else torch.cat([states[:-1][self.window], states[-1:]])

    def probe_scores(self, states: Tensor) -> list[float] | None:
        """The probe's score of each token or span; `None` without a probe. A span's is the mean of its tokens'."""
        if self.weights is None:
            return None
        scores: list[float] = (states[self.row].float() @ self.weights.to(states.device) + self.intercept).tolist()
        return scores


MLDS_ALONE = StateReader()
"""Reads states of which all are the MLDS's."""
