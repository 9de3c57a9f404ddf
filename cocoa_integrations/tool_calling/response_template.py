"""Calls that transformers parses by the response template of a tokenizer, for models whose format is not derived."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cocoa_integrations.tool_calling.calls import Call, Reading
from cocoa_integrations.tool_calling.json_text import can_be_sent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def has_response_template(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether transformers can parse the answers of a model."""
    return getattr(tokenizer, "response_template", None) is not None and hasattr(tokenizer, "parse_response")


def parsed_response(
    tokenizer: "PreTrainedTokenizerBase", text: str, tools: Sequence[Mapping[str, Any]], offsets: tuple[int, int]
) -> Reading | None:
    """The text and the calls of an answer; ``None`` if no call is parsed. ``offsets`` are those of the answer."""
    try:
        message = tokenizer.parse_response(text, prefix="", tools=[dict(tool) for tool in tools])
    except Exception:  # the template of a tokenizer may not describe the text
        return None
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    calls = [
        Call(function["name"], json.dumps(function["arguments"], ensure_ascii=False), function["arguments"], offsets)
        for function in functions
        if isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), dict)
        and can_be_sent(function)
    ]
    return Reading(message.get("content") or "", calls) if calls else None
