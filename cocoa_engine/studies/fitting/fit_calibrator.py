"""Fitting a whole calibrator for an engine's model: measure labelled answers, then fit each level."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cocoa_engine.calibration.calibrator import CalibrationWarning, Level, RiskCalibrator, Rule, Settings
from cocoa_engine.config import CocoaConfig
from cocoa_engine.datasets import LabelledText, Question
from cocoa_engine.studies.fitting.fit import fit_levels
from cocoa_engine.studies.fitting.measured import labelled_features, own_answers
from cocoa_engine.studies.fitting.thresholds import require
from cocoa_engine.studies.signal.segments import force

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine


def fit_calibrator(
    engine: CocoaEngine,
    answers: Sequence[LabelledText],
    questions: Sequence[Question],
    *,
    config: CocoaConfig | None,
    chat: bool,
    isotonic: bool,
    threshold: tuple[Rule, float] | None,
    folds: int,
    draws: int,
    seed: int,
) -> RiskCalibrator:
    """Fit a calibrator; :meth:`RiskCalibrator.fit <cocoa_engine.RiskCalibrator.fit>` describes the arguments."""
    if threshold is not None:
        require(*threshold)
    config = engine.config if config is None else config
    forced = force(engine, answers, config, chat=chat, grow=True)
    found = labelled_features(forced, config, engine.num_layers)
    about: dict[Level, str] = dict.fromkeys(found, f"{len(answers)} given answers")
    if questions:
        found["answer"] = own_answers(engine, questions, config)
        about["answer"] = f"the model's own answers to {len(questions)} questions"
    fitted, missing = fit_levels(
        found, about, isotonic=isotonic, folds=folds, draws=draws, seed=seed, threshold=threshold
    )
    for reason in missing:
        warnings.warn(CalibrationWarning(reason), stacklevel=3)  # at the caller of RiskCalibrator.fit
    return RiskCalibrator(model_name=engine.model_name, settings=Settings.of(config, engine.num_layers), **fitted)
