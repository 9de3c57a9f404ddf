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

from cocoa_engine import passage_attention
from cocoa_engine.integration import safe_logger
from cocoa_engine.report import RISK_KEY, PartReport, RiskReport, SpanReport
from cocoa_integrations._shared.citations import (
    CITATIONS_KEY,
    NOT_CITED,
    Citation,
    citations_of,
    find_in,
    spread,
)
from cocoa_integrations._shared.edits import Change, EditedText, Entry
from cocoa_integrations._shared.tries import TRIES_KEY
from cocoa_integrations.llama_index.callbacks import Collected, RiskCollector
from cocoa_integrations.llama_index.retrieved import (
    by_source_node,
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


class MissingRiskWarning(UserWarning):
    """A response has no risk. The message gives the reason."""


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

    With ``min_attention``, the lowest attention of a part on the node that it cites, also its citations.
    """

    def __init__(self, min_attention: float | None = None) -> None:
        super().__init__()
        self._min_attention = min_attention
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
            metadata |= {} if self._min_attention is None else {CITATIONS_KEY: []}
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
        if self._min_attention is not None:
            cited, spans = citations_of(report.spans, _attentions(parts, nodes), self._min_attention)
            citations = [citation.with_values(id=nodes[citation.source - 1].node.node_id) for citation in cited]
            report = report.with_values(spans=spans)
        return report, citations

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


def _attentions(parts: Sequence[Part], nodes: Sequence[NodeWithScore]) -> list[list[float | None]]:
    """For each span of a response its attention on each node."""
    of_parts = [_attention_by_node(part, nodes) for part in parts]
    if not all(is_complete for _, is_complete in of_parts):
        logger.warning(NOT_CITED)
    return [of_span for attentions, _ in of_parts for of_span in attentions]


def _attention_by_node(part: Part, nodes: Sequence[NodeWithScore]) -> tuple[list[list[float | None]], bool]:
    """The attention of each span of a part on each node, and whether it is that on all nodes of the prompt.

    It was measured while the answer was written, unless the nodes of the response are others than those that were
    retrieved. Then the answer is fed again. The values are ``None`` for a node that was not in the prompt as it is.
    """
    answer, numbers = part.answer, part.numbers
    measured = [answer.report.spans[number].passage_attention if answer.node_ids else [] for number in numbers]
    complete = [values or [None] * len(nodes) for values in measured]
    if answer.asked is None or answer.generation is None:
        return complete, not nodes or not measured or any(measured)
    service, call = answer.asked
    engine, prompt_ids = service.engine, service.prompt_ids(call)
    prompt = engine.decode(prompt_ids)
    texts = texts_in(prompt, nodes, engine)
    in_prompt = find_in(prompt, texts)
    others = prompt
    for number in in_prompt:
        others = others.replace(texts[number], "\0")
    changed = shares_a_run(others, [text for number, text in enumerate(texts) if number not in in_prompt])
    if not all(values[number] is not None for values in complete for number in in_prompt):
        source = [texts[number] for number in in_prompt]
        fed_again = passage_attention(engine, answer.generation, prompt_ids, source)
        complete = [spread(fed_again[number], in_prompt, len(nodes)) for number in numbers]
        changed = changed or not any(fed_again)
    return complete, not changed


def _warn(message: str) -> None:
    warnings.warn(message, MissingRiskWarning, stacklevel=4)
