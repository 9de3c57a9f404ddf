"""The log of ``cocoa serve``: no line has text of a request, whoever writes it, and none has control characters."""

from __future__ import annotations

import copy
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from uvicorn.config import LOGGING_CONFIG
from uvicorn.logging import AccessFormatter, ColourizedFormatter, DefaultFormatter

from cocoa_engine.errors import MESSAGE_LIMIT
from cocoa_engine.safe_text import bounded, one_line
from cocoa_integrations.server.errors import described, log_unexpected, logger


class _Lines(ColourizedFormatter):
    """uvicorn's format. A message of another package may quote a request, and is shown only if it may.

    Args:
        shows_texts: whether the log may have text of requests.
        **options: those of uvicorn.
    """

    def __init__(self, shows_texts: Callable[[], bool], **options: Any) -> None:
        super().__init__(**options)
        self._shows_texts = shows_texts

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        record = copy.copy(record)
        record.exc_text = record.stack_info = None  # another handler may have made the text, with the message
        if record.name.startswith("uvicorn"):
            if isinstance(record.args, tuple):
                record.args = tuple(_safe(one) if isinstance(one, str) else one for one in record.args)
        elif not record.name.startswith("cocoa_"):  # whose loggers are safe themselves
            hidden = f"{record.name} has a message (line {record.lineno} of {record.filename}; --log-prompts shows it)"
            record.msg, record.args = "%s", (_safe(record.getMessage()) if self._shows_texts() else hidden,)
        return super().format(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Where an error was raised, and the error."""
        where = "".join(traceback.format_tb(ei[2]))
        return where + described(ei[1], with_message=self._shows_texts())


class _DefaultLines(_Lines, DefaultFormatter): ...


class _AccessLines(_Lines, AccessFormatter): ...


def _safe(text: str) -> str:
    return one_line(bounded(text, MESSAGE_LIMIT))


def log_config(shows_texts: Callable[[], bool]) -> dict[str, Any]:
    """uvicorn's logging, with the messages of this package, and those that other packages have for the root logger.

    Args:
        shows_texts: whether the log may have text of requests.
    """
    config = copy.deepcopy(LOGGING_CONFIG)
    for name, kind in (("default", _DefaultLines), ("access", _AccessLines)):
        config["formatters"][name] |= {"()": kind, "shows_texts": shows_texts}
    of_all = {"handlers": ["default"], "level": "WARNING"}
    config["root"] = of_all
    config["loggers"]["transformers"] = {**of_all, "propagate": False}  # which has a handler of its own
    config["loggers"]["cocoa_integrations.server"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return config


@contextmanager
def unhandled_logged(shows_texts: Callable[[], bool]) -> Iterator[None]:
    """Write warnings, and errors that end a thread or occur in a destructor, to the log. Python would print them.

    The loggers that :func:`log_config` changes have their own handlers again afterwards.

    Args:
        shows_texts: whether the log may have text of requests.
    """

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        own = category.__module__.startswith("cocoa_")
        text = str(message) if own or shows_texts() else "--log-prompts shows its message"
        logger.warning("%s", text if own else f"{category.__name__} in line {lineno} of {filename}: {text}")

    def log(unhandled: Any) -> None:
        if isinstance(unhandled.exc_value, Exception):
            log_unexpected(unhandled.exc_value, with_message=shows_texts())

    before = warnings.showwarning, threading.excepthook, sys.unraisablehook
    loggers = [logging.getLogger(name) for name in (None, *log_config(shows_texts)["loggers"])]
    kept = [(each, each.handlers[:], each.level, each.propagate) for each in loggers]
    warnings.showwarning, threading.excepthook, sys.unraisablehook = show, log, log
    try:
        yield
    finally:
        warnings.showwarning, threading.excepthook, sys.unraisablehook = before
        for each, handlers, level, propagate in kept:
            each.handlers, each.propagate = handlers, propagate
            each.setLevel(level)
