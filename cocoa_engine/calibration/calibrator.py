"""Computes the risk in [0, 1] of a span or an answer from its features, with fitted weights. Plain Python."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cocoa_engine.calibration.domain import Domain
from cocoa_engine.calibration.features import (
    ANSWER_FEATURES,
    PROBE_FEATURE,
    SOURCE_FEATURES,
    SPAN_FEATURES,
    SpanStatistics,
    answer_features,
    span_features,
)
from cocoa_engine.calibration.probe import Probe
from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import middle_layers
from cocoa_engine.errors import CalibrationError, ConfigError
from cocoa_engine.messages import explain
from cocoa_engine.methods import METHODS
from cocoa_engine.output_files import locked, require_writable, write_file
from cocoa_engine.results import Generation
from cocoa_engine.safe_text import bounded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cocoa_engine.datasets import LabelledText, Question
    from cocoa_engine.engine import CocoaEngine

Level = Literal["span", "answer"]
"""Whether a risk is that of a span or of a whole answer."""

Rule = Literal["precision", "recall", "specificity", "conformal"]
"""How a threshold is chosen."""

PROBABILITY_THRESHOLD = 0.5
"""The risk from which spans and answers are flagged by a calibrator without a threshold of its own."""

EMBEDDED = Path(__file__).parent / "embedded.json"
"""The embedded model's calibrator. The file and docs/explanation/signal.md describe its data and validation."""


LARGEST = 1e6
"""Features are cut to this absolute value. Those that are measured are far below it, unless they are infinite."""


class CalibrationWarning(UserWarning):
    """A calibrator is used with a model, settings or answers that it was not fitted for, or it could be fitted only in
    part."""

    @classmethod
    def of(cls, differences: Sequence[str]) -> CalibrationWarning:
        """The warning that lists differences from :meth:`RiskCalibrator.mismatches`."""
        return cls(
            f"the calibrator does not match: {bounded('; '.join(differences), 800)}. Its risks may be "
            "meaningless here. Fit a calibrator for these settings (cocoa calibrate), or use none."
        )


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Settings(_Part):
    """The settings that a calibrator is valid for: the layers, which tokens compete, and where spans end.

    Given texts are always divided where tokens compete, whatever ``span_boundary`` is.
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
        """The settings of a config, for a model with ``num_layers`` layers."""
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
    """A non-decreasing map from [0, 1] to [0, 1]: linear between its knots, constant outside them."""

    x: list[float]
    y: list[float]

    @model_validator(mode="after")
    def _monotone(self) -> Isotonic:
        rising = all(a < b for a, b in zip(self.x, self.x[1:], strict=False))
        if len(self.x) != len(self.y) or not self.x or not rising or sorted(self.y) != self.y:
            raise ValueError("isotonic: x must increase, y must not decrease, and both must have the same length")
        if not 0 <= self.y[0] <= self.y[-1] <= 1:
            raise ValueError("isotonic: y must be in [0, 1]")
        return self

    def __call__(self, value: float) -> float:
        after = bisect_right(self.x, value)
        if after == 0 or after == len(self.x):
            return self.y[0 if after == 0 else -1]
        x0, x1, y0, y1 = self.x[after - 1], self.x[after], self.y[after - 1], self.y[after]
        return min(max(y0 + (y1 - y0) * (value - x0) / (x1 - x0), y0), y1)


class Estimate(_Part):
    """An estimate with its 95 % bootstrap interval over prompts."""

    estimate: float
    low: float
    high: float


class Baseline(_Part):
    """A baseline that needs no fit: its AUROC, and the calibrated risk's AUROC minus the baseline's."""

    auroc: Estimate
    difference: Estimate


class ReliabilityBin(_Part):
    """Items of similar risk: their number, their mean risk, and the share of them that is hallucinated."""

    items: int
    mean_risk: float
    share_hallucinated: float


class Validation(_Part):
    """The quality of the risk on prompts that it was not fitted on, by grouped cross-validation.

    AUROC and AUPRC, also those of the baselines (``rivals``), compare items of the same fold only, because the risks of
    two folds come from two fits.
    """

    folds: int = Field(description="Folds of the cross-validation; 0 if the risk was fitted on other data.")
    repeats: int = Field(
        1, description="How often the prompts were divided into folds; the values cover all divisions."
    )
    prompts: int
    items: int = Field(description="Spans, or answers as wholes.")
    hallucinated: int
    auroc: Estimate
    auprc: Estimate
    brier: float = Field(description="Mean squared error of the risk.")
    brier_of_base_rate: float = Field(description="The same for a constant risk, the share of hallucinated items.")
    ece: float = Field(description="Expected calibration error over the reliability bins.")
    reliability: list[ReliabilityBin]
    rivals: dict[str, Baseline]

    @property
    def division(self) -> str:
        """A description of the folds; empty if the risk was fitted on other data."""
        again = f", divided {self.repeats} times" if self.repeats > 1 else ""
        return f"{self.folds} folds of prompts{again}" if self.folds else ""

    def plot(self, unit: str = "item") -> Figure:
        """The reliability curve: for each bin of risks, the share of items that is hallucinated.

        Args:
            unit: the name of an item: ``"span"`` or ``"answer"``.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from cocoa_engine.rendering.plot import reliability_curve

        return reliability_curve(self, unit)


class Threshold(_Part):
    """The risk from which an item is flagged, and the rule and target that it was chosen by."""

    value: float = Field(ge=0)
    rule: Rule
    target: float
    precision: float | None = Field(description="Precision on the items it was chosen on; `None` if none is flagged.")
    recall: float
    prompts: int


class FittedRisk(_Part):
    """A risk in [0, 1]: a logistic model of some features, optionally followed by an isotonic map.

    risk = g(1 / (1 + e^-z)), with z = b + sum_k w_k (x_k - mean_k) / scale_k, and g the isotonic map or the identity.

    Attributes:
        data: a description of the data it was fitted on.
        domain: which features are like those that it was fitted on.
        validation: how well it does on prompts that it was not fitted on.
        threshold: the risk from which items are flagged, if one was chosen.
    """

    data: str
    features: list[str]
    means: list[float]
    scales: list[float]
    weights: list[float]
    intercept: float
    isotonic: Isotonic | None = None
    domain: Domain | None = None
    validation: Validation
    threshold: Threshold | None = None

    @model_validator(mode="after")
    def _of_one_length(self) -> FittedRisk:
        if not len(self.features) == len(self.means) == len(self.scales) == len(self.weights):
            raise ValueError("features, means, scales and weights must have the same length")
        if min(self.scales, default=1) <= 0:
            raise ValueError("scales must be above 0")
        if self.domain is not None and len(self.domain.centre) != len(self.features):
            raise ValueError("domain: the centre must have a number for each feature")
        largest = abs(self.intercept)
        for weight, mean, scale in zip(self.weights, self.means, self.scales, strict=True):
            largest += abs(weight) * ((LARGEST + abs(mean)) / scale)
        if not math.isfinite(largest):
            raise ValueError("a weight, mean or intercept is too large, or a scale too small, for a finite risk")
        return self

    def __call__(self, features: Sequence[float]) -> float:
        """The risk of an item with these features, in the order of :attr:`features`.

        Raises:
            CalibrationError: a feature was not measured, or is NaN.
        """
        weighted = zip(self.weights, self._scaled(features), strict=True)
        risk = logistic(self.intercept + sum(weight * value for weight, value in weighted))
        return self.isotonic(risk) if self.isotonic else risk

    def is_out_of_domain(self, features: Sequence[float]) -> bool:
        """Whether an item with these features is unlike those that the risk was fitted on.

        Raises:
            CalibrationError: a feature was not measured, or is NaN.
        """
        return self.domain is not None and self.domain.is_outside(self._scaled(features))

    def _scaled(self, features: Sequence[float]) -> list[float]:
        """(x_k - mean_k) / scale_k of each feature, with x_k cut to :data:`LARGEST`."""
        known = zip(self.features, features, self.means, self.scales, strict=True)
        scaled = []
        for name, value, mean, scale in known:
            if math.isnan(value):
                raise CalibrationError(_MISSING.get(name, f"the feature {name} is not a number (NaN)."))
            scaled.append((min(max(value, -LARGEST), LARGEST) - mean) / scale)
        return scaled

    def flags(self, features: Sequence[float]) -> bool:
        """Whether the risk reaches the threshold, or is no number (NaN).

        Raises:
            CalibrationError: no threshold was chosen.
        """
        if self.threshold is None:
            raise CalibrationError("this calibrator has no threshold; choose one when you fit it.")
        return not self(features) < self.threshold.value


def threshold_of(fitted: FittedRisk) -> float:
    """The threshold that was chosen with the fit; otherwise 0.5, from which an error is more likely than not."""
    return PROBABILITY_THRESHOLD if fitted.threshold is None else fitted.threshold.value


_MISSING = {
    **dict.fromkeys(
        SOURCE_FEATURES,
        "the source attention was not measured, and this calibrator needs it: measure with an engine that has this "
        "calibrator, and with a model whose attention can be seen.",
    ),
    PROBE_FEATURE: "the span has no value of the probe: measure it with an engine that has this calibrator.",
}
"""Messages for features that may be missing."""


class RiskCalibrator(_Part):
    """The risk of a span, of an answer as a whole, or of both.

    Attributes:
        model_name: the model it was fitted for.
        settings: the settings it was fitted with.
        heads: the (layer, head) pairs whose attention is the source attention. `None`: the model's attention was not
            seen, and source attention is not a feature.
        probe: the direction of hidden states that is a feature of spans; `None` if there is none.
        span: the risk of a span, from :data:`~cocoa_engine.calibration.features.SPAN_FEATURES`; `None` if no spans were
            labelled.
        answer: the risk of an answer, from :data:`~cocoa_engine.calibration.features.ANSWER_FEATURES`; `None` if no
            answers were labelled.
        closed_book: the risk of an answer to a prompt without a passage (:attr:`.Generation.closed_book`). `None`:
            ``answer`` applies to every prompt.
    """

    schema_version: Literal[3] = 3
    model_name: str
    settings: Settings
    heads: tuple[tuple[int, int], ...] | None = None
    probe: Probe | None = None
    span: FittedRisk | None = None
    answer: FittedRisk | None = None
    closed_book: FittedRisk | None = None

    @model_validator(mode="after")
    def _of_known_features(self) -> RiskCalibrator:
        if self.span is None and self.answer is None:
            raise ValueError("it has no risk, neither of spans nor of answers")
        if self.heads is not None and (not self.heads or min(map(min, self.heads)) < 0):
            raise ValueError("heads: one or more pairs of a layer and a head are needed, counted from 0")
        if self.probe is not None and self.span is None:
            raise ValueError("it has a probe, which is a feature of spans, and no risk of spans")
        absent = {*(SOURCE_FEATURES if self.heads is None else ()), *(() if self.probe else (PROBE_FEATURE,))}
        if self.closed_book is not None and self.answer is None:
            raise ValueError("it has a risk of answers to short prompts, and none of other answers")
        levels = ((self.span, SPAN_FEATURES), (self.answer, ANSWER_FEATURES), (self.closed_book, ANSWER_FEATURES))
        for fitted, names in levels:
            known = [name for name in names if name not in absent]
            if fitted is not None and fitted.features != known:
                raise ValueError(
                    f"features: this version measures {', '.join(known)}; another version fitted it, fit it again"
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
        probe: bool = False,
        isotonic: bool = False,
        threshold: tuple[Rule, float] | None = None,
        folds: int = 5,
        draws: int = 1000,
        seed: int = 0,
    ) -> RiskCalibrator:
        """Fit a calibrator for an engine's model, as ``cocoa calibrate`` does.

        Its validation is by cross-validation, on prompts left out of the fit. If only one of the two levels can be
        fitted, the other is left out with a :class:`CalibrationWarning`.

        Args:
            engine: the engine with the model.
            answers: labelled answers (:func:`~cocoa_engine.datasets.read_labelled`), which are fed to the model. The
                risk of answers is fitted on the labels of whole answers, the risk of spans on labelled parts.
            questions: questions with known answers (:func:`~cocoa_engine.datasets.read_questions`). The model answers
                them, and the risk of an answer is fitted on that instead.
            config: the settings that the calibrator is valid for. Default: the engine's.
            chat: feed ``answers`` through the model's chat template instead of as text to continue. ``questions``
                always use the template if the model has one.
            probe: also fit a probe, a direction of the model's hidden states, on the labelled parts of ``answers``. It
                improves the risk of spans of answers like these, and makes it worse on others.
            isotonic: add an isotonic map after the logistic model.
            threshold: the rule and target of the threshold that :meth:`flags` uses: ``"precision"``, ``"recall"``,
                ``"specificity"`` (the share of supported items that are not flagged) or ``"conformal"`` (the share that
                may be missed), such as ``("recall", 0.8)``.
            folds: folds of the cross-validation, grouped by prompt. With few items, the division is repeated.
            draws: number of bootstrap draws.
            seed: seed of the bootstrap, and of the prompts that a conformal threshold is chosen on.

        Raises:
            CalibrationError: nothing is labelled, there are too few prompts of either class, or a probe is asked for
                and no parts of answers are labelled.
            MissingExtraError: scikit-learn is not installed.
        """
        from cocoa_engine.studies.fitting.fit_calibrator import fit_calibrator

        return fit_calibrator(
            engine,
            answers,
            questions,
            config=config,
            chat=chat,
            probe=probe,
            isotonic=isotonic,
            threshold=threshold,
            folds=folds,
            draws=draws,
            seed=seed,
        )

    @classmethod
    def fit_self(
        cls,
        engine: CocoaEngine,
        documents: Sequence[str] = (),
        *,
        count: int = 300,
        config: CocoaConfig | None = None,
        chat: bool = False,
        isotonic: bool = False,
        threshold: tuple[Rule, float] | None = None,
        folds: int = 5,
        draws: int = 1000,
        seed: int = 0,
    ) -> RiskCalibrator:
        """Fit a calibrator without labelled data, as ``cocoa calibrate --self`` does.

        The model answers questions about invented passages and about the user's documents, some of which have no answer
        in their passage. Its answers are labelled by comparison. The risk of spans is fitted on retellings of invented
        passages with planted errors, which the model reads. The documentation, under "Calibrate without labels", says
        how far such a calibrator was right on other texts.

        Args:
            engine: the engine with the model.
            documents: texts to ask about as well, such as those that the model will answer from.
            count: the number of questions; there are half as many texts with planted errors.
            config, chat, isotonic, threshold, folds, draws: as for :meth:`fit`.
            seed: seed of the questions, of the bootstrap, and of the prompts of a conformal threshold.

        Raises:
            CalibrationError: the documents have nothing to ask for, or there are too few answers of either class.
            MissingExtraError: scikit-learn is not installed.
        """
        from cocoa_engine.studies.fitting.fit_self import fit_self_made

        return fit_self_made(
            engine,
            documents,
            count=count,
            config=config,
            chat=chat,
            isotonic=isotonic,
            threshold=threshold,
            folds=folds,
            draws=draws,
            seed=seed,
        )

    @classmethod
    def of(cls, given: RiskCalibrator | str | Path | None) -> RiskCalibrator | None:
        """A calibrator as it is, or read from its file; `None` stays `None`.

        Raises:
            ConfigError: it is neither.
            CalibrationError: the file cannot be read.
        """
        if given is None or isinstance(given, RiskCalibrator):
            return given
        if not isinstance(given, (str, Path)):
            raise ConfigError(f"calibrator must be a RiskCalibrator or its file, not {type(given).__name__}.")
        return cls.load(given)

    @classmethod
    def load(cls, path: str | Path) -> RiskCalibrator:
        """Read a calibrator from its JSON file.

        Args:
            path: the file. ``"embedded"`` is the calibrator that comes with the package, for the embedded model.

        Raises:
            CalibrationError: the file cannot be read, or is not a calibrator of this version.
        """
        path = EMBEDDED if str(path) == "embedded" else path
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except ValidationError as error:
            raise CalibrationError(f"{path} is not a calibrator of this version: {explain(error)}") from None
        except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character
            reason = getattr(error, "strerror", None) or error
            raise CalibrationError(f"the calibrator {path} cannot be read: {reason}.") from error

    def save(self, path: str | Path) -> None:
        """Write the calibrator as JSON. An existing file is replaced when the new one is complete.

        Raises:
            ConfigError: another process is writing the file, or it cannot be written.
        """
        require_writable(Path(path))
        with locked(Path(path)):
            write_file(Path(path), self.model_dump_json(indent=1) + "\n")

    def spans_only(self) -> RiskCalibrator | None:
        """This calibrator without its risk of answers; `None` if nothing is left."""
        return None if self.span is None else self.model_copy(update={"answer": None, "closed_book": None})

    def risk(self, span: SpanStatistics) -> float:
        """The risk of a span, in [0, 1]: the estimated probability that a part of it is hallucinated.

        Raises:
            CalibrationError: the calibrator has no risk of spans, or a feature that it needs was not measured.
        """
        return self._of_spans(self._features_of(span))

    def answer_risk(self, generation: Generation) -> float:
        """The risk of an answer, in [0, 1]: the estimated probability that it is wrong as a whole.

        Raises:
            CalibrationError: the calibrator has no risk of answers, or a feature that it needs was not measured.
        """
        fitted = self.for_answer(generation)
        return fitted(self._features_of_answer(generation, fitted))

    def rated(self, generation: Generation) -> Generation:
        """The answer with ``answer_risk``, if the calibrator has a risk of answers, and with ``out_of_domain``."""
        if not generation.spans:
            return generation
        many = generation.has_spans_out_of_domain
        if self.answer is None:
            return generation.model_copy(update={"out_of_domain": many})
        fitted = self.for_answer(generation)
        features = self._features_of_answer(generation, fitted)
        outside = fitted.is_out_of_domain(features)
        return generation.model_copy(
            update={
                "answer_risk": fitted(features),
                "answer_threshold": threshold_of(fitted),
                "calibrated_on": fitted.data,
                "answer_out_of_domain": outside,
                "out_of_domain": many or outside,
            }
        )

    def for_answer(self, generation: Generation) -> FittedRisk:
        """The fitted risk that applies to an answer, by whether its prompt holds a passage.

        Raises:
            CalibrationError: the calibrator has no risk of answers.
        """
        if self.answer is None:
            raise CalibrationError("this calibrator was fitted on spans: it has no risk of an answer as a whole.")
        if self.closed_book is not None and generation.closed_book:
            return self.closed_book
        return self.answer

    def is_out_of_domain(self, span: SpanStatistics) -> bool:
        """Whether a span is unlike those that the calibrator was fitted on, so that its risk may be meaningless.

        Raises:
            CalibrationError: the calibrator has no risk of spans, or a feature that it needs was not measured.
        """
        return self._of_spans.is_out_of_domain(self._features_of(span))

    def is_answer_out_of_domain(self, generation: Generation) -> bool:
        """Whether an answer as a whole is unlike those that the calibrator was fitted on.

        Raises:
            CalibrationError: the calibrator has no risk of answers, or a feature that it needs was not measured.
        """
        fitted = self.for_answer(generation)
        return fitted.is_out_of_domain(self._features_of_answer(generation, fitted))

    def flags(self, span: SpanStatistics) -> bool:
        """Whether a span's risk reaches the threshold.

        Raises:
            CalibrationError: no threshold was chosen, or the calibrator has no risk of spans.
        """
        return self._of_spans.flags(self._features_of(span))

    def flags_answer(self, generation: Generation) -> bool:
        """Whether an answer's risk reaches the threshold; raises as :meth:`flags` does."""
        fitted = self.for_answer(generation)
        return fitted.flags(self._features_of_answer(generation, fitted))

    def _features_of(self, span: SpanStatistics) -> list[float]:
        """The span's features that the risk of spans was fitted on."""
        values = dict(zip(SPAN_FEATURES, span_features(span), strict=True))
        return [values[name] for name in self._of_spans.features]

    def _features_of_answer(self, generation: Generation, fitted: FittedRisk) -> list[float]:
        """The answer's features that a risk of answers was fitted on."""
        values = dict(zip(ANSWER_FEATURES, answer_features(generation), strict=True))
        return [values[name] for name in fitted.features]

    @property
    def _of_spans(self) -> FittedRisk:
        if self.span is None:
            raise CalibrationError("this calibrator was fitted on whole answers: it has no risk of a span.")
        return self.span

    def obstacle(self, model_name: str, dtype: str, shape: tuple[int, int, int]) -> str | None:
        """Why the calibrator cannot be used with a model at all; `None` if it can.

        Args:
            model_name: the model's name.
            dtype: the data type of its weights, such as ``"float32"``.
            shape: its numbers of layers and of attention heads per layer, and the width of its hidden states.
        """
        num_layers, num_heads, hidden_size = shape
        if any(layer >= num_layers or head >= num_heads for layer, head in self.heads or ()):
            return (
                f"it needs the attention of heads that {model_name} does not have: the model has {num_layers} layers "
                f"of {num_heads} heads"
            )
        found = None if self.probe is None else self.probe.obstacle(model_name, dtype, num_layers, hidden_size)
        return None if found is None else f"it has a probe, and {found}"

    def mismatches(self, model_name: str, config: CocoaConfig | None, num_layers: int) -> list[str]:
        """The differences between a model and its settings (`None`: unknown) and those of the fit, as messages."""
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


@lru_cache(maxsize=1)
def embedded_calibrator() -> RiskCalibrator:
    """The embedded model's calibrator."""
    return RiskCalibrator.load(EMBEDDED)


def logistic(z: float) -> float:
    """1 / (1 + e^-z), without overflow."""
    if z >= 0:
        return 1 / (1 + math.exp(-z))
    power = math.exp(z)
    return power / (1 + power)
