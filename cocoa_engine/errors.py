"""The exceptions of this package, the messages of those about rejected options, and foreign text in messages and logs.

Each message says what is wrong and how to fix it. Errors are raised before any work is done, except those that can only
occur during the work, such as :class:`NonFiniteLogitsError`. In foreign text, control characters and lone surrogates
become visible, and long texts shorter.
"""

import difflib
import logging
import reprlib
from collections.abc import Iterable
from importlib import import_module
from numbers import Number
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

MESSAGE_LIMIT = 800
"""Number of characters of a message that are kept. Messages quote files, and can become arbitrarily long."""

# invisible characters that reverse the direction of text
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))

# these belong to ordinary Hebrew, Arabic and Persian text, and do not reverse letters
_DIRECTION_MARKS = (0x061C, 0x200E, 0x200F)

# C0 controls except tab and newline become their Unicode pictures, DEL likewise, C1 controls a replacement character.
# Characters that reverse the direction of text are shown by name, and so are lone surrogates: text with one cannot be
# encoded, so that printing it fails.
_CONTROLS: dict[int, int | str] = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_CONTROLS |= {0xFFFE: 0xFFFD, 0xFFFF: 0xFFFD}  # no characters, and not allowed in XML, such as SVG
_NAMED = (*_DIRECTIONS, *range(0xD800, 0xE000))
_CONTROLS |= {code: f"<U+{code:04X}>" for code in _NAMED}

# what a terminal interprets beside C0 controls, which JSON escapes itself: DEL, C1 controls, marks of direction
_ESCAPES: dict[int, str] = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *_DIRECTION_MARKS, *_DIRECTIONS)}

_ENDS_OF_LINES: dict[int, str] = {0x0A: "␊", 0x2028: "<U+2028>", 0x2029: "<U+2029>"}

_values = reprlib.Repr()
_values.maxstring = _values.maxother = _values.maxlong = 80
_values.maxlevel, _values.maxdict, _values.maxlist, _values.maxtuple, _values.maxset = 2, 4, 4, 4, 4


def safe(text: str) -> str:
    """The text with visible control characters, so that a terminal or browser does not interpret them.

    Lone surrogates are shown too: the result can be encoded.
    """
    return text.translate(_CONTROLS)


def safe_json(document: str) -> str:
    """The same JSON value, with control characters and marks of direction escaped, so that a terminal shows them."""
    return document.translate(_ESCAPES)


def shortened(text: str, limit: int) -> str:
    """A text of at most ``limit`` characters, at least 100: the middle of a longer one is left out."""
    if len(text) <= limit:
        return text
    shown = limit - 40
    end = shown // 3
    return f"{text[: shown - end]} … ({len(text) - shown} characters left out) … {text[len(text) - end :]}"


def bounded(text: str, limit: int) -> str:
    """At most ``limit`` characters (at least 800) of a text as by :func:`safe`, without the middle of a longer one."""
    shown = safe(shortened(text, limit))
    return shown if len(shown) <= limit else safe(shortened(text, limit // 8))  # `safe` shows one by at most 8


def one_line(text: str) -> str:
    """The text as by :func:`safe`, with visible ends of lines, so that no part of it looks like a line of its own."""
    return safe(text).translate(_ENDS_OF_LINES)


def short_repr(value: object) -> str:
    """Like ``repr``, but of about 80 characters: long texts and collections are shortened."""
    try:
        return safe(shortened(_values.repr(value), 120))
    except Exception:  # an integer of thousands of digits, or a user's class
        return f"<{type(value).__name__}>"


def safe_logger(name: str) -> logging.Logger:
    """The logger of a module. Its arguments may be foreign text: each one is shown like the message of an error."""
    logger = logging.getLogger(name)  # noqa: TID251
    logger.addFilter(_make_safe)
    return logger


def _make_safe(record: logging.LogRecord) -> bool:
    """Replace the arguments of a line, except numbers, by texts that neither a terminal nor a new line interprets."""
    if isinstance(record.args, tuple):
        shown = (arg if isinstance(arg, Number) else one_line(bounded(str(arg), MESSAGE_LIMIT)) for arg in record.args)
        record.args = tuple(shown)
    return True


LISTED = 4  # number of errors that a message lists; it counts the others


class CocoaError(Exception):
    """Base class of every error raised by ``cocoa_engine`` and ``cocoa_integrations``.

    In messages, control characters are shown as visible characters, and the middle of a long message is left out.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        message = [bounded(arg, MESSAGE_LIMIT) if isinstance(arg, str) else arg for arg in args[:1]]
        super().__init__(*message, *args[1:], **kwargs)


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
    details = error.errors(include_url=False)
    for detail in details:  # the collector cannot look into pydantic's error: what the frames hold would stay for ever
        if isinstance(raised := detail.get("ctx", {}).get("error"), Exception):
            raised.__traceback__ = raised.__context__ = raised.__cause__ = None
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


DISTRIBUTIONS = {
    "jsonschema_specifications": "jsonschema-specifications",
    "langchain_core": "langchain-core",
    "llama_index": "llama-index-core",
    "lm_eval": "lm-eval",
    "opentelemetry": "opentelemetry-api",
    "rouge_score": "rouge-score",
    "sklearn": "scikit-learn",
}
"""The packages whose name on the package index differs from the name of their module.

A module of a package that several distributions share is listed by its full name."""


def need(module: str, *, extra: str, what: str) -> Any:
    """Import and return a module of an optional package, which an extra of this package installs.

    Raises:
        MissingExtraError: the package is not installed. The message says ``what`` needs it.
    """
    top = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != top:
            raise  # the package is installed, but one of its own imports is missing
        distribution = DISTRIBUTIONS.get(module) or DISTRIBUTIONS.get(top, top)
        raise MissingExtraError(
            f"{what} needs {distribution}: pip install 'cocoa-integrations[{extra}]'", name=error.name
        ) from None
