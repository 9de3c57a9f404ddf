"""How much the retrieved nodes changed each span of an answer: its own prompt, once more without their texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from llama_index.core.schema import MetadataMode, NodeWithScore

from cocoa_engine import ContextLift, Generation, PromptError, context_lift
from cocoa_integrations.llama_index.callbacks import Start

_WORDS_IN_A_ROW = 8
"""So many words of a node that follow one another in the prompt are taken for a part of it."""


class WithoutNodes:
    """Cuts the texts of nodes out of the texts of a prompt.

    It works on the prompt that was really sent, so it needs to know nothing of templates or synthesizers. Each node's
    text is cut out once, where it first stands: a question or an earlier turn that quotes it stays. A node that a
    synthesizer has split is cut out by its runs of words.

    Attributes:
        found: whether anything has been cut out yet.
    """

    def __init__(self, nodes: Sequence[NodeWithScore]) -> None:
        ways = [
            [node.node.get_content(metadata_mode=mode).strip() for mode in (MetadataMode.LLM, MetadataMode.NONE)]
            for node in nodes
        ]
        # the longest first: a shorter one may be a part of it
        self._nodes = sorted((way for way in ways if way[-1]), key=lambda way: len(way[0]), reverse=True)
        self.found = False

    def __call__(self, text: str) -> str:
        """The next text of the prompt, with whatever is in it cut out."""
        left = []
        for ways in self._nodes:
            whole = next((way for way in ways if way in text), None)
            if whole is not None:
                text = text.replace(whole, "", 1)
                self.found = True
                continue
            left.append(ways)
            if (shorter := _without_runs(text, ways[-1])) != text:
                text, self.found = shorter, True
        self._nodes = left
        return text


def lift_of(generation: Generation, start: Start | None, nodes: Sequence[NodeWithScore]) -> list[ContextLift] | None:
    """The lift of every span of an answer by what was retrieved for it; None if nothing of that is in its prompt.

    Args:
        generation: the answer.
        start: asks for it again.
        nodes: what was retrieved.
    """
    if start is None:
        return None
    without = WithoutNodes(nodes)
    try:
        bare = start(without)
    except PromptError:  # there was nothing else in it
        return None
    if not without.found:
        return None
    full = start()
    return context_lift(full.engine, generation, bare.prompt, with_context=full.prompt if full.processed else None)


def _without_runs(text: str, part: str) -> str:
    """A text without the runs of words that it has in common with ``part``, in their order."""
    words = list(re.finditer(r"\S+", text))
    matcher = SequenceMatcher(None, [word.group() for word in words], part.split(), autojunk=False)
    for block in reversed(matcher.get_matching_blocks()):
        if block.size >= _WORDS_IN_A_ROW:
            text = text[: words[block.a].start()] + text[words[block.a + block.size - 1].end() :]
    return text
