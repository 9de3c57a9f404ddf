"""The calibrator of an engine: where it applies, its warnings, and how the risks of a call are computed."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CalibrationError
from cocoa_engine.execution.backends import Backend
from cocoa_engine.execution.session import Session
from cocoa_engine.methods.retrieval_heads import are_spread, heads_of_model, source_heads
from cocoa_engine.model.language_model import dtype_name
from cocoa_engine.risk import CalibrationWarning, RiskCalibrator, embedded_calibrator
from cocoa_engine.risk.risk_measure import RiskMeasure, risk_measure

UNLIKE = (
    "an answer is unlike those that the calibrator was fitted on (out_of_domain). Its risks may be meaningless. Fit a "
    "calibrator on answers like yours (cocoa calibrate), or use none (calibrator=None, or --calibrator none)."
)
"""The warning of answers outside the calibrator's domain."""


class RiskPolicy:
    """Computes the risks of an engine's calls, with its calibrator where that applies.

    Args:
        session: the engine's model.
        calibrator: as for :class:`~cocoa_engine.CocoaEngine`.

    Attributes:
        calibrator: the calibrator, if there is one.

    Raises:
        CalibrationError: the calibrator's file cannot be read, or it cannot be used with this model.
    """

    def __init__(self, session: Session, calibrator: RiskCalibrator | str | Path | None) -> None:
        self._session = session
        self._automatic = calibrator == "auto"
        self._warned: set[str] = set()
        self.calibrator = self._embedded() if self._automatic else self._usable(calibrator)

    def spans_only(self) -> RiskPolicy:
        """The same without a calibrator of answers."""
        other = copy.copy(self)
        other.calibrator = None if self.calibrator is None else self.calibrator.spans_only()
        return other

    def fitting(self, config: CocoaConfig) -> RiskCalibrator | None:
        """The calibrator, unless it is the default one and was fitted for other settings."""
        if self.calibrator is None or (self._automatic and self._differences(self.calibrator, config)):
            return None
        return self.calibrator

    def applying(self, config: CocoaConfig, backend: Backend | None = None) -> RiskCalibrator | None:
        """The calibrator that applies to a call with these settings.

        The default calibrator applies only to the settings that it was fitted for, and where what it needs is measured.
        Selects the model's backend, if that has not been done before.

        Args:
            config: the settings of the call.
            backend: the backend that will run the call, if it is known.
        """
        found = self.fitting(config)
        if found is None or (self._automatic and not measures_source(found, backend or self._session.backend)):
            return None
        return found

    def check(self, config: CocoaConfig) -> None:
        """Check the risk that ``config`` asks for, without looking at the backend.

        Raises:
            ConfigError: there is no calibrator, or no reference distribution, for it.
        """
        risk_measure(config, self.fitting(config), heads_of_model(config.decore_heads, self._session.model))

    def measure(
        self, config: CocoaConfig, source: object = None, *, given: bool = False, backend: Backend | None = None
    ) -> RiskMeasure:
        """How the risks of a call are computed. The embedded risk of answers is not used for given texts.

        Args:
            config: the settings of the call.
            source: the passages, if the caller named them.
            given: whether the text is given, not decoded.
            backend: the backend that will run the call, if it is known.

        Raises:
            ConfigError: the risk that ``config`` asks for cannot be measured.
        """
        calibrator, model = self.applying(config, backend), self._session.model
        if given and self._automatic and calibrator is not None:
            calibrator = calibrator.spans_only()
        found = heads = heads_of_model(config.decore_heads, model)
        fitted = None if calibrator is None else calibrator.heads
        measured = source_heads(config.decore_heads, model, fitted)
        if fitted is not None and set(measured) != set(source_heads(config.decore_heads, model)):
            heads = None  # the calibrator's heads are measured, and the reference distribution is of others
        measure = risk_measure(config, calibrator, heads, has_source=bool(source))
        return replace(measure, spread=are_spread(measured, found, model))

    def warn_of_domain(self, outside: bool) -> None:
        """Warn, once for each engine, if an answer is outside the domain of the calibrator."""
        if outside and "domain" not in self._warned:
            self._warned.add("domain")
            warnings.warn(CalibrationWarning(UNLIKE), stacklevel=3)

    def warn_of_mismatch(self, config: CocoaConfig | None) -> None:
        """Warn, once for each difference, that the calibrator was fitted with another model or other settings."""
        if self.calibrator is None or self._automatic:
            return
        found = self._differences(self.calibrator, config)
        if fresh := [difference for difference in found if difference not in self._warned]:
            self._warned.update(fresh)
            warnings.warn(CalibrationWarning.of(fresh), stacklevel=4)

    def _embedded(self) -> RiskCalibrator | None:
        """The embedded model's calibrator, if this is that model."""
        found = embedded_calibrator()
        return found if found.model_name == self._session.model_name and self._obstacle(found) is None else None

    def _usable(self, calibrator: RiskCalibrator | str | Path | None) -> RiskCalibrator | None:
        """The calibrator, read from its file if need be.

        Raises:
            CalibrationError: the file cannot be read, or the calibrator needs other layers, heads or hidden states than
                this model has.
        """
        found = RiskCalibrator.of(calibrator)
        if found is not None and (obstacle := self._obstacle(found)):
            raise CalibrationError(
                f"the calibrator cannot be used with this model: {obstacle}. Fit one for it (cocoa calibrate), or use "
                "none."
            )
        return found

    def _obstacle(self, calibrator: RiskCalibrator) -> str | None:
        """Why the calibrator cannot be used with this model; `None` if it can."""
        model = self._session.model
        heads, width = (getattr(model.config, name, None) or 0 for name in ("num_attention_heads", "hidden_size"))
        shape = (model.num_layers, heads, width)
        return calibrator.obstacle(self._session.model_name, dtype_name(model), shape)

    def _differences(self, calibrator: RiskCalibrator, config: CocoaConfig | None) -> list[str]:
        """The differences between this model and these settings and those that the calibrator was fitted for."""
        model = self._session.model
        found = calibrator.mismatches(self._session.model_name, config, model.num_layers)
        path = None if config is None else config.decore_heads
        if calibrator.heads is not None and path is not None:
            heads = source_heads(path, model)
            if set(heads) != set(calibrator.heads):
                found.append(f"the source attention is that of the heads in {path}, not of those of the fit")
        return found


def measures_source(calibrator: RiskCalibrator, backend: Backend) -> bool:
    """Whether a backend sees the attention of the heads that a calibrator needs, if it needs any."""
    return not calibrator.heads or (not backend.model.is_divided and backend.sees_attention)
