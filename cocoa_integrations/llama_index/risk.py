"""Functions that read the risk from responses and from the outputs of agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index.core.base.llms.types import ThinkingBlock

from cocoa_engine.errors import ConfigError
from cocoa_engine.report import RISK_KEY, RiskReport, ValueReport
from cocoa_integrations.llama_index.answers import REPORTS_KEY
from cocoa_integrations.tool_calling import fields_of_report


def get_risk(answer: Any) -> RiskReport:
    """The risk report of a complete answer.

    The spans of a compact report are completed with what can be derived; ``score`` and ``chosen`` of spans and the list
    of all ``claims`` are only in a full report. (In scripts without spaces, claims end where tokens end; a compact
    report has no tokens.) See ``risk_metadata`` of :class:`CocoaLLM`.

    Args:
        answer: a ``ChatResponse`` or ``CompletionResponse`` (for a stream, the last one), the ``AgentOutput`` of an
            agent, a response of :class:`RiskQueryEngine` or :class:`RiskChatEngine`, or a report, such as one of
            :func:`collect_risk`.

    Raises:
        ConfigError: the answer has no report.
        DataError: the metadata of the answer holds something else than a report.
    """
    if isinstance(answer, RiskReport):
        return answer
    report = answer if isinstance(answer, Mapping) and "spans" in answer else _wire_of(answer)
    if report is None:
        raise ConfigError(
            f"this {type(answer).__name__} has no risk report; take it from a response of CocoaLLM (for a stream, the "
            "last one), wrap the engine in RiskQueryEngine or RiskChatEngine, or collect it with collect_risk(); with "
            "risk_metadata='none' responses have none"
        )
    return RiskReport.from_wire(dict(report)).expanded(*_texts_of(answer))


def argument_risks(answer: Any) -> dict[str, dict[str, ValueReport]]:
    """The risk of each argument of each tool call of an answer.

    Args:
        answer: as for :func:`get_risk`.

    Returns:
        By the id of the call, then by the name of the argument: ``risk`` (the highest of its spans; see ``calibrated``
        of the report), ``con_mlds`` and ``f_mlds`` (means over its spans), ``log_prob`` (of its tokens), ``start`` and
        ``end`` (in the generated text) and the numbers of its ``spans``. The values inside an argument follow by their
        paths, such as ``$.people[0].age``.

    Raises:
        ConfigError: the answer has no report.
    """
    return {call.id: call.arguments for call in _structured(answer).tool_calls}


def field_risks(answer: Any) -> dict[str, ValueReport]:
    """The risk of each field of a structured answer, such as a response of ``as_structured_llm(...)``.

    ``structured_predict`` returns the object alone: collect its report with :func:`collect_risk`. Of several tool calls
    it is the first.

    Args:
        answer: as for :func:`get_risk`.

    Returns:
        By JSON path (``$.person.age``, ``$.items[0].name``, ``$['other name']``), in the order of the answer: the same
        values as in :func:`argument_risks`. Objects and lists have an entry, and so has every value in them. Empty for
        an answer without structure.

    Raises:
        ConfigError: the answer has no report.
    """
    return fields_of_report(_structured(answer))


def _structured(answer: Any) -> RiskReport:
    """The report with the fields or arguments: of a response that shows one answer, the report of this answer."""
    report = get_risk(answer)
    metadata = getattr(answer, "metadata", None)
    if report.fields or report.tool_calls or len(report.parts) != 1 or not isinstance(metadata, Mapping):
        return report
    reports = metadata.get(REPORTS_KEY) or []
    number = report.parts[0].report
    return RiskReport.from_wire(reports[number]) if number < len(reports) else report


def _wire_of(answer: Any) -> Mapping[str, Any] | None:
    for name in ("additional_kwargs", "raw", "metadata"):
        holder = getattr(answer, name, None)
        if isinstance(holder, Mapping) and holder.get(RISK_KEY) is not None:
            report: Mapping[str, Any] = holder[RISK_KEY]
            return report
    return None


def _texts_of(answer: Any) -> tuple[str, str]:
    """The text of a response and that of its reasoning: its own, or those of its message."""
    message = getattr(answer, "message", None) or getattr(answer, "response", None)
    text = getattr(answer, "text", None) if message is None else getattr(message, "content", message)
    blocks = [block for block in getattr(message, "blocks", ()) if isinstance(block, ThinkingBlock)]
    return text if isinstance(text, str) else "", "".join(block.content or "" for block in blocks)
