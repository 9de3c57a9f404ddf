"""The model's answers to many prompts, decoded in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cocoa_engine.config import CocoaConfig
from cocoa_engine.lab.answer_cache import AnswerCache, CacheFolder
from cocoa_engine.model.prompts import Prompt, Source
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
    source: Sequence[Source | None] | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[tuple[ItemT, Generation]]:
    """Each item with the model's answer to its prompt.

    Args:
        engine: the engine with the model.
        items: what is asked, such as questions.
        prompts: the prompt of each item.
        config: the settings. ``max_risk`` is left out: only complete answers can be judged.
        source: the passages of each prompt, as for :meth:`~cocoa_engine.CocoaEngine.generate_batch`.
        advance: called with the number of prompts answered since the last call.
    """
    config, size = config.replace(max_risk=None), engine.runtime.max_batch_size
    for start in range(0, len(items), size):
        batch = slice(start, start + size)
        passages = None if source is None else source[batch]
        generations = engine.generate_batch(prompts[batch], config=config, source=passages)
        advance(len(generations))
        yield from zip(items[batch], generations, strict=True)


def answered(
    engine: CocoaEngine,
    items: Sequence[ItemT],
    prompts: Sequence[Prompt],
    config: CocoaConfig,
    values_of: Callable[[Generation], dict[str, Any]],
    *,
    source: Sequence[Sequence[str] | None] | None = None,
    cache: AnswerCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[tuple[ItemT, dict[str, Any]]]:
    """Each item with plain values of the model's answer to its prompt, in order, each as soon as it is known.

    Args:
        engine, items, prompts, config, source: as for :func:`generated`.
        values_of: measures an answer.
        cache: values of prompts that were answered before are taken from here, and others are added.
        advance: called with the number of prompts answered since the last call.
    """
    passages = [None] * len(prompts) if source is None else list(source)
    identities = [prompt if one is None else [prompt, one] for prompt, one in zip(prompts, passages, strict=True)]
    known = [None if cache is None else cache.get(one) for one in identities]
    missing = [number for number, values in enumerate(known) if values is None]
    advance(len(known) - len(missing))
    asked, of_asked = [prompts[at] for at in missing], [passages[at] for at in missing]
    answers = generated(engine, missing, asked, config, source=of_asked, advance=advance)
    for number, (item, values) in enumerate(zip(items, known, strict=True)):
        if values is None:
            _, generation = next(answers)
            values = values_of(generation)
            if cache is not None:
                cache.add(identities[number], values)
        yield item, values


def answers_cache(folder: CacheFolder, what: str, engine: CocoaEngine, config: CocoaConfig) -> AnswerCache:
    """A cache of the model's answers with some settings, for :func:`answered`.

    Raises:
        ConfigError: as for :class:`.AnswerCache`.
    """
    calibrator = engine.calibrator_for(config)
    settings = {
        "config": config.model_dump(mode="json"),
        "calibrator": None if calibrator is None else calibrator.model_dump(mode="json"),
    }
    return AnswerCache(folder, what, engine, config, settings)
