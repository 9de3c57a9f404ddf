"""The calibrator: its file, the features that it takes, and the risks that it gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from cocoa_engine.arguments import SettingsModel
from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import middle_layers
from cocoa_engine.errors import CalibrationError, CocoaError, ConfigError, bounded
from cocoa_engine.files import locked, require_writable, write_file
from cocoa_engine.methods import METHODS
from cocoa_engine.risk.features import (
    ANSWER_FEATURES,
    LATER_FEATURES,
    PROBE_FEATURE,
    SOURCE_FEATURES,
    SPAN_FEATURES,
    AnswerStatistics,
    answer_features,
    span_features,
)
from cocoa_engine.risk.fitted import FittedRisk, Part, Probe, threshold_of
from cocoa_engine.spans import Span


class Settings(Part):
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
        values = config.model_dump(include={*cls.model_fields}, exclude={"middle_layers"})
        layers = config.middle_layers or middle_layers(num_layers)
        return cls(**values, middle_layers=layers, branches=METHODS[config.method].branches)


AnswerT = TypeVar("AnswerT", bound=AnswerStatistics)

EMBEDDED = Path(__file__).parent / "embedded.json"
"""The embedded model's calibrator. The file and docs/explanation/signal.md describe its data and validation."""


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


class RiskCalibrator(SettingsModel, Part):
    """The risk of a span, of an answer as a whole, or of both.

    Its methods raise a :class:`~cocoa_engine.CalibrationError` if it lacks the risk of spans or of answers that they
    need, or if a feature was not measured.

    Attributes:
        model_name: the model it was fitted for.
        settings: the settings it was fitted with.
        heads: the (layer, head) pairs whose attention is the source attention. `None`: the model's attention was not
            seen, and source attention is not a feature.
        probe, answer_probe: the direction of hidden states that is a feature of spans, and that of answers; `None` if
            there is none.
        span: the risk of a span, from :data:`~cocoa_engine.risk.features.SPAN_FEATURES`; `None` if no spans were
            labelled.
        answer: the risk of an answer, from :data:`~cocoa_engine.risk.features.ANSWER_FEATURES`; `None` if no
            answers were labelled.
        closed_book: the risk of an answer to a prompt without a passage (:attr:`.Generation.closed_book`). `None`:
            ``answer`` applies to every prompt.
    """

    _invalid: ClassVar[type[CocoaError]] = CalibrationError
    _what: ClassVar[str] = "field"

    schema_version: Literal[3] = 3
    model_name: str
    settings: Settings
    heads: tuple[tuple[int, int], ...] | None = None
    probe: Probe | None = None
    answer_probe: Probe | None = None
    span: FittedRisk | None = None
    answer: FittedRisk | None = None
    closed_book: FittedRisk | None = None

    @model_validator(mode="after")
    def _of_known_features(self) -> RiskCalibrator:
        if self.span is None and self.answer is None:
            raise ValueError("it has no risk, neither of spans nor of answers")
        if self.heads is not None and (not self.heads or min(map(min, self.heads)) < 0):
            raise ValueError("heads: one or more pairs of a layer and a head are needed, counted from 0")
        if (self.probe and not self.span) or (self.answer_probe and not self.answer):
            raise ValueError("it has a probe, which is a feature of a risk that it does not have")
        if self.closed_book is not None and self.answer is None:
            raise ValueError("it has a risk of answers to short prompts, and none of other answers")
        for fitted, probe, names in (
            (self.span, self.probe, SPAN_FEATURES),
            (self.answer, self.answer_probe, ANSWER_FEATURES),
            (self.closed_book, self.answer_probe, ANSWER_FEATURES),
        ):
            absent = {*(SOURCE_FEATURES if self.heads is None else ()), *(() if probe else (PROBE_FEATURE,))}
            measured = [name for name in names if name not in absent]
            before = [name for name in measured if name not in LATER_FEATURES]
            if fitted is not None and fitted.features not in (measured, before):
                raise ValueError(
                    f"features: this version measures {', '.join(measured)}; another version fitted it, fit it again"
                )
        return self

    @property
    def probes(self) -> dict[str, Probe]:
        """The probes, by the name of the field that has their score in a span."""
        probes = {"probe": self.probe, "answer_probe": self.answer_probe}
        return {name: probe for name, probe in probes.items() if probe is not None}

    @classmethod
    def of(cls, value: RiskCalibrator | str | Path | None) -> RiskCalibrator | None:
        """A calibrator as it is, or read from its file (:meth:`load`); `None` stays `None`."""
        if value is None or isinstance(value, RiskCalibrator):
            return value
        if not isinstance(value, (str, Path)):
            raise ConfigError(f"calibrator must be a RiskCalibrator or its file, not {type(value).__name__}.")
        return cls.load(value)

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
        except CalibrationError as error:
            raise CalibrationError(f"{path} is not a calibrator of this version: {error}") from None
        except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character
            reason = getattr(error, "strerror", None) or error
            raise CalibrationError(f"the calibrator {path} cannot be read: {reason}.") from error

    def save(self, path: str | Path) -> None:
        """Write the calibrator as JSON. An existing file is replaced when the new one is complete.

        Raises:
            ConfigError: another process is writing the file, or it cannot be written, or a text of the calibrator is
                not valid Unicode.
        """
        require_writable(Path(path))
        try:
            text = self.model_dump_json(indent=1) + "\n"
        except ValueError as error:  # pydantic's
            raise ConfigError(f"the calibrator cannot be written: {error}; is its model_name a text?") from None
        with locked(Path(path)):
            write_file(Path(path), text)

    def spans_only(self) -> RiskCalibrator | None:
        """This calibrator without its risk of answers; `None` if nothing is left."""
        of_answers = ("answer", "closed_book", "answer_probe")
        return None if self.span is None else self.model_copy(update=dict.fromkeys(of_answers))

    def risk(self, span: Span) -> float:
        """The risk of a span, in [0, 1]: the estimated probability that a part of it is hallucinated.

        Raises:
            CalibrationError: the calibrator has no risk of spans, or a feature that it needs was not measured.
        """
        fitted, features = self._of_span(span)
        return fitted(features)

    def answer_risk(self, generation: AnswerStatistics) -> float:
        """The risk of an answer, in [0, 1]: the estimated probability that it is wrong as a whole.

        Raises:
            CalibrationError: the calibrator has no risk of answers, or a feature that it needs was not measured.
        """
        fitted, features = self._of_answer(generation)
        return fitted(features)

    def rated(self, generation: AnswerT) -> AnswerT:
        """The answer with ``answer_risk``, if the calibrator has a risk of answers, and with ``out_of_domain``."""
        if not generation.spans:
            return generation
        update: dict[str, Any] = {"out_of_domain": generation.has_spans_out_of_domain}
        if self.answer is not None:
            fitted, features = self._of_answer(generation)
            outside = fitted.is_out_of_domain(features)
            update |= {
                "answer_risk": fitted(features),
                "answer_risk_source": "calibrator",
                "answer_threshold": threshold_of(fitted),
                "calibrated_on": fitted.data,
                "answer_out_of_domain": outside,
                "out_of_domain": generation.has_spans_out_of_domain or outside,
            }
        return generation.model_copy(update=update)

    def is_out_of_domain(self, span: Span) -> bool:
        """Whether a span is unlike those that the calibrator was fitted on, so that its risk may be meaningless.

        Raises:
            CalibrationError: the calibrator has no risk of spans, or a feature that it needs was not measured.
        """
        fitted, features = self._of_span(span)
        return fitted.is_out_of_domain(features)

    def _of_span(self, span: Span) -> tuple[FittedRisk, list[float]]:
        if self.span is None:
            raise CalibrationError("this calibrator was fitted on whole answers: it has no risk of a span.")
        values = dict(zip(SPAN_FEATURES, span_features(span), strict=True))
        return self.span, [values[name] for name in self.span.features]

    def _of_answer(self, generation: AnswerStatistics) -> tuple[FittedRisk, list[float]]:
        if self.answer is None:
            raise CalibrationError("this calibrator was fitted on spans: it has no risk of an answer as a whole.")
        fitted = self.closed_book if self.closed_book is not None and generation.closed_book else self.answer
        values = dict(zip(ANSWER_FEATURES, answer_features(generation), strict=True))
        return fitted, [values[name] for name in fitted.features]

    def mismatches(self, model_name: str, config: CocoaConfig | None, num_layers: int) -> list[str]:
        """The differences between a model and its settings (`None`: unknown) and those of the fit, as messages."""
        differences = []
        if model_name != self.model_name:
            differences.append(f"the model is {model_name}, not {self.model_name}")
        if config is None:
            return differences
        actual = Settings.of(config, num_layers)
        for name, wanted in self.settings:
            value = getattr(actual, name)
            if name == "branches" and value != wanted:
                differences.append(f"method={config.method!r} grows {'' if value else 'no '}candidates to compare")
            elif value != wanted:
                differences.append(f"{name} is {value}, not {wanted}")
        return differences


@lru_cache(maxsize=1)
def embedded_calibrator() -> RiskCalibrator:
    """The embedded model's calibrator."""
    return RiskCalibrator.load(EMBEDDED)
