"""Greedy decoding: always the most probable token. The baseline every other method departs from."""

from __future__ import annotations

from cocoa_engine.methods.base import DecodingMethod


class Greedy(DecodingMethod):
    """score(S) = log p_S; no risk point is branched, both MLDS are measured all the same."""

    name = "greedy"
    branches = False

    def score(self, log_prob: float, mlds: float, alpha: float) -> float:
        return log_prob
