"""Answers with calls: as a chat template writes them, token by token, and what is passed on while they come."""

import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ChatTemplateError
from cocoa_integrations.chat_service.local import GrowingAnswer
from cocoa_integrations.tool_calling.calls import Reading
from cocoa_integrations.tool_calling.derivation import Probe
from cocoa_integrations.tool_calling.formats import template_format


def written(
    engine: CocoaEngine, tools: list[Any], calls: Iterable[tuple[str, dict[str, Any]]], text: str, thought: str = ""
) -> str | None:
    """An answer as the template writes it, with its end; ``None`` if the template refuses it."""
    style, described = template_format(engine)
    assert style is not None
    made = [{"name": name, "arguments": json.dumps(given) if style.encoded else given} for name, given in calls]
    listed = [{"type": "function", "id": f"abcdefgh{number}", "function": call} for number, call in enumerate(made)]
    message = {"role": "assistant", "content": text, "tool_calls": listed}
    options = {"tools": tools} if described else {}

    def render(messages: Any, begin: bool) -> str | None:
        try:
            return engine.render_chat(messages, add_generation_prompt=begin, split_special_tokens=False, **options)
        except ChatTemplateError:
            return None

    return Probe(render).written({**message, "reasoning_content": thought} if thought else message)


def tokens_of(engine: CocoaEngine, answer: str) -> tuple[list[str], list[list[int]]]:
    """The text that each token of an answer adds, and its id."""
    track, parts = engine.detokenizer(), list[str]()
    ids = engine.tokenizer.encode(answer, add_special_tokens=False)
    for token_id in ids:
        start = len(track.text)
        track.push(token_id)
        parts.append(track.text[start:])
    return parts, [[token_id] for token_id in ids]


def pieces_of(
    plan: Any, parts: list[str], ids: list[list[int]] | None = None, *, splits: bool = True
) -> tuple[list[Any], Reading]:
    """What is passed on of an answer whose parts come one after the other, and what is read of the whole."""
    growing: Any = GrowingAnswer(plan, splits=splits, entry_of=lambda *_: None)  # type: ignore[arg-type, return-value]
    pieces, end = [], 0
    for number, part in enumerate(parts):
        start, end = end, end + len(part)
        token_ids = [] if ids is None else ids[number]
        pieces += growing.add(SimpleNamespace(text=part, token_ids=token_ids, start=start, end=end))
    held, rest, reading = growing.finish()
    return [*pieces, *held, rest], reading


def added_up(pieces: list[Any]) -> list[Any]:
    """The text of the pieces, and the name, the arguments as they were written, and the error of each call."""
    calls: list[list[Any]] = []
    for delta in (delta for piece in pieces for delta in piece.calls):
        if delta.number == len(calls):
            calls.append([delta.name, "", None])
        calls[delta.number][1] += delta.written
        calls[delta.number][2] = delta.error
    return ["".join(piece.content for piece in pieces), *calls]
