"""Which source raised the log-probability of each part of an answer most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cocoa_engine import ContextLift
from cocoa_engine.errors import ConfigError

CITATIONS_KEY = "cocoa_citations"

MIN_LIFT = 1.0
"""Default of the lowest lift of a cited part, in nats: without its source, the part is less than 0.37 times as
probable."""


def require_min_lift(min_lift: Any) -> float:
    """Check the lowest lift of a citation.

    Raises:
        ConfigError: it is not a finite number.
    """
    is_number = isinstance(min_lift, (int, float)) and not isinstance(min_lift, bool)
    if not is_number or not math.isfinite(min_lift):
        raise ConfigError(f"min_lift takes a finite number of nats, not {min_lift!r}.")
    return float(min_lift)


def lift_in_nats(lift: ContextLift | None) -> float | None:
    """The lift of log p of a whole span, whatever ``span_log_prob`` is."""
    return None if lift is None else math.fsum(lift.token_log_probs)


def citations_of(
    spans: Sequence[dict[str, Any]], lifts: Sequence[Sequence[float | None]], min_lift: float
) -> list[dict[str, Any]]:
    """The citations of an answer, in the order of its text. Every span also gets ``source`` and ``source_lifts``.

    Spans that end within a word are taken together, so that a citation never ends there. The lift of a part is the sum
    over its spans. A part is cited if the highest lift of any source reaches ``min_lift``; neighbouring parts with the
    same source are one citation.

    Args:
        spans: entries of ``cocoa_spans``, in order.
        lifts: for each span, the lift by each source; ``None`` if the source was not in the prompt.
        min_lift: the lowest lift of a cited part, in nats.

    Returns:
        For each citation ``source`` (from 1), ``start``, ``end``, ``text``, ``lift`` and the numbers of its ``spans``.
    """
    citations: list[dict[str, Any]] = []
    previous: dict[str, Any] | None = None
    for words in _whole_words(spans):
        totals = _totals([lifts[number] for number in words])
        text = "".join(spans[number]["text"] for number in words)
        best = max(range(len(totals)), key=totals.__getitem__, default=None)
        cited = best is not None and totals[best] >= min_lift and bool(text.strip())
        source = best + 1 if best is not None and cited else None
        for number in words:
            spans[number]["source"], spans[number]["source_lifts"] = source, list(lifts[number])
        if source is None or best is None:
            previous = None if text.strip() else previous
            continue
        if previous is not None and previous["source"] == source and previous["end"] == spans[words[0]]["start"]:
            previous["end"] = spans[words[-1]]["end"]
            previous["text"] += text
            previous["lift"] += totals[best]
            previous["spans"] += words
            continue
        previous = {
            "source": source,
            "start": spans[words[0]]["start"],
            "end": spans[words[-1]]["end"],
            "text": text,
            "lift": totals[best],
            "spans": list(words),
        }
        citations.append(previous)
    return citations


def with_markers(
    text: str, entries: Sequence[list[dict[str, Any]]], citations: Sequence[dict[str, Any]], marker: str = "[{source}]"
) -> str:
    """The text with a marker after each citation. The offsets of the entries and citations are moved accordingly.

    Args:
        text: the text of the answer.
        entries: lists of objects with ``start`` and ``end`` in the text.
        citations: the citations.
        marker: a template with ``{source}``.
    """
    moved = [one for of_one in (*entries, citations) for one in of_one]
    for citation in reversed(citations):
        end = citation["end"]
        after_space = end > 0 and text[end - 1].isspace()
        mark = marker.format(source=citation["source"])
        mark = f"{mark} " if after_space else f" {mark}"
        text = text[:end] + mark + text[end:]
        for one in moved:
            if one["start"] >= end and one is not citation:
                one["start"] += len(mark)
                one["end"] += len(mark)
    return text


def _whole_words(spans: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The numbers of the spans, those that share a word together."""
    groups: list[list[int]] = []
    before = ""
    for number, span in enumerate(spans):
        within = bool(groups) and before[-1:].isalnum() and span["text"][:1].isalnum()
        if within and spans[number - 1]["end"] == span["start"]:
            groups[-1].append(number)
        else:
            groups.append([number])
        before = span["text"] or before
    return groups


def _totals(lifts: Sequence[Sequence[float | None]]) -> list[float]:
    """The sum of the lifts of several spans by source; a source that was not in the prompt has -inf."""
    return [
        -math.inf if all(value is None for value in column) else math.fsum(value or 0.0 for value in column)
        for column in zip(*lifts, strict=True)
    ]
