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

_BLACK = "\uffff"
"""A character that no text contains."""


class WithoutNodes:
    """Removes the texts of nodes from the texts of a prompt.

    It works on the prompt that was sent, and is independent of templates and synthesizers. The text of each node is
    removed once, at its first occurrence, so a question or an earlier turn that quotes it is kept. A node that stands
    only inside the text of another is not removed by itself. If a synthesizer has split a node, the runs of its words
    that the prompt contains are removed, outside the texts of the other nodes.

    Args:
        nodes: the retrieved nodes.
        only: the index of the only node to remove. Default: all.

    Attributes:
        found: whether any text has been removed.
    """

    def __init__(self, nodes: Sequence[NodeWithScore], *, only: int | None = None) -> None:
        contents = {number: node.node.get_content(MetadataMode.NONE).strip() for number, node in enumerate(nodes)}
        self._waiting = {number: text for number, text in contents.items() if text}
        # each node with its metadata, and without
        versions = [(number, nodes[number].node.get_content(MetadataMode.LLM).strip()) for number in self._waiting]
        # the longest first: it may contain a shorter one
        versions = [version for version in (*versions, *self._waiting.items()) if version[1]]
        self._versions = sorted(versions, key=lambda version: len(version[1]), reverse=True)
        self._only = only
        self.found = False

    def __call__(self, text: str) -> str:
        """The next text of the prompt without the texts of the nodes."""
        free = text  # with the texts of the nodes blacked out
        cuts: list[tuple[int, int]] = []
        for number, version in self._versions:
            if number in self._waiting and (start := free.find(version)) >= 0:
                del self._waiting[number]
                cut = start, start + len(version)
                free = _blacked_out(free, *cut)
                cuts += [cut] if self._only in (None, number) else []
        for number, content in self._waiting.items():
            for run in _runs(free, content) if self._only in (None, number) else ():
                free = _blacked_out(free, *run)
                cuts.append(run)
        self.found = self.found or bool(cuts)
        for start, end in sorted(cuts, reverse=True):
            text = text[:start] + text[end:]
        return text


def lift_of(
    generation: Generation, start: Start | None, nodes: Sequence[NodeWithScore], *, only: int | None = None
) -> list[ContextLift] | None:
    """The context lift of every span of an answer, or ``None`` if its prompt contains no text of the nodes.

    Args:
        generation: the answer.
        start: the function that repeats the request.
        nodes: the retrieved nodes.
        only: the index of the only node to leave out. Default: all.
    """
    if start is None:
        return None
    without = WithoutNodes(nodes, only=only)
    try:
        without_source = start(without)
    except PromptError:  # the prompt had no other text
        return None
    if not without.found:
        return None
    full = start()
    return context_lift(
        start.engine, generation, without_source.prompt, with_context=full.prompt if full.processed else None
    )


def shares_a_run(prompt: str, texts: Sequence[str]) -> bool:
    """Whether a prompt has a run of at least as many words of one of the texts as :class:`WithoutNodes` removes."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[start : start + _MIN_RUN]) for start in range(len(words) - _MIN_RUN + 1)}

    of_prompt = runs(prompt) if texts else set()
    return any(not of_prompt.isdisjoint(runs(text)) for text in texts)


def _blacked_out(text: str, start: int, end: int) -> str:
    return text[:start] + _BLACK * (end - start) + text[end:]


def _runs(text: str, part: str) -> list[tuple[int, int]]:
    """The ranges of the runs of words that a text has in common with ``part``."""
    words = list(re.finditer(r"\S+", text))
    matcher = SequenceMatcher(None, [word.group() for word in words], part.split(), autojunk=False)
    long = [block for block in matcher.get_matching_blocks() if block.size >= _MIN_RUN]
    return [(words[block.a].start(), words[block.a + block.size - 1].end()) for block in long]
