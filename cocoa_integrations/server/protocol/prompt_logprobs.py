"""The log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from typing import Any

from cocoa_engine import Cancellation, CocoaConfig, CocoaEngine, Generation
from cocoa_integrations._shared.logprobs import TokenLogprobs

_MOST_LOGITS = 2**28
"""Above this number of logits, one GiB in float32, a text is read in several forward passes."""


def prompt_logprobs(
    engine: CocoaEngine, token_ids: list[int], top: int, cancellation: Cancellation
) -> list[dict[str, Any]]:
    """An entry for each token of a prompt, special tokens included; the first has no log-probability.

    Args:
        engine: the engine.
        token_ids: the prompt.
        top: the number of most probable tokens to list for each token.
        cancellation: ends the work.

    Raises:
        PromptError: the prompt is too long, or has unknown token ids.
    """
    tokens = TokenLogprobs(engine, special=True)
    entries = [tokens.token(token_ids[0], None)]
    if len(token_ids) == 1:
        return entries
    config = CocoaConfig(method="greedy", top_logprobs=top)
    scored = score_one(
        engine.without_calibrator(), token_ids[:1], token_ids[1:], config=config, cancellation=cancellation
    )
    (span,) = scored.spans
    rivals = span.top_log_probs or [[]] * len(span.token_ids)
    for token_id, log_prob, most_probable in zip(span.token_ids, span.token_log_probs, rivals, strict=True):
        entries.append(tokens.token(token_id, log_prob, most_probable))
    return entries


def score_one(engine: CocoaEngine, prompt: str | list[int], text: str | list[int], **options: Any) -> Generation:
    """Score one text, in one forward pass, or in several if the logits would need much memory."""
    # a text has at most about as many tokens as characters
    if (len(text) + 1) * engine.info().vocab_size > _MOST_LOGITS and not options.get("divide"):
        texts: Any = [text]
        scored: list[Generation] = engine.score(prompt, texts, **options)
        return scored[0]
    return engine.score(prompt, text, **options)
