"""Checks of text that users give."""

from __future__ import annotations

import re

from cocoa_engine.errors import PromptError

_SURROGATE = re.compile("[\ud800-\udfff]")


def require_unicode(text: str, what: str) -> None:
    """Refuse text that cannot be encoded. A lone surrogate is half of a character, and tokenizers do not accept it.

    Args:
        text: the text.
        what: the name of the text in the error message.

    Raises:
        PromptError: the text has a lone surrogate.
    """
    if (found := _SURROGATE.search(text)) is not None:
        raise PromptError(
            f"the {what} has a lone surrogate (U+{ord(found.group()):04X}) at character {found.start()}, which is not "
            "valid Unicode. Decode the text it came from as UTF-16 or with errors='replace', or remove the character."
        )
