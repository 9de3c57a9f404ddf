"""Any chat engine, with the risk of each of its answers on the response."""

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
from cocoa_integrations.llama_index.answers import Answers
from cocoa_integrations.metadata import REPORTS_KEY, RISK_KEY


class RiskStreamingChatResponse(StreamingAgentChatResponse):
    """A streamed chat response with ``metadata``, filled when the stream has been read to its end."""

    metadata: dict[str, Any]
    _answers: Answers

    @classmethod
    def of(cls, response: StreamingAgentChatResponse, answers: Answers) -> RiskStreamingChatResponse:
        """The same response: one state in common, since a thread or task of the engine's already writes to it."""
        same = object.__new__(cls)
        same.__dict__ = response.__dict__
        same.metadata = {RISK_KEY: None, REPORTS_KEY: answers.reports}
        same._answers = answers
        return same

    @property
    def response_gen(self) -> Generator[str, None, None]:
        """The pieces of the answer."""
        return self._answers.read(super().response_gen, self.metadata, self.source_nodes)

    def async_response_gen(self) -> AsyncGenerator[str, None]:
        """The pieces of the answer."""
        return self._answers.aread(super().async_response_gen(), self.metadata, self.source_nodes)


class RiskChatEngine(BaseChatEngine):
    """Wraps a chat engine whose LLM is a :class:`CocoaLLM` and puts the answer's risk on the response::

        engine = RiskChatEngine(index.as_chat_engine(llm=llm))
        response = engine.chat("Who built the lighthouse?")
        response.metadata["cocoa_risk"]["max_risk"]

    What ``metadata`` holds is as for :class:`RiskQueryEngine`; the report of a condensed question is among
    ``cocoa_reports``. Nothing of it enters the chat history. A streamed response has it when its ``response_gen`` (or
    ``async_response_gen``) has been read to its end.

    Args:
        inner: the chat engine.
        context_lift: also measure how much the retrieved nodes changed each span, see :class:`RiskQueryEngine`.

    Raises:
        ConfigError: ``inner`` is not a chat engine.
    """

    def __init__(self, inner: BaseChatEngine, *, context_lift: bool = False) -> None:
        if not isinstance(inner, BaseChatEngine):
            raise ConfigError(
                f"RiskChatEngine wraps a chat engine, not a {type(inner).__name__}; for a query engine there is "
                "RiskQueryEngine."
            )
        self._inner = inner
        self._context_lift = context_lift

    @property
    def chat_history(self) -> list[ChatMessage]:
        """The inner engine's."""
        return self._inner.chat_history

    def reset(self) -> None:
        """Begin a new conversation."""
        self._inner.reset()

    def chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **options: Any
    ) -> AGENT_CHAT_RESPONSE_TYPE:
        """Answer a message; ``options`` are the inner engine's own."""
        answers = Answers(lift=self._context_lift)
        with answers:
            response = self._inner.chat(message, chat_history, **options)
        if isinstance(response, StreamingAgentChatResponse):
            return RiskStreamingChatResponse.of(response, answers)
        metadata = _fresh(response)
        answers.write(metadata, response.response, response.source_nodes)
        return response

    async def achat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **options: Any
    ) -> AGENT_CHAT_RESPONSE_TYPE:
        """As :meth:`chat`."""
        answers = Answers(lift=self._context_lift)
        with answers:
            response = await self._inner.achat(message, chat_history, **options)
        if isinstance(response, StreamingAgentChatResponse):
            return RiskStreamingChatResponse.of(response, answers)
        metadata = _fresh(response)
        await answers.awrite(metadata, response.response, response.source_nodes)
        return response

    def stream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **options: Any
    ) -> RiskStreamingChatResponse:
        """As :meth:`chat`, in pieces."""
        answers = Answers(lift=self._context_lift)
        with answers:
            response = self._inner.stream_chat(message, chat_history, **options)
        return RiskStreamingChatResponse.of(response, answers)

    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **options: Any
    ) -> RiskStreamingChatResponse:
        """As :meth:`chat`, in pieces."""
        answers = Answers(lift=self._context_lift)
        with answers:
            response = await self._inner.astream_chat(message, chat_history, **options)
        return RiskStreamingChatResponse.of(response, answers)


def _fresh(response: AgentChatResponse) -> dict[str, Any]:
    """Metadata of the response's own."""
    response.metadata = dict(response.metadata or {})
    return response.metadata
