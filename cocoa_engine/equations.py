"""The equations as pure functions: disagreement of layers (MLDS), and the scores of candidate spans by every method.

All other modules import them from here. Logarithms are natural.

A span's hidden states are mean-pooled over its tokens, H[S, l] = mean_{i in S} h[i, l]. The Middle Layer Disagreement
Scores compare the pooled states of layers. They are computed in float32 for every model dtype.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import expm1, inf, isnan
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:  # settings and results can be imported without torch
    from numpy import float64
    from numpy.typing import NDArray
    from torch import Tensor

Number = TypeVar("Number", float, "Tensor", "NDArray[float64]")

SpanLogProb = Literal["sum", "mean", "common_length", "end_mean", "greedy_end", "gnmt", "sqrt"]


def middle_layers(num_layers: int) -> tuple[int, int]:
    """The paper's middle window (m, n) = (floor(L / 3), floor(2L / 3)), both inclusive, of a model with L layers."""
    return num_layers // 3, 2 * num_layers // 3


def mean_pooled(states: Tensor) -> Tensor:
    """H[S, l] = mean_{i in S} h[i, l]: the states of a span's tokens, ``[..., t, d]``, to ``[..., d]``."""
    return states.mean(dim=-2)


def mean_pooled_sum(total: Tensor, count: int) -> Tensor:
    """H[S, l] from the sum of the states of a span's ``count`` tokens, which grows with the span."""
    return total / count


def disagreement(a: Tensor, b: Tensor) -> Tensor:
    """dis(a, b) = 1 - cos(H[S, a], H[S, b]), in [0, 2]: pooled states, ``[..., d]``, to ``[...]`` float32.

    The disagreement with a zero vector is 1.
    """
    from torch.nn.functional import cosine_similarity

    return 1.0 - cosine_similarity(a.float(), b.float(), dim=-1)


def con_mlds(middle: Tensor) -> Tensor:
    """ConMLDS of spans, ``[...]`` float32 in [0, 2), from the pooled states of layers m..n, ``[N, ..., d]``."""
    return con_mlds_of(disagreement(middle[:-1], middle[1:]), (0, middle.shape[0] - 1))


def f_mlds(middle: Tensor, final: Tensor) -> Tensor:
    """fMLDS of spans, ``[...]`` float32 in [0, 2], from the pooled states of layers m..n and of layer L."""
    to_final = disagreement(middle, final.unsqueeze(0).expand_as(middle))
    return f_mlds_of(to_final, (0, middle.shape[0] - 1))


def con_mlds_of(consecutive: Any, window: tuple[int, int]) -> Any:
    """ConMLDS: (1 / N) * sum_{j=m}^{n-1} dis(j, j + 1), with N = n - m + 1.

    The sum has n - m terms and is divided by N = n - m + 1, as printed in the paper.

    Args:
        consecutive: dis(j, j + 1) of each layer j, layers first: ``[L]`` or ``[L, ...]``, a list, tensor or array.
        window: (m, n), both inclusive.
    """
    m, n = window
    return _total(consecutive[m:n]) / (n - m + 1)


def f_mlds_of(to_final: Any, window: tuple[int, int]) -> Any:
    """fMLDS: (1 / N) * sum_{j=m}^{n} dis(j, L), with N = n - m + 1.

    Args:
        to_final: dis(j, L) of each layer j, layers first: ``[L]`` or ``[L, ...]``. dis(L, L) is 0 and may be left out.
        window: (m, n), both inclusive.
    """
    m, n = window
    return _total(to_final[m : n + 1]) / (n - m + 1)


def _total(values: Any) -> Any:
    return sum(values) if isinstance(values, Sequence) else values.sum(0)


def improbability(log_prob: float) -> float:
    """1 - p of a token with log p, in [0, 1], also where p is nearly 1."""
    return abs(expm1(log_prob))  # abs: not -0.0


ANSWER_TOKENS = 24
"""The number of tokens that count in the surprisal of a longer answer."""


def answer_surprisal(token_log_probs: Sequence[float]) -> float:
    """-log p of an answer's tokens, in nats; of t > 24 tokens, 24 / t of it, so that a long answer is not surprising
    by its length alone."""
    return -sum(token_log_probs) * min(1.0, ANSWER_TOKENS / len(token_log_probs))


def distribution(quantiles: Sequence[float], value: float) -> float:
    """F(value), in [0, 1], of the distribution with these quantiles (at equal steps from 0 to 1), linear between them.

    At a value that equals some quantiles, F is the middle of their levels. F(NaN) is NaN.
    """
    if isnan(value):
        return value
    last = len(quantiles) - 1
    before, after = bisect_left(quantiles, value), bisect_right(quantiles, value)
    if before < after:
        return (before + after - 1) / 2 / last
    if before in (0, len(quantiles)):
        return 1.0 if before else 0.0
    low, high = quantiles[before - 1], quantiles[before]
    return (before - 1 + (value - low) / (high - low)) / last


def entropy(log_p: Tensor) -> Tensor:
    """-sum_w p(w) log p(w) in nats, ``[..., 1]``, of log-probabilities ``[..., V]``. A token of p = 0 adds nothing."""
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1, keepdim=True)


def span_log_prob(token_log_probs: Sequence[float], rule: SpanLogProb = "sum") -> float:
    """log p_S of a span that is compared with no other; see :func:`span_log_probs`.

    Without rivals, ``"common_length"``, ``"end_mean"`` and ``"greedy_end"`` are the sum.

    Raises:
        ValueError: the span has no token.
    """
    return span_log_probs([token_log_probs], rule)[0]


def span_log_probs(
    candidates: Sequence[Sequence[float]], rule: SpanLogProb = "sum", ended: Sequence[bool] = ()
) -> list[float]:
    """log p_S of candidates that are compared with each other, by a rule for unequal lengths.

    With n tokens of log-probabilities log p_i = log p(y_i | x, y_<i):

    - ``"sum"``: sum_i log p_i, as in the paper. A short candidate has few terms, so one that ends at once can win.
    - ``"mean"``: sum_i log p_i / n.
    - ``"common_length"``: the sum over the first k tokens, where k is the length of the shortest candidate.
    - ``"end_mean"``: the sum; for a candidate that ends the answer, N times its mean, where N is the length of the
      longest candidate that does not (of all, if all end). It therefore beats rivals of N tokens only by its mean.
    - ``"greedy_end"``: the sum. Of the candidates that end the answer only the first may be kept; see
      :func:`may_be_kept`.
    - ``"gnmt"``: sum_i log p_i / ((5 + n) / 6)^a with a = 0.6 (Wu et al., 2016, equation 14).
    - ``"sqrt"``: sum_i log p_i / n^0.5, between the sum (exponent 0) and the mean (exponent 1).

    All rules rank candidates of equal length alike under CoCoA-SIG.

    Args:
        candidates: for each candidate, log p of each of its tokens, in nats.
        ended: whether each candidate ends the answer, by an end token or a stop text. Empty: none does.

    Raises:
        ValueError: a candidate has no token, or ``ended`` is of another length.
    """
    if not all(candidates):
        raise ValueError("a span has at least one token")
    ends = list(ended) or [False] * len(candidates)
    if len(ends) != len(candidates):
        raise ValueError(f"ended is given for {len(ends)} of {len(candidates)} candidates")
    lengths = [len(candidate) for candidate in candidates]
    if rule == "common_length":
        return [float(sum(candidate[: min(lengths)])) for candidate in candidates]
    totals = [float(sum(candidate)) for candidate in candidates]
    if rule == "end_mean":
        longest = max((n for n, end in zip(lengths, ends, strict=True) if not end), default=max(lengths))
        scales = [longest / n if end else 1.0 for n, end in zip(lengths, ends, strict=True)]
        return [total * scale for total, scale in zip(totals, scales, strict=True)]
    return [total / length_penalty(n, rule) for total, n in zip(totals, lengths, strict=True)]


def may_be_kept(rule: SpanLogProb, ended: Sequence[bool]) -> list[bool]:
    """Which candidates of a risk point may be kept.

    If a candidate ends the answer, its log p covers the complete rest of the answer. The log p of any other candidate
    covers only the beginning of a longer text, so the two are not comparable. Under ``"greedy_end"``, a candidate that
    ends the answer may therefore be kept only if it is the first, which greedy decoding takes. All other rules allow
    all candidates. ``ended`` says whether each candidate ends the answer, the one that greedy decoding takes first.
    """
    return [rule != "greedy_end" or number == 0 or not end for number, end in enumerate(ended)]


def length_penalty(length: Number, rule: SpanLogProb) -> Number:
    """The divisor of the sum of log p over the tokens of a span without rivals.

    With n tokens, 1 for rules that are then the sum, n for ``"mean"``, n^0.5 for ``"sqrt"``. For ``"gnmt"``,
    ((5 + n) / 6)^0.6: Wu et al. (2016), "Google's Neural Machine Translation System", equation 14.
    """
    powers: dict[SpanLogProb, tuple[Number, float]] = {
        "mean": (length, 1.0),
        "sqrt": (length, 0.5),
        "gnmt": ((5 + length) / 6, 0.6),
    }
    base, power = powers.get(rule, (length, 0.0))
    return base**power


def rule_without_rivals(rule: SpanLogProb) -> SpanLogProb:
    """The rule that gives the same log p_S for a span without rivals: ``"sum"`` for rules that compare candidates."""
    return rule if rule in ("mean", "sqrt", "gnmt") else "sum"


def cocoa(log_prob: Number, mlds: Number, alpha: float) -> Number:
    """CoCoA score: log p_S - alpha * MLDS(S)."""
    return log_prob - alpha * mlds


def cocoa_sig(log_prob: Number, mlds: Number, alpha: float) -> Number:
    """CoCoA-SIG score: log p_S * (1 + alpha * MLDS(S)).

    The penalty alpha * MLDS(S) is gated by the span's self-information -log p_S: the score of a span that the model is
    certain of changes little, even if its layers disagree.
    """
    return log_prob * (1 + alpha * mlds)


def diver(score: float, pmi: float, weight: float) -> float:
    """Diver's score: log p_S + w * PMI(S; x). For spans without PMI, which is then 0, it is ``score``."""
    return score + weight * pmi


def dola_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1/2 KL(M || p) + 1/2 KL(M || q) with M = (p + q) / 2: Jensen-Shannon, with the arguments as in DoLa's code."""
    middle = (log_p.exp() + log_q.exp()) / 2
    log_middle = middle.log()
    # 0 * log 0 is 0, also where both probabilities are 0
    return (middle * (2 * log_middle - log_p - log_q)).nan_to_num(0.0).sum(-1) / 2


def dola_contrast(logits: Tensor, early: Tensor) -> Tensor:
    """DoLa's contrast of each token: log p_N(w) - log p_l(w), with l the layer whose p_l is farthest from p_N.

    From the model's logits, ``[W, V]``, and those of K layers, ``[K, W, V]``; -inf where the model's logit is.
    """
    log_p, log_q = logits.log_softmax(-1), early.log_softmax(-1)
    chosen = dola_divergence(log_p, log_q).argmax(0)  # [W]
    rows = chosen[None, :, None].expand(1, *logits.shape)
    return (log_p - log_q.gather(0, rows)[0]).masked_fill(logits == -inf, -inf)


def decore_contrast(logits: Tensor, masked: Tensor) -> Tensor:
    """DeCoRe's contrast of each token: log softmax((1 + a) log p - a log p_masked), with a the entropy of p.

    From the logits of the model, ``[W, V]``, and of the model with masked heads; -inf where the model's logit is.
    """
    log_p, log_masked = logits.log_softmax(-1), masked.log_softmax(-1)
    a = entropy(log_p)  # [W, 1]
    contrast = (1 + a) * log_p - a * log_masked
    return contrast.masked_fill(logits == -inf, -inf).log_softmax(-1)
