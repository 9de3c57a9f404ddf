"""Which source each part of an answer was taken from, by the attention on each source."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from cocoa_engine.integration import clauses
from cocoa_engine.report import RangeReport, RiskReport, SpanReport
from cocoa_integrations._shared.edits import Change, Edit, EditedText, is_machine_read

CITATIONS_KEY = "cocoa_citations"

MIN_ATTENTION = 0.05  # of a cited part by default

NOT_CITED = (
    "some sources are not cited, because the prompt does not have the text of every source as it is, or the model's "
    "attention on it was not measured"
)
MOST_PASSAGES = 256  # in the ``source`` of a request to a server: every span has a value for each


class Citation(RangeReport):
    """One entry of ``cocoa_citations``: a part of the answer and the source that it was taken from."""

    source: int = Field(description="Number of the node or document, from 1.")
    id: str | None = Field(description="Id of the node or document.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="LangChain: metadata of the document.")
    start: int = Field(description="Offset of the part's first character in the text.")
    end: int = Field(description="Offset after its last character, before the marker.")
    text: str = Field(description="Text of the part.")
    attention: float = Field(description="Mean attention of the part on the source, in [0, 1].")
    spans: list[int] = Field(description="Numbers of its spans.")


def find_in(text: str, passages: Sequence[str]) -> list[int]:
    """The numbers of the passages whose text stands in a prompt, white space around it left out."""
    return [number for number, passage in enumerate(passages) if passage.strip() and passage.strip() in text]


def spread(values: Sequence[float | None], numbers: Sequence[int], count: int) -> list[float | None]:
    """The values of some passages, by the numbers of all ``count``; ``None`` for those without a value."""
    by_number = dict(zip(numbers, values, strict=True)) if values else {}
    return [by_number.get(number) for number in range(count)]


def citations_of(
    spans: Sequence[SpanReport], attentions: Sequence[Sequence[float | None]], min_attention: float
) -> tuple[list[Citation], list[SpanReport]]:
    """The citations of an answer, without ids, and its spans with their sources and attentions.

    ``attentions`` has those of each span by source; ``None`` if the source was not in the prompt. Spans that share a
    word are taken together. The attention of a part is the mean over its characters.
    """
    parts: list[tuple[int, list[int]]] = []  # the source of each citation, and its spans
    sourced = [
        span.with_values(source=None, source_attentions=list(of_span))
        for span, of_span in zip(spans, attentions, strict=True)
    ]
    is_open = False

    def attention_on(source: int, numbers: Sequence[int]) -> float:
        pairs = [(attentions[number][source], max(1, len(spans[number].text or ""))) for number in numbers]
        measured = [(value, length) for value, length in pairs if value is not None]
        count = sum(length for _, length in measured)
        return math.fsum(value * length for value, length in measured) / count if measured else -math.inf

    for words in whole_words(spans):
        means = [attention_on(source, words) for source in range(len(attentions[words[0]]))]
        best = max(range(len(means)), key=means.__getitem__, default=None)
        is_visible = any((spans[number].text or "").strip() for number in words)
        if best is None or means[best] < min_attention or not is_visible:
            is_open = is_open and not is_visible
            continue
        for number in words:
            sourced[number] = sourced[number].with_values(source=best + 1)
        if is_open and parts[-1][0] == best and spans[parts[-1][1][-1]].end == spans[words[0]].start:
            parts[-1][1].extend(words)
        else:
            parts.append((best, list(words)))
        is_open = True
    citations = []
    for source, numbers in parts:
        place = {"start": spans[numbers[0]].start, "end": spans[numbers[-1]].end, "spans": numbers}
        text, attention = "".join(spans[number].text or "" for number in numbers), attention_on(source, numbers)
        citations.append(Citation(id=None, source=source + 1, text=text, attention=attention, **place))
    return citations, sourced


def marker_edits(text: str, citations: Sequence[Citation]) -> list[Edit]:
    """The changes that insert the markers, in the order of the text.

    The sources of a clause stand together at its end, before the punctuation there: ``It is red [1][2].`` A clause is
    cited if a citation has one of its content words, or of its words if it has none. The markers of a block of code
    stand in the clause before it, or in a line before the block.
    """

    def shared(word: tuple[int, int], citation: Citation) -> str:
        return text[max(word[0], citation.start) : min(word[1], citation.end)]

    places: dict[tuple[int, str], set[int]] = {}
    before: int | None = None
    for part in clauses(text):
        pairs = itertools.product(part.words, citations)
        cited = {citation.source for word, citation in pairs if any(map(str.isalnum, shared(word, citation)))}
        if not part.is_code and any(map(str.isalnum, text[part.start : part.end])):
            before = part.place
        if cited:
            place = (part.start, "{}\n") if before is None else (before, " {}")
            places.setdefault(place, set()).update(cited)
    return [
        Edit(start=place, end=place, after=form.format("".join(f"[{source}]" for source in sorted(cited))))
        for (place, form), cited in places.items()
    ]


def with_markers(text: EditedText, citations: Sequence[Citation], report: RiskReport) -> Change:
    """What markers after the citations make of a text, in place of those that it has; each answer has its own."""
    begin, edits = text.begin, list[Edit]()
    whole: list[RangeReport] = [RangeReport(start=begin, end=begin + len(text.original))]
    for part in text.originals(report.parts) or whole:
        answer = text.original[part.start - begin : part.end - begin]
        cited = [
            citation.with_values(start=max(citation.start, part.start) - part.start, end=citation.end - part.start)
            for citation in citations
            if part.start < citation.end and citation.start < part.end
        ]
        markers = [] if is_machine_read(answer, report) else marker_edits(answer, cited)
        edits += [edit.with_values(start=edit.start + part.start, end=edit.end + part.start) for edit in markers]
    return text.changed(edits, with_markers=False)


def whole_words(spans: Sequence[SpanReport]) -> list[list[int]]:
    """The numbers of the spans, those that share a word together."""
    groups: list[list[int]] = []
    before, end = "", -1
    for number, span in enumerate(spans):
        text = span.text or ""
        if groups and end == span.start and before[-1:].isalnum() and text[:1].isalnum():
            groups[-1].append(number)
        else:
            groups.append([number])
        before, end = text or before, span.end
    return groups
