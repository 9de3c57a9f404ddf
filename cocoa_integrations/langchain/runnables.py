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


def argument_risks(message: BaseMessage) -> dict[str, dict[str, dict[str, Any]]]:
    """What was measured of each argument of each tool call of an answer.

    Returns:
        By the call's id, then by the argument's name: ``risk`` (the highest of its spans; see ``calibrated`` of the
        report), ``con_mlds``, ``f_mlds`` (their means), ``log_prob`` (of its own tokens), ``start`` and ``end`` (in the
        generated text) and the numbers of its ``spans``. Of nested arguments only the outermost are told apart.

    Raises:
        ConfigError: it carries no report, as for :func:`get_risk`.
    """
    return {call["id"]: call["arguments"] for call in get_risk(message).get("tool_calls", ())}


def find_risk(answer: Any) -> dict[str, Any] | None:
    """The risk report of an answer, if it carries one."""
    if isinstance(answer, ChatGeneration):
        answer = answer.message
    if isinstance(answer, BaseMessage):
        return answer.response_metadata.get(RISK_KEY)
    if isinstance(answer, Generation):
        return (answer.generation_info or {}).get(RISK_KEY)
    return None
