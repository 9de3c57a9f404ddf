"""Greedy decoding: always the most probable token. The baseline of all other methods."""

from __future__ import annotations

from cocoa_engine.methods.base import DecodingMethod


class Greedy(DecodingMethod):
    """score(S) = log p_S. Risk points are not branched; both MLDS are measured all the same."""

    name = "greedy"
    branches = False

    def score(self, log_prob: float, mlds: float, alpha: float) -> float:
        return log_prob
