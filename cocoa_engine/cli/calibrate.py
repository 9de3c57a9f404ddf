"""cocoa calibrate: fit a calibrator of risks, or check one on other data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cocoa_engine.cli import measured
from cocoa_engine.cli.info import load_engine
from cocoa_engine.cli.options import Json, LoadOptions, Model, NoColor, file_option, with_options
from cocoa_engine.cli.output import (
    Overwrite,
    Progress,
    check_drawable,
    on_interrupt,
    output,
    plain_table,
    print_json,
    print_note,
    reserved,
)
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CalibrationError, ConfigError, need
from cocoa_engine.files import draft_of, is_stream
from cocoa_engine.lab.data import LabelledText, Question, read_questions, sample
from cocoa_engine.methods import METHODS
from cocoa_engine.risk.calibrator import RiskCalibrator, Settings
from cocoa_engine.risk.features import Level
from cocoa_engine.risk.fitted import Estimate, Rule, Threshold, Validation

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine
    from cocoa_engine.lab.cache import CacheFolder
    from cocoa_engine.lab.fit import LabelledFeatures

ANSWER = 10.0
"""The work of an answer to a question, where that of feeding a text is 1."""

FITTED_SETTINGS = [name for name in Settings.model_fields if name != "branches"]
"""The settings that a calibrator was fitted with; whether there are branches follows from the method."""


@dataclass
class LabelledAnswers:
    """Where labelled answers come from: options of ``cocoa calibrate``, and what is read from their files."""

    data: Annotated[Path | None, typer.Option(help="Labelled answers: a file or a folder.")] = None
    questions: Annotated[
        Path | None,
        file_option(
            "Questions with known answers. The model answers them, and the risk of an answer as a whole is fitted on "
            "its answers."
        ),
    ] = None
    self_made: Annotated[
        bool,
        typer.Option(
            "--self",
            help="No labelled data: the risk of spans is fitted on retellings of invented passages with planted "
            "errors. --prompts sets their number. Default: at most 150, until the AUROC is steady.",
        ),
    ] = False
    format: measured.Format = None
    prompts: measured.Prompts = None
    chat: measured.Chat = False
    seed: measured.Seed = 0
    records: list[LabelledText] = field(init=False, default_factory=list)
    asked: list[Question] = field(init=False, default_factory=list)

    def read(self) -> None:
        if self.data is not None:
            self.records = measured.read(self.data, self.format, self.prompts, self.seed)
        if self.questions is not None:
            self.asked = sample(read_questions(self.questions), self.prompts, self.seed)

    def measure(
        self,
        engine: CocoaEngine,
        config: CocoaConfig,
        level: Level | None,
        *,
        layers: Sequence[int],
        cache: CacheFolder | None,
        progress: Progress,
        last: Literal["fitting", "computing"],
    ) -> tuple[dict[Level, LabelledFeatures], dict[Level, str]]:
        """The features of the answers, and a description of their source, by level. The stage ``last`` follows.

        Those for a probe are the mean states after ``layers``.
        """
        from cocoa_engine.lab.cache import AnswerCache
        from cocoa_engine.lab.fit_calibrator import about_self_made
        from cocoa_engine.lab.heads import PROMPTS
        from cocoa_engine.lab.measured import Layers, labelled_features, own_answers
        from cocoa_engine.lab.self_made import ROUNDS, TEXTS, made_spans

        Layers.of(config, engine.num_layers)  # refuse bad settings before the work
        number = (self.prompts or TEXTS) if self.self_made else 0
        shares = {
            "feeding answers": len(self.records),
            "answering questions": ANSWER * len(self.asked),
            "feeding texts": number,
        }
        reference = {"measuring source attention": ANSWER * PROMPTS} if number and last == "fitting" else {}
        progress.plan({**shares, last: 0.1 * sum(shares.values()), **reference})
        fate = partial(measured.fate, cache)
        features: dict[Level, LabelledFeatures] = {}
        about: dict[Level, str] = {}
        if self.data is not None:
            as_fed: Any = {"chat": self.chat, "layers": layers, "cache": cache, "progress": progress}
            with measured.teacher_forced(engine, self.records, config, **as_fed) as answers:
                features = labelled_features(answers, config, engine.num_layers)
            how = "as a chat" if self.chat else "plain prompts"
            about = dict.fromkeys(features, f"{self.data.name}, {len(self.records)} given answers, {how}")
        if self.questions is not None:
            answers_kept = AnswerCache(cache, "answers", engine, config) if cache else None
            with progress.stage("answering questions", "questions", len(self.asked), fate=fate) as stage:
                features["answer"] = own_answers(
                    engine, self.asked, config, layers=layers, cache=answers_kept, advance=stage.advance
                )
            about["answer"] = f"{self.questions.name}, the model's own answers to {len(self.asked)} questions"
        if self.self_made:
            options: Any = {"rounds": 1 if self.prompts else ROUNDS, "chat": self.chat, "seed": self.seed}
            with progress.stage("feeding texts", "texts", number, fate=fate) as stage:
                features["span"] = made_spans(engine, number, config, cache=cache, advance=stage.advance, **options)
            about["span"] = about_self_made(features["span"])
        features = {name: items for name, items in features.items() if level in (None, name)}
        if not features:
            raise CalibrationError(f"the data has no labels{f' by {level}' if level else ''}.")
        return features, about


def shown(validation: Validation, unit: str, threshold: Threshold | None) -> list[Table | Text]:
    """How well a risk ranks and is calibrated, compared with the unfitted baselines, and its threshold."""
    from cocoa_engine.lab.statistics import Interval, caution

    def interval(value: Estimate, form: str = ".3f") -> str:
        return Interval(value.estimate, value.low, value.high).shown(form)

    folds = f"; {validation.division}" if validation.division else ""
    title = f"{validation.items} {unit}s of {validation.prompts} prompts, {validation.hallucinated} hallucinated{folds}"
    table = plain_table("", "AUROC", "risk minus that", title=title)
    table.add_row("calibrated risk", interval(validation.auroc), "")
    for name, baseline in validation.rivals.items():
        table.add_row(name, interval(baseline.auroc), interval(baseline.difference, "+.3f"))
    lines = [
        f"AUPRC {interval(validation.auprc)}; Brier {validation.brier:.4f} (base rate "
        f"{validation.brier_of_base_rate:.4f}); ECE {validation.ece:.4f}",
        caution(validation.prompts) or "",
    ]
    if threshold is not None:
        flagged = f"no {unit} is flagged"
        precision = flagged if threshold.precision is None else f"precision {threshold.precision:.3f}"
        lines.append(
            f"threshold {threshold.value:.4f} ({threshold.rule}, target {threshold.target:g}): {precision}, recall "
            f"{threshold.recall:.3f} on {threshold.prompts} prompts"
        )
        if threshold.rule == "conformal":
            few = f" {threshold.prompts} prompts are too few for a threshold above 0, which flags everything."
            lines.append(
                f"Guarantee: for a new prompt exchangeable with these {threshold.prompts}, the expected share of "
                f"hallucinated {unit}s below the threshold is at most {threshold.target:g}. It holds on average over "
                "prompts, not for each prompt, and for texts measured in the same way."
                + (few if threshold.target * (threshold.prompts + 1) < 1 else "")
            )
    return [table, *(Text(line) for line in lines if line)]


def plot_of(plot: Path, level: Level) -> Path:
    return plot.with_stem(f"{plot.stem}-{level}")


def draw(validations: Mapping[Level, Validation], plot: Path) -> list[Path]:
    """Write the reliability curve of each level, and return the files."""
    from cocoa_engine.rendering.plot import reliability_curve

    files = [plot_of(plot, level) for level in validations]
    for file, (level, validation) in zip(files, validations.items(), strict=True):
        with draft_of(file) as draft:
            reliability_curve(validation, level).savefig(draft, format=file.suffix[1:])
    return files


def keep_own_reference(engine: CocoaEngine, out: Path, cache: CacheFolder | None, progress: Progress) -> None:
    """Measure the reference distribution of the model's source attention, and keep it in the cache directory."""
    from cocoa_engine.lab.heads import PROMPTS, keep_reference

    again = "" if cache is None else " to the end; give the same command with --overwrite to continue"
    note = on_interrupt(f"{out} was written; the model's own source attention was not measured{again}")
    with note, progress.stage("measuring source attention", "prompts", PROMPTS) as stage:
        try:
            file = keep_reference(engine, advance=stage.advance, cache=cache)
        except (OSError, RuntimeError) as error:
            print_note(f"the reference of the source attention cannot be kept in the cache directory: {error}")
            return
    if file is not None:
        print_note(f"the model's own source attention was measured as well and written to {file}")


def as_fitted(config: CocoaConfig, fitted: Settings, check: object) -> CocoaConfig:
    wanted = {name: getattr(fitted, name) for name in FITTED_SETTINGS}
    refused = f"the calibrator {check} was fitted {{}}: it cannot be evaluated with {{}}. Leave the option out."
    for name, value in wanted.items():
        if name in config.model_fields_set and getattr(config, name) != value:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise ConfigError(refused.format(f"with --{name.replace('_', '-')} {text}", "another value"))
    if METHODS[config.method].branches != fitted.branches:
        if "method" in config.model_fields_set:
            answers = f"on answers {'with' if fitted.branches else 'without'} candidates"
            raise ConfigError(refused.format(answers, f"--method {config.method}"))
        config = config.replace(method="greedy")
    return config.replace(**wanted)


def checked(
    calibrator: RiskCalibrator,
    check: str,
    features: Mapping[Level, LabelledFeatures],
    answers: LabelledAnswers,
    draws: int,
) -> dict[Level, Validation]:
    """Evaluate the risks of the calibrator ``check``. Questions that all lack a passage have that of short prompts."""
    from cocoa_engine.lab.fit import risks_of, validate
    from cocoa_engine.lab.measured import LEVELS

    closed_book = answers.asked and all(question.context is None for question in answers.asked)
    risks = {"span": calibrator.span, "answer": (calibrator.closed_book if closed_book else None) or calibrator.answer}
    probes = {"span": calibrator.probe, "answer": calibrator.answer_probe}
    validations: dict[Level, Validation] = {}
    alike = {}
    for unit in LEVELS:
        if (items := features.get(unit)) is None:
            continue
        if items.labels.all() or not items.labels.any():
            alike[unit] = f"all are {'hallucinated' if items.labels.any() else 'supported'}"
        elif (risk := risks[unit]) is not None:
            of_items = risks_of(risk, items, probes[unit])
            validations[unit] = validate(items, of_items, draws=draws, seed=answers.seed)
    if not validations:
        reasons = "; ".join(f"{unit}s: {reason}" for unit, reason in alike.items())
        raise CalibrationError(f"{check} has no risk of a level that can be ranked here{reasons and f' ({reasons})'}.")
    for unit, reason in alike.items():
        print_note(f"{unit}s are left out: {reason}")
    return validations


def _share(text: str) -> Any:
    return typer.Option(min=0, max=1, help=f"Choose {text}")


@with_options("method", *FITTED_SETTINGS, "max_new_tokens")
def calibrate(
    context: typer.Context,
    config: CocoaConfig,
    loading: LoadOptions,
    answers: LabelledAnswers,
    out: Annotated[Path | None, file_option("The calibrator's JSON file.")] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Evaluate this calibrator instead of fitting one. 'embedded': the package's calibrator.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        file_option(
            "Write the reliability curves: FILE risk.svg becomes risk-span.svg and risk-answer.svg. Default: beside "
            "--out."
        ),
    ] = None,
    level: Annotated[
        Literal["span", "answer"] | None, typer.Option(help="Fit only this risk. Default: all that are labelled.")
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Also fit a probe, a direction of the model's hidden states. It improves the risk of answers like "
            "these, and makes it worse on others.",
        ),
    ] = False,
    isotonic: Annotated[bool, typer.Option("--isotonic", help="Add an isotonic map after the logistic model.")] = False,
    precision: Annotated[float | None, _share("the lowest threshold with at least this precision.")] = None,
    recall: Annotated[float | None, _share("the highest threshold with at least this recall.")] = None,
    specificity: Annotated[
        float | None, _share("the lowest threshold that leaves at least this share of what is right unflagged.")
    ] = None,
    miss: Annotated[
        float | None, _share("a threshold that misses at most this share, by conformal risk control.")
    ] = None,
    folds: Annotated[
        int, typer.Option(min=2, max=1000, help="Cross-validation folds, by prompt; repeated with few items.")
    ] = 5,
    draws: measured.Draws = 1000,
    cache: measured.Cache = None,
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
    rules: dict[Rule, float | None] = {"precision": precision, "recall": recall}
    rules |= {"specificity": specificity, "conformal": miss}
    thresholds = [(rule, target) for rule, target in rules.items() if target is not None]
    data, questions, own = answers.data is not None, answers.questions is not None, answers.self_made
    checks = check is not None
    for is_wrong, message in (
        (thresholds[1:], "--precision, --recall, --specificity and --miss each choose the threshold: give one of them"),
        ((out is None) != checks, "give either --out FILE to fit a calibrator, or --check FILE to evaluate one"),
        (checks and (thresholds or probe),
         "--check evaluates a calibrator as it is: a threshold cannot be chosen, nor a probe fitted"),
        (not (data or questions or own),
         "give --data PATH with labelled answers, --questions FILE for the model to answer, both, or --self"),
        (own and (data or questions), "--self makes its own texts: leave out --data and --questions"),
        (own and level == "answer", "--self fits the risk of spans: leave out --level answer"),
        (probe and own, "--probe is fitted on labelled data: leave out --self"),
    ):  # fmt: skip
        if is_wrong:
            raise ConfigError(message)
    calibrator = None if check is None else RiskCalibrator.load(check)
    if calibrator is not None and calibrator.probes and own:
        raise ConfigError("the calibrator has a probe, which is checked on labelled data: leave out --self")
    if calibrator is not None:
        config = as_fitted(config, calibrator.settings, check)
    need("sklearn", extra="risk", what="cocoa calibrate")
    from cocoa_engine.lab.fit import FitSettings  # torch: not for every `cocoa --help`
    from cocoa_engine.lab.fit_calibrator import fit_risks, verdict
    from cocoa_engine.lab.measured import probe_layers

    threshold = thresholds[0] if thresholds else None
    settings = FitSettings(
        probe=probe, isotonic=isotonic, threshold=threshold, folds=folds, draws=draws, seed=answers.seed
    )
    if plot is None and out is not None and not is_stream(out):
        plot = out.with_suffix(".svg")
    if plot is not None:
        check_drawable("plot", plot)
    answers.read()
    levels: list[Level] = ["span", "answer"] if level is None else [level]
    files = [*([] if out is None else [out]), *([] if plot is None else [plot_of(plot, unit) for unit in levels])]
    with reserved(*files, overwrite=overwrite), measured.measured_answers(context, cache) as folder:
        progress = Progress("calibrate")
        engine = load_engine(model, loading, progress=progress).without_calibrator()
        measure = partial(answers.measure, config=config, level=level, cache=folder, progress=progress)
        chosen: dict[Level, Threshold | None] = {}
        notes: list[str] = []
        if calibrator is not None:
            layers = [of_level.layer for of_level in calibrator.probes.values()]  # of spans first
            features, _ = measure(engine.with_calibrator(calibrator), layers=layers, last="computing")
            with progress.stage("computing"):
                validations = checked(calibrator, str(check), features, answers, draws)
        else:
            assert out is not None
            layers = probe_layers(engine.num_layers) if probe else []
            features, about = measure(engine, layers=layers, last="fitting")
            with progress.stage("fitting"):
                calibrator, notes = fit_risks(engine, config, features, about, settings)
            calibrator.save(out)
            if answers.self_made:
                keep_own_reference(engine, out, folder, progress)
            risks = {unit: risk for unit in levels if (risk := getattr(calibrator, unit)) is not None}
            validations = {unit: risk.validation for unit, risk in risks.items()}
            chosen = {unit: risk.threshold for unit, risk in risks.items()}
        verdicts = {unit: verdict(validation, unit) for unit, validation in validations.items()}
        written = [*([] if out is None else [out]), *([] if plot is None else draw(validations, plot))]
        if json and not checks:
            print_json(calibrator.model_dump_json())
        elif json:
            report = {
                unit: {**validation.model_dump(), "verdict": verdicts[unit].finding}
                for unit, validation in validations.items()
            }
            print_json(dumps(report))
        else:
            parts = [part for unit in validations for part in shown(validations[unit], unit, chosen.get(unit))]
            lines = [*notes, *([f"Written to {', '.join(map(str, written))}."] if written else [])]
            lines += [conclusion.sentence for conclusion in verdicts.values()] if checks else []
            output(no_color).print(Group(*parts, *map(Text, lines)))
        poor = [conclusion for conclusion in verdicts.values() if conclusion.finding != "holds"]
        if not checks:
            for conclusion in poor:
                print_note(f"warning: {out} was written, but do not rely on it. {conclusion.sentence}")
        if strict and poor:
            raise typer.Exit(1)
