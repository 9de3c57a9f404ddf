"""Diver (Lu et al., 2024), reconstructed: spans are ranked by their mutual information with the prompt."""

from cocoa_engine.methods.base import DecodingMethod


class Diver(DecodingMethod):
    """score(S) = log p_S + w * PMI(S; x), with PMI(S; x) = log p(x | x, y, S) - log p(x | x, y).

    x is the prompt and y the answer so far. log p(x | ...) is computed by teacher forcing the prompt again after the
    candidate, so each candidate costs as many tokens as the prompt has. A span without candidates scores log p_S; the
    decoder adds the weighted PMI.

    The authors' code is not public, and this implementation is based on the paper's abstract and reviews only. They do
    not state the weight w; ``diver_weight`` is 1 by default.
    """

    name = "diver"
    reads_back = True
