"""The risk of every argument of a tool call: that of the spans in which its value was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cocoa_engine import CocoaEngine, Generation, Span
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations.tool_calling.reading import Call


def tool_call_risks(
    generation: Generation, calls: Sequence[tuple[str, Call]], engine: CocoaEngine
) -> list[dict[str, Any]]:
    """What is reported of each call, for ``cocoa_risk["tool_calls"]``.

    ``risk`` is the highest of any span that the value shares a character with, ``con_mlds`` and ``f_mlds`` are their
    means, and ``log_prob`` is the sum over the value's own tokens; a token that the grammar left no choice in counts 0.
    ``start`` and ``end`` are offsets in the generated text, in which a call is written out; the quotes of a text are
    not part of it. Of a whole call, ``risk`` is that of all its spans, its name's too; ``error`` says why it cannot be
    made, and is None if it can.

    Args:
        generation: the answer.
        calls: the id and place of each call in it.
        engine: the engine that answered.
    """
    tokens = _token_places(generation, engine)
    report = []
    for call_id, call in calls:
        spans = _overlapping(generation.spans, call.place)
        arguments = {name: _measured(generation, tokens, place) for name, place in call.values.items()}
        report.append(
            {
                "name": call.name,
                "id": call_id,
                "risk": max((span.risk for _, span in spans), default=0.0),
                "arguments": arguments,
                "error": call.error,
            }
        )
    return report


def _measured(
    generation: Generation, tokens: Sequence[tuple[int, int, float]], place: tuple[int, int]
) -> dict[str, Any]:
    spans = _overlapping(generation.spans, place)
    start, end = place
    count = max(1, len(spans))
    return {
        "risk": max((span.risk for _, span in spans), default=0.0),
        "con_mlds": sum(span.con_mlds for _, span in spans) / count,
        "f_mlds": sum(span.f_mlds for _, span in spans) / count,
        "log_prob": sum(log_prob for first, last, log_prob in tokens if first < end and last > start),
        "start": start,
        "end": end,
        "spans": [number for number, _ in spans],
    }


def _overlapping(spans: Sequence[Span], place: tuple[int, int]) -> list[tuple[int, Span]]:
    start, end = place
    return [(number, span) for number, span in enumerate(spans) if span.start < end and span.end > start]


def _token_places(generation: Generation, engine: CocoaEngine) -> list[tuple[int, int, float]]:
    """Where the text of each token begins and ends, and its log p."""
    entries = TokenLogprobs(engine)
    places, at = [], 0
    for span in generation.spans:
        for entry in entries.of(span):
            places.append((at, at + len(entry["token"]), entry["logprob"]))
            at += len(entry["token"])
    return places
