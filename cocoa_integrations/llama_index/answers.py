"""The answers that a model gave for one response, and their risk in the metadata of the response."""

import asyncio
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from typing import Any, get_args

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.schema import NodeWithScore
from llama_index.core.tools import ToolOutput

from cocoa_engine import ConfigError, passage_attention
from cocoa_engine.integration import safe_logger
from cocoa_engine.report import RISK_KEY, PartReport, RiskReport, SpanReport
from cocoa_integrations._shared.citations import (
    CANNOT_ATTEND,
    CITATIONS_KEY,
    NOT_FOUND,
    NOT_SEEN,
    Citation,
    CitedBy,
    Citing,
    citations_of,
    find_in,
    lift_in_nats,
    spread,
    with_lifts,
)
from cocoa_integrations._shared.edits import Change, EditedText, Entry
from cocoa_integrations._shared.tries import TRIES_KEY
from cocoa_integrations.llama_index.callbacks import Collected, RiskCollector
from cocoa_integrations.llama_index.retrieved import (
    by_source_node,
    lift_of,
    shares_a_run,
    texts_in,
    watch_retrievals,
)
from cocoa_integrations.reports import REPORTS_KEY

logger = safe_logger(__name__)

EMPTY = "Empty Response"
"""What LlamaIndex's synthesizers show instead of an empty answer."""

SEPARATOR = "\n---------------------\n"
"""What LlamaIndex's ``Accumulate`` puts between answers."""

_OF_A_SERVER = "measured on a model in this process, with a CocoaLLM; the answer is that of a server."


class MissingRiskWarning(UserWarning):
    """A response has no risk, or no context lift. The message gives the reason."""


@dataclass(frozen=True)
class Part:
    """A stretch of the shown text that an answer wrote; ``moved`` is added to offsets in the generated text."""

    number: int
    answer: Collected
    start: int
    end: int
    moved: int

    @property
    def numbers(self) -> range:
        """The numbers of the answer's spans that are shown. Those before it, such as its reasoning, are not."""
        spans, begin = self.answer.report.spans, self.answer.begin
        return range(sum(span.end <= begin for span in spans) if begin else 0, len(spans))

    def spans_in(self, text: str) -> list[SpanReport]:
        """The spans, with offsets in the shown text."""
        spans = self._placed([self.answer.report.spans[number] for number in self.numbers])
        return [span.with_values(text=text[span.start : span.end]) for span in spans]

    def report_in(self, spans: Sequence[SpanReport]) -> RiskReport:
        """These spans, with offsets in the shown text. Fields and calls are in the answer's own report."""
        report = Change("", (), self._placed).of_report(self.answer.report.without("fields", "tool_calls"))
        first, values = self.numbers.start, dict[str, Any](spans=list(spans))
        if report.reasoning is not None:  # its spans are not part of the shown text
            values["reasoning"] = report.reasoning.without("answer_start").with_values(spans=[])
        if report.check:
            values["check"] = [
                check.with_values(spans=[number - first for number in check.spans]) for check in report.check
            ]
        return report.with_values(**values)

    def _placed(self, entries: Iterable[Entry]) -> list[Entry]:
        """Entries with their offsets in the shown text, which may lack white space at the ends."""

        def place(offset: int) -> int:
            return min(max(offset + self.moved, self.start), self.end)

        return [entry.with_values(start=place(entry.start), end=place(entry.end)) for entry in entries]


class Answers(RiskCollector):
    """Collects the answers requested inside its ``with`` block and writes their risk to the metadata of a response.

    It measures the context lift of the spans with ``lift``, and finds citations as ``cite`` says.
    """

    def __init__(self, *, lift: bool, cite: Citing | None = None) -> None:
        super().__init__()
        self._lift, self._cite = lift, cite
        self._answers: list[Collected] = []
        self.nodes = []
        watch_retrievals()

    def take(self, answer: Collected) -> None:
        """Add an answer."""
        super().take(answer)
        self._answers.append(answer)

    def write(
        self,
        metadata: dict[str, Any],
        text: str,
        nodes: Sequence[NodeWithScore],
        sources: Sequence[ToolOutput] = (),
        *,
        is_object: bool = False,
    ) -> None:
        """Fill the metadata of a response. Without answers, the report is ``None`` and the list of reports is empty.

        The report of the response is that of the last answer that is its text, up to white space; or that of all
        answers in a text that ``Accumulate`` joined, see :func:`joined`; or that of the only answer, where the response
        shows the object that was parsed from it. Otherwise it is ``None``: LlamaIndex does not tell which answer wrote
        what. Where an engine of ours inside has replaced the text, its own report stays.

        Args:
            metadata: the metadata of the response.
            text: the text of the response.
            nodes: the nodes retrieved for it.
            sources: the outputs that a chat engine made the response of, perhaps that of an engine of ours.
            is_object: whether the text is that of an object which was parsed from an answer.
        """
        inside, shown = _engine_inside(text, metadata, sources)
        metadata |= inside
        answers = [_by_source_node(answer, nodes) for answer in self._answers]
        metadata[REPORTS_KEY] = [answer.report.to_dict() for answer in answers]
        if shown is not None and shown.replaced:
            metadata |= {} if self._cite is None else {CITATIONS_KEY: []}
            return
        report, citations = self._report_of(answers, text if shown is None else shown.original, nodes, is_object)
        if shown is not None and report is not None:  # an engine of ours inside may have changed the text
            change = EditedText(shown.original, (), shown.begin).changed(shown.edits)
            inner, report = RiskReport.from_wire(inside[RISK_KEY]), change.of_report(report)
            if inner.gate is not None:
                report = report.with_values(gate=inner.gate)
            if [span.text for span in inner.spans] == [span.text for span in report.spans]:
                # what the engine inside measured stays, such as the sources that it cites
                report = report.with_values(
                    spans=[
                        of_inner.with_values(**{name: getattr(span, name) for name in span.model_fields_set})
                        for of_inner, span in zip(inner.spans, report.spans, strict=True)
                    ]
                )
            citations = None if citations is None else change.moved(citations)
        metadata[RISK_KEY] = None if report is None else report.to_dict()
        if citations is not None:
            metadata[CITATIONS_KEY] = [citation.to_dict() for citation in citations]

    def _report_of(
        self, answers: Sequence[Collected], text: str, nodes: Sequence[NodeWithScore], is_object: bool
    ) -> tuple[RiskReport | None, list[Citation] | None]:
        """The report of a text that the model wrote, and its citations."""
        if not answers:
            _warn(
                "the response has no risk, because no CocoaLLM generated it: either another LLM did, or "
                "nothing was retrieved and no LLM was called."
            )
            return None, None
        parts = parts_of(text, answers)
        if not parts and is_object and len(answers) == 1:
            return answers[0].report, None
        if not parts:
            _warn(
                "the response has no cocoa_risk, because LlamaIndex does not tell which answer wrote its text: an "
                "output parser or an engine changed it. The reports of the answers are in cocoa_reports."
            )
            return None, None
        report, citations = joined(parts, text), None
        here = all(part.answer.start is not None for part in parts)
        if self._lift and here:
            report = report.with_values(spans=self._lifted(report.spans, parts, nodes))
        elif self._lift:
            _warn(f"no context lift and no citations by lift: they are {_OF_A_SERVER}")
        if self._cite is not None and (sources := self._sources(self._cite, parts, nodes, here)) is not None:
            by, values = sources
            passages, spans = citations_of(report.spans, values, self._cite.lowest[by], by)
            citations = [citation.with_values(id=nodes[citation.source - 1].node.node_id) for citation in passages]
            report = report.with_values(spans=spans)
        return report, citations

    def _sources(
        self, cite: Citing, parts: Sequence[Part], nodes: Sequence[NodeWithScore], here: bool
    ) -> tuple[CitedBy, list[list[float | None]]] | None:
        """What finds the sources of a response, and for each span its value by each node; ``None`` if nothing can.

        ``here`` is whether the model is in this process.
        """
        why, values = None, list[list[float | None]]()
        for part in parts if cite.by != "lift" else ():
            of_part, reason = _attention_by_node(part, nodes)
            values, why = values + of_part, why or reason
        if why == NOT_SEEN and cite.by == "attention":
            raise ConfigError(CANNOT_ATTEND)
        if cite.by != "lift" and (why is None or (cite.by == "attention" and here)):
            return "attention", values
        if not here:
            _warn(f"no citations: {'' if why is None else f'{why}, and '}lift is {_OF_A_SERVER}")
            return None
        if why is not None:
            logger.warning("citations are by lift, because %s", why)
        return "lift", [of_span for part in parts for of_span in _lift_by_node(part, nodes)]

    def _lifted(
        self, spans: Sequence[SpanReport], parts: Sequence[Part], nodes: Sequence[NodeWithScore]
    ) -> list[SpanReport]:
        remaining, lifted, missing = iter(spans), list[SpanReport](), False
        for part in parts:
            lifts = lift_of(part.answer.generation, part.answer.start, nodes)
            of_part = [next(remaining) for _ in part.numbers]
            missing = missing or lifts is None
            lifted += of_part if lifts is None else with_lifts(of_part, [lifts[number] for number in part.numbers])
        if missing:
            _warn(
                "no context lift: the prompt of this answer contains no text of the source nodes, so there is "
                "nothing to leave out."
            )
        return lifted

    def read(self, deltas: Iterator[str], metadata: dict[str, Any], *retrieved: Any) -> Generator[str, None, None]:
        """Pass a stream on, and fill ``metadata`` when it has been read to its end; see :meth:`write`."""
        text = ""
        with closing(self.reading(deltas)) as read:
            for delta in read:
                text += delta
                yield delta
        self.write(metadata, text, *retrieved)

    async def aread(
        self, deltas: AsyncIterator[str], metadata: dict[str, Any], *retrieved: Any
    ) -> AsyncGenerator[str, None]:
        """Like :meth:`read`."""
        text = ""
        async with aclosing(self.areading(deltas)) as read:
            async for delta in read:
                text += delta
                yield delta
        await asyncio.to_thread(self.write, metadata, text, *retrieved)


def parts_of(text: str, answers: Sequence[Collected]) -> list[Part]:
    """The parts of a shown text that answers wrote, in the order of the text; empty if that is not known."""
    for number in reversed(range(len(answers))):
        answer = answers[number]
        written = answer.text[answer.begin :]
        if written.strip() == text.strip() or (text == EMPTY and not written):
            lead = len(text) - len(text.lstrip()) - (len(written) - len(written.lstrip()))
            return [Part(number, answer, 0, len(text) if written else 0, lead - answer.begin)]
    by_request = sorted(range(len(answers)), key=lambda number: answers[number].request)
    for first in range(len(answers)):  # the first ones may be of other requests, such as a rewritten question
        if parts := _accumulated(text, answers, by_request[first:]):
            return parts
    return []


def _accumulated(text: str, answers: Sequence[Collected], numbers: Sequence[int]) -> list[Part]:
    """The parts of a text that ``Accumulate`` made of answers in the order of their requests."""
    parts: list[Part] = []
    position = 0
    for count, number in enumerate(numbers):
        answer = answers[number]
        written = answer.text[answer.begin :]
        opening = f"{SEPARATOR if count else ''}Response {count + 1}: {written or EMPTY}"
        if not text.startswith(opening, position):
            return []
        position += len(opening)
        start = position - len(written or EMPTY)
        parts.append(Part(number, answer, start, start + len(written), start - answer.begin))
    return parts if position == len(text) else []


def joined(parts: Sequence[Part], text: str) -> RiskReport:
    """The report of a shown text.

    One answer keeps its report, with offsets in the text. That of several answers has the spans of all of them and
    ``parts``; their claims and sentences are in their own reports.
    """
    reports = [part.answer.report for part in parts]
    if len(parts) == 1 and parts[0].answer.text == text:
        return reports[0]
    spans = [span for part in parts for span in part.spans_in(text)]
    spans = [span.with_values(span=number) for number, span in enumerate(spans)]
    if len(parts) == 1:
        report = parts[0].report_in(spans)
    else:
        report = RiskReport.of_spans(
            spans,
            method=_common(report.method for report in reports),
            risk_source=_common(report.risk_source for report in reports if report.spans),
            threshold=_common(report.threshold for report in reports if report.spans),
            model_name=_common(report.model_name for report in reports),
        )
        if any(report.out_of_domain for report in reports):
            report = report.with_values(out_of_domain=True)
        if (heads := _common(report.source_heads for report in reports)) is not None:
            report = report.with_values(source_heads=heads)
    ranges = [PartReport(start=part.start, end=part.end, report=part.number) for part in parts]
    return report.with_values(parts=ranges)


def _common(values: Iterable[Any]) -> Any:
    """The value that all reports have in common; ``None`` if they differ."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _engine_inside(
    text: str, metadata: dict[str, Any], sources: Sequence[ToolOutput]
) -> tuple[dict[str, Any], EditedText | None]:
    """What an engine of ours inside wrote of this text to a source or to the metadata, and the text by its report."""
    outputs = [source.raw_output for source in reversed(sources)]
    written = [output.metadata or {} for output in outputs if isinstance(output, get_args(RESPONSE_TYPE))]
    for of_output in [*written, metadata]:
        wire = of_output.get(RISK_KEY)
        if wire is not None and (shown := EditedText.find(text, RiskReport.from_wire(wire))) is not None:
            return {key: of_output[key] for key in (RISK_KEY, CITATIONS_KEY, TRIES_KEY) if key in of_output}, shown
    return {}, None


def _by_source_node(answer: Collected, nodes: Sequence[NodeWithScore]) -> Collected:
    """The answer with the attention of its spans by the source nodes of the response, as in its other answers."""
    if not answer.node_ids:  # the caller named the sources
        return answer
    spans = []
    for span in answer.report.spans:
        values = by_source_node(span.passage_attention, answer.node_ids, nodes) if span.passage_attention else None
        span = span.without("passage_attention")
        spans.append(span if values is None else span.with_values(passage_attention=values))
    return replace(answer, report=answer.report.with_values(spans=spans))


def _lift_by_node(part: Part, nodes: Sequence[NodeWithScore]) -> list[list[float | None]]:
    """For each span of a part, its lift by each node, in nats; ``None`` if the node was not in the prompt."""
    answer = part.answer
    of_nodes = [lift_of(answer.generation, answer.start, nodes, only=number) for number in range(len(nodes))]
    return [[None if lifts is None else lift_in_nats(lifts[number]) for lifts in of_nodes] for number in part.numbers]


def _attention_by_node(part: Part, nodes: Sequence[NodeWithScore]) -> tuple[list[list[float | None]], str | None]:
    """The attention of each span of a part on each node, and why it is not that on all nodes of the prompt.

    It was measured while the answer was written, unless the nodes of the response are others than those that were
    retrieved. Then the answer is fed again. The values are ``None`` for a node that was not in the prompt as it is; the
    reason is ``NOT_SEEN`` or ``NOT_FOUND``, or ``None`` if nothing is missing.
    """
    answer, numbers = part.answer, part.numbers
    measured = [answer.report.spans[number].passage_attention if answer.node_ids else [] for number in numbers]
    complete = [values or [None] * len(nodes) for values in measured]
    if answer.start is None or answer.generation is None:
        return complete, NOT_FOUND if nodes and measured and not any(measured) else None
    asked = answer.start()
    engine = answer.start.service.engine
    prompt = engine.decode(asked.prompt)
    texts = texts_in(prompt, nodes, engine)
    in_prompt = find_in(prompt, texts)
    others = prompt
    for number in in_prompt:
        others = others.replace(texts[number], "\0")
    changed = shares_a_run(others, [text for number, text in enumerate(texts) if number not in in_prompt])
    why = NOT_FOUND if changed else None
    if not all(values[number] is not None for values in complete for number in in_prompt):
        source = [texts[number] for number in in_prompt]
        fed_again = passage_attention(engine, answer.generation, asked.prompt, source)
        if not any(fed_again):
            return complete, NOT_SEEN
        complete = [spread(fed_again[number], in_prompt, len(nodes)) for number in numbers]
    return complete, why


def _warn(message: str) -> None:
    warnings.warn(message, MissingRiskWarning, stacklevel=4)
