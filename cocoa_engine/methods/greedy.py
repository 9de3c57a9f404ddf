"""Greedy decoding: always the most probable token. The baseline for the other methods."""

from cocoa_engine.methods.base import DecodingMethod


class Greedy(DecodingMethod):
    """score(S) = log p_S. No branches are opened at risk points; both MLDS are still measured."""

    name = "greedy"
    branches = False
