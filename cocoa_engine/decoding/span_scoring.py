"""What a span is reported with: its log-probability, MLDS, score and risk under the given settings."""

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
    """ConMLDS and fMLDS of B spans, copied to the host at once.

    Args:
        pooled: ``[N + 1, B, d]`` float32: mean states of layers m..n, then of the final one.
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
        contrasts: of a contrasting method, one for each token.
        pmi: PMI(S; x), for a method that reads the prompt back.
    """
    log_prob = equations.span_log_prob(token_log_probs, config.span_log_prob)
    if contrasts:
        return log_prob, equations.span_log_prob(contrasts, config.span_log_prob)
    score = METHODS[config.method].score(log_prob, ranking_mlds(config, con_mlds, f_mlds), config.alpha)
    return log_prob, score + config.diver_weight * pmi


def ranking_mlds(config: CocoaConfig, con_mlds: float, f_mlds: float) -> float:
    """The metric that ranks, which is also the raw risk."""
    return f_mlds if config.metric == "f_mlds" else con_mlds


def calibrates_spans(calibrator: RiskCalibrator | None) -> TypeGuard[RiskCalibrator]:
    """Whether there is a calibrator, and it was fitted on spans."""
    return calibrator is not None and calibrator.span is not None


def reported_risk(config: CocoaConfig, calibrator: RiskCalibrator | None, span: SpanStatistics) -> float:
    """The risk that a span is reported with: calibrated, in [0, 1], or else the raw MLDS that ranks."""
    if calibrates_spans(calibrator):
        return calibrator.risk(span)
    return ranking_mlds(config, span.con_mlds, span.f_mlds)


def reaches_max_risk(config: CocoaConfig, risk: float) -> bool:
    """Whether a reported risk reaches the configured limit."""
    return config.max_risk is not None and risk >= config.max_risk
