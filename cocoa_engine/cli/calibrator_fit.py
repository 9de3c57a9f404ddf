"""``cocoa calibrate --out``: fits a calibrator on labelled answers, and writes it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from cocoa_engine.cli.labelled_features import ANSWER, LabelledAnswers
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.terminal import on_interrupt, print_json, print_note
from cocoa_engine.cli.validation_report import ValidationReport, risk_table
from cocoa_engine.config import CocoaConfig
from cocoa_engine.risk.features import Level

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine
    from cocoa_engine.lab.cache import CacheFolder
    from cocoa_engine.lab.fit import FitSettings


def fit_and_save(
    engine: CocoaEngine,
    config: CocoaConfig,
    answers: LabelledAnswers,
    level: Level | None,
    out: Path,
    report: ValidationReport,
    *,
    settings: FitSettings,
    progress: Progress,
) -> None:
    """Fit a calibrator, write it, and show how well it does on prompts left out of the fit.

    Args:
        engine: the engine with the model.
        config: the settings that it is fitted for.
        answers: the labelled answers.
        level: the only risk to fit.
        out: its file.
        report: shows the validation.
        settings: how it is fitted.
        progress: that of the command.

    Raises:
        CalibrationError: too little is labelled.
        Exit: a risk is poor, and ``report.strict``.
    """
    from cocoa_engine.lab.fit import fit_levels
    from cocoa_engine.lab.fit_calibrator import calibrator_of, notes, verdict
    from cocoa_engine.lab.heads import PROMPTS

    engine = engine.without_calibrator()
    shares = answers.shares()
    reference = {"measuring source attention": ANSWER * PROMPTS} if answers.self_made else {}
    progress.plan({**shares, "fitting": 0.1 * sum(shares.values()), **reference})
    found, about = answers.measured(engine, config, level, states=settings.probe, progress=progress)
    with progress.stage("fitting"):
        fitted = fit_levels(found, about, settings)
        calibrator = calibrator_of(engine, config, fitted, probe=settings.probe)
    calibrator.save(out)
    kept = _reference_kept(engine, out, answers.cache, progress) if answers.self_made else None
    drawn = report.draw({one: risk.validation for one, risk in fitted.risks.items()})
    verdicts = {one: verdict(risk.validation, one) for one, risk in fitted.risks.items()}
    if report.json:
        print_json(calibrator.model_dump_json())
    else:
        parts: list[Group | Text] = [risk_table(risk, one) for one, risk in fitted.risks.items()]
        parts += map(Text, notes(calibrator, fitted))
        report.show(parts, [out, *drawn])
    if kept is not None:
        print_note(f"the model's own source attention was measured as well and written to {kept}")
    for one in verdicts.values():
        if one.finding != "holds":
            print_note(f"warning: {out} was written, but do not rely on it. {one.sentence}")
    report.exit_if_poor(verdicts)


def _reference_kept(engine: CocoaEngine, out: Path, cache: CacheFolder | None, progress: Progress) -> Path | None:
    """The file of the reference distribution of the model's source attention, if it was made."""
    from cocoa_engine.lab.heads import keep_reference

    again = "" if cache is None else " to the end; give the same command with --overwrite to continue"
    note = on_interrupt(f"{out} was written; the model's own source attention was not measured{again}")
    with note, progress.stage("measuring source attention", "prompts") as stage:
        try:
            return keep_reference(engine, on_progress=stage.at, cache=cache)
        except (OSError, RuntimeError) as error:
            print_note(f"the reference of the source attention cannot be kept in the cache directory: {error}")
            return None
