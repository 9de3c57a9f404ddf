"""The risk of the arguments of a tool call, from the spans that contain their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cocoa_engine import CocoaEngine, Generation, Span
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations.tool_calling.reading import Call


def tool_call_risks(
    generation: Generation, calls: Sequence[tuple[str, Call]], engine: CocoaEngine
) -> list[dict[str, Any]]:
    """The entries of ``cocoa_risk["tool_calls"]``, one for each call.

    For an argument, ``risk`` is the highest risk of the spans that overlap its value, ``con_mlds`` and ``f_mlds`` are
    means over these spans, and ``log_prob`` is the sum over the tokens of the value. Tokens that the grammar forces
    have log-probability 0. ``start`` and ``end`` are offsets in the generated text, which contains the tool calls; the
    quotes of a string are not included. For a call, ``risk`` is the highest risk of all its spans, including those of
    its name, and ``error`` says why the call is invalid, or is ``None``.

    Args:
        generation: the answer.
        calls: each call with its id.
        engine: the engine that answered.
    """
    tokens = _token_offsets(generation, engine)
    report = []
    for call_id, call in calls:
        spans = _overlapping(generation.spans, call.offsets)
        arguments = {name: _argument(generation, tokens, offsets) for name, offsets in call.values.items()}
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


def _argument(
    generation: Generation, tokens: Sequence[tuple[int, int, float]], offsets: tuple[int, int]
) -> dict[str, Any]:
    spans = _overlapping(generation.spans, offsets)
    start, end = offsets
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


def _overlapping(spans: Sequence[Span], offsets: tuple[int, int]) -> list[tuple[int, Span]]:
    start, end = offsets
    return [(number, span) for number, span in enumerate(spans) if span.start < end and span.end > start]


def _token_offsets(generation: Generation, engine: CocoaEngine) -> list[tuple[int, int, float]]:
    """Start and end of the text of each token, and its log-probability."""
    entries = TokenLogprobs(engine)
    offsets, position = [], 0
    for span in generation.spans:
        for entry in entries.of(span):
            offsets.append((position, position + len(entry["token"]), entry["logprob"]))
            position += len(entry["token"])
    return offsets
