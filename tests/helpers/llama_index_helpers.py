"""A listener on LlamaIndex's events, a retriever, and a logits processor that scripts an answer."""

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from cocoa_engine import CocoaEngine

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
    if isinstance(response, StreamingAgentChatResponse) and how.startswith("a"):
        return "".join([delta async for delta in response.async_response_gen()]), response
    if isinstance(response, AsyncStreamingResponse):
        return "".join([delta async for delta in response.response_gen]), response
    if isinstance(response, (StreamingResponse, StreamingAgentChatResponse)):
        return "".join(await asyncio.to_thread(list, response.response_gen)), response
    return str(response), response


class Script:
    """A logits processor that makes the assistant say what ``answer`` returns for the prompt's text."""

    def __init__(self, engine: CocoaEngine, answer: Callable[[str], str]) -> None:
        self._engine = engine
        self._answer = answer
        self._opening = engine.encode("<|im_start|>assistant\n", add_special_tokens=False)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        sequence, size = ids[0].tolist(), len(self._opening)
        start = max(n for n in range(size, len(sequence) + 1) if sequence[n - size : n] == self._opening)
        answer = self._engine.encode(self._answer(self._engine.decode(sequence[:start])), add_special_tokens=False)
        answer.append(self._engine.tokenizer.eos_token_id)
        forced = torch.full_like(scores, -torch.inf)
        forced[:, answer[min(len(sequence) - start, len(answer) - 1)]] = 0.0
        return forced
