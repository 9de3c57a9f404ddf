"""Reading risk out of what the models return: plain functions, usable as steps of a chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, Generation

from cocoa_engine import Generation as EngineGeneration
from cocoa_engine.errors import ConfigError
from cocoa_integrations.limits import Metric, highest, require_metric
from cocoa_integrations.metadata import RISK_KEY, SPANS_KEY, all_spans, risk_report

Answer = BaseMessage | Generation | EngineGeneration | Mapping[str, Any]
"""A message from ``ChatCocoa`` (its streamed chunks added up, too), a generation from ``CocoaLLM``, the engine's own
``cocoa_engine.Generation``, or the ``{"text": ..., "risk": ...}`` of ``CocoaLLM.with_risk()`` and
``RiskOutputParser``."""


def get_risk(answer: Answer) -> dict[str, Any]:
    """The risk report of a whole answer, as ``RunnableLambda(get_risk)`` in a chain.

    Args:
        answer: see :data:`Answer`.

    Raises:
        ConfigError: it carries no report: a plain text, an answer of another model, or one broken off.
    """
    report = find_risk(answer)
    if report is not None:
        return report
    name = type(answer).__name__
    if isinstance(answer, (BaseMessage, Generation, Mapping)) and get_spans(answer):
        raise ConfigError(
            f"this {name} is a part of an answer, or one broken off, and only a whole answer has a risk report; add "
            "all chunks of the stream up, or read what is there with get_spans()"
        )
    raise ConfigError(
        f"this {name} carries no risk report; take it from ChatCocoa's message before it is parsed into text, from "
        "CocoaLLM.with_risk(), or collect it with get_risk_callback()"
    )


def max_risk(answer: Answer, metric: Metric = "risk") -> float:
    """The highest figure of any span of a whole answer, for conditions such as those of ``RunnableBranch``.

    Spans of nothing but whitespace do not count, though they do in the report's own ``max_risk``.

    Args:
        answer: see :data:`Answer`.
        metric: ``risk`` (in [0, 1] with a calibrator, otherwise the raw MLDS of the configured metric), ``con_mlds``,
            ``f_mlds``, or ``self_information`` (-log p of the span, in nats).

    Raises:
        ConfigError: the answer carries no report, or the metric is unknown.
    """
    require_metric(metric)
    return highest(get_risk(answer)["spans"], metric)


def get_spans(answer: Answer) -> list[dict[str, Any]]:
    """The spans that a streamed chunk or an answer carries, also one broken off; none if it carries none."""
    if isinstance(answer, ChatGeneration):
        answer = answer.message
    if isinstance(answer, BaseMessage):
        return list(answer.additional_kwargs.get(SPANS_KEY, ()))
    if isinstance(answer, EngineGeneration):
        return all_spans(answer)
    if isinstance(answer, Mapping):
        return list((find_risk(answer) or {}).get("spans", ()))
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
    if isinstance(answer, EngineGeneration):
        return risk_report(answer)
    if isinstance(answer, Mapping):
        report = answer.get("risk")
        return report if isinstance(report, dict) and "spans" in report else None
    return None
