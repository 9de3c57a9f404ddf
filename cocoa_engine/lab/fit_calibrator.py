"""fit_calibrator and fit_self_made: a calibrator for an engine, and the verdict on it."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from cocoa_engine.config import CocoaConfig
from cocoa_engine.engine import CocoaEngine
from cocoa_engine.errors import CalibrationError, need
from cocoa_engine.lab.data import LabelledText, Question
from cocoa_engine.lab.fit import DEFAULTS, FitSettings, LabelledFeatures, fit
from cocoa_engine.lab.measured import force, labelled_features, own_answers, probe_layers
from cocoa_engine.lab.self_made import ROUNDS, TEXTS, made_spans
from cocoa_engine.methods.retrieval_heads import source_heads
from cocoa_engine.model.language_model import dtype_name
from cocoa_engine.risk.calibrator import CalibrationWarning, RiskCalibrator, Settings
from cocoa_engine.risk.features import SOURCE_FEATURES, Level
from cocoa_engine.risk.fitted import FittedRisk, Probe, Validation

Finding = Literal["holds", "ranks", "chance"]
"""``holds``: the risk ranks better than chance, and its Brier score is below that of the base rate. ``ranks``: it ranks
better than chance, but a constant risk has no higher Brier score. ``chance``: the interval of its AUROC reaches 0.5."""


class Verdict(NamedTuple):
    """The finding, and a sentence with its values."""

    finding: Finding
    sentence: str


def verdict(validation: Validation, level: Level) -> Verdict:
    """The verdict on a risk of spans or of answers."""
    auroc = validation.auroc
    ranking = f"AUROC {auroc.estimate:.3f} ({auroc.low:.3f} – {auroc.high:.3f})"
    brier = f"Brier {validation.brier:.4f}, base rate {validation.brier_of_base_rate:.4f}"
    if auroc.low <= 0.5:
        return Verdict("chance", f"Verdict: the risk of {level}s is no better than chance here: {ranking}; {brier}.")
    if validation.brier < validation.brier_of_base_rate:
        return Verdict("holds", f"Verdict: the risk of {level}s holds here: {ranking}; {brier}.")
    words = f"it is no better than the base rate as a probability ({brier}; {ranking})."
    return Verdict("ranks", f"Verdict: the risk of {level}s ranks but is not calibrated here: {words}")


def fit_calibrator(
    engine: CocoaEngine,
    answers: Sequence[LabelledText] = (),
    questions: Sequence[Question] = (),
    *,
    config: CocoaConfig | None = None,
    chat: bool = False,
    settings: FitSettings = DEFAULTS,
) -> RiskCalibrator:
    """Fit a calibrator for an engine's model, as ``cocoa calibrate`` does.

    Its validation is by cross-validation, on prompts left out of the fit. If only one of the two levels can be fitted,
    the other is left out with a :class:`CalibrationWarning`.

    Args:
        engine: the engine with the model.
        answers: labelled answers (:func:`~cocoa_engine.lab.data.read_labelled`), which are fed to the model. The risk
            of answers is fitted on the labels of whole answers, the risk of spans on labelled parts.
        questions: questions with known answers (:func:`~cocoa_engine.lab.data.read_questions`). The model answers them,
            and the risk of an answer is fitted on that instead.
        config: the settings that the calibrator is valid for. Default: the engine's.
        chat: feed ``answers`` through the model's chat template instead of as text to continue. ``questions`` always
            use the template if the model has one.
        settings: how it is fitted.

    Raises:
        CalibrationError: nothing is labelled, or there are too few prompts of either class.
        MissingExtraError: scikit-learn is not installed.
    """
    config, engine = config or engine.config, engine.without_calibrator()
    layers = probe_layers(engine.num_layers) if settings.probe else ()
    forced = force(engine, answers, config, chat=chat, layers=layers)
    items = labelled_features(forced, config, engine.num_layers)
    about: dict[Level, str] = dict.fromkeys(items, f"{len(answers)} given answers")
    if questions:
        items["answer"] = own_answers(engine, questions, config, layers=layers)
        about["answer"] = f"the model's own answers to {len(questions)} questions"
    return _warned(engine, config, items, about, settings)


def fit_self_made(
    engine: CocoaEngine,
    *,
    count: int | None = None,
    config: CocoaConfig | None = None,
    chat: bool = False,
    settings: FitSettings = DEFAULTS,
) -> RiskCalibrator:
    """Fit the risk of spans without labelled data, as ``cocoa calibrate --self`` does.

    The model reads retellings of invented passages with planted errors. The documentation, under "Calibrate without
    labels", says how far such a risk was right on other texts. Whole answers have the default rank.

    Args:
        engine: the engine with the model.
        count: the number of retellings. Default: at most 150, until the AUROC of a cross-validation is steady.
        config, chat: as for :func:`fit_calibrator`.
        settings: how it is fitted; a probe is not. Its seed is also that of the retellings.

    Raises:
        CalibrationError: there are too few retellings.
        MissingExtraError: scikit-learn is not installed.
    """
    config, engine = config or engine.config, engine.without_calibrator()
    need("sklearn", extra="risk", what="fitting a calibrator")
    rounds, count = (ROUNDS, TEXTS) if count is None else (1, count)
    items = made_spans(engine, count, config, rounds=rounds, chat=chat, seed=settings.seed)
    without_probe = settings.model_copy(update={"probe": False})
    return _warned(engine, config, {"span": items}, {"span": about_self_made(items)}, without_probe)


def about_self_made(items: LabelledFeatures) -> str:
    """What a calibrator says about its data."""
    return f"made by the model itself: {len(set(items.groups))} retellings of invented passages with planted errors"


def _warned(
    engine: CocoaEngine,
    config: CocoaConfig,
    items: Mapping[Level, LabelledFeatures],
    about: Mapping[Level, str],
    settings: FitSettings,
) -> RiskCalibrator:
    calibrator, notes = fit_risks(engine, config, items, about, settings)
    for reason in notes:
        warnings.warn(CalibrationWarning(reason), stacklevel=3)  # at the caller of the public function
    return calibrator


def fit_risks(
    engine: CocoaEngine,
    config: CocoaConfig,
    items: Mapping[Level, LabelledFeatures],
    about: Mapping[Level, str],
    settings: FitSettings = DEFAULTS,
) -> tuple[RiskCalibrator, list[str]]:
    """Fit a risk for each level that can be fitted, from its labelled items and what they are ``about``.

    Returns:
        The calibrator, and what could not be fitted or measured, as messages.

    Raises:
        CalibrationError: nothing is labelled, or no level can be fitted.
    """
    if not items:
        raise CalibrationError("the data has no labels.")
    risks: dict[Level, FittedRisk] = {}
    notes: list[str] = []
    probes: dict[Level, Probe] = {}
    model = engine.session.model
    for level, of_level in items.items():
        try:
            risks[level], direction = fit(of_level, about[level], settings)
        except CalibrationError as error:
            notes.append(f"No risk of {level}s: {error}")
            continue
        if direction is not None:
            probes[level] = Probe(
                layer=probe_layers(engine.num_layers)[direction.at],
                model_name=engine.model_name,
                dtype=dtype_name(model),
                weights=tuple(direction.weights.tolist()),
                intercept=direction.intercept,
            )
    if not risks:
        raise CalibrationError(" ".join(notes))
    measured = any(name in risk.features for risk in risks.values() for name in SOURCE_FEATURES)
    calibrator = RiskCalibrator(
        model_name=engine.model_name,
        settings=Settings.of(config, engine.num_layers),
        heads=source_heads(config.decore_heads, model) if measured else None,
        probe=probes.get("span"),
        answer_probe=probes.get("answer"),
        **risks,
    )
    if calibrator.heads is None:
        notes.append(
            "The source attention is not a feature: the retrieval heads of the model are not known (find them with "
            "`cocoa heads`, and give the file as decore_heads), or its attention cannot be seen."
        )
    return calibrator, notes
