"""The source of an answer: which passage of the prompt its spans attend to."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from cocoa_engine.decoding.branch import passage_means
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.engine import CocoaEngine
from cocoa_engine.execution.backends.shared_cache import SharedCache
from cocoa_engine.model.prompts import Prompt, Source, passage_positions, prompt_ids, require_fits
from cocoa_engine.results import Generation
from cocoa_engine.scoring.given_texts import score_spans
from cocoa_engine.scoring.text_tree import fed


def passage_attention(engine: CocoaEngine, generation: Generation, prompt: Prompt, source: Source) -> list[list[float]]:
    """The attention of every span of an answer on each passage of its prompt, by feeding the answer again.

    What the prefix cache has of the prompt is not fed again. ``engine.generate(..., source=...)`` measures the same
    while the answer is written, where the passages are known before.

    Args:
        engine: the engine that answered, or one with the same model.
        prompt: the prompt that was answered, as text or token ids.
        source: the passages, as for :meth:`CocoaEngine.generate`.

    Returns:
        For each of ``generation.spans`` its ``passage_attention``: one value in [0, 1] for each passage; empty if the
        model's retrieval heads are not known, or its attention cannot be seen.

    Raises:
        ConfigError: a passage is not in the prompt.
        PromptError: the prompt is empty, or the prompt and the answer do not fit the context window.
        NonFiniteLogitsError: the model's logits are NaN or infinite.
    """
    session, config = engine.session, generation.config
    before = prompt_ids(session.model, session.tokens, prompt)
    passages = passage_positions(session.tokens, prompt, before, source)
    text, lengths = generation.token_ids, [len(span.token_ids) for span in generation.spans]
    if not text:
        return []
    require_fits(session.model, len(before), len(text))
    capture = capture_spec(session.model, config)._replace(early=(), masked=())
    backend = session.backend
    if not isinstance(backend, SharedCache):  # the others would run a pass for each token
        scored = score_spans(session.model, before, text, lengths, config, capture, passages)
        return [span.passage_attention for span in scored]
    rows: list[Sequence[float]] = []
    with fed(backend, before, [text], capture, passages=passages) as steps:
        for step in steps:
            rows += step.output.passages
    ranges = pairwise(accumulate(lengths, initial=0))
    return [passage_means(rows[start:end]) for start, end in ranges]
