"""The attention of an answer on passages of its prompt, measured after it was written."""

from __future__ import annotations

from itertools import pairwise

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import passage_means
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.execution.backends.shared_cache import SharedCache
from cocoa_engine.execution.session import Session, SessionOwner
from cocoa_engine.model.prompts import Prompt, Source, passage_positions, prompt_ids, require_fits
from cocoa_engine.results import Generation
from cocoa_engine.scoring.teacher_forcing import score_spans
from cocoa_engine.scoring.text_tree import TextTree


def passage_attention(
    engine: SessionOwner, generation: Generation, prompt: Prompt, source: Source
) -> list[list[float]]:
    """The attention of every span of an answer on each passage of its prompt, by feeding the answer again.

    What the prefix cache has of the prompt is not fed again. ``engine.generate(..., source=...)`` measures the same
    while the answer is written, where the passages are known before.

    Args:
        engine: the engine that answered, or one with the same model.
        generation: the answer.
        prompt: the prompt that was answered, as text or token ids.
        source: the passages, as for :meth:`CocoaEngine.generate`.

    Returns:
        For each of ``generation.spans`` its ``passage_attention``: one value in [0, 1] for each passage; empty if the
        model's retrieval heads are not known, or its attention cannot be seen.

    Raises:
        ConfigError: a passage is not in the prompt.
        PromptError: the prompt is empty, or prompt and answer do not fit the context window.
        NonFiniteLogitsError: the model's logits are NaN or infinite, where they are computed again.
    """
    session: Session = engine.session
    before = prompt_ids(session.model, session.tokens, prompt)
    passages = passage_positions(session.tokens, prompt, before, source)
    spans = [span.token_ids for span in generation.spans]
    if not spans:
        return []
    require_fits(session.model, len(before), sum(map(len, spans)))
    config: CocoaConfig = generation.config
    capture = capture_spec(session.model, config)._replace(early=(), masked=())
    if not isinstance(session.backend, SharedCache):  # the others would run a pass for each token
        measured = score_spans(session.model, before, spans, config, capture, [0] * len(spans), passages)
        return [span.passage_attention for span in measured]
    rows: list[list[float]] = []
    text = [token_id for span in spans for token_id in span]
    with TextTree(session.backend, before, [text], capture, passages=passages) as tree:
        for step in (step for group in tree.groups() for step in group.steps()):
            rows += [] if step.output.passages is None else step.output.passages.tolist()
    ends = [sum(map(len, spans[:number])) for number in range(len(spans) + 1)]
    return [passage_means(rows[start:end]) for start, end in pairwise(ends)]
