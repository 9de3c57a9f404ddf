"""The exceptions of this package, and the messages of those about rejected options.

Each message says what is wrong and how to fix it. Errors are raised before any work is done, except those that can only
occur during the work, such as :class:`NonFiniteLogitsError`.
"""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cocoa_engine.safe_text import MESSAGE_LIMIT, bounded, safe, short_repr, shortened

if TYPE_CHECKING:
    from pydantic import ValidationError

LISTED = 4  # number of errors that a message lists; it counts the others


class CocoaError(Exception):
    """Base class of every error raised by ``cocoa_engine`` and ``cocoa_integrations``.

    In messages, control characters are shown as visible characters, and the middle of a long message is left out.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        message = [bounded(arg, MESSAGE_LIMIT) if isinstance(arg, str) else arg for arg in args[:1]]
        super().__init__(*message, *args[1:], **kwargs)


class ForeignError(Exception):
    """An error of another package as the cause of one of ours: its class's name, and its text as in our messages."""


def safe_cause(error: BaseException, earlier: int = 8) -> BaseException:
    """The error to raise one of this package's errors from, for tracebacks: its text may quote foreign text too.

    It is the error itself, unless the text of it or of one of its own causes has control characters, is long or cannot
    be made. Then it is a :class:`ForeignError` with the same traceback. At most ``earlier`` of its causes are kept.
    """
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    safe_one = None if cause is None or not earlier else safe_cause(cause, earlier - 1)
    kind = type(error)
    try:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        shown = bounded(text, MESSAGE_LIMIT)
        message = f"{kind.__name__}: {shown}"
    except Exception:  # a foreign error may fail to give its text; it must not replace the one that is raised from it
        text, shown, message = "", "?", f"<{kind.__name__}>"
    if shown == text and safe_one is cause:
        return error
    stand_in = ForeignError(message)
    stand_in.__cause__ = safe_one
    return stand_in.with_traceback(error.__traceback__)


class ConfigError(CocoaError, ValueError):
    """A setting is unknown, out of range or does not fit the model."""


class PromptError(CocoaError, ValueError):
    """The prompt (or the text to score) is empty, of the wrong type, not Unicode, or longer than the context window."""


class DataError(CocoaError, ValueError):
    """A data file or a server's answer is unusable: wrong encoding, wrong types, missing fields, one class only."""


class MissingExtraError(CocoaError, ImportError):
    """An optional package is not installed. The message gives the command that installs it."""


class ChatTemplateError(CocoaError, ValueError):
    """The tokenizer has no chat template, or the messages do not fit the template."""


class UnsupportedModelError(CocoaError, ValueError):
    """The model is not a causal language model, or lacks what the requested method or measurement needs."""


class ModelLoadError(CocoaError, OSError):
    """The model cannot be found or read, or is refused (pickled weights, remote code)."""


class OutputError(CocoaError, OSError):
    """A file cannot be written: the disk is full, or the folder is read-only."""


class NonFiniteLogitsError(CocoaError, ArithmeticError):
    """The model (or a logits processor) produced logits from which no token can be chosen."""


class ForkedProcessError(CocoaError, RuntimeError):
    """The engine was loaded before the process forked, and is used in the child.

    A fork does not copy torch's threads, for which the child would wait forever. Load the engine in the child, or start
    processes with the method ``spawn``.
    """


class EngineBusyError(CocoaError, RuntimeError):
    """``Runtime.max_queue`` calls are waiting already."""


class WorkerError(CocoaError, RuntimeError):
    """The process that compiles grammars and compares schemas cannot be started. The schema is not the cause."""


class RequestCancelledError(CocoaError, RuntimeError):
    """The call was cancelled by its :class:`~cocoa_engine.Cancellation`, or the process is ending."""


class IncompleteAnswerError(CocoaError, ValueError):
    """A required tool call was cut off or cannot be parsed, or an answer does not fit its schema."""


class GenerationTimeoutError(CocoaError, TimeoutError):
    """An answer took longer than its time limit."""


class HallucinationRiskError(CocoaError, RuntimeError):
    """The risk of an answer reaches its threshold.

    Attributes:
        report: the :class:`~cocoa_engine.report.RiskReport` of the answer. Its spans hold the withheld text.
        value: the highest value of any span.
        threshold: the value from which an answer is withheld.
        metric: the name of the value.
        answer: the withheld answer, with ``gate`` in its report, where a gate of LangChain raised the error.
    """

    def __init__(
        self,
        message: str,
        *,
        report: Any = None,
        value: float | None = None,
        threshold: float | None = None,
        metric: str | None = None,
    ) -> None:
        super().__init__(message)  # the other arguments have defaults, so that the error can be pickled
        self.report = report
        self.value = value
        self.threshold = threshold
        self.metric = metric
        self.answer: Any = None


class UnsupportedFeatureError(CocoaError, NotImplementedError):
    """A feature of the framework that these models do not support, such as tools in a text model."""


class CalibrationError(CocoaError, ValueError):
    """A file is not a calibrator, or a calibrator cannot be fitted or used on the given data."""


def explain(error: "ValidationError") -> str:
    """The first errors of a pydantic validation in one line, with shortened values."""
    lines = []
    details = error.errors(include_url=False, include_context=False)
    for detail in details[:LISTED]:
        message = shortened(detail["msg"].removeprefix("Value error, "), 400)
        name = shortened(".".join(str(part) for part in detail["loc"]), 120)
        # errors without a location have complete messages
        lines.append(f"{name}: {message} (got {short_repr(detail['input'])})" if name else message)
    if len(details) > LISTED:
        lines.append(f"and {len(details) - LISTED} more errors")
    return safe("; ".join(lines))


def unknown(names: Iterable[str], choices: Iterable[str], *, what: str) -> str:
    """A message about unknown names, with the closest known name for each."""
    choices, names = list(choices), list(names)
    listed = ", ".join(f"{what} {short_repr(name)}{did_you_mean(name, choices)}" for name in names[:LISTED])
    if len(names) > LISTED:
        listed += f" and {len(names) - LISTED} more"
    return f"unknown {listed}; known are {', '.join(choices)}"


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` with the closest known name, or an empty string."""
    close = difflib.get_close_matches(str(name)[:100], list(choices), n=1)  # the given name may not be a string
    return f" (did you mean {close[0]!r}?)" if close else ""
