"""The features of a risk: plain numbers that describe a span or a whole answer, decoded or given as text."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, Protocol

from typing_extensions import Self

from cocoa_engine.spans import Span, Usage

Level = Literal["span", "answer"]
"""Whether a risk is that of a span or of a whole answer."""

MARGIN_CAP = 20.0
"""Margins are capped at this value, in nats. Without a cap, the margin of a single allowed token is infinite."""

CONTESTED = -math.log(0.3)
"""A token is contested if its margin is at most this, in nats: another token had at least 0.3 times its probability
(gamma's default)."""

POSITION_CAP = 32
"""Positions in an answer are capped at this value, in tokens. Without a cap, the risk would depend on the length of the
answers that it was fitted on, and would not transfer to longer ones."""

_SHARED = (
    *("con_mlds", "f_mlds", "mean_log_prob", "min_log_prob", "mean_entropy", "mean_margin"),
    *("copied", "copied_run", "mean_rank", "log_tokens"),
)

SOURCE_FEATURES = ("source_attention", "lowest_source_attention")
"""The features that are missing where the model's attention on the source is not measured."""

PROBE_FEATURE = "probe"
"""The feature of spans, or of answers, that only a calibrator with a probe of them has."""

LATER_FEATURES = ("log_prompt_tokens",)
"""The features that calibrators of this schema version may lack, because they were fitted before these were added."""

ANSWER_FEATURES = (*_SHARED, "contested", "log_contested", "log_prompt_tokens", *SOURCE_FEATURES, PROBE_FEATURE)
"""The features of an answer, in this order. Logarithms are natural, entropies and margins in nats.

- Both MLDS: means over the spans, weighted by their tokens.
- Of the tokens: mean and lowest log p, mean entropy, mean margin.
- The share of tokens that occur in the prompt, and the mean of ``Span.token_copied``.
- The mean of log(1 + token id): BPE vocabularies number their tokens from frequent to rare.
- The log of the number of tokens.
- The share of contested tokens (:data:`CONTESTED`), and log(1 + their number).
- log(1 + the number of tokens of the prompt): answers from long passages are more often wrong.
- The mean source attention of the tokens, and the mean of the lowest fifth of them (:func:`source_features`).
- The mean over the tokens of the probe's score (``Span.answer_probe``), for a calibrator that has such a probe."""

SPAN_FEATURES = (
    *_SHARED,
    *("entropy", "max_entropy", "margin", "min_margin", "max_rank", "candidates", "candidate_spread"),
    *("log_position", "before_log_prob", "before_entropy", "before_copied", "before_copied_run"),
    *("source_attention", PROBE_FEATURE),
)
"""The features of a span, in this order.

- As for an answer, up to the log of the number of tokens.
- Entropy of the first token (at the risk point) and the highest entropy; margin of the first token and the lowest.
- The highest log(1 + token id).
- At the risk point: the number of candidates, and the highest log p of a first token minus the lowest.
- Of the tokens before the span (``Span.preceding``): log(1 + number), at most :data:`POSITION_CAP`, and means.
- The mean source attention of the tokens.
- The score of the calibrator's probe (``Span.probe``), for a calibrator that has one."""


class AnswerStatistics(Protocol):
    """A :class:`~cocoa_engine.Generation`, which is of a layer above."""

    @property
    def spans(self) -> Sequence[Span]: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def closed_book(self) -> bool: ...

    @property
    def answer_risk(self) -> float | None: ...

    @property
    def has_spans_out_of_domain(self) -> bool: ...

    def model_copy(self, *, update: dict[str, Any]) -> Self: ...


def span_features(span: Span) -> list[float]:
    """The features of a span, in the order of :data:`SPAN_FEATURES`. NaN stands for what was not measured."""
    entropies, margins, before = span.token_entropies, span.token_margins, span.preceding
    first = [candidate.token_log_probs[0] for candidate in span.candidates]
    return [
        span.con_mlds,
        span.f_mlds,
        *_token_features(span.token_ids, span.token_log_probs, entropies, margins, span.token_copied),
        entropies[0],
        max(entropies),
        min(margins[0], MARGIN_CAP),
        min(*margins, MARGIN_CAP),
        math.log1p(max(span.token_ids)),
        float(max(1, len(first))),  # a span that is no risk point counts as one candidate without spread
        max(first) - min(first) if first else 0.0,
        math.log1p(min(before.tokens, POSITION_CAP)),
        before.log_prob,
        before.entropy,
        before.copied,
        before.copied_run,
        source_features(span.token_source_attention)[0],
        _known(span.probe),
    ]


def answer_features(generation: AnswerStatistics) -> list[float]:
    """The features of an answer, in the order of :data:`ANSWER_FEATURES`. NaN stands for what was not measured."""
    spans = generation.spans
    token_ids, log_probs, entropies, margins, copied, attention = (
        list(chain.from_iterable(getattr(span, f"token_{name}") for span in spans))
        for name in ("ids", "log_probs", "entropies", "margins", "copied", "source_attention")
    )
    contested = sum(margin <= CONTESTED for margin in margins)
    return [
        sum(span.con_mlds * len(span.token_ids) for span in spans) / len(token_ids),
        sum(span.f_mlds * len(span.token_ids) for span in spans) / len(token_ids),
        *_token_features(token_ids, log_probs, entropies, margins, copied),
        contested / len(margins),
        math.log1p(contested),
        math.log1p(generation.usage.prompt_tokens),
        *source_features(attention),
        sum(_known(span.answer_probe) * len(span.token_ids) for span in spans) / len(token_ids),
    ]


def _known(score: float | None) -> float:
    return math.nan if score is None else score


def _token_features(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    entropies: Sequence[float],
    margins: Sequence[float],
    copied: Sequence[int],
) -> list[float]:
    """The features over t tokens that spans and answers share; every argument is ``[t]``."""
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


def source_features(attention: Sequence[float]) -> list[float]:
    """The mean source attention of t tokens, ``[t]``, and the mean of the lowest fifth of them; NaN without any."""
    if not attention:
        return [math.nan, math.nan]
    lowest = sorted(attention)[: -(-len(attention) // 5)]
    return [sum(attention) / len(attention), sum(lowest) / len(lowest)]
