"""CoCoA-SIG, "Listen to the Layers" (Subbalakshmi et al., 2026): the self-information-gated penalty."""

from cocoa_engine import equations
from cocoa_engine.methods.base import DecodingMethod


class CocoaSig(DecodingMethod):
    """score(S) = log p_S * (1 + alpha * MLDS(S))."""

    name = "cocoa-sig"

    def score(self, log_prob: float, mlds: float, alpha: float) -> float:
        return equations.cocoa_sig(log_prob, mlds, alpha)
