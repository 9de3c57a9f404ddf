"""The level of detail of what calls return. Callbacks, traces and caches always receive the full metadata."""

from __future__ import annotations

from typing import Any, TypeVar

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, Generation, LLMResult

from cocoa_integrations._shared.detail import Detail, Stored, compact_report
from cocoa_integrations._shared.metadata import RISK_KEY, SPANS_KEY
from cocoa_integrations.langchain.messages import reasoning_of

Message = TypeVar("Message", bound=AIMessage)


def stored_in(message: BaseMessage) -> Stored:
    """The texts that a message has beside its report."""
    return Stored(message.text, reasoning_of(message))


def set_report(message: AIMessage, report: dict[str, Any], spans: list[dict[str, Any]]) -> None:
    """Replace the report and the spans of a message, in the detail that its report has.

    Args:
        message: the message, which is changed.
        report: the changed report, as :func:`~cocoa_integrations.langchain.get_risk` returned it.
        spans: the changed ``cocoa_spans``, which a compact message does not have.
    """
    if report.get("compact"):
        report = compact_report(report, stored_in(message))
    else:
        message.additional_kwargs[SPANS_KEY] = spans
    message.response_metadata[RISK_KEY] = report


def reduced_result(result: LLMResult, detail: Detail, *, logprobs: bool) -> LLMResult:
    """A result whose answers have the given detail. The given result is not changed: callbacks keep it.

    Args:
        result: the result with full metadata.
        detail: the level of detail.
        logprobs: whether the answers keep their log-probabilities, which belong to the full metadata otherwise.
    """
    if detail == "full":
        return result
    generations = [[_reduced(answer, detail, logprobs) for answer in answers] for answers in result.generations]
    return result.model_copy(update={"generations": generations})


def _reduced(answer: Any, detail: Detail, logprobs: bool) -> Any:
    if isinstance(answer, ChatGeneration):
        if not isinstance(answer.message, AIMessage):
            return answer
        message = reduced_message(answer.message, detail, logprobs=logprobs)
        return type(answer)(message=message, generation_info=answer.generation_info)
    if isinstance(answer, Generation):
        info = _reduced_metadata(answer.generation_info or {}, detail, Stored(answer.text), logprobs)
        return answer.model_copy(update={"generation_info": info})
    return answer


def reduced_message(message: Message, detail: Detail, *, logprobs: bool, stored: Stored | None = None) -> Message:
    """A message with the given detail; see :func:`reduced_result`.

    Args:
        message: the message, or a chunk.
        detail: the level of detail.
        logprobs: whether it keeps its log-probabilities.
        stored: the texts of the whole answer, if the message is a chunk.
    """
    update = {
        "additional_kwargs": {key: value for key, value in message.additional_kwargs.items() if key != SPANS_KEY},
        "response_metadata": _reduced_metadata(
            message.response_metadata, detail, stored_in(message) if stored is None else stored, logprobs
        ),
    }
    return message.model_copy(update=update)


def _reduced_metadata(metadata: dict[str, Any], detail: Detail, stored: Stored, logprobs: bool) -> dict[str, Any]:
    left_out = {SPANS_KEY, *([] if logprobs else ["logprobs"]), *([RISK_KEY] if detail == "none" else [])}
    kept = {key: value for key, value in metadata.items() if key not in left_out}
    if RISK_KEY in kept:
        kept[RISK_KEY] = compact_report(kept[RISK_KEY], stored)
    return kept


class ReducedStream:
    """Reduces the chunks of one stream. A compact stream has its report in the last chunk, and no spans before.

    Args:
        detail: the level of detail.
        logprobs: whether the last chunk keeps the log-probabilities.
    """

    def __init__(self, detail: Detail, *, logprobs: bool) -> None:
        self._detail = detail
        self._logprobs = logprobs
        self._stored = Stored("")

    def next(self, chunk: AIMessageChunk) -> AIMessageChunk:
        """The next chunk with the detail of the stream."""
        self._stored += stored_in(chunk)
        return reduced_message(chunk, self._detail, logprobs=self._logprobs, stored=self._stored)
