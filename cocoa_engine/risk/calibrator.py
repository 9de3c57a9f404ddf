"""From the features of a span to its risk in [0, 1], with weights that were fitted before. Plain Python."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CalibrationError
from cocoa_engine.faults import explain
from cocoa_engine.results import Generation
from cocoa_engine.risk.features import ANSWER_FEATURES, SPAN_FEATURES, SpanFigures, answer_features, span_features

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cocoa_engine.engine import CocoaEngine
    from cocoa_engine.labelled import LabelledText, Question

Level = Literal["span", "answer"]
"""What there is a risk of."""

Rule = Literal["precision", "recall", "conformal"]
"""How a threshold is chosen."""

EMBEDDED = Path(__file__).parent / "embedded.json"
"""The embedded model's; what it was fitted on, and what it is worth, is said in it and in docs/explanation/signal.md."""


class CalibrationWarning(UserWarning):
    """A calibrator is used with a model or settings that it was not fitted with: its risks may mean nothing."""

    @classmethod
    def of(cls, differences: Sequence[str]) -> CalibrationWarning:
        """The warning of differences, as :meth:`RiskCalibrator.mismatches` says them."""
        return cls(
            f"the calibrator was fitted otherwise: {'; '.join(differences)}. Its risks may mean nothing here; fit one "
            "with these (cocoa calibrate), or leave the calibrator out."
        )


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Settings(_Part):
    """The settings that a risk is valid for: which layers, what competes, whether it is grown, where spans end.

    Given texts are cut where tokens compete, whatever the settings of the end are.
    """

    final_layer: Literal["post_norm", "pre_norm"]
    middle_layers: tuple[int, int]
    gamma: float
    max_candidates: int
    max_span_tokens: int = 16
    span_boundary: Literal["right", "left", "own", "fixed"] = "right"
    branches: bool = Field(True, description="Whether the decoding method grows candidates at risk points.")

    @classmethod
    def of(cls, config: CocoaConfig, num_layers: int) -> Settings:
        """Those of a config, for a model with that many layers."""
        from cocoa_engine.disagreement import middle_layers  # which loads torch: a calibrator is read without it
        from cocoa_engine.methods import METHODS

        return cls(
            final_layer=config.final_layer,
            middle_layers=config.middle_layers or middle_layers(num_layers),
            gamma=config.gamma,
            max_candidates=config.max_candidates,
            max_span_tokens=config.max_span_tokens,
            span_boundary=config.span_boundary,
            branches=METHODS[config.method].branches,
        )


class Isotonic(_Part):
    """A non-decreasing map from [0, 1] to [0, 1]: straight between its knots, constant beyond them."""

    x: list[float]
    y: list[float]

    @model_validator(mode="after")
    def _monotone(self) -> Isotonic:
        rising = all(a < b for a, b in zip(self.x, self.x[1:], strict=False))
        if len(self.x) != len(self.y) or not self.x or not rising or sorted(self.y) != self.y:
            raise ValueError("isotonic: x must rise, y must not fall, and the two must be of one length")
        if not 0 <= self.y[0] <= self.y[-1] <= 1:
            raise ValueError("isotonic: y must be in [0, 1]")
        return self

    def __call__(self, value: float) -> float:
        place = bisect_right(self.x, value)
        if place == 0 or place == len(self.x):
            return self.y[0 if place == 0 else -1]
        x0, x1, y0, y1 = self.x[place - 1], self.x[place], self.y[place - 1], self.y[place]
        return min(max(y0 + (y1 - y0) * (value - x0) / (x1 - x0), y0), y1)


class Estimate(_Part):
    """A figure with its 95 % bootstrap interval over prompts."""

    estimate: float
    low: float
    high: float


class Rival(_Part):
    """X: its AUROC, and the calibrated risk's less that."""

    auroc: Estimate
    difference: Estimate


class ReliabilityBin(_Part):
    """Items whose risk is alike: how many, their mean risk, and the share of them that is hallucinated."""

    items: int
    mean_risk: float
    share_hallucinated: float


class Validation(_Part):
    """How the risk does on prompts that it was not fitted on, by grouped cross-validation.

    AUROC and AUPRC, the rivals' too, are over the items of each fold: risks of two folds come from two fits.
    """

    folds: int = Field(description="Of the cross-validation; 0 where nothing was fitted on these prompts at all.")
    repeats: int = Field(1, description="How often the prompts were divided into folds; figures are over all of these.")
    prompts: int
    items: int = Field(description="Spans, or answers as wholes.")
    hallucinated: int
    auroc: Estimate
    auprc: Estimate
    brier: float = Field(description="Mean squared error of the risk.")
    brier_of_base_rate: float = Field(description="The same of a risk that is the share of hallucinated items.")
    ece: float = Field(description="Expected calibration error: mean gap of the reliability bins, by their size.")
    reliability: list[ReliabilityBin]
    rivals: dict[str, Rival]

    @property
    def division(self) -> str:
        """How the prompts were divided, in words; empty where nothing was fitted on them."""
        again = f", divided {self.repeats} times" if self.repeats > 1 else ""
        return f"{self.folds} folds of prompts{again}" if self.folds else ""

    def plot(self, unit: str = "item") -> Figure:
        """The reliability curve: of each bin of risks, the share that is hallucinated.

        Args:
            unit: what the items are called: ``"span"`` or ``"answer"``.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from cocoa_engine.rendering.plot import reliability_curve

        return reliability_curve(self, unit)


class Threshold(_Part):
    """From which risk on a span is flagged, and what was asked of that choice."""

    value: float = Field(ge=0)
    rule: Rule
    target: float
    precision: float | None = Field(description="Reached on the spans it was chosen on; none if nothing is flagged.")
    recall: float
    prompts: int


class FittedRisk(_Part):
    """A risk in [0, 1]: a logistic model of some features, and an isotonic map on top if one was fitted.

    risk = g(1 / (1 + e^-z)),  z = b + sum_k w_k (x_k - mean_k) / scale_k,  g the isotonic map or none

    Attributes:
        data: what it was fitted on.
        validation: how it does on prompts that it was not fitted on.
        threshold: from which risk on to flag, if one was chosen.
    """

    data: str
    features: list[str]
    means: list[float]
    scales: list[float]
    weights: list[float]
    intercept: float
    isotonic: Isotonic | None = None
    validation: Validation
    threshold: Threshold | None = None

    @model_validator(mode="after")
    def _of_one_length(self) -> FittedRisk:
        if not len(self.features) == len(self.means) == len(self.scales) == len(self.weights):
            raise ValueError("features, means, scales and weights must be of one length")
        if min(self.scales, default=1) <= 0:
            raise ValueError("scales must be above 0")
        return self

    def __call__(self, features: Sequence[float]) -> float:
        """The risk by the features, in their order."""
        scaled = zip(self.weights, features, self.means, self.scales, strict=True)
        z = self.intercept + sum(weight * (value - mean) / scale for weight, value, mean, scale in scaled)
        risk = logistic(z)
        return self.isotonic(risk) if self.isotonic else risk

    def flags(self, features: Sequence[float]) -> bool:
        """Whether the risk reaches the threshold.

        Raises:
            CalibrationError: no threshold was chosen.
        """
        if self.threshold is None:
            raise CalibrationError("this calibrator has no threshold; choose one when it is fitted.")
        return self(features) >= self.threshold.value


class RiskCalibrator(_Part):
    """The risk of a span, of an answer as a whole, or of both.

    Attributes:
        model_name: the model whose spans and answers it was fitted on.
        settings: the settings these were measured with.
        span: of a span, from :data:`~cocoa_engine.risk.features.SPAN_FEATURES`; none if no spans were labelled.
        answer: of an answer, from :data:`~cocoa_engine.risk.features.ANSWER_FEATURES`; none if no answers were.
    """

    schema_version: Literal[2] = 2
    model_name: str
    settings: Settings
    span: FittedRisk | None = None
    answer: FittedRisk | None = None

    @model_validator(mode="after")
    def _of_known_features(self) -> RiskCalibrator:
        if self.span is None and self.answer is None:
            raise ValueError("it holds no risk, neither of spans nor of answers")
        for fitted, known in ((self.span, SPAN_FEATURES), (self.answer, ANSWER_FEATURES)):
            if fitted is not None and fitted.features != list(known):
                raise ValueError(
                    f"features: this version measures {', '.join(known)}; another one fitted it, fit it anew"
                )
        return self

    @classmethod
    def fit(
        cls,
        engine: CocoaEngine,
        answers: Sequence[LabelledText] = (),
        questions: Sequence[Question] = (),
        *,
        config: CocoaConfig | None = None,
        chat: bool = False,
        isotonic: bool = False,
        threshold: tuple[Rule, float] | None = None,
        folds: int = 5,
        draws: int = 1000,
        seed: int = 0,
    ) -> RiskCalibrator:
        """Fit one for an engine's model, as ``cocoa calibrate`` does; its figures are of prompts left out of the fit.

        Args:
            answers: with labels (:func:`~cocoa_engine.labelled.read_labelled`): they are fed to the model. Those
                labelled as wholes give the risk of an answer, those with labelled parts also that of a span.
            questions: with known answers (:func:`~cocoa_engine.labelled.read_questions`): the model answers them, and
                the risk of an answer is fitted on that instead.
            config: the settings that the calibrator will be valid for; by default the engine's.
            chat: ask through the model's chat template instead of as a text to continue. Questions always are, where
                there is one.
            isotonic: an isotonic map on top of the logistic model.
            threshold: by which :meth:`flags` decides: ``"precision"``, ``"recall"`` or ``"conformal"`` (the share that
                may be missed), and the target, such as ``("recall", 0.8)``.
            folds: of the cross-validation, grouped by prompt; few items are divided into them several times.
            draws: of the bootstrap.
            seed: of that, and of what a conformal threshold is chosen on.

        Raises:
            CalibrationError: nothing is labelled, or there are too few prompts of either class; a level that lacks
                these while the other has them is left out, with a :class:`CalibrationWarning`.
            MissingExtraError: scikit-learn is not installed.
        """
        from cocoa_engine.risk.fitting import fit_levels
        from cocoa_engine.risk.measured import labelled_features, own_answers
        from cocoa_engine.risk.thresholds import require
        from cocoa_engine.signal.segments import force

        if threshold is not None:
            require(*threshold)
        config = engine.config if config is None else config
        fed = force(engine, answers, config, chat=chat, grow=True)
        found = labelled_features(fed, config, engine.num_layers)
        about: dict[Level, str] = dict.fromkeys(found, f"{len(answers)} given answers")
        if questions:
            found["answer"] = own_answers(engine, questions, config)
            about["answer"] = f"the model's own answers to {len(questions)} questions"
        fitted, missing = fit_levels(
            found, about, isotonic=isotonic, folds=folds, draws=draws, seed=seed, threshold=threshold
        )
        for words in missing:
            warnings.warn(CalibrationWarning(words), stacklevel=2)
        return cls(model_name=engine.model_name, settings=Settings.of(config, engine.num_layers), **fitted)

    @classmethod
    def load(cls, path: str | Path) -> RiskCalibrator:
        """Read one from its JSON file.

        Args:
            path: the file; ``"embedded"`` is the one that comes with the package, for the embedded model.

        Raises:
            CalibrationError: there is no such file, or it holds no calibrator of this version.
        """
        path = EMBEDDED if str(path) == "embedded" else path
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise CalibrationError(f"the calibrator {path} cannot be read: {error.strerror}.") from error
        except ValidationError as error:
            raise CalibrationError(f"{path} is not a calibrator that can be used: {explain(error)}") from None

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def risk(self, span: SpanFigures) -> float:
        """The risk of a span, in [0, 1]: the probability, by this calibrator, that a part of it is hallucinated.

        Raises:
            CalibrationError: it was fitted on whole answers only.
        """
        return self._of_spans(span_features(span))

    def answer_risk(self, generation: Generation) -> float:
        """The risk of an answer, in [0, 1]: the probability, by this calibrator, that it is wrong as a whole.

        Raises:
            CalibrationError: it was fitted on spans only; or the answer is a text that was scored without a calibrator
                of answers, so that nobody measured what would have competed in it.
        """
        return self._of_answers(answer_features(generation))

    def flags(self, span: SpanFigures) -> bool:
        """Whether a span's risk reaches the threshold.

        Raises:
            CalibrationError: no threshold was chosen, or it was fitted on whole answers only.
        """
        return self._of_spans.flags(span_features(span))

    def flags_answer(self, generation: Generation) -> bool:
        """Whether an answer's risk reaches the threshold; errors as for :meth:`flags`."""
        return self._of_answers.flags(answer_features(generation))

    @property
    def _of_spans(self) -> FittedRisk:
        if self.span is None:
            raise CalibrationError("this calibrator was fitted on whole answers: it knows no risk of a span.")
        return self.span

    @property
    def _of_answers(self) -> FittedRisk:
        if self.answer is None:
            raise CalibrationError("this calibrator was fitted on spans: it knows no risk of an answer as a whole.")
        return self.answer

    def mismatches(self, model_name: str, config: CocoaConfig | None, num_layers: int) -> list[str]:
        """In what a model and its settings (if they are known) differ from those of the fit, in words."""
        found = []
        if model_name != self.model_name:
            found.append(f"the model is {model_name}, not {self.model_name}")
        wanted, actual = self.settings, self.settings if config is None else Settings.of(config, num_layers)
        for name in Settings.model_fields:
            if getattr(wanted, name) == getattr(actual, name):
                continue
            if name == "branches" and config is not None:
                found.append(f"method={config.method!r} grows {'' if actual.branches else 'no '}candidates to compare")
            else:
                found.append(f"{name} is {getattr(actual, name)}, not {getattr(wanted, name)}")
        return found


def logistic(z: float) -> float:
    """1 / (1 + e^-z), without overflow."""
    if z >= 0:
        return 1 / (1 + math.exp(-z))
    power = math.exp(z)
    return power / (1 + power)
