"""Functions that read the risk from the answers of the models. They can be used as runnables in a chain."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from functools import partial
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableConfig

from cocoa_engine import Generation as EngineGeneration
from cocoa_engine import UnitLevel
from cocoa_engine.errors import ConfigError
from cocoa_integrations._shared.detail import Stored, expanded_report
from cocoa_integrations._shared.limits import Metric, highest, require_metric, require_unit
from cocoa_integrations._shared.metadata import RISK_KEY, SPANS_KEY, all_spans, risk_report
from cocoa_integrations.langchain.detail import stored_in
from cocoa_integrations.tool_calling import fields_of_report

Answer = BaseMessage | Generation | EngineGeneration | Mapping[str, Any]
"""A message of ``ChatCocoa`` (or the sum of its streamed chunks), a generation of ``CocoaLLM``, a
``cocoa_engine.Generation``, or the ``{"text": ..., "risk": ...}`` of ``CocoaLLM.with_risk()`` and
``RiskOutputParser``."""


def get_risk(answer: Answer) -> dict[str, Any]:
    """The risk report of a complete answer. In a chain use ``RunnableLambda(get_risk)``.

    The spans of a compact report are completed with what can be derived; ``score`` and ``chosen`` of spans and the list
    of all ``claims`` are only in a full report. (In scripts without spaces, claims end where tokens end; a compact
    report has no tokens.) See ``risk_metadata`` of the models.

    Args:
        answer: see :data:`Answer`.

    Raises:
        ConfigError: the answer has no report, because it is plain text, is from another model, or was interrupted.
    """
    report = find_risk(answer)
    if report is not None:
        return report
    name = type(answer).__name__
    if isinstance(answer, (BaseMessage, Generation, Mapping)) and get_spans(answer):
        raise ConfigError(
            f"this {name} is a chunk of an answer, or an interrupted answer, and only a complete answer has a risk "
            "report; add all chunks of the stream, or read the available spans with get_spans()"
        )
    raise ConfigError(
        f"this {name} has no risk report; take it from ChatCocoa's message before it is parsed into text, from "
        "CocoaLLM.with_risk(), or collect it with get_risk_callback(); with risk_metadata='none' answers have none"
    )


def max_risk(answer: Answer, metric: Metric = "risk", *, unit: UnitLevel = "span") -> float:
    """The highest value of any span, claim or sentence of a complete answer, for conditions such as those of
    ``RunnableBranch``.

    Spans that contain only whitespace do not count. They do count in ``max_risk`` of the report.

    Args:
        answer: see :data:`Answer`.
        metric: ``risk`` (``risk_source`` of the report says what it is), ``con_mlds``, ``f_mlds``, or
            ``self_information`` (-log p of the span, in nats).
        unit: ``span``; ``claim``, which leaves out punctuation and function words; or ``sentence``, whose value is the
            mean of its three riskiest claims.

    Raises:
        ConfigError: the answer has no report, or the metric or the unit is unknown.
    """
    require_metric(metric)
    require_unit(unit)
    return highest(get_risk(answer)["spans"], metric, unit)


def get_spans(answer: Answer) -> list[dict[str, Any]]:
    """The spans of a streamed chunk or of an answer, which may be interrupted; empty if it has none."""
    if isinstance(answer, ChatGeneration):
        answer = answer.message
    if isinstance(answer, BaseMessage):
        return list(answer.additional_kwargs.get(SPANS_KEY) or _compact_spans(answer))
    if isinstance(answer, EngineGeneration):
        return all_spans(answer)
    if isinstance(answer, Mapping):
        return list((find_risk(answer) or {}).get("spans", ()))
    return list((answer.generation_info or {}).get(SPANS_KEY) or _compact_spans(answer))


def _compact_spans(answer: Any) -> list[dict[str, Any]]:
    """The spans of a compact report. Those of a full one are listed beside it, by chunk."""
    report = find_risk(answer) or {}
    return report.get("spans", []) if report.get("compact") else []


def argument_risks(message: BaseMessage) -> dict[str, dict[str, dict[str, Any]]]:
    """The risk of each argument of each tool call of an answer.

    Returns:
        By the id of the call, then by the name of the argument: ``risk`` (the highest of its spans; see ``calibrated``
        of the report), ``con_mlds`` and ``f_mlds`` (means over its spans), ``log_prob`` (of its tokens), ``start`` and
        ``end`` (in the generated text) and the numbers of its ``spans``. The values inside an argument follow by their
        paths, such as ``$.people[0].age``. For an answer in JSON see :func:`field_risks`.

    Raises:
        ConfigError: the answer has no report, as for :func:`get_risk`.
    """
    return {call["id"]: call["arguments"] for call in get_risk(message).get("tool_calls", ())}


def field_risks(message: BaseMessage) -> dict[str, dict[str, Any]]:
    """The risk of each field of a structured answer, such as ``raw`` of ``with_structured_output(include_raw=True)``.

    Works for every method: for an answer in JSON, and for one that is a tool call. Of several calls it is the first.

    Returns:
        By JSON path (``$.person.age``, ``$.items[0].name``, ``$['other name']``), in the order of the answer: the same
        values as in :func:`argument_risks`. Objects and lists have an entry, and so has every value in them. Empty for
        an answer without structure.

    Raises:
        ConfigError: the answer has no report, as for :func:`get_risk`.
    """
    return fields_of_report(get_risk(message))


def require_message(answer: Any, name: str) -> AIMessage:
    """The answer of the chat of a chain.

    Args:
        answer: the answer.
        name: the function that made the chain.

    Raises:
        ConfigError: it is no message.
    """
    if not isinstance(answer, AIMessage):
        raise ConfigError(
            f"{name} needs a chat that returns messages, and this one returns a {type(answer).__name__}; put a parser "
            f"after the chain, as in {name}(...) | parser, and bind a schema with chat.bind(response_format=...) "
            "instead of with_structured_output()"
        )
    return answer


def find_risk(answer: Any) -> dict[str, Any] | None:
    """The risk report of an answer, or ``None``."""
    if isinstance(answer, ChatGeneration):
        answer = answer.message
    if isinstance(answer, BaseMessage):
        return expanded_report(answer.response_metadata.get(RISK_KEY), stored_in(answer))
    if isinstance(answer, Generation):
        return expanded_report((answer.generation_info or {}).get(RISK_KEY), Stored(answer.text))
    if isinstance(answer, EngineGeneration):
        return risk_report(answer)
    if isinstance(answer, Mapping):
        report = answer.get("risk")
        return report if isinstance(report, dict) and "spans" in report else None
    return None


class Call(NamedTuple):
    """A call that a chain makes, in both forms."""

    run: Callable[[], Any]
    arun: Callable[[], Awaitable[Any]]


Calls = Generator[Call, Any, Any]
"""The calls of a chain, in order. The result of each is sent back; what is returned is the result of the chain."""


def invocation(runnable: Runnable[Any, Any], given: Any, config: RunnableConfig, **options: Any) -> Call:
    """The call of a runnable."""
    return Call(partial(runnable.invoke, given, config, **options), partial(runnable.ainvoke, given, config, **options))


def prompt_text_of(chat: Any, prompt: Any) -> Call:
    """The call for the text of a prompt."""
    return Call(partial(chat.prompt_text, prompt), partial(chat.aprompt_text, prompt))


def run_calls(calls: Calls) -> Any:
    """Make calls one after the other, and return the result of the chain."""
    step = partial(calls.send, None)
    while True:
        try:
            call = step()
        except StopIteration as end:
            return end.value
        try:
            step = partial(calls.send, call.run())
        except Exception as error:
            step = partial(calls.throw, error)


async def arun_calls(calls: Calls) -> Any:
    """Like :func:`run_calls`, awaited."""
    step = partial(calls.send, None)
    while True:
        try:
            call = step()
        except StopIteration as end:
            return end.value
        try:
            step = partial(calls.send, await call.arun())
        except Exception as error:
            step = partial(calls.throw, error)
