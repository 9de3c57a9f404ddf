"""A listener on LlamaIndex's events, a retriever, and what engines answer."""

import asyncio
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from cocoa_integrations.llama_index import RiskStreamingChatResponse

PROMPT = "The capital of France is"


class Listener(BaseEventHandler):
    """Keeps every event."""

    events: list[BaseEvent] = []  # noqa: RUF012  # a pydantic field

    @classmethod
    def class_name(cls) -> str:
        return "Listener"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    def of(self, *kinds: type[BaseEvent]) -> list[Any]:
        """The events of these classes, in order."""
        return [event for event in self.events if isinstance(event, kinds)]


class Finds(BaseRetriever):
    """Finds these texts, always; each is the text and the id of a node."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self._texts = texts

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=text, id_=text)) for text in self._texts]


async def answered(engine: Any, how: str, question: str) -> tuple[str, Any]:
    """The text of an engine's response by one of its methods, read to its end, and the response."""
    method = getattr(engine, how)
    response = await method(question) if how.startswith("a") else await asyncio.to_thread(method, question)
    if isinstance(response, RiskStreamingChatResponse) and how.startswith("a"):
        return "".join([delta async for delta in response.async_response_gen()]), response
    if isinstance(response, AsyncStreamingResponse):
        return "".join([delta async for delta in response.response_gen]), response
    if isinstance(response, (StreamingResponse, RiskStreamingChatResponse)):
        return "".join(await asyncio.to_thread(list, response.response_gen)), response
    return str(response), response
