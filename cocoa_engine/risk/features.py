"""What a risk is worked out from: plain numbers, of a span or of a whole answer, decoded or given as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from cocoa_engine.results import Generation, Preceding, Span

MARGIN_CAP = 20.0
"""Margins above it, in nats, count as this; an infinite one (a single allowed token) could not be weighed."""

_OF_TOKENS = (
    "mean_log_prob",
    "min_log_prob",
    "mean_entropy",
    "max_entropy",
    "mean_margin",
    "min_margin",
    "copied",
    "copied_run",
    "mean_rank",
    "max_rank",
    "log_tokens",
)
"""Over the tokens: log p, entropy and margin, each the mean and the worst; the share that occurs in the prompt, and the
mean length of the prompt's run that a token ends (``Span.token_copied``); log(1 + id), mean and highest: vocabularies
that were merged pair by pair number their tokens from the frequent to the rare; log of their number."""

_OF_PRECEDING = ("log_position", "before_log_prob", "before_entropy", "before_copied", "before_copied_run")

SPAN_FEATURES = (
    "con_mlds",
    "f_mlds",
    "entropy",
    "margin",
    "candidates",
    "candidate_spread",
    *_OF_PRECEDING,
    *_OF_TOKENS,
)
"""In this order: both MLDS; entropy and margin where the span begins (the risk point); how many tokens competed there,
and log p of the best of these less that of the last; what stands before it (``Span.preceding``, log(1 + number) of
tokens); and what is said of its tokens. Logarithms are natural, entropies in nats."""

ANSWER_FEATURES = ("con_mlds", "f_mlds", "max_f_mlds", *_OF_TOKENS)
"""In this order: both MLDS, means over the spans weighed by their tokens; the highest fMLDS of a span; and what is said
of all its tokens."""


def span_features(span: Span) -> list[float]:
    """The features of a span, in the order of :data:`SPAN_FEATURES`."""
    first = [candidate.token_log_probs[0] for candidate in span.candidates]
    return [
        span.con_mlds,
        span.f_mlds,
        span.token_entropies[0],
        min(span.token_margins[0], MARGIN_CAP),
        float(max(1, len(first))),
        max(first) - min(first) if first else 0.0,
        *of_preceding(span.preceding),
        *of_tokens(span.token_ids, span.token_log_probs, span.token_entropies, span.token_margins, span.token_copied),
    ]


def answer_features(generation: Generation) -> list[float]:
    """The features of an answer, in the order of :data:`ANSWER_FEATURES`."""
    spans = generation.spans
    tokens = sum(len(span.token_ids) for span in spans)
    return [
        sum(span.con_mlds * len(span.token_ids) for span in spans) / tokens,
        sum(span.f_mlds * len(span.token_ids) for span in spans) / tokens,
        max(span.f_mlds for span in spans),
        *of_tokens(
            generation.token_ids,
            list(chain.from_iterable(span.token_log_probs for span in spans)),
            list(chain.from_iterable(span.token_entropies for span in spans)),
            list(chain.from_iterable(span.token_margins for span in spans)),
            list(chain.from_iterable(span.token_copied for span in spans)),
        ),
    ]


def of_preceding(before: Preceding) -> list[float]:
    """The features of what stands before a span."""
    return [math.log1p(before.tokens), before.log_prob, before.entropy, before.copied, before.copied_run]


def of_tokens(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    entropies: Sequence[float],
    margins: Sequence[float],
    copied: Sequence[int],
) -> list[float]:
    """The features over t tokens, ``[t]`` each, that spans and answers share."""
    count = len(log_probs)
    capped = [min(margin, MARGIN_CAP) for margin in margins]
    return [
        sum(log_probs) / count,
        min(log_probs),
        sum(entropies) / count,
        max(entropies),
        sum(capped) / count,
        min(capped),
        sum(run > 0 for run in copied) / count,
        sum(copied) / count,
        sum(math.log1p(token_id) for token_id in token_ids) / count,
        math.log1p(max(token_ids)),
        math.log(count),
    ]
