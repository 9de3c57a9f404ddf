"""cocoa calibrate: fit a calibrator of risks, or check one on other data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cocoa_engine.cli.info import load_engine
from cocoa_engine.cli.labelled import ANSWER, Cache, Chat, Draws, Format, LabelledAnswers, Prompts, Seed
from cocoa_engine.cli.options import Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.output import Overwrite, check_drawable, on_interrupt, output, print_json, print_note, reserved
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.unfinished import measured_answers
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CalibrationError, ConfigError
from cocoa_engine.lab.data import Question
from cocoa_engine.optional import need
from cocoa_engine.output_files import draft_of, is_stream
from cocoa_engine.risk.calibrator import CalibrationWarning, RiskCalibrator, Settings
from cocoa_engine.risk.features import Level
from cocoa_engine.risk.fitted import Estimate, FittedRisk, Rule, Threshold, Validation

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine
    from cocoa_engine.lab.cache import CacheFolder
    from cocoa_engine.lab.fit import FitSettings, LabelledFeatures
    from cocoa_engine.lab.fit_calibrator import Verdict


@dataclass(frozen=True)
class ValidationReport:
    """How ``cocoa calibrate`` shows how good a calibrator is.

    Attributes:
        plot: the file that those of the reliability curves are named after; `None`: none is written.
        json: print JSON instead of tables.
        no_color: without colour.
        strict: end with status 1 if a risk is poor.
    """

    plot: Path | None
    json: bool
    no_color: bool
    strict: bool

    def plot_of(self, level: Level) -> list[Path]:
        """The file of a level's reliability curve, if one is written."""
        return [] if self.plot is None else [self.plot.with_stem(f"{self.plot.stem}-{level}")]

    def draw(self, found: Mapping[Level, Validation]) -> list[Path]:
        """Write the reliability curve of each level, and return the files."""
        from cocoa_engine.rendering.plot import reliability_curve

        files = []
        for level, validation in found.items():
            for file in self.plot_of(level):
                with draft_of(file) as draft:
                    reliability_curve(validation, level).savefig(draft, format=file.suffix[1:])
                files.append(file)
        return files

    def show(self, tables: Sequence[Group | Text], written: Sequence[Path], after: Sequence[Text] = ()) -> None:
        """Print tables, the names of written files, and some lines after them."""
        files = [Text(f"Written to {', '.join(map(str, written))}.")] if written else []
        output(self.no_color).print(Group(*tables, *files, *after))

    def exit_if_poor(self, found: Mapping[Level, Verdict]) -> None:
        """End the command with status 1 if a risk is poor, and :attr:`strict`.

        Raises:
            Exit: that is so.
        """
        if self.strict and any(one.finding != "holds" for one in found.values()):
            raise typer.Exit(1)


def validation_table(found: Validation, unit: str) -> Group:
    """How well a risk ranks and is calibrated, compared with the unfitted baselines."""
    from cocoa_engine.lab.ranking import caution

    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", title_style="")
    folds = f"; {found.division}" if found.division else ""
    table.title = f"{found.items} {unit}s of {found.prompts} prompts, {found.hallucinated} hallucinated{folds}"
    for name in ("", "AUROC", "risk minus that"):
        table.add_column(name, overflow="fold")
    table.add_row("calibrated risk", _interval(found.auroc), "")
    for name, baseline in found.rivals.items():
        table.add_row(name, _interval(baseline.auroc), _interval(baseline.difference, "+.3f"))
    line = (
        f"AUPRC {_interval(found.auprc)}; Brier {found.brier:.4f} (base rate {found.brier_of_base_rate:.4f}); "
        f"ECE {found.ece:.4f}"
    )
    return Group(table, Text(line), *([] if (warning := caution(found.prompts)) is None else [Text(warning)]))


def risk_table(fitted: FittedRisk, unit: str) -> Group:
    """The validation of a fitted risk, and its threshold."""
    validation = validation_table(fitted.validation, unit)
    if fitted.threshold is None:
        return validation
    one = fitted.threshold
    precision = f"no {unit} is flagged" if one.precision is None else f"precision {one.precision:.3f}"
    line = (
        f"threshold {one.value:.4f} ({one.rule}, target {one.target:g}): {precision}, recall {one.recall:.3f} on "
        f"{one.prompts} prompts"
    )
    return Group(validation, Text(line), *([Text(_guarantee(one, unit))] if one.rule == "conformal" else []))


def _guarantee(threshold: Threshold, unit: str) -> str:
    """The guarantee of conformal risk control, in words."""
    promise = (
        f"Guarantee: for a new prompt exchangeable with these {threshold.prompts}, the expected share of hallucinated "
        f"{unit}s below the threshold is at most {threshold.target:g}. It holds on average over prompts, not for each "
        "prompt, and for texts measured in the same way."
    )
    if threshold.target * (threshold.prompts + 1) >= 1:
        return promise
    return f"{promise} {threshold.prompts} prompts are too few for a threshold above 0, which flags everything."


def _interval(value: Estimate, form: str = ".3f") -> str:
    from cocoa_engine.lab.ranking import Interval

    return Interval(value.estimate, value.low, value.high).shown(form)


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
    from cocoa_engine.lab.fit_calibrator import fit_risks, verdict
    from cocoa_engine.lab.heads import PROMPTS

    engine = engine.without_calibrator()
    shares = answers.shares()
    reference = {"measuring source attention": ANSWER * PROMPTS} if answers.self_made else {}
    progress.plan({**shares, "fitting": 0.1 * sum(shares.values()), **reference})
    found, about = answers.measured(engine, config, level, states=settings.probe, progress=progress)
    with progress.stage("fitting"):
        calibrator, notes = fit_risks(engine, config, found, about, settings)
    risks = {one: risk for one in found if (risk := getattr(calibrator, one)) is not None}
    calibrator.save(out)
    kept = _reference_kept(engine, out, answers.cache, progress) if answers.self_made else None
    drawn = report.draw({one: risk.validation for one, risk in risks.items()})
    verdicts = {one: verdict(risk.validation, one) for one, risk in risks.items()}
    if report.json:
        print_json(calibrator.model_dump_json())
    else:
        parts: list[Group | Text] = [risk_table(risk, one) for one, risk in risks.items()]
        parts += map(Text, notes)
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
    from cocoa_engine.lab.fit import risks_of, validate
    from cocoa_engine.lab.fit_calibrator import verdict
    from cocoa_engine.lab.measured import LEVELS

    if differences := known.mismatches(engine.model_name, config, engine.num_layers):
        warnings.warn(CalibrationWarning.of(differences), stacklevel=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # it was given above
        engine = engine.without_calibrator().with_calibrator(known)
    shares = answers.shares()
    progress.plan({**shares, "computing": 0.1 * sum(shares.values())})
    found, _ = answers.measured(engine, config, level, states=known.probe is not None, progress=progress)
    alike = {one: _all_are(items) for one, items in found.items() if items.labels.all() or not items.labels.any()}
    found = {one: items for one, items in found.items() if one not in alike}
    with progress.stage("computing"):
        checked = {
            one: validate(found[one], risks_of(risk, found[one], known.probe), draws=draws, seed=answers.seed)
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


@with_options("method", *FITTED_SETTINGS, "max_new_tokens")
def calibrate(
    context: typer.Context,
    config: CocoaConfig,
    loading: LoadOptions,
    data: Annotated[Path | None, typer.Option(help="Labelled answers: a file or a folder.")] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Questions with known answers. The model answers them, and the risk of an answer as a whole is fitted "
            "on its answers.",
        ),
    ] = None,
    self_made: Annotated[
        bool,
        typer.Option(
            "--self",
            help="No labelled data: the model answers questions about invented passages, and about --documents. "
            "--prompts sets their number (default: 300).",
        ),
    ] = False,
    documents: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR", help="With --self: a text, or a folder of .txt and .md files, to ask about as well."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The calibrator's JSON file.", dir_okay=False)] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Evaluate this calibrator instead of fitting one. 'embedded': the package's calibrator.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the reliability curves: FILE risk.svg becomes risk-span.svg and risk-answer.svg. "
            "Default: beside --out.",
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    level: Annotated[
        Literal["span", "answer"] | None, typer.Option(help="Fit only this risk. Default: all that are labelled.")
    ] = None,
    format: Format = None,
    prompts: Prompts = None,
    chat: Chat = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Also fit a probe, a direction of the model's hidden states. It improves the risk of spans of answers "
            "like these, and makes it worse on others.",
        ),
    ] = False,
    isotonic: Annotated[bool, typer.Option("--isotonic", help="Add an isotonic map after the logistic model.")] = False,
    precision: Annotated[
        float | None, typer.Option(min=0, max=1, help="Choose the lowest threshold with at least this precision.")
    ] = None,
    recall: Annotated[
        float | None, typer.Option(min=0, max=1, help="Choose the highest threshold with at least this recall.")
    ] = None,
    specificity: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Choose the lowest threshold that leaves at least this share of what is right unflagged."
        ),
    ] = None,
    miss: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Choose a threshold that misses at most this share, by conformal risk control."
        ),
    ] = None,
    folds: Annotated[
        int,
        typer.Option(
            min=2, max=1000, help="Cross-validation folds, grouped by prompt. With few items, it is repeated."
        ),
    ] = 5,
    draws: Draws = 1000,
    seed: Seed = 0,
    cache: Cache = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with status 1 if a risk is no better than the base rate or chance.")
    ] = False,
    overwrite: Overwrite = False,
    model: Model = None,
    json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Fit a calibrator: the risk in [0, 1] of spans and of whole answers, depending on the labels of the data.

    Features are layer disagreement, log-probabilities, entropies, margins, candidates, tokens copied from the prompt
    and attention on it, and with --probe a direction of the hidden states. The risk is validated on prompts left out
    of the fit, and compared with unfitted baselines.
    """
    threshold = _threshold(precision, recall, specificity, miss)
    if (out is None) == (check is None):
        raise ConfigError("give either --out FILE to fit a calibrator, or --check FILE to evaluate one")
    if check is not None and (threshold or probe):
        raise ConfigError("--check evaluates a calibrator as it is: a threshold cannot be chosen, nor a probe fitted")
    if data is None and questions is None and not self_made:
        raise ConfigError(
            "give --data PATH with labelled answers, --questions FILE for the model to answer, both, or --self"
        )
    if self_made and (data is not None or questions is not None):
        raise ConfigError("--self makes its own questions: leave out --data and --questions")
    if documents is not None and not self_made:
        raise ConfigError("--documents is for --self, which asks questions about them")
    if probe and data is None:
        raise ConfigError("--probe needs --data PATH with answers whose hallucinated parts are labelled")
    known = None if check is None else RiskCalibrator.load(check)
    if known is not None:
        config = as_fitted(config, known.settings, check)
    need("sklearn", extra="risk", what="cocoa calibrate")
    from cocoa_engine.lab.fit import FitSettings  # torch: not for every `cocoa --help`

    if plot is None and out is not None and not is_stream(out):
        plot = out.with_suffix(".svg")
    if plot is not None:
        check_drawable("plot", plot)
    answers = LabelledAnswers.read(
        data=data,
        format=format,
        questions=questions,
        self_made=self_made,
        documents=documents,
        prompts=prompts,
        chat=chat,
        seed=seed,
    )
    report = ValidationReport(plot, json, no_color, strict)
    levels: list[Level] = ["span", "answer"] if level is None else [level]
    files = [] if out is None else [out]
    files += [file for one in levels for file in report.plot_of(one)]
    with reserved(*files, overwrite=overwrite), measured_answers(context, cache) as kept:
        answers = replace(answers, cache=kept)
        progress = Progress("calibrate")
        engine = load_engine(model, loading, progress=progress)
        if known is not None:
            check_calibrator(engine, config, known, str(check), answers, level, report, draws=draws, progress=progress)
        elif out is not None:
            fit_and_save(
                engine,
                config,
                answers,
                level,
                out,
                report,
                settings=FitSettings(
                    probe=probe, isotonic=isotonic, threshold=threshold, folds=folds, draws=draws, seed=seed
                ),
                progress=progress,
            )


def _threshold(
    precision: float | None, recall: float | None, specificity: float | None, miss: float | None
) -> tuple[Rule, float] | None:
    from cocoa_engine.lab.thresholds import require  # numpy: not for every `cocoa --help`

    given: list[tuple[Rule, float]] = []
    if precision is not None:
        given.append(("precision", precision))
    if recall is not None:
        given.append(("recall", recall))
    if specificity is not None:
        given.append(("specificity", specificity))
    if miss is not None:
        given.append(("conformal", miss))
    if len(given) > 1:
        raise ConfigError("--precision, --recall, --specificity and --miss each choose the threshold: give one of them")
    for rule, target in given:
        require(rule, target)
    return given[0] if given else None
