"""``cocoa calibrate --check``: evaluates a calibrator on labelled answers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from json import dumps
from typing import TYPE_CHECKING

from rich.text import Text

from cocoa_engine.cli.labelled_features import LabelledAnswers
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.terminal import print_json, print_note
from cocoa_engine.cli.validation_report import ValidationReport, validation_table
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CalibrationError, ConfigError
from cocoa_engine.lab.data import Question
from cocoa_engine.risk.calibrator import CalibrationWarning, RiskCalibrator, Settings
from cocoa_engine.risk.features import Level
from cocoa_engine.risk.fitted import FittedRisk

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine
    from cocoa_engine.lab.fit import LabelledFeatures

FITTED_SETTINGS = [name for name in Settings.model_fields if name != "branches"]
"""The settings that a calibrator was fitted with; whether there are branches follows from the method."""


def as_fitted(config: CocoaConfig, fitted: Settings, check: object) -> CocoaConfig:
    """The settings that a calibrator was fitted with.

    Args:
        config: the settings of the command line, which must agree with them.
        fitted: those of the calibrator.
        check: the name of its file.

    Raises:
        ConfigError: a setting is given with another value.
    """
    wanted = {name: getattr(fitted, name) for name in FITTED_SETTINGS}
    for name in wanted:
        if name in config.model_fields_set and getattr(config, name) != wanted[name]:
            value = ",".join(map(str, wanted[name])) if isinstance(wanted[name], tuple) else wanted[name]
            raise ConfigError(
                f"the calibrator {check} was fitted with --{name.replace('_', '-')} {value}: it cannot be evaluated "
                "with another value. Leave the option out."
            )
    from cocoa_engine.methods import METHODS

    if METHODS[config.method].branches != fitted.branches:
        if "method" in config.model_fields_set:
            raise ConfigError(
                f"the calibrator {check} was fitted on answers {'with' if fitted.branches else 'without'} candidates: "
                f"it cannot be evaluated with --method {config.method}. Leave the option out."
            )
        config = config.replace(method="greedy")
    return config.replace(**wanted)


def check_calibrator(
    engine: CocoaEngine,
    config: CocoaConfig,
    known: RiskCalibrator,
    name: str,
    answers: LabelledAnswers,
    level: Level | None,
    report: ValidationReport,
    *,
    draws: int,
    progress: Progress,
) -> None:
    """Evaluate a calibrator, and show how well it does.

    Args:
        engine: the engine with the model.
        config: the settings that it was fitted with.
        known: the calibrator.
        name: the name of its file.
        answers: the labelled answers.
        level: the only risk to evaluate.
        report: shows the result.
        draws: number of bootstrap draws.
        progress: that of the command.

    Raises:
        CalibrationError: it has no risk of a level that is labelled with both classes.
        Exit: a risk is poor, and ``report.strict``.
    """
    from cocoa_engine.lab.fit import direction_of, risks_of, validate
    from cocoa_engine.lab.fit_calibrator import verdict
    from cocoa_engine.lab.measured import LEVELS

    if differences := known.mismatches(engine.model_name, config, engine.num_layers):
        warnings.warn(CalibrationWarning.of(differences), stacklevel=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # it was given above
        engine = engine.without_calibrator().with_calibrator(known)
    direction = None if known.probe is None else direction_of(known.probe)
    shares = answers.shares()
    progress.plan({**shares, "computing": 0.1 * sum(shares.values())})
    found, _ = answers.measured(engine, config, level, states=direction is not None, progress=progress)
    alike = {one: _all_are(items) for one, items in found.items() if items.labels.all() or not items.labels.any()}
    found = {one: items for one, items in found.items() if one not in alike}
    with progress.stage("computing"):
        checked = {
            one: validate(found[one], risks_of(risk, found[one], direction), draws=draws, seed=answers.seed)
            for one in LEVELS
            if one in found and (risk := _risk_of(known, one, answers.asked)) is not None
        }
    if not checked:
        said = "; ".join(f"{one}s: {why}" for one, why in alike.items())
        raise CalibrationError(f"{name} has no risk of a level that can be ranked here{said and f' ({said})'}.")
    for one, why in alike.items():
        print_note(f"{one}s are left out: {why}")
    verdicts = {one: verdict(validation, one) for one, validation in checked.items()}
    drawn = report.draw(checked)
    if report.json:
        record = {
            one: {**validation.model_dump(), "verdict": verdicts[one].finding} for one, validation in checked.items()
        }
        print_json(dumps(record))
    else:
        tables = [validation_table(validation, one) for one, validation in checked.items()]
        report.show(tables, drawn, [Text(one.sentence) for one in verdicts.values()])
    report.exit_if_poor(verdicts)


def _all_are(items: LabelledFeatures) -> str:
    return f"all are {'hallucinated' if items.labels.any() else 'supported'}"


def _risk_of(known: RiskCalibrator, level: Level, asked: Sequence[Question]) -> FittedRisk | None:
    """The fitted risk to evaluate: for questions that all lack a passage, that of short prompts."""
    if level == "answer" and known.closed_book is not None and asked and all(one.context is None for one in asked):
        return known.closed_book
    return known.span if level == "span" else known.answer
