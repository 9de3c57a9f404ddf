"""The nodes that a query retrieved: as the passages of the prompts that are made of them."""

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import MetadataMode, NodeWithScore

from cocoa_engine import CocoaEngine
from cocoa_integrations._shared.citations import find_in
from cocoa_integrations.llama_index.callbacks import collected_nodes

_MIN_RUN = 8  # words in common with a node that count as part of it


def add_nodes(nodes: Sequence[NodeWithScore]) -> None:
    """Add nodes to those of the innermost collector of nodes, if there is one, each once."""
    if (collected := collected_nodes()) is not None:
        for node in nodes:  # appended, because several threads may retrieve at once
            if all(node.node.node_id != other.node.node_id for other in collected):
                collected.append(node)


class PassagesOfCall:
    """The retrieved nodes whose text is in the prompt of one call, by id. Create it inside the call."""

    def __init__(self) -> None:
        self._nodes = list(collected_nodes() or ())
        self.node_ids: list[str] = []

    def __call__(
        self, prompt: Callable[[], str], engine: CocoaEngine | None = None, most: int | None = None
    ) -> list[str] | None:
        """The texts of the nodes in a prompt, ``most`` at most; ``None`` if there are none."""
        if not self._nodes:
            return None
        text = prompt()
        texts = texts_in(text, self._nodes, engine)
        numbers = find_in(text, texts)[:most]
        self.node_ids[:] = [self._nodes[number].node.node_id for number in numbers]
        return [texts[number] for number in numbers] or None


def texts_in(prompt: str, nodes: Sequence[NodeWithScore], engine: CocoaEngine | None) -> list[str]:
    """The texts of nodes, as they stand in a prompt; the tokenizer that decoded it may change a text."""
    texts = [node.node.get_content(MetadataMode.NONE).strip() for node in nodes]
    for number, text in enumerate(texts):
        if engine is not None and text not in prompt:
            texts[number] = engine.decode(engine.encode(text, add_special_tokens=False)).strip()
    return texts


def by_source_node(
    measured: Sequence[float | None], node_ids: Sequence[str], nodes: Sequence[NodeWithScore]
) -> list[float | None] | None:
    """The attention of a span on each source node; ``None`` for a node that was not in the prompt, or if all are."""
    values = dict(zip(node_ids, measured, strict=False)) if len(measured) == len(node_ids) else {}
    by_node = [values.get(node.node.node_id) for node in nodes]  # a response can have a node twice
    return None if all(value is None for value in by_node) else by_node


class _NodesRetrieved(BaseEventHandler):
    def handle(self, event: BaseEvent, **options: Any) -> None:
        if isinstance(event, RetrievalEndEvent):
            add_nodes(event.nodes)


_handler = _NodesRetrieved()


def watch_retrievals() -> None:
    """Listen to LlamaIndex's events. Others may have replaced its list of handlers since the last call."""
    dispatcher = get_dispatcher()
    if not any(handler is _handler for handler in dispatcher.event_handlers):
        dispatcher.add_event_handler(_handler)


def shares_a_run(prompt: str, texts: Sequence[str]) -> bool:
    """Whether a prompt has a run of words of one of the texts, as of a node that a synthesizer has split."""
    words = prompt.split()
    matchers = (SequenceMatcher(None, words, text.split(), autojunk=False) for text in texts)
    return any(block.size >= _MIN_RUN for matcher in matchers for block in matcher.get_matching_blocks())
