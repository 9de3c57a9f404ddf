"""What a risk is worked out from: plain numbers, of a span or of a whole answer, decoded or given as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Protocol

from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import cocoa_sig, span_log_prob
from cocoa_engine.errors import CalibrationError
from cocoa_engine.results import Generation
from cocoa_engine.spans import Candidate, Competition, Preceding

MARGIN_CAP = 20.0
"""Margins above it, in nats, count as this; an infinite one (a single allowed token) could not be weighed."""

CONTESTED = -math.log(0.3)
"""A token with no larger margin, in nats, was contested: another had 0.3 times its probability (gamma's default)."""

FAR = 32
"""Places further on in an answer count as this: how long answers go on is a habit of the data that a risk is fitted on,
which would be carried on to longer ones."""

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

ANSWER_FEATURES = (*_SHARED, "contested", "log_contested", "candidates", "score_spread", "best_score")
"""In this order: both MLDS, means over the answer's spans weighed by their tokens; and of its tokens log p (mean and
lowest), mean entropy and margin; the share that the prompt holds, and the mean run of the prompt that they end
(``Span.token_copied``); the mean log(1 + id), as vocabularies that were merged pair by pair number their tokens from
the frequent to the rare; log of their number; the share that was contested (:data:`CONTESTED`), and log(1 + number) of
those; and means over its risk points of how many candidates there were, of the best of their scores less the worst, and
of the best (:func:`competition`). Logarithms are natural, entropies in nats."""

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
best of these less that of the last, and the best of the candidates' scores less the worst; and what stands before it
(``Span.preceding``; log(1 + number) of tokens, at most :data:`FAR`)."""

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
    """The features of an answer, in the order of :data:`ANSWER_FEATURES`.

    Raises:
        CalibrationError: it is a text scored as given, and what would have competed in it was not measured.
    """
    spans, competed = generation.spans, generation.competition
    if competed is None and any(span.kind == "given" for span in spans):
        raise CalibrationError(
            "what would have competed in a text scored as given is not known: score it by an engine that has a "
            "calibrator of answers."
        )
    competed = competed or competition(span.candidates for span in spans)
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
        *of_competition(competed),
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
    """The features of what competed at a risk point; of a span that is none, one candidate and no spread."""
    first = [one.token_log_probs[0] for one in candidates]
    spread, _ = _scores(candidates)
    return [float(max(1, len(candidates))), max(first) - min(first) if first else 0.0, spread]


def competition(points: Iterable[Sequence[Candidate]]) -> Competition:
    """What competed in an answer.

    Args:
        points: the candidates of each span; none where none competed.
    """
    contested = [candidates for candidates in points if candidates]
    if not contested:
        return Competition()
    spreads, best = zip(*map(_scores, contested), strict=True)
    count = len(contested)
    return Competition(
        risk_points=count,
        candidates=sum(map(len, contested)) / count,
        score_spread=sum(spreads) / count,
        best_score=sum(best) / count,
    )


def of_competition(competed: Competition) -> list[float]:
    """The features of what competed in an answer."""
    return [competed.candidates, competed.score_spread, competed.best_score]


def _scores(candidates: Sequence[Candidate]) -> tuple[float, float]:
    """The best of the candidates' scores less the worst, and the best; zeros without candidates.

    Scores are CoCoA-SIG's, s = log p_S (1 + alpha fMLDS), with log p_S as a sum and :data:`ALPHA`.
    """
    scores = [cocoa_sig(span_log_prob(one.token_log_probs), one.f_mlds, ALPHA) for one in candidates]
    return (max(scores) - min(scores), max(scores)) if scores else (0.0, 0.0)


def of_preceding(before: Preceding) -> list[float]:
    """The features of what stands before a span."""
    return [math.log1p(min(before.tokens, FAR)), before.log_prob, before.entropy, before.copied, before.copied_run]
