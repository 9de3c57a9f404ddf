"""Reading the risk of answers of LangChain and LlamaIndex, neither of which is imported."""

from collections.abc import Mapping
from typing import Any

from cocoa_engine import Generation, UnitLevel
from cocoa_engine.errors import ConfigError
from cocoa_engine.report import RISK_KEY, SPANS_KEY, Metric, RiskReport, SpanReport, ValueReport
from cocoa_integrations._shared.limits import highest, require_known
from cocoa_integrations.tool_calling import fields_of_report

REPORTS_KEY = "cocoa_reports"
"""The key of the reports of all answers that the model gave for one response of LlamaIndex."""

_HOLDERS = ("response_metadata", "generation_info", "additional_kwargs", "raw", "metadata")


def get_risk(answer: Any) -> RiskReport:
    """The risk report of a complete answer. In a chain of LangChain use ``RunnableLambda(get_risk)``.

    The spans of a compact report are completed with what can be derived; ``score`` and ``chosen`` of spans and the list
    of all ``claims`` are only in a full report. (In scripts without spaces, claims end where tokens end; a compact
    report has no tokens.) See ``risk_metadata`` of the models.

    Args:
        answer: in LangChain a message of ``ChatCocoa`` (or the sum of its streamed chunks), a generation of
            ``CocoaLLM``, or the ``{"text": ..., "risk": ...}`` of ``CocoaLLM.with_risk()`` and ``RiskOutputParser``. In
            LlamaIndex a ``ChatResponse`` or ``CompletionResponse`` (for a stream, the last one), the ``AgentOutput`` of
            an agent, or a response of ``RiskQueryEngine`` or ``RiskChatEngine``. In both a ``cocoa_engine.Generation``
            or a report.

    Example:
        >>> report = get_risk(chain.invoke({"question": "Who wrote Dune?"}))
        >>> report.max_risk, [span.risk for span in report.spans]

    Raises:
        ConfigError: the answer has no report, because it is plain text, is from another model, or was interrupted.
        DataError: the metadata of the answer holds something else than a report.
    """
    if (report := find_risk(answer)) is not None:
        return report
    name = type(answer).__name__
    if get_spans(answer):
        raise ConfigError(
            f"this {name} is a chunk of an answer, or an interrupted answer, and only a complete answer has a risk "
            "report; add all chunks of the stream, or read the available spans"
        )
    raise ConfigError(
        f"this {name} has no risk report; take it from the answer of the model before it is parsed into text. "
        "LangChain: CocoaLLM.with_risk() returns it and get_risk_callback() collects it. LlamaIndex: RiskQueryEngine "
        "and RiskChatEngine write it and collect_risk() collects it. With risk_metadata='none' answers have none"
    )


def find_risk(answer: Any) -> RiskReport | None:
    """The risk report of an answer, or ``None``."""
    if isinstance(answer, RiskReport):
        return answer
    if isinstance(answer, Generation):
        return RiskReport.of(answer)
    if isinstance(answer, Mapping):
        report = answer.get("risk", answer)
        if isinstance(report, RiskReport):
            return report
        if not isinstance(report, Mapping) or "spans" not in report:
            return None
        text = answer.get("text")
        return RiskReport.from_wire(dict(report)).expanded(text if isinstance(text, str) else "")
    report = _held(answer, RISK_KEY)
    return None if report is None else RiskReport.from_wire(report).expanded(*texts_of(answer))


def get_spans(answer: Any) -> list[SpanReport]:
    """The spans of a streamed chunk or of an answer, which may be interrupted; empty if it has none."""
    if spans := _held(answer, SPANS_KEY):
        return [SpanReport.from_wire(span) for span in spans]
    report = find_risk(answer)
    # the spans of the full report of a message are listed beside it, by chunk
    is_listed = report is None or (_held(answer, RISK_KEY) is not None and not report.is_compact)
    return [] if report is None or is_listed else report.spans


def max_risk(answer: Any, metric: Metric = "risk", *, unit: UnitLevel = "span") -> float:
    """The highest value of any span, claim or sentence of a complete answer, such as for a ``RunnableBranch``.

    Spans that contain only whitespace do not count. They do count in ``max_risk`` of the report.

    Args:
        answer: a complete answer.
        metric: ``risk`` (``risk_source`` of the report says what it is), ``con_mlds``, ``f_mlds``, or
            ``self_information`` (-log p of the span, in nats).
        unit: ``span``; ``claim``, which leaves out punctuation and function words; or ``sentence``, whose value is the
            mean of its three riskiest claims.

    Raises:
        ConfigError: the answer has no report, or the metric or the unit is unknown.
    """
    require_known("metric", metric, Metric)
    require_known("unit", unit, UnitLevel)
    return highest(get_risk(answer).spans, metric, unit)


def argument_risks(answer: Any) -> dict[str, dict[str, ValueReport]]:
    """The risk of each argument of each tool call of an answer, which is given as to :func:`get_risk`.

    Returns:
        By the id of the call, then by the name of the argument: ``risk`` (the highest of its spans; see ``calibrated``
        of the report), ``con_mlds`` and ``f_mlds`` (means over its spans), ``log_prob`` (of its tokens), ``start`` and
        ``end`` (in the generated text) and the numbers of its ``spans``. The values inside an argument follow by their
        paths, such as ``$.people[0].age``. For an answer in JSON see :func:`field_risks`.

    Raises:
        ConfigError: the answer has no report.
    """
    return {call.id: call.arguments for call in _structured(answer).tool_calls}


def field_risks(answer: Any) -> dict[str, ValueReport]:
    """The risk of each field of a structured answer, which is given as to :func:`get_risk`.

    Such as ``raw`` of LangChain's ``with_structured_output(include_raw=True)``, or a response of LlamaIndex's
    ``as_structured_llm(...)``; ``structured_predict`` returns the object alone: collect its report with
    ``collect_risk``. Works for every method: for an answer in JSON, and for one that is a tool call. Of several calls
    it is the first.

    Returns:
        By JSON path (``$.person.age``, ``$.items[0].name``, ``$['other name']``), in the order of the answer: the same
        values as in :func:`argument_risks`. Objects and lists have an entry, and so has every value in them. Empty for
        an answer without structure.

    Raises:
        ConfigError: the answer has no report.
    """
    return fields_of_report(_structured(answer))


def texts_of(answer: Any) -> tuple[str, str]:
    """The text of an answer and that of its reasoning: its own, or those of its message."""
    message = getattr(answer, "message", None) or getattr(answer, "response", None) or answer
    text = message if isinstance(message, str) else getattr(message, "text", getattr(message, "content", None))
    return text if isinstance(text, str) else "", reasoning_of(message)


def reasoning_of(message: Any) -> str:
    """The text of the reasoning of a message: of its blocks, or where other integrations put it."""
    if not isinstance(kwargs := getattr(message, "additional_kwargs", None), Mapping):
        return ""  # a text, or an object of the user's own
    content = getattr(message, "content", None)
    parts = [block.content for block in getattr(message, "blocks", ()) if block.block_type == "thinking"]
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and (kind := block.get("type")) in ("reasoning", "thinking"):
            parts.append(str(block.get(kind) or ""))
    return "".join(filter(None, parts)) or str(kwargs.get("reasoning_content") or "")


def _structured(answer: Any) -> RiskReport:
    """The report with the fields or arguments: of a response that shows one answer, the report of this answer."""
    report, reports = get_risk(answer), _held(answer, REPORTS_KEY) or []
    if report.fields or report.tool_calls or len(report.parts) != 1 or report.parts[0].report >= len(reports):
        return report
    return RiskReport.from_wire(reports[report.parts[0].report])


def _held(answer: Any, key: str) -> Any:
    """A value in the metadata of an answer, or of its message."""
    for owner in (answer, getattr(answer, "message", None)):
        for name in _HOLDERS:
            holder = getattr(owner, name, None)
            if isinstance(holder, Mapping) and holder.get(key) is not None:
                return holder[key]
    return None
