"""The model's answers to many prompts, decoded in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from cocoa_engine.config import CocoaConfig
from cocoa_engine.model.prompts import Prompt
from cocoa_engine.results import Generation

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine

ItemT = TypeVar("ItemT")


def generated(
    engine: CocoaEngine,
    items: Sequence[ItemT],
    prompts: Sequence[Prompt],
    config: CocoaConfig,
    *,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[tuple[ItemT, Generation]]:
    """Each item with the model's answer to its prompt.

    Args:
        engine: the engine with the model.
        items: what is asked, such as questions.
        prompts: the prompt of each item.
        config: the settings. ``max_risk`` is left out: only complete answers can be judged.
        advance: called with the number of prompts answered since the last call.
    """
    config, size = config.replace(max_risk=None), engine.runtime.max_batch_size
    for start in range(0, len(items), size):
        batch = slice(start, start + size)
        generations = engine.generate_batch(prompts[batch], config=config)
        yield from zip(items[batch], generations, strict=True)
        advance(len(generations))
