"""Calibrators and spans with figures of one's choice."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cocoa_engine import RiskCalibrator
from cocoa_engine.lab.fit import FitSettings, LabelledFeatures, fit
from cocoa_engine.risk.calibrator import Settings
from cocoa_engine.risk.features import ANSWER_FEATURES, SOURCE_FEATURES, SPAN_FEATURES
from cocoa_engine.risk.fitted import FittedRisk
from tests.helpers.tiny_models import NUM_LAYERS

SETTINGS = Settings(final_layer="post_norm", middle_layers=(10, 20), gamma=0.3, max_candidates=8)
TINY = SETTINGS.model_copy(update={"middle_layers": (NUM_LAYERS // 3, 2 * NUM_LAYERS // 3)})
EMBEDDED = "SmolLM2-135M-Instruct"
HEADS = ((20, 3), (17, 5))


def labelled_items(
    prompts: int = 60, each: int = 6, *, level: str = "span", seed: int = 0, signal: float = 1.0, source: bool = False
) -> LabelledFeatures:
    """Spans or answers whose labels depend on two of their features, and not on the others."""
    known = SPAN_FEATURES if level == "span" else ANSWER_FEATURES
    names = [name for name in known if name != "probe" and (source or name not in SOURCE_FEATURES)]
    random = np.random.default_rng(seed)
    features = random.normal(size=(prompts * each, len(names)))
    z = signal * (features[:, names.index("f_mlds")] - features[:, names.index("mean_log_prob")]) - 0.5
    labels = random.random(len(z)) < 1 / (1 + np.exp(-z))
    return LabelledFeatures(names, features, labels, [f"prompt {number // each}" for number in range(len(z))])


def risk(items: LabelledFeatures | None = None, data: str = "made up", **settings: Any) -> FittedRisk:
    """A risk that was fitted on made-up items, by default spans."""
    return fit(labelled_items() if items is None else items, data, FitSettings(**{"draws": 40, **settings}))[0]


@cache
def _fitted_once(level: str, source: bool, **options: Any) -> FittedRisk:
    """A fit takes seconds. Two folds are enough where its quality does not matter."""
    return risk(labelled_items(level=level, source=source), **{"folds": 2, **options})


def fitted(
    *,
    model_name: str = EMBEDDED,
    settings: Settings = SETTINGS,
    levels: tuple[str, ...] = ("span",),
    source: bool = False,
    domain: bool = False,
    **options: Any,
) -> RiskCalibrator:
    """A calibrator of made-up spans, answers or both, for the embedded model unless told otherwise.

    Real spans are far from made-up ones, so it has a domain only on request.
    """
    risks = {level: _fitted_once(level, source, **options) for level in levels}
    if not domain:
        risks = {level: one.model_copy(update={"domain": None}) for level, one in risks.items()}
    risks = {level: one.model_copy(deep=True) for level, one in risks.items()}
    return RiskCalibrator(model_name=model_name, settings=settings, heads=HEADS if source else None, **risks)


def save_calibrator(path: Path, model_name: str) -> str:
    """Save a calibrator of spans for a tiny model, and return the name of the file."""
    fitted(model_name=model_name, settings=TINY, draws=2).save(path)
    return str(path)
