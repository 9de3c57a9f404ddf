"""A wrapper around a chat engine that adds the risk of the answer to each response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine.types import (
    AGENT_CHAT_RESPONSE_TYPE,
    AgentChatResponse,
    BaseChatEngine,
    StreamingAgentChatResponse,
)

from cocoa_engine import ConfigError
from cocoa_engine.report import REPORTS_KEY, RISK_KEY
from cocoa_integrations.llama_index.answers import Answers


class RiskStreamingChatResponse(StreamingAgentChatResponse):
    """A streamed chat response with ``metadata``, which is filled when the stream has been read to its end."""

    metadata: dict[str, Any]
    _answers: Answers

    @classmethod
    def of(cls, response: StreamingAgentChatResponse, answers: Answers) -> RiskStreamingChatResponse:
        """The response as this class. Both objects share their state, because the engine already writes to it."""
        same = object.__new__(cls)
        same.__dict__ = response.__dict__
        same.metadata = {RISK_KEY: None, REPORTS_KEY: answers.reports}
        same._answers = answers
        return same

    @property
    def response_gen(self) -> Generator[str, None, None]:
        """The text of the answer, in chunks."""
        return self._answers.read(super().response_gen, self.metadata, self.source_nodes, self.sources)

    def async_response_gen(self) -> AsyncGenerator[str, None]:
        """The text of the answer, in chunks."""
        return self._answers.aread(super().async_response_gen(), self.metadata, self.source_nodes, self.sources)


class RiskChatEngine(BaseChatEngine):
    """Wraps a chat engine whose LLM is a :class:`CocoaLLM` and adds the risk of the answer to the response::

        engine = RiskChatEngine(index.as_chat_engine(llm=llm))
        response = engine.chat("Who built the lighthouse?")
        response.metadata["cocoa_risk"]["max_risk"]

    ``metadata`` has the same keys as for :class:`RiskQueryEngine`; the report of a condensed question is in
    ``cocoa_reports``. The chat history contains no metadata. For a streamed response, ``metadata`` is filled when its
    ``response_gen`` (or ``async_response_gen``) has been read to its end.

    Args:
        inner: the chat engine.
        context_lift: also measure how much the retrieved nodes changed each span; see :class:`RiskQueryEngine`.

    Raises:
        ConfigError: ``inner`` is not a chat engine.
    """

    def __init__(self, inner: BaseChatEngine, *, context_lift: bool = False) -> None:
        if not isinstance(inner, BaseChatEngine):
            raise ConfigError(
                f"RiskChatEngine wraps a chat engine, not a {type(inner).__name__}; for a query engine use "
                "RiskQueryEngine."
            )
        self._inner = inner
        self._context_lift = context_lift

    @property
    def chat_history(self) -> list[ChatMessage]:
        """The chat history of the inner engine."""
        return self._inner.chat_history

    def reset(self) -> None:
        """Start a new conversation."""
        self._inner.reset()

    def chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **options: Any
    ) -> AGENT_CHAT_RESPONSE_TYPE:
        """Answer a message; ``options`` are passed to the inner engine."""
        answers = Answers(lift=self._context_lift)
        with answers:
            response = self._inner.chat(message, chat_history, **options)
        if isinstance(response, StreamingAgentChatResponse):
            return RiskStreamingChatResponse.of(response, answers)
        metadata = _copy_metadata(response)
        answers.write(metadata, response.response, response.source_nodes, response.sources)
        return response

    async def achat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **options: Any
    ) -> AGENT_CHAT_RESPONSE_TYPE:
        """Like :meth:`chat`, asynchronously."""
        answers = Answers(lift=self._context_lift)
        with answers:
            response = await self._inner.achat(message, chat_history, **options)
        if isinstance(response, StreamingAgentChatResponse):
            return RiskStreamingChatResponse.of(response, answers)
        metadata = _copy_metadata(response)
        await answers.awrite(metadata, response.response, response.source_nodes, response.sources)
        return response

    def stream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **options: Any
    ) -> RiskStreamingChatResponse:
        """Like :meth:`chat`, streamed."""
        answers = Answers(lift=self._context_lift)
        with answers:
            response = self._inner.stream_chat(message, chat_history, **options)
        return RiskStreamingChatResponse.of(response, answers)

    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **options: Any
    ) -> RiskStreamingChatResponse:
        """Like :meth:`chat`, streamed."""
        answers = Answers(lift=self._context_lift)
        with answers:
            response = await self._inner.astream_chat(message, chat_history, **options)
        return RiskStreamingChatResponse.of(response, answers)


def _copy_metadata(response: AgentChatResponse) -> dict[str, Any]:
    """Replace the metadata of the response by a copy, and return it."""
    response.metadata = dict(response.metadata or {})
    return response.metadata
