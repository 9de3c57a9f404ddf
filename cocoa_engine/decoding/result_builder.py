"""Completes decided spans with their texts and risks, and builds generations from them."""

from collections.abc import Iterable, Sequence
from typing import Any

from cocoa_engine.config import CocoaConfig
from cocoa_engine.model.detokenizer import Detokenizer
from cocoa_engine.model.tokenizer import Tokens
from cocoa_engine.results import Generation
from cocoa_engine.risk.policy import RiskMeasure, reaches
from cocoa_engine.spans import Span, Usage

LOOP, LONGEST = 24, 8
"""The number of tokens in which a loop is looked for, and of the longest sequence that it repeats."""


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether the last :data:`LOOP` tokens repeat one sequence of at most :data:`LONGEST` tokens."""
    last = token_ids[-LOOP:]
    return len(last) == LOOP and any(last[size:] == last[:-size] for size in range(1, LONGEST + 1))


def token_ends(tokens: Tokens, token_ids: Iterable[int]) -> tuple[str, list[int]]:
    """The text of tokens, and its length, in complete characters, after each. Some decoders drop its first space."""
    track, ends = Detokenizer(tokens), []
    for token_id in token_ids:
        track.push(token_id)
        ends.append(len(track.text))
    return track.text, ends


def complete_span(
    span: Span, text_range: tuple[int, int, str], config: CocoaConfig, measure: RiskMeasure, *, repeats: bool = False
) -> Span:
    """A measured span with its text and its risk.

    Args:
        span: the span. Its ``token_ends`` may lie behind its end, where a stop text was cut off.
        text_range: ``(start, end, text)`` of the span in the answer.
        repeats: whether the answer runs in a loop where the span ends.
    """
    start, end, text = text_range
    risk = measure(span)
    return span.model_copy(
        update={
            "text": text,
            "start": start,
            "end": end,
            "token_ends": [*(min(max(at, start), end) for at in span.token_ends[:-1]), end],
            "risk": risk.value,
            "risk_source": risk.source,
            "flagged": risk.flagged,
            "out_of_domain": measure.is_out_of_domain(span),
            "reaches_max_risk": reaches(risk.value, config.max_risk),
            "repeats": repeats,
        }
    )


def make_generation(
    spans: Sequence[Span], config: CocoaConfig, measure: RiskMeasure, usage: dict[str, int], **values: Any
) -> Generation:
    """The answer that consists of ``spans``, with its risk as a whole.

    ``usage`` and ``values`` are the fields of :class:`.Usage` and :class:`.Generation` that do not follow from them.
    """
    token_ids = [token_id for span in spans for token_id in span.token_ids]
    risk_points = sum(span.kind == "risk_point" for span in spans)
    generation = Generation(
        text="".join(span.text for span in spans),
        token_ids=token_ids,
        spans=list(spans),
        usage=Usage(completion_tokens=len(token_ids), risk_points=risk_points, **usage),
        config=config,
        threshold=measure.threshold_of(spans[0].risk_source) if spans else None,
        source_heads="spread" if measure.spread and any(span.token_source_attention for span in spans) else None,
        **values,
    )
    return measure.rated(generation)
