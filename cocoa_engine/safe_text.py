"""Foreign text in messages and logs: control characters and lone surrogates become visible, long texts shorter."""

import logging
import reprlib
from numbers import Number

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
    logger = logging.getLogger(name)
    logger.addFilter(_make_safe)
    return logger


def _make_safe(record: logging.LogRecord) -> bool:
    """Replace the arguments of a line, except numbers, by texts that neither a terminal nor a new line interprets."""
    if isinstance(record.args, tuple):
        shown = (arg if isinstance(arg, Number) else one_line(bounded(str(arg), MESSAGE_LIMIT)) for arg in record.args)
        record.args = tuple(shown)
    return True
