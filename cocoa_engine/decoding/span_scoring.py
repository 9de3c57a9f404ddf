"""The log-probability, MLDS and score of a span under given settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cocoa_engine import equations
from cocoa_engine.config import CocoaConfig
from cocoa_engine.methods import METHODS


def mlds(pooled: Tensor) -> tuple[list[float], list[float]]:
    """ConMLDS and fMLDS of B spans. All values are copied to the host at once.

    Args:
        pooled: ``[N + 1, B, d]`` float32, the mean states of layers m..n, then of the final layer.
    """
    middle, final = pooled[:-1], pooled[-1]
    con, f = torch.stack([equations.con_mlds(middle), equations.f_mlds(middle, final)]).tolist()
    return con, f


def log_prob_and_score(
    config: CocoaConfig,
    token_log_probs: Sequence[float],
    con_mlds: float,
    f_mlds: float,
    *,
    contrasts: Sequence[float] = (),
    pmi: float = 0.0,
) -> tuple[float, float]:
    """log p_S of a span without rivals, and its score under the configured method and metric.

    Args:
        config: the settings: method, metric, alpha, ``span_log_prob`` and ``diver_weight``.
        token_log_probs: log p of each token.
        con_mlds, f_mlds: the span's MLDS.
        contrasts: the contrast of each token, for a contrasting method; the score is log p_S computed from them.
        pmi: PMI(S; x), for a method that reads the prompt back; ``diver_weight`` times PMI is added to the score.
    """
    log_prob = equations.span_log_prob(token_log_probs, config.span_log_prob)
    if contrasts:
        return log_prob, equations.span_log_prob(contrasts, config.span_log_prob)
    return log_prob, _score(config, log_prob, con_mlds, f_mlds, pmi)


def log_probs_and_scores(
    config: CocoaConfig,
    token_log_probs: Sequence[Sequence[float]],
    ended: Sequence[bool],
    con_mlds: Sequence[float],
    f_mlds: Sequence[float],
    pmi: Sequence[float] = (),
) -> list[tuple[float, float]]:
    """log p_S and the score of each candidate of a risk point; see :func:`log_prob_and_score`.

    Args:
        ended: whether each candidate ends the answer.
    """
    log_probs = equations.span_log_probs(token_log_probs, config.span_log_prob, ended)
    values = zip(log_probs, con_mlds, f_mlds, pmi or [0.0] * len(log_probs), strict=True)
    return [(log_prob, _score(config, log_prob, con, f, of_prompt)) for log_prob, con, f, of_prompt in values]


def _score(config: CocoaConfig, log_prob: float, con_mlds: float, f_mlds: float, pmi: float) -> float:
    score = METHODS[config.method].score(log_prob, ranking_mlds(config, con_mlds, f_mlds), config.alpha)
    return equations.diver(score, pmi, config.diver_weight)


def best_candidate(config: CocoaConfig, scores: Sequence[float], ended: Sequence[bool]) -> int:
    """The index of the candidate with the highest score of those that may be kept; in a tie, the first.

    Args:
        ended: whether each candidate ends the answer.
    """
    allowed = equations.may_be_kept(config.span_log_prob, ended)
    return max((index for index, may in enumerate(allowed) if may), key=lambda index: (scores[index], -index))


def ranking_mlds(config: CocoaConfig, con_mlds: float, f_mlds: float) -> float:
    """The MLDS by the configured metric. It ranks the candidates."""
    return f_mlds if config.metric == "f_mlds" else con_mlds
