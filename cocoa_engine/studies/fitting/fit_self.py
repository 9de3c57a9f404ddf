"""Fitting a calibrator on a labelled set that the model makes itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cocoa_engine.calibration.calibrator import CalibrationWarning, RiskCalibrator
from cocoa_engine.calibration.features import Level
from cocoa_engine.calibration.fitted_risk import Rule
from cocoa_engine.config import CocoaConfig
from cocoa_engine.studies.fitting.fit import fit_levels
from cocoa_engine.studies.fitting.fit_calibrator import calibrator_of, notes
from cocoa_engine.studies.fitting.self_made import made_questions, self_made_features
from cocoa_engine.studies.fitting.thresholds import require

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine


def fit_self_made(
    engine: CocoaEngine,
    documents: Sequence[str],
    *,
    count: int,
    config: CocoaConfig | None,
    chat: bool,
    isotonic: bool,
    threshold: tuple[Rule, float] | None,
    folds: int,
    draws: int,
    seed: int,
) -> RiskCalibrator:
    """Fit a calibrator; :meth:`RiskCalibrator.fit_self <cocoa_engine.RiskCalibrator.fit_self>` has the arguments."""
    if threshold is not None:
        require(*threshold)
    config = engine.config if config is None else config
    engine = engine.without_calibrator()
    found = self_made_features(engine, made_questions(documents, count, seed), config, chat=chat, seed=seed)
    fitted = fit_levels(
        found,
        about(found, count, len(documents)),
        isotonic=isotonic,
        folds=folds,
        draws=draws,
        seed=seed,
        threshold=threshold,
    )
    calibrator = calibrator_of(engine, config, fitted, probe=False)
    for reason in notes(calibrator, fitted):
        warnings.warn(CalibrationWarning(reason), stacklevel=3)  # at the caller of RiskCalibrator.fit_self
    return calibrator


def about(levels: Iterable[Level], count: int, documents: int) -> dict[Level, str]:
    """What a calibrator says about the data of each level."""
    of_what = f"invented passages and {documents} documents" if documents else "invented passages"
    data: dict[Level, str] = {
        "span": f"made by the model itself: {count // 2} retellings of invented passages with planted errors",
        "answer": f"made by the model itself: its answers to {count} questions about {of_what}",
    }
    return {level: data[level] for level in levels}
