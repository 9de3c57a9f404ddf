"""The reference distribution of a model's source attention: that of the spans which it writes itself from a source.

The model answers questions about invented passages, and retells them. No labels are needed: a span that attends less to
its source than most of the model's own spans has a high rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from cocoa_engine.engine import CocoaEngine
from cocoa_engine.errors import UnsupportedModelError
from cocoa_engine.methods.retrieval_heads import RetrievalHeads, heads_of_model, keep, spread_heads_of
from cocoa_engine.output_files import write_file
from cocoa_engine.studies.invented import Passage, passages

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
) -> RetrievalHeads:
    """Measure the reference distribution of a model's source attention.

    Args:
        engine: the engine with the model. Its settings are used for decoding.
        found: the model's retrieval heads.
        prompts: the number of prompts that the model answers.
        seed: seed of the invented passages.
        on_progress: called with the number of prompts answered and their total.

    Returns:
        The heads with ``reference`` and ``reference_spans``.

    Raises:
        UnsupportedModelError: the model's attention cannot be seen, or its answers have too few spans.
    """
    values: list[float] = []
    with tempfile.TemporaryDirectory(prefix="cocoa-heads-") as folder:
        file = Path(folder) / "heads.json"
        write_file(file, found.model_dump_json())
        config = engine.config.replace(
            decore_heads=str(file), max_new_tokens=MAX_NEW_TOKENS, max_risk=None, method="cocoa-sig"
        )
        asked = [_encoded(engine, request) for request in islice(_requests(seed), prompts)]
        size = engine.runtime.max_batch_size
        for start in range(0, len(asked), size):
            for answer in engine.generate_batch(asked[start : start + size], config=config):
                values += [
                    span.source_attention
                    for span in answer.spans
                    if span.source_attention is not None and any(letter.isalnum() for letter in span.text)
                ]
            on_progress(min(start + size, len(asked)), len(asked))
    if len(values) < MIN_SPANS:
        raise UnsupportedModelError(
            f"{engine.model_name} wrote {len(values)} spans with a known source attention in {prompts} answers; at "
            f"least {MIN_SPANS} are needed. Its attention may not be visible (see `cocoa info`)."
        )
    knots = np.quantile(np.array(values), np.linspace(0, 1, KNOTS)).clip(0, 1)
    rounded = [round(float(knot), 6) for knot in knots]
    return found.model_copy(update={"reference": rounded, "reference_spans": len(values)})


def keep_reference(
    engine: CocoaEngine, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Path | None:
    """Measure the reference distribution of a model that has none, and keep it in the cache directory.

    Its heads are the retrieval heads that are known, or else those of :func:`.spread_heads`.

    Args:
        engine: as for :func:`with_reference`.
        on_progress: likewise.

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
        measured = with_reference(engine, named, on_progress=on_progress)
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
