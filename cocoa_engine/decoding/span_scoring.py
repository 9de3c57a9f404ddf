"""The log-probability, MLDS, score and risk of a span under given settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from cocoa_engine import equations
from cocoa_engine.calibration import RiskCalibrator
from cocoa_engine.calibration.features import SpanStatistics
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
    """log p_S of a span, and its score under the configured method and metric.

    Args:
        config: the settings: method, metric, alpha, ``span_log_prob`` and ``diver_weight``.
        token_log_probs: log p of each token.
        con_mlds, f_mlds: the span's MLDS.
        contrasts: the contrast of each token, for a contrasting method; the score is their sum or mean.
        pmi: PMI(S; x), for a method that reads the prompt back; ``diver_weight`` times PMI is added to the score.
    """
    log_prob = equations.span_log_prob(token_log_probs, config.span_log_prob)
    if contrasts:
        return log_prob, equations.span_log_prob(contrasts, config.span_log_prob)
    score = METHODS[config.method].score(log_prob, ranking_mlds(config, con_mlds, f_mlds), config.alpha)
    return log_prob, score + config.diver_weight * pmi


def ranking_mlds(config: CocoaConfig, con_mlds: float, f_mlds: float) -> float:
    """The MLDS by the configured metric. It ranks the candidates, and is the risk without a calibrator."""
    return f_mlds if config.metric == "f_mlds" else con_mlds


def calibrates_spans(calibrator: RiskCalibrator | None) -> TypeGuard[RiskCalibrator]:
    """Whether there is a calibrator that was fitted on spans."""
    return calibrator is not None and calibrator.span is not None


def reported_risk(config: CocoaConfig, calibrator: RiskCalibrator | None, span: SpanStatistics) -> float:
    """The risk of a span: a probability in [0, 1] if the calibrator was fitted on spans, otherwise its raw MLDS."""
    if calibrates_spans(calibrator):
        return calibrator.risk(span)
    return ranking_mlds(config, span.con_mlds, span.f_mlds)


def reaches_max_risk(config: CocoaConfig, risk: float) -> bool:
    """Whether a risk is at least ``CocoaConfig.max_risk``, or no number (NaN). Always `False` if no limit is set."""
    return config.max_risk is not None and not risk < config.max_risk
