"""``cocoa calibrate``: fit a risk in [0, 1] on labelled answers, and validate it on unseen prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from cocoa_engine.cli.calibrator_check import FITTED_SETTINGS, as_fitted, check_calibrator
from cocoa_engine.cli.calibrator_fit import fit_and_save
from cocoa_engine.cli.dataset_options import Cache, Chat, Draws, Format, Prompts, Seed
from cocoa_engine.cli.export import Overwrite, check_drawable, reserved
from cocoa_engine.cli.labelled_features import LabelledAnswers
from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.unfinished import measured_answers
from cocoa_engine.cli.validation_report import ValidationReport
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.optional import need
from cocoa_engine.output_files import is_stream
from cocoa_engine.risk.calibrator import RiskCalibrator
from cocoa_engine.risk.features import Level
from cocoa_engine.risk.fitted import Rule


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
