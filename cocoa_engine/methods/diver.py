"""Diver (Lu et al., 2024): spans ranked by how much they say about the input. A reconstruction."""

from __future__ import annotations

from cocoa_engine.methods.base import DecodingMethod


class Diver(DecodingMethod):
    """score(S) = log p_S + w * PMI(S; x), with PMI(S; x) = log p(x | x, y, S) - log p(x | x, y).

    x is the prompt, y the answer so far; log p(x | ...) is by teacher forcing the prompt once more after what was said,
    which costs as many tokens as the prompt has for each candidate. A run in which nothing competed scores log p_S.

    No code is public and the paper's full text was not at hand: this is made from its abstract and its reviews. The
    weight w is not given there; ``diver_weight`` is 1 by default.
    """

    name = "diver"
    reads_back = True

    def score(self, log_prob: float, mlds: float, alpha: float) -> float:
        """log p_S; the point-wise mutual information is added where it was measured."""
        return log_prob
