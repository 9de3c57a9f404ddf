"""Which source each part of an answer was taken from: by context lift, or by the attention on each source."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pydantic import Field

from cocoa_engine import ContextLift
from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import unknown
from cocoa_engine.report import ReportEntry
from cocoa_engine.risk import clauses, content_words, list_marks, word_ranges
from cocoa_integrations._shared.edits import Change, Edit, EditedText, is_machine_read

CITATIONS_KEY = "cocoa_citations"

MIN_LIFT = 1.0
"""Default of the lowest lift of a cited part, in nats: without its source, the part is less than 0.37 times as
probable."""


MIN_ATTENTION = 0.05
"""Default of the lowest attention of a cited part on its source."""

CitedBy = Literal["lift", "attention"]
"""What finds the source of a part. ``"lift"``: the source without which the part is least probable. ``"attention"``:
the source that the model's retrieval heads attended to most while it wrote the part."""

NOT_SEEN = "the model's attention cannot be measured"
NOT_FOUND = "the prompt does not have the text of every source as it is"
"""Why the default does not cite by attention."""

CANNOT_ATTEND = (
    "citations by attention need a model with attention over the whole prompt, and a backend that sees it; this model "
    'runs without. Cite with by="lift".'
)

MOST_PASSAGES = 256
"""The largest number of passages in the ``source`` of a request to a server: every span has a value for each."""

VALUES: dict[CitedBy, str] = {"lift": "source_lifts", "attention": "source_attentions"}
"""The key of a span's values by source."""


class Citation(ReportEntry):
    """One entry of ``cocoa_citations``: a part of the answer and the source that it was taken from."""

    source: int = Field(description="Number of the node or document, from 1.")
    id: str | None = Field(description="Id of the node or document.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="LangChain: metadata of the document.")
    start: int = Field(description="Offset of the part's first character in the text.")
    end: int = Field(description="Offset after its last character, before the marker.")
    text: str = Field(description="Text of the part.")
    lift: float | None = Field(
        None,
        description="Citations by lift: log p of the part with all sources minus log p without this one, in nats.",
    )
    attention: float | None = Field(
        None,
        description="Citations by attention: the part's mean attention on the source, in [0, 1].",
    )
    spans: list[int] = Field(description="Numbers of its spans.")


def require_min_lift(min_lift: Any) -> float:
    """Check the lowest lift of a citation.

    Raises:
        ConfigError: it is not a finite number.
    """
    return _require_finite("min_lift", min_lift, "a finite number of nats")


@dataclass(frozen=True)
class Citing:
    """How citations are found.

    Attributes:
        by: what finds the source of a part. ``None``: attention, or lift where attention cannot find it.
        lowest: the lowest value of a cited part, by what finds its source.
    """

    by: CitedBy | None
    lowest: Mapping[CitedBy, float]


def citing(by: Any, min_lift: Any, min_attention: Any) -> Citing:
    """Check how citations are found.

    Args:
        by: what finds the source of a part. With ``None`` and a lowest lift alone it is the lift.
        min_lift: the lowest lift of a cited part, in nats; ``None``: :data:`MIN_LIFT`.
        min_attention: the lowest attention of a cited part; ``None``: :data:`MIN_ATTENTION`.

    Raises:
        ConfigError: ``by`` is unknown, or a limit is not a finite number.
    """
    if by is not None and by not in get_args(CitedBy):
        raise ConfigError(f"by: {unknown([str(by)], get_args(CitedBy), what='value')}")
    lift = require_min_lift(MIN_LIFT if min_lift is None else min_lift)
    given = MIN_ATTENTION if min_attention is None else min_attention
    attention = _require_finite("min_attention", given, "a share of the attention in [0, 1]")
    if by is None and min_lift is not None and min_attention is None:
        by = "lift"
    return Citing(by, {"lift": lift, "attention": attention})


def _require_finite(name: str, value: Any, what: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ConfigError(f"{name} takes {what}, not {value!r}.")
    return float(value)


def find_in(text: str, passages: Sequence[str]) -> list[int]:
    """The numbers of the passages whose text stands in a prompt, white space around it left out."""
    return [number for number, passage in enumerate(passages) if passage.strip() and passage.strip() in text]


def spread(values: Sequence[float], numbers: Sequence[int], count: int) -> list[float | None]:
    """The values of some passages, by the numbers of all ``count``; ``None`` for those without a value."""
    known = dict(zip(numbers, values, strict=True)) if values else {}
    return [known.get(number) for number in range(count)]


def lift_in_nats(lift: ContextLift | None) -> float | None:
    """The lift of log p of a whole span, whatever ``span_log_prob`` is."""
    return None if lift is None else math.fsum(lift.token_log_probs)


def citations_of(
    spans: Sequence[dict[str, Any]],
    values: Sequence[Sequence[float | None]],
    lowest: float,
    by: CitedBy = "lift",
) -> list[dict[str, Any]]:
    """The citations of an answer, in the order of its text.

    Every span also gets ``source``, and ``source_lifts`` or ``source_attentions``. Spans that end within a word are
    taken together, so that a citation never ends there. The lift of a part is the sum over its spans, the attention is
    the mean over its characters. A part is cited if the highest value of any source reaches ``lowest``; neighbouring
    parts with the same source are one citation.

    Args:
        spans: entries of ``cocoa_spans``, in order.
        values: for each span, the lift or the attention by each source; ``None`` if the source was not in the prompt.
        lowest: the lowest value of a cited part: nats, or a share of the attention.
        by: what the values are.

    Returns:
        For each citation ``source`` (from 1), ``start``, ``end``, ``text``, ``lift`` or ``attention``, and the numbers
        of its ``spans``.
    """
    citations: list[dict[str, Any]] = []
    previous: dict[str, Any] | None = None

    def value_of(numbers: Sequence[int], source: int) -> float:
        of_source = [(values[number][source], max(1, len(spans[number]["text"]))) for number in numbers]
        known = [(value, length) for value, length in of_source if value is not None]
        if not known:
            return -math.inf
        if by == "lift":
            return math.fsum(value for value, _ in known)
        return math.fsum(value * length for value, length in known) / sum(length for _, length in known)

    for words in whole_words(spans):
        totals = [value_of(words, source) for source in range(len(values[words[0]]))]
        text = "".join(spans[number]["text"] for number in words)
        best = max(range(len(totals)), key=totals.__getitem__, default=None)
        cited = best is not None and totals[best] >= lowest and bool(text.strip())
        source = best + 1 if best is not None and cited else None
        for number in words:
            spans[number] |= {"source": source, VALUES[by]: list(values[number])}
        if source is None or best is None:
            previous = None if text.strip() else previous
            continue
        if previous is not None and previous["source"] == source and previous["end"] == spans[words[0]]["start"]:
            previous["end"] = spans[words[-1]]["end"]
            previous["text"] += text
            previous["spans"] += words
            previous[by] = value_of(previous["spans"], best)
            continue
        previous = {
            "source": source,
            "start": spans[words[0]]["start"],
            "end": spans[words[-1]]["end"],
            "text": text,
            by: totals[best],
            "spans": list(words),
        }
        citations.append(previous)
    return citations


def marker_edits(text: str, citations: Sequence[Mapping[str, Any]]) -> list[Edit]:
    """The changes that insert the markers, in the order of the text.

    The sources of a clause stand together at its end, before the punctuation there: ``It is red [1][2].`` A clause is
    cited if a citation has one of its content words, or a part of one; in a clause without content words every word
    counts. The markers of a block of code stand in the clause before it, or in a line before the block.

    Args:
        text: the text of the answer.
        citations: the citations, with offsets in the text.
    """
    parts = clauses(text)
    begins = [part.start for part in parts]
    sources: list[set[int]] = [set() for _ in parts]
    content, marks = content_words(text), list_marks(text)
    with_content = {bisect_right(begins, word.start) - 1 for word in content}
    others = [word for word in word_ranges(text) if not any(mark.start <= word.start < mark.end for mark in marks)]
    others = [word for word in others if bisect_right(begins, word.start) - 1 not in with_content]
    for word in content + others:
        for one in citations:
            shared = text[max(word.start, one["start"]) : min(word.end, one["end"])]
            if any(map(str.isalnum, shared)):
                sources[bisect_right(begins, word.start) - 1].add(one["source"])
    places: dict[tuple[int, str], set[int]] = {}
    before: int | None = None
    for part, cited in zip(parts, sources, strict=True):
        if not part.is_code and any(map(str.isalnum, text[part.start : part.end])):
            before = part.place
        if cited:
            place = (part.start, "{}\n") if before is None else (before, " {}")
            places.setdefault(place, set()).update(cited)
    return [
        Edit(place, place, after=form.format("".join(f"[{source}]" for source in sorted(cited))))
        for (place, form), cited in places.items()
    ]


def with_markers(text: EditedText, citations: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> Change:
    """What markers after the citations make of a text. They replace those that it has.

    Each answer in the text has markers of its own; one that a program reads, see :func:`.is_machine_read`, has none.

    Args:
        text: the text.
        citations: the citations, with offsets in its original.
        report: the report of the text.
    """
    begin, edits = text.begin, list[Edit]()
    whole = {"start": begin, "end": begin + len(text.original)}
    for part in text.originals(report.get("parts", ())) or [whole]:
        start, end = part["start"], part["end"]
        answer = text.original[start - begin : end - begin]
        cited = [
            {**one, "start": max(one["start"], start) - start, "end": one["end"] - start}
            for one in citations
            if start < one["end"] and one["start"] < end
        ]
        found = [] if is_machine_read(answer, report) else marker_edits(answer, cited)
        edits += [replace(edit, start=edit.start + start, end=edit.end + start) for edit in found]
    return text.changed(edits, with_markers=False)


def whole_words(spans: Sequence[Mapping[str, Any]]) -> list[list[int]]:
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
