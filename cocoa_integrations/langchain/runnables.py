"""Reading risk out of what the models return: plain functions, usable as steps of a chain."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, Generation

from cocoa_engine.errors import ConfigError
from cocoa_integrations.metadata import RISK_KEY, SPANS_KEY


def get_risk(answer: BaseMessage | Generation) -> dict[str, Any]:
    """The risk report of a whole answer, as ``RunnableLambda(get_risk)`` in a chain.

    Args:
        answer: a message from ``ChatCocoa`` (its streamed chunks added up, too) or a generation from ``CocoaLLM``.

    Raises:
        ConfigError: it carries no report: a plain text, an answer of another model, or one broken off.
    """
    report = find_risk(answer)
    if report is None:
        raise ConfigError(
            f"this {type(answer).__name__} carries no risk report; take it from ChatCocoa's message before it is "
            "parsed into text, or collect it with get_risk_callback()"
        )
    return report


def get_spans(answer: BaseMessage | Generation) -> list[dict[str, Any]]:
    """The spans that a streamed chunk or an answer carries, also one broken off; none if it carries none."""
    if isinstance(answer, ChatGeneration):
        answer = answer.message
    if isinstance(answer, BaseMessage):
        return list(answer.additional_kwargs.get(SPANS_KEY, ()))
    return list((answer.generation_info or {}).get(SPANS_KEY, ()))


def find_risk(answer: Any) -> dict[str, Any] | None:
    """The risk report of an answer, if it carries one."""
    if isinstance(answer, ChatGeneration):
        answer = answer.message
    if isinstance(answer, BaseMessage):
        return answer.response_metadata.get(RISK_KEY)
    if isinstance(answer, Generation):
        return (answer.generation_info or {}).get(RISK_KEY)
    return None
