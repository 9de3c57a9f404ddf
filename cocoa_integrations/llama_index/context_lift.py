"""Context lift: how much the retrieved nodes changed each span of an answer.

The answer is fed again after its own prompt, from which the texts of the nodes are removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from llama_index.core.schema import MetadataMode, NodeWithScore

from cocoa_engine import ContextLift, Generation, PromptError, context_lift
from cocoa_integrations.llama_index.callbacks import Start

_MIN_RUN = 8
"""A run of at least this many words that a prompt has in common with a node counts as part of the node."""


class WithoutNodes:
    """Removes the texts of nodes from the texts of a prompt.

    It works on the prompt that was sent, and is independent of templates and synthesizers. The text of each node is
    removed once, at its first occurrence, so a question or an earlier turn that quotes it is kept. If a synthesizer has
    split a node, the runs of its words that the prompt contains are removed.

    Args:
        nodes: the retrieved nodes.

    Attributes:
        found: whether any text has been removed.
    """

    def __init__(self, nodes: Sequence[NodeWithScore]) -> None:
        # the text of each node with its metadata, and without
        versions = [
            [node.node.get_content(metadata_mode=mode).strip() for mode in (MetadataMode.LLM, MetadataMode.NONE)]
            for node in nodes
        ]
        # the longest first: it may contain a shorter one
        self._nodes = sorted((texts for texts in versions if texts[-1]), key=lambda texts: len(texts[0]), reverse=True)
        self.found = False

    def __call__(self, text: str) -> str:
        """The next text of the prompt without the texts of the nodes."""
        remaining = []
        for versions in self._nodes:
            complete = next((version for version in versions if version in text), None)
            if complete is not None:
                text = text.replace(complete, "", 1)
                self.found = True
                continue
            remaining.append(versions)
            if (shorter := _without_runs(text, versions[-1])) != text:
                text, self.found = shorter, True
        self._nodes = remaining
        return text


def lift_of(generation: Generation, start: Start | None, nodes: Sequence[NodeWithScore]) -> list[ContextLift] | None:
    """The context lift of every span of an answer, or ``None`` if its prompt contains no text of the nodes.

    Args:
        generation: the answer.
        start: the function that repeats the request.
        nodes: the retrieved nodes.
    """
    if start is None:
        return None
    without = WithoutNodes(nodes)
    try:
        bare = start(without)
    except PromptError:  # the prompt had no other text
        return None
    if not without.found:
        return None
    full = start()
    return context_lift(full.engine, generation, bare.prompt, with_context=full.prompt if full.processed else None)


def _without_runs(text: str, part: str) -> str:
    """A text without the runs of words that it has in common with ``part``."""
    words = list(re.finditer(r"\S+", text))
    matcher = SequenceMatcher(None, [word.group() for word in words], part.split(), autojunk=False)
    for block in reversed(matcher.get_matching_blocks()):
        if block.size >= _MIN_RUN:
            text = text[: words[block.a].start()] + text[words[block.a + block.size - 1].end() :]
    return text
