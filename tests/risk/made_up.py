"""Calibrators and spans with figures of one's choice."""

from __future__ import annotations

from typing import Any

import numpy as np

from cocoa_engine import RiskCalibrator
from cocoa_engine.risk.calibrator import Settings
from cocoa_engine.risk.features import FEATURES
from cocoa_engine.risk.fitting import LabelledFeatures, fit

SETTINGS = Settings(final_layer="post_norm", middle_layers=(10, 20), gamma=0.3, max_candidates=8)
EMBEDDED = "SmolLM2-135M-Instruct"


def labelled_spans(prompts: int = 60, each: int = 6, *, seed: int = 0, signal: float = 1.0) -> LabelledFeatures:
    """Spans whose labels depend on two of their features, and not on the others."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(prompts * each, len(FEATURES)))
    z = signal * (features[:, FEATURES.index("f_mlds")] - features[:, FEATURES.index("mean_log_prob")]) - 0.5
    labels = random.random(len(z)) < 1 / (1 + np.exp(-z))
    return LabelledFeatures(features, labels, [f"prompt {number // each}" for number in range(len(z))])


def fitted(spans: LabelledFeatures | None = None, **options: Any) -> RiskCalibrator:
    """A calibrator of made-up spans, for the embedded model unless told otherwise."""
    about = {"model_name": EMBEDDED, "settings": SETTINGS, "data": "made up", "unit": "span", "draws": 40}
    return fit(labelled_spans() if spans is None else spans, **{**about, **options})
