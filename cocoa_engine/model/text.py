"""Checks of text that users give."""

import re
from collections.abc import Mapping
from typing import Any

from cocoa_engine.errors import PromptError, short_repr

TEXT_BLOCKS = {
    **dict.fromkeys(("text", "input_text", "output_text", "text-plain"), "text"),
    "refusal": "refusal",
}
"""The types of content blocks that are text, and the member of the block that has it."""

THOUGHT = "thinking"
"""The type of a content block that is reasoning, and the member of the block that has it."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def require_unicode(text: str, what: str) -> None:
    """Check that ``what`` is text without a lone surrogate, half of a character. Tokenizers do not accept others."""
    if not isinstance(text, str):
        raise PromptError(f"the {what} must be a str, not {type(text).__name__}.")
    if (half := _SURROGATE.search(text)) is not None:
        raise PromptError(
            f"the {what} has a lone surrogate (U+{ord(half.group()):04X}) at character {half.start()}, which is not "
            "valid Unicode. Decode the text it came from as UTF-16 or with errors='replace', or remove the character."
        )


def block_text(block: Any, where: str, *, thoughts: bool = False) -> str:
    """The text of a content block of a message, a mapping with ``type``. Only its type says whether it is text.

    ``thoughts``: blocks of reasoning are accepted, too.
    """
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise PromptError(f"{short_repr(block)} in {where} has no type; the model reads text only")
    member = THOUGHT if thoughts and kind == THOUGHT else TEXT_BLOCKS.get(kind)
    if member is None:
        raise PromptError(f"content of type {short_repr(kind)} in {where}; the model reads text only")
    text = block.get(member)
    if not isinstance(text, str):
        raise PromptError(f"content of type {kind!r} in {where} has no {member}; the model reads text only")
    return text
