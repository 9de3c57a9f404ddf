"""The risk of an engine's calls: which value of a span it is, its threshold, and where the calibrator applies."""

import copy
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import ANSWER_TOKENS, improbability
from cocoa_engine.errors import CalibrationError, ConfigError
from cocoa_engine.execution.backends import Backend
from cocoa_engine.execution.session import Session
from cocoa_engine.methods.retrieval_heads import (
    RetrievalHeads,
    RightAnswers,
    are_spread,
    heads_of_model,
    source_heads,
)
from cocoa_engine.model.language_model import dtype_name
from cocoa_engine.risk.calibrator import AnswerT, CalibrationWarning, RiskCalibrator, embedded_calibrator
from cocoa_engine.risk.fitted import threshold_of
from cocoa_engine.spans import RiskSource, Span

ANSWER_THRESHOLD = 0.9
"""The rank among right answers from which an answer is too risky: a tenth of right answers like these reach it."""

GENERAL = RightAnswers.model_validate_json((Path(__file__).parent / "right_answers.json").read_bytes())
"""The right answers of the models that were measured, for models whose own were not (`cocoa heads` measures them)."""

RANK_THRESHOLD = 0.95
"""The risk from which a span is flagged by its source attention: it is among the twentieth of the model's spans that
attend least to their source. Of 108 right answers about a passage, 82 % have no such span."""


class RiskOfSpan(NamedTuple):
    """The risk of one span: its value (`None` if it was not measured), its source, whether it reaches the threshold."""

    value: float | None
    source: RiskSource
    flagged: bool


@dataclass(frozen=True)
class RiskMeasure:
    """How the risk of a span is computed in one call.

    Attributes:
        source: the value that the risk is computed from.
        calibrator: the calibrator of the call, which may estimate the risk of spans, of answers, or of both.
        heads: the model's retrieval heads, whose reference distribution ranks source attention.
        otherwise: what the risk of a span is computed from if ``source`` was not measured for it; `None`: it has none.
        spread: whether the source attention is that of heads that were not searched for.
        right_answers: the right answers that give the threshold of ``token_probability``.
        ranks: whether an answer without a calibrated risk is ranked among them.
    """

    source: RiskSource
    calibrator: RiskCalibrator | None = None
    heads: RetrievalHeads | None = None
    otherwise: RiskSource | None = None
    spread: bool = False
    right_answers: RightAnswers = GENERAL
    ranks: bool = False

    def __call__(self, span: Span) -> RiskOfSpan:
        """The risk of a span."""
        source, value = self.source, self._value(self.source, span)
        if value is None and self.otherwise is not None:
            source, value = self.otherwise, self._value(self.otherwise, span)
        return RiskOfSpan(value, source, reaches(value, self.threshold_of(source)))

    def is_out_of_domain(self, span: Span) -> bool:
        """Whether a span's risk is the calibrator's, and the span is unlike those that it was fitted on."""
        return self.source == "calibrator" and cast(RiskCalibrator, self.calibrator).is_out_of_domain(span)

    def threshold_of(self, source: RiskSource | None) -> float | None:
        """The threshold of a source of risk; `None` if there is none, as for a raw MLDS."""
        if source == "calibrator" and self.calibrator is not None and self.calibrator.span is not None:
            return threshold_of(self.calibrator.span)
        if source == "token_probability":
            return self.right_answers.span_threshold
        return RANK_THRESHOLD if source == "source_attention" else None

    def rated(self, generation: AnswerT) -> AnswerT:
        """The answer with its risk as a whole: the calibrator's, or its rank among right answers."""
        if self.calibrator is not None:
            generation = self.calibrator.rated(generation)
        by_calibrator = self.calibrator is not None and self.calibrator.answer is not None
        if not self.ranks or by_calibrator or not generation.spans:
            return generation
        log_probs = [log_prob for span in generation.spans for log_prob in span.token_log_probs]
        return generation.model_copy(
            update={
                "answer_risk": self.right_answers.rank(log_probs),
                "answer_risk_source": "rank",
                "answer_threshold": ANSWER_THRESHOLD,
                "calibrated_on": self.right_answers.of,
                "answer_out_of_domain": len(log_probs) > ANSWER_TOKENS,
            }
        )

    def _value(self, source: RiskSource, span: Span) -> float | None:
        if source == "calibrator":
            return cast(RiskCalibrator, self.calibrator).risk(span)
        if source == "source_attention":
            attention = span.source_attention
            return None if attention is None else cast(RetrievalHeads, self.heads).rank(attention)
        if source == "token_probability":
            return token_risk(span.token_log_probs)
        return span.f_mlds if source == "f_mlds" else span.con_mlds


def right_answers_of(heads: RetrievalHeads | None) -> RightAnswers:
    """A model's own right answers, measured with its heads, or else those of the measured models."""
    return (heads.right_answers if heads is not None else None) or GENERAL


def token_risk(token_log_probs: list[float]) -> float:
    """1 - p of the least probable token of a span, in [0, 1]."""
    return improbability(min(token_log_probs))


def reaches(risk: float | None, threshold: float | None) -> bool:
    """Whether a risk is at least a threshold. A risk that is not a finite number reaches every threshold."""
    return threshold is not None and risk is not None and not risk < threshold


def risk_measure(
    config: CocoaConfig,
    calibrator: RiskCalibrator | None = None,
    heads: RetrievalHeads | None = None,
    *,
    has_source: bool = False,
) -> RiskMeasure:
    """The risk of a call's spans, by ``CocoaConfig.risk``.

    Raises:
        ConfigError: the risk that is asked for cannot be measured: there is no calibrator for spans, or no reference
            distribution of source attention.
    """
    fitted = calibrator is not None and calibrator.span is not None
    ranks = heads is not None and heads.reference is not None
    if config.risk == "auto":
        if fitted:
            return RiskMeasure("calibrator", calibrator)
        if has_source and ranks:
            return RiskMeasure("source_attention", calibrator, heads, otherwise="token_probability")
        return RiskMeasure("token_probability", calibrator)
    if config.risk == "calibrator" and not fitted:
        raise ConfigError(
            "risk='calibrator' needs a calibrator that was fitted on spans for this model and these settings; fit "
            "one with `cocoa calibrate` and pass it as calibrator, or leave risk at 'auto'."
        )
    if config.risk == "source_attention" and not ranks:
        raise ConfigError(
            "risk='source_attention' needs the model's retrieval heads and a reference distribution; find both with "
            "`cocoa heads`, or leave risk at 'auto'."
        )
    return RiskMeasure(config.risk, calibrator, heads)


UNLIKE = (
    "an answer is unlike those that the calibrator was fitted on (out_of_domain). Its risks may be meaningless. Fit a "
    "calibrator on answers like yours (cocoa calibrate), or use none (calibrator=None, or --calibrator none)."
)


class RiskPolicy:
    """Computes the risks of an engine's calls, with its calibrator where that applies.

    Raises:
        CalibrationError: the calibrator's file cannot be read, or it cannot be used with this model.
    """

    def __init__(self, session: Session, calibrator: RiskCalibrator | str | Path | None) -> None:
        self._session = session
        self._automatic = calibrator == "auto"
        self._warned: set[str] = set()
        self._ranks = True
        if self._automatic:
            embedded = embedded_calibrator()
            fits = embedded.model_name == session.model_name and self._obstacle(embedded) is None
            self.calibrator: RiskCalibrator | None = embedded if fits else None
            return
        self.calibrator = RiskCalibrator.of(calibrator)
        if self.calibrator is not None and (obstacle := self._obstacle(self.calibrator)):
            raise CalibrationError(
                f"the calibrator cannot be used with this model: {obstacle}. Fit one for it (cocoa calibrate), or use "
                "none."
            )

    def spans_only(self) -> "RiskPolicy":
        """The same without a risk of answers."""
        other = copy.copy(self)
        other.calibrator = None if self.calibrator is None else self.calibrator.spans_only()
        other._ranks = False
        return other

    def fitting(self, config: CocoaConfig) -> RiskCalibrator | None:
        """The calibrator, unless it is the default one and was fitted for other settings."""
        if self.calibrator is None or (self._automatic and self._differences(self.calibrator, config)):
            return None
        return self.calibrator

    def applying(self, config: CocoaConfig, backend: Backend | None = None) -> RiskCalibrator | None:
        """The calibrator that applies to a call with these settings, run by a backend (default: the model's); the
        default one only where what it needs is measured."""
        calibrator = self.fitting(config)
        if calibrator is None or not self._automatic:
            return calibrator
        return calibrator if measures_source(calibrator, backend or self._session.backend) else None

    def check(self, config: CocoaConfig) -> None:
        """Check the risk that ``config`` asks for, without looking at the backend."""
        risk_measure(config, self.fitting(config), heads_of_model(config.decore_heads, self._session.model))

    def measure(
        self, config: CocoaConfig, source: object = None, *, of_given_text: bool = False, backend: Backend | None = None
    ) -> RiskMeasure:
        """How the risks of a call are computed, see :func:`risk_measure`. The embedded risk of answers is not for given
        texts."""
        calibrator, model = self.applying(config, backend), self._session.model
        if of_given_text and self._automatic and calibrator is not None:
            calibrator = calibrator.spans_only()
        heads = of_model = heads_of_model(config.decore_heads, model)
        fitted = None if calibrator is None else calibrator.heads
        measured = source_heads(config.decore_heads, model, fitted)
        if fitted is not None and set(measured) != set(source_heads(config.decore_heads, model)):
            heads = None  # the calibrator's heads are measured, and the reference distribution is of others
        measure = risk_measure(config, calibrator, heads, has_source=bool(source))
        return replace(
            measure,
            spread=are_spread(measured, of_model, model),
            right_answers=right_answers_of(of_model),
            ranks=self._ranks and not of_given_text,
        )

    def warn_of_domain(self, outside: bool) -> None:
        """Warn, once for each engine, if an answer is outside the domain of the calibrator."""
        if outside and "domain" not in self._warned:
            self._warned.add("domain")
            warnings.warn(CalibrationWarning(UNLIKE), stacklevel=3)

    def warn_of_mismatch(self, config: CocoaConfig | None) -> None:
        """Warn, once for each difference, that the calibrator was fitted with another model or other settings."""
        if self.calibrator is None or self._automatic:
            return
        differences = self._differences(self.calibrator, config)
        if fresh := [difference for difference in differences if difference not in self._warned]:
            self._warned.update(fresh)
            warnings.warn(CalibrationWarning.of(fresh), stacklevel=4)

    def _obstacle(self, calibrator: RiskCalibrator) -> str | None:
        """Why the calibrator cannot be used with this model; `None` if it can."""
        model = self._session.model
        layers, heads = model.num_layers, model.num_heads or 0
        width = getattr(model.config, "hidden_size", None) or 0
        name, dtype = self._session.model_name, dtype_name(model)
        if any(layer >= layers or head >= heads for layer, head in calibrator.heads or ()):
            has = f"the model has {layers} layers of {heads} heads"
            return f"it needs the attention of heads that {name} does not have: {has}"
        for probe in calibrator.probes.values():
            if (name, dtype) != (probe.model_name, probe.dtype):
                fitted = f"{probe.model_name} in {probe.dtype}"
                return f"it has a probe that was fitted on the states of {fitted}, not of {name} in {dtype}"
            if probe.layer > layers or len(probe.weights) != width:
                read = f"{len(probe.weights)} numbers after layer {probe.layer}"
                return f"it has a probe that reads {read}; {name} has {layers} layers of {width} numbers"
        return None

    def _differences(self, calibrator: RiskCalibrator, config: CocoaConfig | None) -> list[str]:
        """The differences between this model and these settings and those that the calibrator was fitted for."""
        model = self._session.model
        differences = calibrator.mismatches(self._session.model_name, config, model.num_layers)
        path = None if config is None else config.decore_heads
        if calibrator.heads and path is not None and set(source_heads(path, model)) != set(calibrator.heads):
            differences.append(f"the source attention is that of the heads in {path}, not of those of the fit")
        return differences


def measures_source(calibrator: RiskCalibrator, backend: Backend) -> bool:
    """Whether a backend sees the attention of the heads that a calibrator needs, if it needs any."""
    return not calibrator.heads or (not backend.model.is_divided and backend.sees_attention)
