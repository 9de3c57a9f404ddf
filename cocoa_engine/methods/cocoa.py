"""CoCoA, "Listen to the Layers" (Subbalakshmi et al., 2026): the ungated penalty."""

from cocoa_engine import equations
from cocoa_engine.methods.base import DecodingMethod


class Cocoa(DecodingMethod):
    """score(S) = log p_S - alpha * MLDS(S)."""

    name = "cocoa"

    def score(self, log_prob: float, mlds: float, alpha: float) -> float:
        return equations.cocoa(log_prob, mlds, alpha)
