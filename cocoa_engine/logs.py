"""Loggers whose lines show control characters and ends of lines, and are of bounded length."""

from __future__ import annotations

import logging
from numbers import Number

from cocoa_engine.errors import MESSAGE_LIMIT
from cocoa_engine.safe_text import bounded, one_line


def safe_logger(name: str) -> logging.Logger:
    """The logger of a module. Its arguments may be foreign text: each one is shown like the message of an error."""
    logger = logging.getLogger(name)
    logger.addFilter(_make_safe)
    return logger


def _make_safe(record: logging.LogRecord) -> bool:
    """Replace the arguments of a line, except numbers, by texts that neither a terminal nor a new line interprets."""
    if isinstance(record.args, tuple):
        shown = (arg if isinstance(arg, Number) else one_line(bounded(str(arg), MESSAGE_LIMIT)) for arg in record.args)
        record.args = tuple(shown)
    return True
