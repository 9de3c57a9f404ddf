"""What a risk is worked out from: plain numbers, of a span or of a whole answer, decoded or given as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from cocoa_engine.config import CocoaConfig
from cocoa_engine.results import Candidate, Generation, Preceding
from cocoa_engine.scores import cocoa_sig

MARGIN_CAP = 20.0
"""Margins above it, in nats, count as this; an infinite one (a single allowed token) could not be weighed."""

CONTESTED = -math.log(0.3)
"""A token with no larger margin, in nats, was contested: another had 0.3 times its probability (gamma's default)."""

_SHARED = (
    "con_mlds",
    "f_mlds",
    "mean_log_prob",
    "min_log_prob",
    "mean_entropy",
    "mean_margin",
    "copied",
    "copied_run",
    "mean_rank",
    "log_tokens",
)

ANSWER_FEATURES = (*_SHARED, "contested", "log_contested")
"""In this order: both MLDS, means over the answer's spans weighed by their tokens; and of its tokens log p (mean and
lowest), mean entropy and margin; the share that the prompt holds, and the mean run of the prompt that they end
(``Span.token_copied``); the mean log(1 + id), as vocabularies that were merged pair by pair number their tokens from
the frequent to the rare; log of their number; the share that was contested (:data:`CONTESTED`), and log(1 + number) of
those. Logarithms are natural, entropies in nats."""

SPAN_FEATURES = (
    *_SHARED,
    "entropy",
    "max_entropy",
    "margin",
    "min_margin",
    "max_rank",
    "candidates",
    "candidate_spread",
    "score_spread",
    "log_position",
    "before_log_prob",
    "before_entropy",
    "before_copied",
    "before_copied_run",
)
"""In this order: the same of a span and its tokens, but for those contested; entropy where it begins (the risk point)
and highest, margin where it begins and lowest; the highest log(1 + id); how many tokens competed there, log p of the
best of these less that of the last, and the best score of the candidates less the worst (:func:`of_candidates`); and
what stands before it (``Span.preceding``; log(1 + number) of tokens)."""

ALPHA: float = CocoaConfig.model_fields["alpha"].default
"""Of the scores whose spread is a feature: the default ones whatever ranks the candidates, so that a calibrator holds
for every alpha and either metric."""


class SpanFigures(Protocol):
    """What was measured of a span, decided or reported."""

    @property
    def con_mlds(self) -> float: ...

    @property
    def f_mlds(self) -> float: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def token_log_probs(self) -> list[float]: ...

    @property
    def token_entropies(self) -> list[float]: ...

    @property
    def token_margins(self) -> list[float]: ...

    @property
    def token_copied(self) -> list[int]: ...

    @property
    def preceding(self) -> Preceding: ...

    @property
    def candidates(self) -> list[Candidate]: ...


def span_features(span: SpanFigures) -> list[float]:
    """The features of a span, in the order of :data:`SPAN_FEATURES`."""
    return [
        span.con_mlds,
        span.f_mlds,
        *of_tokens(span.token_ids, span.token_log_probs, span.token_entropies, span.token_margins, span.token_copied),
        *worst_of_tokens(span.token_ids, span.token_entropies, span.token_margins),
        *of_candidates(span.candidates),
        *of_preceding(span.preceding),
    ]


def answer_features(generation: Generation) -> list[float]:
    """The features of an answer, in the order of :data:`ANSWER_FEATURES`."""
    spans = generation.spans
    tokens = sum(len(span.token_ids) for span in spans)
    margins = list(chain.from_iterable(span.token_margins for span in spans))
    return [
        sum(span.con_mlds * len(span.token_ids) for span in spans) / tokens,
        sum(span.f_mlds * len(span.token_ids) for span in spans) / tokens,
        *of_tokens(
            generation.token_ids,
            list(chain.from_iterable(span.token_log_probs for span in spans)),
            list(chain.from_iterable(span.token_entropies for span in spans)),
            margins,
            list(chain.from_iterable(span.token_copied for span in spans)),
        ),
        *of_contested(margins),
    ]


def of_tokens(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    entropies: Sequence[float],
    margins: Sequence[float],
    copied: Sequence[int],
) -> list[float]:
    """The features over t tokens, ``[t]`` each, that spans and answers share."""
    count = len(log_probs)
    return [
        sum(log_probs) / count,
        min(log_probs),
        sum(entropies) / count,
        sum(min(margin, MARGIN_CAP) for margin in margins) / count,
        sum(run > 0 for run in copied) / count,
        sum(copied) / count,
        sum(math.log1p(token_id) for token_id in token_ids) / count,
        math.log(count),
    ]


def of_contested(margins: Sequence[float]) -> list[float]:
    """The features of an answer's contested tokens."""
    count = sum(margin <= CONTESTED for margin in margins)
    return [count / len(margins), math.log1p(count)]


def worst_of_tokens(token_ids: Sequence[int], entropies: Sequence[float], margins: Sequence[float]) -> list[float]:
    """The features of single tokens of a span: the first and the worst."""
    return [
        entropies[0],
        max(entropies),
        min(margins[0], MARGIN_CAP),
        min(*margins, MARGIN_CAP),
        math.log1p(max(token_ids)),
    ]


def of_candidates(candidates: Sequence[Candidate]) -> list[float]:
    """The features of what competed at a risk point; of a span that is none, one candidate and no spread.

    The scores are CoCoA-SIG's, s = log p_S (1 + alpha fMLDS), with log p_S as a sum and :data:`ALPHA`.
    """
    first = [one.token_log_probs[0] for one in candidates]
    scores = [cocoa_sig(sum(one.token_log_probs), one.f_mlds, ALPHA) for one in candidates]
    return [
        float(max(1, len(candidates))),
        *(max(values) - min(values) if values else 0.0 for values in (first, scores)),
    ]


def of_preceding(before: Preceding) -> list[float]:
    """The features of what stands before a span."""
    return [math.log1p(before.tokens), before.log_prob, before.entropy, before.copied, before.copied_run]
