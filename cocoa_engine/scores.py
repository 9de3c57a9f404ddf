"""Score of a candidate span: from its log-probability and its middle-layer disagreement.

All functions take and return plain numbers or tensors of equal shape; logarithms are natural.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:  # settings are read without loading torch
    import torch

Number = TypeVar("Number", float, "torch.Tensor")

SpanLogProb = Literal["sum", "mean"]


def span_log_prob(token_log_probs: Sequence[float], rule: SpanLogProb = "sum") -> float:
    """log p_S of a span from the log-probabilities of its tokens.

    ``"sum"`` is log p_S = sum_i log p(y_i | x, y_<i), as in the paper; ``"mean"`` divides it by the number of tokens.

    Raises:
        ValueError: if the span has no token.
    """
    if not token_log_probs:
        raise ValueError("a span has at least one token")
    total = float(sum(token_log_probs))
    return total if rule == "sum" else total / len(token_log_probs)


def cocoa(log_prob: Number, mlds: Number, alpha: float) -> Number:
    """CoCoA score: log p_S - alpha * MLDS(S)."""
    return log_prob - alpha * mlds


def cocoa_sig(log_prob: Number, mlds: Number, alpha: float) -> Number:
    """CoCoA-SIG score: log p_S * (1 + alpha * MLDS(S)).

    The penalty alpha * MLDS(S) is gated by the span's self-information -log p_S: a span the model is sure of is
    hardly moved, however much its layers disagree.
    """
    return log_prob * (1 + alpha * mlds)
