"""The attention of an answer on passages of its prompt, measured after it was written."""

from __future__ import annotations

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.execution.session import Session, SessionOwner
from cocoa_engine.model.passages import Source, passage_positions
from cocoa_engine.model.prompts import Prompt, prompt_ids, require_fits
from cocoa_engine.results import Generation
from cocoa_engine.scoring.teacher_forcing import score_spans


def passage_attention(
    engine: SessionOwner, generation: Generation, prompt: Prompt, source: Source
) -> list[list[float]]:
    """The attention of every span of an answer on each passage of its prompt, with one additional forward pass.

    ``engine.generate(..., source=...)`` measures the same without that pass, where the passages are known before.

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
        NonFiniteLogitsError: the model's logits are NaN or infinite.
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
    measured = score_spans(session.model, before, spans, config, capture, [0] * len(spans), passages)
    return [span.passage_attention for span in measured]
