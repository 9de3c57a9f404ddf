"""The nodes that a query retrieved, as the passages of the prompts that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import MetadataMode, NodeWithScore

from cocoa_engine import CocoaEngine
from cocoa_integrations._shared.citations import find_in

_retrieved: ContextVar[list[NodeWithScore] | None] = ContextVar("cocoa_retrieved_nodes", default=None)


class Retrieval:
    """Collects the nodes that are retrieved inside its ``with`` block. The innermost block counts.

    Attributes:
        nodes: the nodes, in order, each once.
    """

    def __init__(self) -> None:
        self.nodes: list[NodeWithScore] = []
        self._outer: list[NodeWithScore] | None = None

    def __enter__(self) -> Retrieval:
        _watch()
        self._outer = _retrieved.get()
        _retrieved.set(self.nodes)
        return self

    def __exit__(self, *error: object) -> None:
        _retrieved.set(self._outer)  # not reset(token): the block may be left in another context


def add_nodes(nodes: Sequence[NodeWithScore]) -> None:
    """Add nodes to those of the innermost :class:`Retrieval`, if there is one."""
    known = _retrieved.get()
    if known is not None:
        ids = {node.node.node_id for node in known}
        for node in nodes:
            if node.node.node_id not in ids:
                ids.add(node.node.node_id)
                known.append(node)


class PassagesOfCall:
    """The retrieved nodes whose text is in the prompt of one call. Create it inside the call.

    Attributes:
        node_ids: the ids of these nodes, in the order of ``passage_attention``.
    """

    def __init__(self) -> None:
        self._nodes = list(_retrieved.get() or ())
        self.node_ids: list[str] = []

    def source(
        self, prompt: Callable[[], str], engine: CocoaEngine | None = None, most: int | None = None
    ) -> list[str] | None:
        """The texts of the nodes in a prompt; ``None`` if there are none.

        Args:
            prompt: returns the text of the prompt. It is not called if nothing was retrieved.
            engine: as for :func:`texts_in`.
            most: the largest number of texts. Nodes beyond it are left out.
        """
        if not self._nodes:
            return None
        text = prompt()
        texts = texts_in(text, self._nodes, engine)
        numbers = find_in(text, texts)[:most]
        self.node_ids = [self._nodes[number].node.node_id for number in numbers]
        return [texts[number] for number in numbers] or None


def texts_in(prompt: str, nodes: Sequence[NodeWithScore], engine: CocoaEngine | None) -> list[str]:
    """The texts of nodes, as they stand in a prompt that has them.

    Args:
        prompt: the text of the prompt.
        nodes: the nodes.
        engine: the engine whose tokens were decoded to the prompt: its tokenizer may change a text.
    """
    texts = [node.node.get_content(MetadataMode.NONE).strip() for node in nodes]
    if engine is None:
        return texts
    return [
        text if text in prompt else engine.decode(engine.encode(text, add_special_tokens=False)).strip()
        for text in texts
    ]


def by_source_node(
    measured: Sequence[float], node_ids: Sequence[str], nodes: Sequence[NodeWithScore]
) -> list[float | None] | None:
    """The attention of a span on each source node of a response; ``None`` for a node that was not in the prompt.

    Args:
        measured: the ``passage_attention`` of the span.
        node_ids: the nodes that it is of.
        nodes: the source nodes of the response.

    Returns:
        The values; ``None`` if the response has none of the nodes, because an engine made others of them, or if the
        span was measured on other texts than nodes.
    """
    if len(measured) != len(node_ids):
        return None
    values = dict(zip(node_ids, measured, strict=True))
    found = [values.get(node.node.node_id) for node in nodes]  # a response can have a node twice
    return None if all(value is None for value in found) else found


class _NodesRetrieved(BaseEventHandler):
    """Tells the innermost :class:`Retrieval` which nodes a retriever has found."""

    @classmethod
    def class_name(cls) -> str:
        """See ``BaseEventHandler``."""
        return "CocoaNodesRetrieved"

    def handle(self, event: BaseEvent, **options: Any) -> None:
        """Add the nodes of a retrieval."""
        if isinstance(event, RetrievalEndEvent):
            add_nodes(event.nodes)


_handler = _NodesRetrieved()


def _watch() -> None:
    """Listen to LlamaIndex's events. Others may have replaced its list of handlers since the last call."""
    dispatcher = get_dispatcher()
    if not any(handler is _handler for handler in dispatcher.event_handlers):
        dispatcher.add_event_handler(_handler)
