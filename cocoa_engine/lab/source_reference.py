"""The reference distribution of a model's source attention: that of the spans which it writes itself from a source.

The model answers questions about invented passages, and retells them. No labels are needed: a span that attends less to
its source than most of the model's own spans has a high rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from cocoa_engine.config import CocoaConfig
from cocoa_engine.engine import CocoaEngine
from cocoa_engine.errors import UnsupportedModelError
from cocoa_engine.lab.answer_cache import AnswerCache, CacheFolder
from cocoa_engine.lab.answering import answered
from cocoa_engine.lab.invented import Passage, passages
from cocoa_engine.methods.retrieval_heads import RetrievalHeads, heads_of_model, keep, spread_heads_of
from cocoa_engine.output_files import write_file
from cocoa_engine.results import Generation

PROMPTS = 60
"""The default number of prompts: as many questions as requests to retell a passage."""

MAX_NEW_TOKENS = 48

KNOTS = 101
"""The number of quantiles that are stored."""

MIN_SPANS = 50
"""With fewer spans, the distribution would be too rough."""


def with_reference(
    engine: CocoaEngine,
    found: RetrievalHeads,
    *,
    prompts: int = PROMPTS,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    cache: CacheFolder | None = None,
) -> RetrievalHeads:
    """Measure the reference distribution of a model's source attention.

    Args:
        engine: the engine with the model. Its settings are used for decoding.
        found: the model's retrieval heads.
        prompts: the number of prompts that the model answers.
        seed: seed of the invented passages.
        on_progress: called with the number of prompts answered and their total.
        cache: a :class:`.CacheFolder` that keeps what is measured of every answer; prompts that are in it are not
            answered again.

    Returns:
        The heads with ``reference`` and ``reference_spans``.

    Raises:
        UnsupportedModelError: the model's attention cannot be seen, or its answers have too few spans.
        ConfigError: the cache is required, and cannot be read or written.
    """
    values: list[float] = []
    with tempfile.TemporaryDirectory(prefix="cocoa-heads-") as folder:
        file = Path(folder) / "heads.json"
        write_file(file, found.model_dump_json())
        config = engine.config.replace(
            decore_heads=str(file), max_new_tokens=MAX_NEW_TOKENS, max_risk=None, method="cocoa-sig"
        )
        asked = [_encoded(engine, request) for request in islice(_requests(seed), prompts)]
        known = None if cache is None else _cache(cache, engine, config)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            on_progress(done, len(asked))

        for _, measured in answered(engine, asked, asked, config, _attention, cache=known, advance=advance):
            values += measured["source_attention"]
    if len(values) < MIN_SPANS:
        invisible = "Its attention may not be visible (see `cocoa info`)"
        remedy = f"Take more prompts ({PROMPTS} by default)" if values else invisible
        raise UnsupportedModelError(
            f"{engine.model_name} wrote {len(values)} spans with a known source attention in {prompts} answers; at "
            f"least {MIN_SPANS} are needed. {remedy}."
        )
    knots = np.quantile(np.array(values), np.linspace(0, 1, KNOTS)).clip(0, 1)
    rounded = [round(float(knot), 6) for knot in knots]
    return found.model_copy(update={"reference": rounded, "reference_spans": len(values)})


def _attention(answer: Generation) -> dict[str, Any]:
    """The source attention of the spans with letters or digits, as far as it is known."""
    found = [span.source_attention for span in answer.spans if any(letter.isalnum() for letter in span.text)]
    return {"source_attention": [value for value in found if value is not None]}


def _cache(folder: CacheFolder, engine: CocoaEngine, config: CocoaConfig) -> AnswerCache:
    """The cache of the answers. The file of the heads has another name each time, so the heads alone count."""
    settings = config.model_dump(mode="json", exclude={"decore_heads"})
    return AnswerCache(folder, "reference", engine, config, {"config": settings})


def keep_reference(
    engine: CocoaEngine,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    cache: CacheFolder | None = None,
) -> Path | None:
    """Measure the reference distribution of a model that has none, and keep it in the cache directory.

    Its heads are the retrieval heads that are known, or else those of :func:`spread_heads_of`.

    Args:
        engine: as for :func:`with_reference`.
        on_progress, cache: likewise.

    Returns:
        The file; `None` if the model has a reference distribution, or no attention that can be seen.

    Raises:
        OSError, RuntimeError: the cache directory cannot be written to.
    """
    model = engine.session.model
    found = heads_of_model(None, model) or spread_heads_of(model)
    if found is None or found.reference is not None:
        return None
    named = found.model_copy(update={"model_name": engine.model_name})
    try:
        measured = with_reference(engine, named, on_progress=on_progress, cache=cache)
    except UnsupportedModelError:
        return None
    return keep(measured, model)


def _requests(seed: int) -> Iterator[str]:
    """Questions about passages, and requests to retell one, in turn."""
    for number, passage in enumerate(passages(seed)):
        yield _question(passage) if number % 2 else f"{passage.text}\n\nSummarise the text in two sentences."


def _question(passage: Passage) -> str:
    task = "Answer the question from the passage, in one sentence."
    return f"Passage: {passage.text}\n\n{task}\nQuestion: {passage.stated[0].question}"


def _encoded(engine: CocoaEngine, request: str) -> list[int]:
    if engine.has_chat_template:
        return engine.encode_chat([{"role": "user", "content": request}])
    return engine.encode(f"{request}\nAnswer:")
