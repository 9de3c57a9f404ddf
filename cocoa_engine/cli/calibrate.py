"""``cocoa calibrate``: fit a risk in [0, 1] on labelled answers, and validate it on unseen prompts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cocoa_engine.calibration.calibrator import CalibrationWarning, RiskCalibrator
from cocoa_engine.calibration.features import Level
from cocoa_engine.calibration.fitted_risk import FittedRisk, Rule, Threshold
from cocoa_engine.calibration.settings import Settings
from cocoa_engine.calibration.validation import Estimate, Validation
from cocoa_engine.cli.dataset_options import (
    Chat,
    Draws,
    Format,
    Prompts,
    Seed,
    progress,
    read,
    read_documents,
    teacher_forced,
)
from cocoa_engine.cli.export import Overwrite, check_drawable, reserved
from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.terminal import output, print_json, print_note
from cocoa_engine.config import CocoaConfig
from cocoa_engine.datasets import Question, read_questions, sample
from cocoa_engine.errors import CalibrationError, ConfigError
from cocoa_engine.optional import need
from cocoa_engine.output_files import draft_of

if TYPE_CHECKING:
    from cocoa_engine.studies.fitting.verdict import Verdict

_SETTINGS = [name for name in Settings.model_fields if name != "branches"]  # follows from the method


@with_options("method", *_SETTINGS, "max_new_tokens")
def calibrate(
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
        typer.Option(min=2, help="Cross-validation folds, grouped by prompt. With few items, it is repeated."),
    ] = 5,
    draws: Draws = 1000,
    seed: Seed = 0,
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
        config = _as_fitted(config, known.settings, check)
    need("sklearn", extra="risk", what="cocoa calibrate")
    if plot is None and out is not None:
        plot = out.with_suffix(".svg")
    if plot is not None:
        check_drawable("plot", plot)
    records = [] if data is None else read(data, format, prompts, seed)
    asked = [] if questions is None else sample(read_questions(questions), prompts, seed)
    texts = [] if documents is None else read_documents(documents)
    levels: list[Level] = ["span", "answer"] if level is None else [level]
    files = [] if out is None else [out]
    files += [] if plot is None else [_plot_of(plot, one) for one in levels]
    with reserved(*files, overwrite=overwrite):
        engine = load_engine(model, loading)
        from cocoa_engine.studies.fitting.direction import direction_of
        from cocoa_engine.studies.fitting.fit import LabelledFeatures, fit_levels, risks_of, validate
        from cocoa_engine.studies.fitting.fit_calibrator import calibrator_of, notes
        from cocoa_engine.studies.fitting.fit_self import about as about_self_made
        from cocoa_engine.studies.fitting.measured import LEVELS, labelled_features, own_answers
        from cocoa_engine.studies.fitting.self_made import QUESTIONS, made_questions, self_made_features
        from cocoa_engine.studies.fitting.verdict import verdict
        from cocoa_engine.studies.signal.indicators import Layers

        if known is not None and (differences := known.mismatches(engine.model_name, config, engine.num_layers)):
            warnings.warn(CalibrationWarning.of(differences), stacklevel=2)
        engine = engine.without_calibrator()
        if known is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CalibrationWarning)  # it was given above
                engine = engine.with_calibrator(known)
        direction = None if known is None or known.probe is None else direction_of(known.probe)
        Layers.of(config, engine.num_layers)  # refuse bad settings before the work
        found: dict[Level, LabelledFeatures] = {}
        about: dict[Level, str] = {}
        if data is not None:
            with teacher_forced(engine, records, config, chat=chat) as answers:
                states = probe or direction is not None
                found = labelled_features(answers, config, engine.num_layers, states=states)
            how = f"{data.name}, {len(records)} given answers, {'as a chat' if chat else 'plain prompts'}"
            about = dict.fromkeys(found, how)
        if questions is not None:
            with progress("Answering questions", len(asked)) as advance:
                found["answer"] = own_answers(engine, asked, config, advance=advance)
            about["answer"] = f"{questions.name}, the model's own answers to {len(asked)} questions"
        if self_made:
            made = made_questions(texts, prompts or QUESTIONS, seed)
            with progress("Answering questions", len(made)) as advance:
                found = self_made_features(engine, made, config, chat=chat, seed=seed, advance=advance)
            about = about_self_made(found, len(made), len(texts))
        found = {one: items for one, items in found.items() if level in (None, one)}
        if not found:
            raise CalibrationError(f"the data has no labels{f' by {level}' if level else ''}.")
        if known is not None:
            checked = {
                one: validate(found[one], risks_of(risk, found[one], direction), draws=draws, seed=seed)
                for one in LEVELS
                if one in found and (risk := _risk_of(known, one, asked)) is not None
            }
            if not checked:
                raise CalibrationError(f"{check} has no risk of a level that is labelled here.")
            found_out = {one: verdict(validation, one) for one, validation in checked.items()}
            drawn = _draw(checked, plot)
            if json:
                record = {
                    one: {**validation.model_dump(), "verdict": found_out[one].finding}
                    for one, validation in checked.items()
                }
                print_json(dumps(record))
            else:
                shown = [_validation(validation, one) for one, validation in checked.items()]
                verdicts = [Text(one.sentence) for one in found_out.values()]
                output(no_color).print(Group(*shown, *_written(drawn), *verdicts))
            _exit_if_poor(found_out, strict=strict)
            return
        assert out is not None
        fitted = fit_levels(found, about, isotonic=isotonic, folds=folds, draws=draws, seed=seed, threshold=threshold)
        calibrator = calibrator_of(engine, config, fitted, probe=probe)
        calibrator.save(out)
        drawn = _draw({one: risk.validation for one, risk in fitted.risks.items()}, plot)
        found_out = {one: verdict(risk.validation, one) for one, risk in fitted.risks.items()}
        if json:
            print_json(calibrator.model_dump_json())
        else:
            parts: list[Group | Text] = [_shown(risk, one) for one, risk in fitted.risks.items()]
            parts += map(Text, notes(calibrator, fitted))
            output(no_color).print(Group(*parts, *_written([out, *drawn])))
        for one in found_out.values():
            if one.finding != "holds":
                print_note(f"warning: {out} was written, but do not rely on it. {one.sentence}")
        _exit_if_poor(found_out, strict=strict)


def _as_fitted(config: CocoaConfig, fitted: Settings, check: object) -> CocoaConfig:
    """The settings that a calibrator was fitted with. Settings given on the command line must agree with them."""
    wanted = {name: getattr(fitted, name) for name in _SETTINGS}
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


def _risk_of(known: RiskCalibrator, level: Level, asked: Sequence[Question]) -> FittedRisk | None:
    """The fitted risk to evaluate: for questions that all lack a passage, that of short prompts."""
    if level == "answer" and known.closed_book is not None and asked and all(one.context is None for one in asked):
        return known.closed_book
    return known.span if level == "span" else known.answer


def _threshold(
    precision: float | None, recall: float | None, specificity: float | None, miss: float | None
) -> tuple[Rule, float] | None:
    from cocoa_engine.studies.fitting.thresholds import require  # numpy: not for every `cocoa --help`

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


def _exit_if_poor(found: Mapping[Level, Verdict], *, strict: bool) -> None:
    if strict and any(one.finding != "holds" for one in found.values()):
        raise typer.Exit(1)


def _plot_of(plot: Path, level: Level) -> Path:
    """The file of a level's reliability curve."""
    return plot.with_stem(f"{plot.stem}-{level}")


def _draw(found: Mapping[Level, Validation], plot: Path | None) -> list[Path]:
    """Write the reliability curve of each level to a file named after ``plot``, and return the files."""
    if plot is None:
        return []
    files = []
    for level, validation in found.items():
        file = _plot_of(plot, level)
        with draft_of(file) as draft:
            validation.plot(level).savefig(draft)
        files.append(file)
    return files


def _written(files: Sequence[Path]) -> list[Text]:
    return [Text(f"Written to {', '.join(map(str, files))}.")] if files else []


def _validation(found: Validation, unit: str) -> Group:
    """How well a risk ranks and is calibrated, compared with the unfitted baselines."""
    from cocoa_engine.studies.signal.ranking import caution

    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", title_style="")
    folds = f"; {found.division}" if found.division else ""
    table.title = f"{found.items} {unit}s of {found.prompts} prompts, {found.hallucinated} hallucinated{folds}"
    for name in ("", "AUROC", "risk minus that"):
        table.add_column(name, no_wrap=True)
    table.add_row("calibrated risk", _interval(found.auroc), "")
    for name, baseline in found.rivals.items():
        table.add_row(name, _interval(baseline.auroc), _interval(baseline.difference, "+.3f"))
    line = (
        f"AUPRC {_interval(found.auprc)}; Brier {found.brier:.4f} (base rate {found.brier_of_base_rate:.4f}); "
        f"ECE {found.ece:.4f}"
    )
    return Group(table, Text(line), *([] if (warning := caution(found.prompts)) is None else [Text(warning)]))


def _shown(fitted: FittedRisk, unit: str) -> Group:
    validation = _validation(fitted.validation, unit)
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
    from cocoa_engine.studies.signal.ranking import Interval

    return Interval(value.estimate, value.low, value.high).shown(form)
