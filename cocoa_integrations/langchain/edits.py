"""Answers with a changed text: messages, generations, and dicts of text and risk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, Generation

from cocoa_integrations._shared.citations import CITATIONS_KEY
from cocoa_integrations._shared.detail import Stored, compact_report
from cocoa_integrations._shared.edits import Change, replacement
from cocoa_integrations._shared.metadata import RISK_KEY, SPANS_KEY, begin_of
from cocoa_integrations.langchain.detail import stored_in
from cocoa_integrations.langchain.runnables import get_risk


def calls_tools(answer: Any) -> bool:
    """Whether an answer, or a chunk of one, has tool calls."""
    message = answer.message if isinstance(answer, ChatGeneration) else answer
    if isinstance(message, AIMessageChunk) and message.tool_call_chunks:
        return True
    return isinstance(message, AIMessage) and bool(message.tool_calls or message.invalid_tool_calls)


def text_of(answer: Any) -> str:
    """The text of an answer."""
    return answer["text"] if isinstance(answer, Mapping) else answer.text


def with_text(answer: Any, text: str) -> Any:
    """A copy with a different text."""
    if isinstance(answer, ChatGeneration):
        return type(answer)(message=with_text(answer.message, text), generation_info=answer.generation_info)
    if isinstance(answer, Generation):
        return answer.model_copy(update={"text": text})
    if isinstance(answer, Mapping):
        return {**answer, "text": text}
    if isinstance(answer.content, str):
        return answer.model_copy(update={"content": text})
    first = next((block for block in answer.content if _is_text(block) and isinstance(block, dict)), {"type": "text"})
    others = [block for block in answer.content if not _is_text(block)]
    reasoning = [block for block in others if _is_reasoning(block)]
    rest = [block for block in others if not _is_reasoning(block)]
    return answer.model_copy(update={"content": [*reasoning, {**first, "text": text}, *rest]})


def _is_text(block: Any) -> bool:
    return isinstance(block, str) or block.get("type") == "text"


def _is_reasoning(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "reasoning"


def without_tool_calls(answer: Any) -> Any:
    """A copy without tool calls."""
    if isinstance(answer, ChatGeneration):
        return type(answer)(message=without_tool_calls(answer.message), generation_info=answer.generation_info)
    if not isinstance(answer, AIMessage) or not calls_tools(answer):
        return answer
    content = answer.content
    if not isinstance(content, str):
        content = [block for block in content if _is_text(block) or _is_reasoning(block)]
    calls: dict[str, list[Any]] = {"tool_calls": [], "invalid_tool_calls": []}
    if isinstance(answer, AIMessageChunk):
        calls["tool_call_chunks"] = []
    return answer.model_copy(update={"content": content, **calls})


def with_report(answer: Any, report: dict[str, Any], change: Change | None = None) -> Any:
    """A copy with a different report, in the detail that the report has.

    Args:
        answer: the answer, whose text is that of the report.
        report: the report.
        change: what moved the offsets in it. The spans and citations of the answer are moved, too.
    """
    if isinstance(answer, ChatGeneration):
        message = with_report(answer.message, report, change)
        return type(answer)(message=message, generation_info=answer.generation_info)
    if isinstance(answer, Mapping):
        return {**answer, "risk": report}

    def changed(values: Mapping[str, Any] | None, stored: Stored) -> dict[str, Any]:
        values = {**(values or {}), RISK_KEY: compact_report(report, stored) if report.get("compact") else report}
        return values if change is None else _moved(_moved(values, SPANS_KEY, change), CITATIONS_KEY, change, report)

    if isinstance(answer, Generation):
        return answer.model_copy(update={"generation_info": changed(answer.generation_info, Stored(answer.text))})
    update = {"response_metadata": changed(answer.response_metadata, stored_in(answer))}
    if change is not None:
        update["additional_kwargs"] = _moved(answer.additional_kwargs, SPANS_KEY, change)
    return answer.model_copy(update=update)


def _moved(
    values: dict[str, Any], key: str, change: Change, shown_in: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Metadata with the offsets of a list in it moved. With a report they count from the text that is shown."""
    shift = 0 if shown_in is None else begin_of(shown_in)
    return {**values, key: change.moved(values[key], shift)} if key in values else values


def with_change(answer: Any, change: Change) -> Any:
    """A copy with a changed text. All offsets in its metadata follow the change."""
    report = change.of_report(get_risk(answer))
    return with_report(with_text(answer, change.text), report, change)


def replaced(answer: Any, text: str) -> Any:
    """A copy with another text in place of the answer."""
    return with_change(answer, replacement(get_risk(answer), text))
