"""Fitting a whole calibrator for an engine's model: measure labelled answers, then fit each level."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cocoa_engine.calibration.calibrator import CalibrationWarning, RiskCalibrator
from cocoa_engine.calibration.features import SOURCE_FEATURES, Level
from cocoa_engine.calibration.fitted_risk import Rule
from cocoa_engine.calibration.probe import Probe
from cocoa_engine.calibration.settings import Settings
from cocoa_engine.config import CocoaConfig
from cocoa_engine.datasets import LabelledText, Question
from cocoa_engine.errors import CalibrationError
from cocoa_engine.methods.retrieval_heads import source_heads
from cocoa_engine.model.language_model import dtype_name
from cocoa_engine.studies.fitting.fit import FittedLevels, fit_levels
from cocoa_engine.studies.fitting.measured import labelled_features, own_answers, probe_layer
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
    probe: bool,
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
    engine = engine.without_calibrator()
    forced = force(engine, answers, config, chat=chat)
    found = labelled_features(forced, config, engine.num_layers, states=probe)
    about: dict[Level, str] = dict.fromkeys(found, f"{len(answers)} given answers")
    if questions:
        found["answer"] = own_answers(engine, questions, config)
        about["answer"] = f"the model's own answers to {len(questions)} questions"
    fitted = fit_levels(found, about, isotonic=isotonic, folds=folds, draws=draws, seed=seed, threshold=threshold)
    calibrator = calibrator_of(engine, config, fitted, probe=probe)
    for reason in notes(calibrator, fitted):
        warnings.warn(CalibrationWarning(reason), stacklevel=3)  # at the caller of RiskCalibrator.fit
    return calibrator


def calibrator_of(engine: CocoaEngine, config: CocoaConfig, fitted: FittedLevels, *, probe: bool) -> RiskCalibrator:
    """The calibrator of fitted risks.

    Args:
        engine: the engine that measured the items.
        config: the settings of the measurement.
        fitted: the fitted risks.
        probe: whether a probe was asked for.

    Raises:
        CalibrationError: a probe was asked for, and no risk of spans could be fitted.
    """
    model = engine.session.model
    direction = fitted.direction
    if probe and direction is None:
        raise CalibrationError(
            "a probe is fitted on answers whose hallucinated parts are labelled, and there are none, or too few."
        )
    measured = any(name in risk.features for risk in fitted.risks.values() for name in SOURCE_FEATURES)
    return RiskCalibrator(
        model_name=engine.model_name,
        settings=Settings.of(config, engine.num_layers),
        heads=source_heads(config.decore_heads, model) if measured else None,
        probe=None
        if direction is None
        else Probe(
            layer=probe_layer(engine.num_layers),
            model_name=engine.model_name,
            dtype=dtype_name(model),
            weights=tuple(direction.weights.tolist()),
            intercept=direction.intercept,
        ),
        **fitted.risks,
    )


def notes(calibrator: RiskCalibrator, fitted: FittedLevels) -> list[str]:
    """What could not be fitted or measured, as messages."""
    if calibrator.heads is not None:
        return fitted.missing
    reason = (
        "The source attention is not a feature: the retrieval heads of the model are not known (find them with `cocoa "
        "heads`, and give the file as decore_heads), or its attention cannot be seen."
    )
    return [*fitted.missing, reason]
