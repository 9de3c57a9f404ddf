"""Answers of the models: changing their text, and how much of the risk they carry.

Callbacks, traces and caches always receive the full metadata.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, NoReturn

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import BaseTransformOutputParser
from langchain_core.outputs import ChatGeneration, Generation, LLMResult
from langchain_core.runnables.utils import AddableDict

from cocoa_engine.errors import ConfigError
from cocoa_engine.report import RISK_KEY, SPANS_KEY, Detail, RiskReport, SpanReport
from cocoa_integrations._shared.citations import CITATIONS_KEY, Citation
from cocoa_integrations._shared.edits import Change, replacement
from cocoa_integrations.reports import find_risk, get_risk, texts_of


def require_message(answer: Any, name: str) -> AIMessage:
    """The answer of the chat in the chain that the function ``name`` made; a ``ConfigError`` if it is no message."""
    if not isinstance(answer, AIMessage):
        raise ConfigError(
            f"{name} needs a chat that returns messages, and this one returns a {type(answer).__name__}; put a parser "
            f"after the chain, as in {name}(...) | parser, and bind a schema with chat.bind(response_format=...) "
            "instead of with_structured_output()"
        )
    return answer


class RiskOutputParser(BaseTransformOutputParser[dict[str, Any]]):
    """Parses an answer of ``ChatCocoa`` into ``{"text": ..., "risk": ...}`` with the dict of its report.

    In a stream, each chunk is passed on immediately as ``{"text": ...}``; the last one also has ``"risk"``. The sum of
    the chunks is the parsed answer. ``CocoaLLM`` returns only text: use ``CocoaLLM.with_risk()``.

    Example:
        >>> chain = prompt | ChatCocoa() | RiskOutputParser()
        >>> chain.invoke({"question": "Who wrote Dune?"})["risk"]["max_risk"]

    Raises:
        ConfigError: the answer has no report, or was interrupted.
    """

    def parse(self, text: str) -> NoReturn:
        """Refuse plain text, which has no risk report.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("plain text has no risk report; parse a message of ChatCocoa, or use CocoaLLM.with_risk()")

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> dict[str, Any]:
        """Text and report of an answer. A partial answer may have no report yet."""
        [answer] = result
        report = find_risk(answer) if partial else get_risk(answer)
        return dict(text_and_risk(answer.text, report))

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[dict[str, Any]]:
        chunks = _Chunks(self)
        for chunk in input:
            yield chunks.parsed(chunk)
        chunks.end()

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[dict[str, Any]]:
        chunks = _Chunks(self)
        async for chunk in input:
            yield chunks.parsed(chunk)
        chunks.end()

    @property
    def _type(self) -> str:
        return "cocoa_risk"


def text_and_risk(text: str, report: RiskReport | None = None) -> AddableDict:
    """Text and report as a dict whose chunks can be added. Without a report, only the text."""
    return AddableDict(text=text) if report is None else AddableDict(text=text, risk=report.to_dict())


class _Chunks:
    def __init__(self, parser: RiskOutputParser) -> None:
        self._parser = parser
        self._last: BaseMessage | None = None
        self._reported = False
        self._texts = ("", "")

    def parsed(self, chunk: str | BaseMessage) -> AddableDict:
        if isinstance(chunk, str):
            self._parser.parse(chunk)
        self._last = chunk
        self._texts = _added(self._texts, chunk)  # a compact report leaves out the texts of the whole answer
        wire = chunk.response_metadata.get(RISK_KEY)
        report = None if wire is None else RiskReport.from_wire(wire).expanded(*self._texts)
        self._reported |= report is not None
        return text_and_risk(chunk.text, report)

    def end(self) -> None:
        if not self._reported and self._last is not None:
            get_risk(self._last)  # raises an error that explains what is missing


def calls_tools(answer: Any) -> bool:
    """Whether an answer, or a chunk of one, has tool calls."""
    if isinstance(answer, AIMessageChunk) and answer.tool_call_chunks:
        return True
    return isinstance(answer, AIMessage) and bool(answer.tool_calls or answer.invalid_tool_calls)


def with_text(answer: Any, text: str) -> Any:
    """A copy with a different text."""
    if isinstance(answer, Generation):
        return answer.model_copy(update={"text": text})
    if isinstance(answer, Mapping):
        return {**answer, "text": text}
    if isinstance(answer.content, str):
        return answer.model_copy(update={"content": text})
    first = next((block for block in answer.content if isinstance(block, dict) and _kind(block) == "text"), {})
    reasoning = [block for block in answer.content if _kind(block) == "reasoning"]
    rest = [block for block in answer.content if _kind(block) not in ("text", "reasoning")]
    return answer.model_copy(update={"content": [*reasoning, {"type": "text", **first, "text": text}, *rest]})


def _kind(block: str | dict[str, Any]) -> Any:
    return "text" if isinstance(block, str) else block.get("type")


def without_tool_calls(answer: Any) -> Any:
    """A copy without tool calls."""
    if not isinstance(answer, AIMessage) or not calls_tools(answer):
        return answer
    content = answer.content
    if not isinstance(content, str):
        content = [block for block in content if _kind(block) in ("text", "reasoning")]
    calls: dict[str, list[Any]] = {"tool_calls": [], "invalid_tool_calls": []}
    if isinstance(answer, AIMessageChunk):
        calls["tool_call_chunks"] = []
    return answer.model_copy(update={"content": content, **calls})


def with_report(answer: Any, report: RiskReport, change: Change | None = None) -> Any:
    """A copy with a different report, in the detail that it has. Spans and citations move as ``change`` says."""
    if isinstance(answer, Mapping):
        return {**answer, "risk": report.to_dict()}
    stored = report.compact(*texts_of(answer)) if report.is_compact else report
    metadata = _moved({**_metadata_of(answer), RISK_KEY: stored.to_dict()}, change, report.begin)
    if isinstance(answer, Generation):
        return answer.model_copy(update={"generation_info": metadata})
    kwargs = _moved(answer.additional_kwargs, change, report.begin)
    return answer.model_copy(update={"response_metadata": metadata, "additional_kwargs": kwargs})


def _moved(values: dict[str, Any], change: Change | None, begin: int) -> dict[str, Any]:
    """Metadata with the offsets of spans and citations moved. Those of citations count from the text that is shown."""
    if change is None:
        return values
    values = dict(values)
    if SPANS_KEY in values:
        spans = [SpanReport.from_wire(span) for span in values[SPANS_KEY]]
        values[SPANS_KEY] = [span.to_dict() for span in change.moved(spans)]
    if CITATIONS_KEY in values:
        citations = [Citation.from_wire(citation) for citation in values[CITATIONS_KEY]]
        values[CITATIONS_KEY] = [citation.to_dict() for citation in change.moved(citations, begin)]
    return values


def with_change(answer: Any, change: Change) -> Any:
    """A copy with a changed text. All offsets in its metadata follow the change."""
    return with_report(with_text(answer, change.text), change.of_report(get_risk(answer)), change)


def replaced(answer: Any, text: str) -> Any:
    """A copy with another text in place of the answer."""
    return with_change(answer, replacement(get_risk(answer), text))


def with_spans(message: AIMessage, report: RiskReport, spans: list[SpanReport]) -> AIMessage:
    """A copy of a message with other spans, in the detail that its report has."""
    message = with_report(message, report.with_values(spans=spans))
    if not report.is_compact:
        update = {**message.additional_kwargs, SPANS_KEY: [span.to_dict() for span in spans]}
        message = message.model_copy(update={"additional_kwargs": update})
    return message


def _metadata_of(answer: BaseMessage | Generation) -> dict[str, Any]:
    return answer.response_metadata if isinstance(answer, BaseMessage) else answer.generation_info or {}


def _added(texts: tuple[str, str], chunk: BaseMessage) -> tuple[str, str]:
    text, reasoning = texts_of(chunk)
    return texts[0] + text, texts[1] + reasoning


def reduced_result(result: LLMResult, detail: Detail, *, logprobs: bool) -> LLMResult:
    """A result whose answers have the given detail. The given result is not changed: callbacks keep it.

    Without ``logprobs``, log-probabilities belong to the full metadata.
    """
    if detail == "full":
        return result
    generations = [[reduced(answer, detail, logprobs=logprobs) for answer in answers] for answers in result.generations]
    return result.model_copy(update={"generations": generations})


def reduced(answer: Any, detail: Detail, *, logprobs: bool, texts: tuple[str, str] | None = None) -> Any:
    """An answer with the given detail; for a chunk, ``texts`` are the text and the reasoning of the answer so far."""
    if isinstance(answer, ChatGeneration):
        message: Any = reduced(answer.message, detail, logprobs=logprobs)
        return type(answer)(message=message, generation_info=answer.generation_info)
    left_out = {SPANS_KEY, *([] if logprobs else ["logprobs"]), *([RISK_KEY] if detail == "none" else [])}
    metadata = {key: value for key, value in _metadata_of(answer).items() if key not in left_out}
    if RISK_KEY in metadata:
        report = RiskReport.from_wire(metadata[RISK_KEY]).compact(*(texts or texts_of(answer)))
        metadata[RISK_KEY] = report.to_dict()
    if isinstance(answer, Generation):
        return answer.model_copy(update={"generation_info": metadata})
    kwargs = {key: value for key, value in answer.additional_kwargs.items() if key != SPANS_KEY}
    return answer.model_copy(update={"additional_kwargs": kwargs, "response_metadata": metadata})


class ReducedStream:
    """Reduces the chunks of one stream. A compact stream has its report in the last chunk, and no spans before."""

    def __init__(self, detail: Detail, *, logprobs: bool) -> None:
        self._detail, self._logprobs = detail, logprobs
        self._texts = ("", "")

    def next(self, chunk: AIMessageChunk) -> AIMessageChunk:
        """The next chunk with the detail of the stream."""
        if self._detail == "full":
            return chunk
        self._texts = _added(self._texts, chunk)
        smaller: AIMessageChunk = reduced(chunk, self._detail, logprobs=self._logprobs, texts=self._texts)
        return smaller
