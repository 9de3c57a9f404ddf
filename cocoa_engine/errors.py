"""Every exception this package raises on purpose.

Each says what is wrong and how to mend it, and is raised before any work is done unless the fault can only show
itself during the work (:class:`NonFiniteLogitsError`).
"""

from __future__ import annotations

import warnings
from typing import Any


class CocoaError(Exception):
    """Base of every error raised by ``cocoa_engine`` and ``cocoa_integrations``."""


class ConfigError(CocoaError, ValueError):
    """A setting is unknown, out of range or does not fit the model."""


class PromptError(CocoaError, ValueError):
    """The prompt (or the text to score) is empty, of the wrong type, or does not fit the context window."""


class DataError(CocoaError, ValueError):
    """A data file cannot be read, or lacks what it is read for: its encoding, a missing field, one class only, ..."""


LabelledDataError = DataError
"""The name under which :class:`DataError` was first public."""


class MissingExtraError(CocoaError, ImportError):
    """An optional package is not installed. The message holds the command that installs it."""


class ChatTemplateError(CocoaError, ValueError):
    """Chat was asked of a tokenizer that has no chat template, or the messages do not fit the template."""


class UnsupportedModelError(CocoaError, ValueError):
    """The model is not a causal language model that this engine can decode."""


class ModelLoadError(CocoaError, OSError):
    """The model could not be found, read or was refused (pickle weights, remote code)."""


class NonFiniteLogitsError(CocoaError, ArithmeticError):
    """The model (or a logits processor) produced logits from which no token can be chosen."""


class EngineBusyError(CocoaError, RuntimeError):
    """Too many requests wait for their turn already."""


class RequestCancelledError(CocoaError, RuntimeError):
    """The call was cancelled by its :class:`~cocoa_engine.Cancellation`."""


class IncompleteAnswerError(CocoaError, ValueError):
    """A tool call that had to be made was cut off, or cannot be read."""


class GenerationTimeoutError(CocoaError, TimeoutError):
    """An answer took longer than the time it was given."""


class HallucinationRiskError(CocoaError, RuntimeError):
    """An answer is riskier than it was allowed to be.

    Attributes:
        report: the answer's whole ``cocoa_risk`` report; its spans hold the withheld text.
        value: the highest figure of any span.
        threshold: from where on it is too high.
        metric: which figure of the spans it is.
    """

    def __init__(
        self,
        message: str,
        *,
        report: dict[str, Any] | None = None,
        value: float | None = None,
        threshold: float | None = None,
        metric: str | None = None,
    ) -> None:
        super().__init__(message)  # the rest has defaults so that the error can be pickled
        self.report = report
        self.value = value
        self.threshold = threshold
        self.metric = metric


class UnsupportedFeatureError(CocoaError, NotImplementedError):
    """A framework's feature was asked for that these models do not have (tools in a text model)."""


class CalibrationError(CocoaError, ValueError):
    """A calibrator's file is not one, or a calibrator cannot be fitted on what was given."""


def __getattr__(name: str) -> Any:
    if name == "MissingPackageError":
        warnings.warn("MissingPackageError is now MissingExtraError", DeprecationWarning, stacklevel=2)
        return MissingExtraError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
