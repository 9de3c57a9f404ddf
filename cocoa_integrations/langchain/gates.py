"""A step of a chain that lets no answer pass that is too risky."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableConfig

from cocoa_engine import Generation as EngineGeneration
from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import unknown
from cocoa_integrations.langchain.runnables import find_risk, get_risk, get_spans
from cocoa_integrations.limits import Limit, Mark, Metric, highest, require_mark
from cocoa_integrations.metadata import RISK_KEY

OnRisk = Literal["raise", "mark", "abstain"]
A = TypeVar("A")

MARK = "[[{text}]]"
ABSTENTION = "I don't know."


def risk_gate(
    threshold: float,
    *,
    metric: Metric = "risk",
    on_risk: OnRisk = "raise",
    mark: Mark = MARK,
    answer: str = ABSTENTION,
) -> RiskGate:
    """A step of a chain that lets an answer pass unless a span of it reaches the threshold.

    It takes and gives a message of ``ChatCocoa``, a generation, or the ``{"text", "risk"}`` of ``CocoaLLM.with_risk()``
    and :class:`RiskOutputParser`; parsers that drop risk come after it. An answer it acted on has an entry ``"gate"``
    in its report: what was done, the metric, the threshold, and the value that reached it.

    **Streams.** Nobody knows whether an answer is too risky before its last span: with ``raise`` and ``abstain`` the
    whole answer is held back until then and passes as one chunk, so a fallback can still begin anew. With ``mark``
    messages stream through, each span marked or not as it comes (but from where a tool call may begin, the rest is held
    back); dicts of text and risk are held back.

    Args:
        threshold: from where on a span is too risky. With a calibrator the risk is a probability. Without one it is the
            raw MLDS, which is no probability, lies between 0 and 2, and has much the same level for all spans of a
            model: 0.5 may stop every answer or none. Look at the risks of your own prompts first.
        metric: the figure the threshold is for: ``risk``; ``con_mlds`` or ``f_mlds``, which are raw even with a
            calibrator; or ``self_information`` (-log p of the span, in nats). Spans of nothing but whitespace, and
            end-of-sequence tokens, do not count.
        on_risk: ``raise`` a ``HallucinationRiskError``, for ``with_fallbacks`` and the like; ``mark`` the risky spans
            in the text; or ``abstain``: give ``answer`` instead, the report (with the withheld text in its spans)
            staying where it is, tool calls being dropped.
        mark: how to mark. A template of ``{text}`` and ``{value}``, by default ``[[{text}]]``, e.g.
            ``"<mark title='{value:.2f}'>{text}</mark>"``, or a function of the text and the span's entry of
            ``cocoa_spans``. Whitespace at the ends of a span stays outside. The offsets in the report are those of the
            unmarked text. A message that calls tools is not marked: its text is for programs. Nothing is escaped,
            within marks or outside of them: do not put the text into a page as it is.
        answer: what is said instead.

    Example:
        >>> strict = prompt | ChatCocoa() | risk_gate(0.5)
        >>> careful = prompt | ChatCocoa(alpha=6.0, max_candidates=16) | risk_gate(0.5, on_risk="abstain")
        >>> chain = strict.with_fallbacks([careful], exceptions_to_handle=(HallucinationRiskError,)) | StrOutputParser()

    Raises:
        ConfigError: an option makes no sense; and from a call, that the answer has no report, or was broken off.
    """
    return RiskGate(threshold, metric=metric, on_risk=on_risk, mark=mark, answer=answer)


class RiskGate(Runnable[Any, Any]):
    """The runnable that :func:`risk_gate` makes, where its options are described."""

    def __init__(
        self,
        threshold: float,
        *,
        metric: Metric = "risk",
        on_risk: OnRisk = "raise",
        mark: Mark = MARK,
        answer: str = ABSTENTION,
    ) -> None:
        self.limit = Limit(threshold, metric)
        if on_risk not in get_args(OnRisk):
            raise ConfigError(unknown([on_risk], get_args(OnRisk), what="on_risk"))
        require_mark(mark)
        if not isinstance(answer, str):
            raise ConfigError(f"answer takes a text, not a {type(answer).__name__}")
        self.on_risk = on_risk
        self.mark = mark
        self.answer = answer

    def passed(self, answer: A) -> A:
        """A whole answer as it leaves the gate; the one given is not changed.

        Raises:
            HallucinationRiskError: it is too risky, and that is what was asked for.
            ConfigError: it carries no report.
        """
        if isinstance(answer, EngineGeneration):
            raise ConfigError(
                "a gate takes answers of LangChain's kinds; read max_risk() of the engine's own Generation"
            )
        report = get_risk(answer)  # type: ignore[arg-type]
        if not self.limit.risky(report["spans"]):
            return answer
        if self.on_risk == "raise":
            raise self.limit.error(report)
        if self.on_risk == "abstain":
            return self._noted(_with_text(_without_tool_calls(answer), self.answer), report)
        return self._noted(self._marked(answer, report["spans"]), report)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """The answer as it leaves the gate; see :meth:`passed`."""
        return self._call_with_config(self.passed, input, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """See :meth:`invoke`."""

        async def passed(answer: Any) -> Any:
            return self.passed(answer)

        return await self._acall_with_config(passed, input, config)

    def transform(self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """The chunks that may pass."""
        yield from self._transform_stream_with_config(input, self._chunks, config)

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """See :meth:`transform`."""
        async for chunk in self._atransform_stream_with_config(input, self._achunks, config):
            yield chunk

    def _chunks(self, input: Iterator[Any]) -> Iterator[Any]:
        stream = _Stream(self)
        for chunk in input:
            yield from stream.let_in(chunk)
        yield from stream.end()

    async def _achunks(self, input: AsyncIterator[Any]) -> AsyncIterator[Any]:
        stream = _Stream(self)
        async for chunk in input:
            for passed in stream.let_in(chunk):
                yield passed
        for passed in stream.end():
            yield passed

    def _marked(self, answer: A, spans: list[dict[str, Any]]) -> A:
        """An answer, or a chunk of one, with marks around its risky spans."""
        if _calls_tools(answer):
            return answer
        return _with_text(answer, self.limit.with_marks(_text(answer), spans, self.mark))

    def _noted(self, answer: A, report: dict[str, Any]) -> A:
        """An answer whose report says what was done to it."""
        gate = {
            "action": self.on_risk,
            "metric": self.limit.metric,
            "threshold": self.limit.threshold,
            "value": highest(report["spans"], self.limit.metric),
        }
        return _with_report(answer, {**report, "gate": gate})


class _Stream:
    """What becomes of the chunks of one stream."""

    def __init__(self, gate: RiskGate) -> None:
        self._gate = gate
        self._held: Any = None
        self._last: BaseMessage | None = None
        self._reported = False

    def let_in(self, chunk: Any) -> Iterator[Any]:
        """Take the next chunk; gives those that may pass."""
        if self._held is None and self._gate.on_risk == "mark" and _is_its_spans(chunk):
            yield self._marked(chunk)
        else:
            self._held = chunk if self._held is None else self._held + chunk

    def end(self) -> Iterator[Any]:
        """What may pass at last."""
        if self._held is not None:
            marks = self._gate.on_risk == "mark" and isinstance(self._held, BaseMessage)
            yield self._marked(self._held) if marks else self._gate.passed(self._held)
        if self._last is not None and not self._reported:
            get_risk(self._last)  # says what is missing

    def _marked(self, chunk: BaseMessage) -> BaseMessage:
        self._last, report = chunk, find_risk(chunk)
        if self._gate.limit.risky(spans := get_spans(chunk)):
            chunk = self._gate._marked(chunk, spans)
        if report is not None:
            self._reported = True
            if self._gate.limit.risky(report["spans"]):
                chunk = self._gate._noted(chunk, report)
        return chunk


def _is_its_spans(chunk: Any) -> bool:
    """Whether a chunk is text and risk of the same spans; where a tool call may begin, the text comes later."""
    return isinstance(chunk, BaseMessage) and chunk.text == "".join(span["text"] for span in get_spans(chunk))


def _calls_tools(answer: Any) -> bool:
    message = answer.message if isinstance(answer, ChatGeneration) else answer
    if isinstance(message, AIMessageChunk) and message.tool_call_chunks:
        return True
    return isinstance(message, AIMessage) and bool(message.tool_calls or message.invalid_tool_calls)


def _text(answer: Any) -> str:
    return answer["text"] if isinstance(answer, Mapping) else answer.text


def _with_text(answer: Any, text: str) -> Any:
    """A copy with another text."""
    if isinstance(answer, ChatGeneration):
        return type(answer)(message=_with_text(answer.message, text), generation_info=answer.generation_info)
    if isinstance(answer, Generation):
        return answer.model_copy(update={"text": text})
    if isinstance(answer, Mapping):
        return {**answer, "text": text}
    if isinstance(answer.content, str):
        return answer.model_copy(update={"content": text})
    first = next((block for block in answer.content if _is_text(block) and isinstance(block, dict)), {"type": "text"})
    others = [block for block in answer.content if not _is_text(block)]
    return answer.model_copy(update={"content": [{**first, "text": text}, *others]})


def _is_text(block: Any) -> bool:
    return isinstance(block, str) or block.get("type") == "text"


def _without_tool_calls(answer: Any) -> Any:
    if isinstance(answer, ChatGeneration):
        return type(answer)(message=_without_tool_calls(answer.message), generation_info=answer.generation_info)
    if not isinstance(answer, AIMessage) or not _calls_tools(answer):
        return answer
    content = answer.content
    if not isinstance(content, str):
        content = [block for block in content if _is_text(block)]
    calls: dict[str, list[Any]] = {"tool_calls": [], "invalid_tool_calls": []}
    if isinstance(answer, AIMessageChunk):
        calls["tool_call_chunks"] = []
    return answer.model_copy(update={"content": content, **calls})


def _with_report(answer: Any, report: dict[str, Any]) -> Any:
    """A copy with another report."""
    if isinstance(answer, ChatGeneration):
        return type(answer)(message=_with_report(answer.message, report), generation_info=answer.generation_info)
    if isinstance(answer, Generation):
        return answer.model_copy(update={"generation_info": {**(answer.generation_info or {}), RISK_KEY: report}})
    if isinstance(answer, Mapping):
        return {**answer, "risk": report}
    return answer.model_copy(update={"response_metadata": {**answer.response_metadata, RISK_KEY: report}})
