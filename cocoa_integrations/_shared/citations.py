"""Which source each part of an answer was taken from: by context lift, or by the attention on each source."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field

from cocoa_engine import ContextLift
from cocoa_engine.errors import ConfigError, unknown
from cocoa_engine.integration import clauses
from cocoa_engine.report import RangeReport, RiskReport, SpanReport, finite
from cocoa_integrations._shared.edits import Change, Edit, EditedText, is_machine_read
from cocoa_integrations._shared.limits import require_finite

CITATIONS_KEY = "cocoa_citations"

MIN_LIFT, MIN_ATTENTION = 1.0, 0.05  # of a cited part by default: in nats, exp(-1) = 0.37; and a share
CitedBy = Literal["lift", "attention"]  # how the source of a part is found

NOT_SEEN = "the model's attention cannot be measured"
NOT_FOUND = "the prompt does not have the text of every source as it is"
CANNOT_ATTEND = (
    "citations by attention need a model with attention over the whole prompt, and a backend that sees it; this model "
    'runs without. Cite with by="lift".'
)
MOST_PASSAGES = 256  # in the ``source`` of a request to a server: every span has a value for each
VALUES: dict[CitedBy, str] = {"lift": "source_lifts", "attention": "source_attentions"}  # by source, of a span


class Citation(RangeReport):
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
        None, description="Citations by attention: the part's mean attention on the source, in [0, 1]."
    )
    spans: list[int] = Field(description="Numbers of its spans.")


class Citing(NamedTuple):
    """What finds the source of a part, by default attention or else lift, and the lowest value of a cited part."""

    by: CitedBy | None
    lowest: Mapping[CitedBy, float]


def citing(by: Any, min_lift: Any, min_attention: Any) -> Citing:
    """Check how citations are found. With a lowest lift alone it is by lift; limits default to those above."""
    if by is not None and by not in get_args(CitedBy):
        raise ConfigError(f"by: {unknown([str(by)], get_args(CitedBy), what='value')}")
    if by is None and min_lift is not None and min_attention is None:
        by = "lift"
    lowest: dict[CitedBy, float] = {"lift": MIN_LIFT, "attention": MIN_ATTENTION}
    limits: dict[CitedBy, Any] = {"lift": min_lift, "attention": min_attention}
    for kind, value in limits.items():
        if value is not None:
            require_finite(f"min_{kind}", value)
            lowest[kind] = float(value)
    return Citing(by, lowest)


def find_in(text: str, passages: Sequence[str]) -> list[int]:
    """The numbers of the passages whose text stands in a prompt, white space around it left out."""
    return [number for number, passage in enumerate(passages) if passage.strip() and passage.strip() in text]


def spread(values: Sequence[float | None], numbers: Sequence[int], count: int) -> list[float | None]:
    """The values of some passages, by the numbers of all ``count``; ``None`` for those without a value."""
    by_number = dict(zip(numbers, values, strict=True)) if values else {}
    return [by_number.get(number) for number in range(count)]


def with_lifts(spans: Sequence[SpanReport], lifts: Sequence[ContextLift | None]) -> list[SpanReport]:
    """Copies of spans with how the context changed them: the values with the context minus those without it."""
    lifted = []
    for span, lift in zip(spans, lifts, strict=True):
        values = (None, None, None) if lift is None else (lift.log_prob, lift.con_mlds, lift.f_mlds)
        names = ("context_lift", "con_mlds_lift", "f_mlds_lift")
        lifted.append(span.with_values(**dict(zip(names, map(finite, values), strict=True))))
    return lifted


def lift_in_nats(lift: ContextLift | None) -> float | None:
    """The lift of log p of a whole span, whatever ``span_log_prob`` is."""
    return None if lift is None else math.fsum(lift.token_log_probs)


def citations_of(
    spans: Sequence[SpanReport],
    values: Sequence[Sequence[float | None]],
    lowest: float,
    by: CitedBy = "lift",
) -> tuple[list[Citation], list[SpanReport]]:
    """The citations of an answer, without ids, and its spans with their sources and values.

    ``values`` has those of each span by source; ``None`` if the source was not in the prompt. Spans that share a word
    are taken together. The lift of a part is the sum over its spans, the attention the mean over its characters.
    """
    parts: list[tuple[int, list[int]]] = []  # the source of each citation, and its spans
    sourced = [span.with_values(source=None, **{VALUES[by]: list(of)}) for span, of in zip(spans, values, strict=True)]
    is_open = False

    def value_of(numbers: Sequence[int], source: int) -> float:
        pairs = [(values[number][source], max(1, len(spans[number].text or ""))) for number in numbers]
        measured = [(value, length if by == "attention" else 1) for value, length in pairs if value is not None]
        count = sum(length for _, length in measured) if by == "attention" else 1
        return math.fsum(value * length for value, length in measured) / count if measured else -math.inf

    for words in whole_words(spans):
        totals = [value_of(words, source) for source in range(len(values[words[0]]))]
        best = max(range(len(totals)), key=totals.__getitem__, default=None)
        is_visible = any((spans[number].text or "").strip() for number in words)
        if best is None or totals[best] < lowest or not is_visible:
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
        text, value = "".join(spans[number].text or "" for number in numbers), {by: value_of(numbers, source)}
        citations.append(Citation(id=None, source=source + 1, text=text, **place, **value))
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
