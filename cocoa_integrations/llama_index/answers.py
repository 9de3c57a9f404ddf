"""The answers that a model gave for one response, and their risk in the metadata of the response."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, get_args

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.schema import NodeWithScore
from llama_index.core.tools import ToolOutput

from cocoa_engine import ConfigError, Generation, passage_attention
from cocoa_engine.logs import safe_logger
from cocoa_engine.report import REPORTS_KEY, RISK_KEY, add_context_lift
from cocoa_integrations._shared.citations import (
    CANNOT_ATTEND,
    CITATIONS_KEY,
    NOT_FOUND,
    NOT_SEEN,
    CitedBy,
    Citing,
    citations_of,
    find_in,
    lift_in_nats,
    spread,
)
from cocoa_integrations._shared.edits import EditedText
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations._shared.tries import TRIES_KEY
from cocoa_integrations.llama_index.callbacks import RiskCollector, Start
from cocoa_integrations.llama_index.context_lift import lift_of, shares_a_run
from cocoa_integrations.llama_index.retrieved import Retrieval, by_source_node, texts_in
from cocoa_integrations.llama_index.shown_text import Part, merged_report, parts_of, text_of

logger = safe_logger(__name__)

_END: Any = object()

_OF_A_SERVER = "measured on a model in this process, with a CocoaLLM; the answer is that of a server."


class MissingRiskWarning(UserWarning):
    """A response has no risk, or no context lift. The message gives the reason."""


class Answered(NamedTuple):
    """One answer, the function that repeats its request, the number of the request, and its report.

    ``start_of_answer`` is the offset in the generated text at which the answer begins, after any reasoning.
    ``node_ids`` are the retrieved nodes in its prompt.
    """

    generation: Generation
    start: Start | None
    request: int
    report: dict[str, Any]
    start_of_answer: int
    node_ids: Sequence[str]


class Answers(RiskCollector):
    """Collects the answers requested inside its ``with`` block and writes their risk to the metadata of a response.

    Args:
        lift: whether to measure the context lift of the spans of the response.
        cite: how citations are found; ``None``: no citations.
    """

    def __init__(self, *, lift: bool, cite: Citing | None = None) -> None:
        super().__init__()
        self._lift, self._cite = lift, cite
        self._answers: list[Answered] = []
        self.retrieval = Retrieval()

    def __enter__(self) -> list[dict[str, Any]]:
        self.retrieval.__enter__()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self.retrieval.__exit__(kind, error, traceback)

    def take(
        self,
        generation: Generation,
        start: Start | None,
        *,
        request: int,
        run_id: str | None = None,
        split: Split | None = None,
        report: Mapping[str, Any] | None = None,
        node_ids: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Add an answer and return its report."""
        report = super().take(generation, start, request=request, run_id=run_id, split=split, report=report)
        begin = 0 if split is None else split.answer_start
        # with its report: threads may interleave
        self._answers.append(Answered(generation, start, request, report, begin, tuple(node_ids)))
        return report

    def write(
        self,
        metadata: dict[str, Any],
        text: str,
        nodes: Sequence[NodeWithScore],
        sources: Sequence[ToolOutput] = (),
    ) -> None:
        """Fill the metadata of a response. Without answers, the report is ``None`` and the list of reports is empty.

        The report of the response covers the answers that its text shows. Later requests, such as those of a memory,
        and earlier ones, such as a rewritten question, do not count. The report is ``None`` if the text was changed
        after it was generated, so that the spans cannot be found in it. Where an engine of ours inside has replaced
        the text, its own report stays.

        Args:
            metadata: the metadata of the response.
            text: the text of the response.
            nodes: the nodes retrieved for it.
            sources: the outputs that a chat engine made the response of. If the report of one describes the text, it
                is taken as that of the engine inside.
        """
        inside, shown = _engine_inside(text, metadata, sources)
        metadata |= inside
        if shown is None:
            self._write(metadata, text, nodes)
        elif shown.replaced:
            metadata |= {REPORTS_KEY: self.reports, **({} if self._cite is None else {CITATIONS_KEY: []})}
        else:  # an engine of ours inside may have changed the text
            cited = metadata.get(CITATIONS_KEY)
            self._write(metadata, shown.original, nodes)
            change = EditedText(shown.original, (), shown.begin).changed(shown.edits)
            if metadata[RISK_KEY] is not None:
                inner = inside[RISK_KEY]
                gate = {key: inner[key] for key in ("gate",) if key in inner}
                report = {**change.of_report(metadata[RISK_KEY]), **gate}
                if [span["text"] for span in inner["spans"]] == [span["text"] for span in report["spans"]]:
                    # what the engine inside measured stays, such as the sources that it cites
                    report["spans"] = [
                        {**of_inner, **span} for of_inner, span in zip(inner["spans"], report["spans"], strict=True)
                    ]
                metadata[RISK_KEY] = report
                if metadata.get(CITATIONS_KEY) is not cited:
                    metadata[CITATIONS_KEY] = change.moved(metadata[CITATIONS_KEY], 0)

    def _write(self, metadata: dict[str, Any], text: str, nodes: Sequence[NodeWithScore]) -> None:
        answers = list(self._answers)
        reports = [answer.report for answer in answers]
        for answer in answers:
            _sort_by_source_node(answer, nodes)
        metadata[REPORTS_KEY] = self.reports
        metadata[RISK_KEY] = None
        if not answers:
            _warn(
                "the response has no risk, because no CocoaLLM or CocoaRemote generated it: either another LLM did, or "
                "nothing was retrieved and no LLM was called."
            )
            return
        requests, begins = [answer.request for answer in answers], [answer.start_of_answer for answer in answers]
        parts = parts_of(text, reports, requests, begins)
        if parts is None:
            _warn(
                "the response has no cocoa_risk, because its text is not what the model wrote: an output parser, a "
                "response_mode or an engine changed it. The reports of the answers are in cocoa_reports."
            )
            return
        only = reports[parts[0].answer] if len(parts) == 1 else None
        report = only if only is not None and text_of(only) == text else merged_report(parts, reports)
        metadata[RISK_KEY] = report
        here = all(answers[part.answer].start is not None for part in parts)
        if self._lift and here:
            self._add_lift(report, parts, answers, nodes)
        elif self._lift:
            _warn(f"no context lift and no citations by lift: they are {_OF_A_SERVER}")
        if self._cite is not None and (found := self._sources(self._cite, parts, answers, nodes, here)) is not None:
            by, values = found
            metadata[CITATIONS_KEY] = citations_of(report["spans"], values, self._cite.lowest[by], by)
            for citation in metadata[CITATIONS_KEY]:
                citation["id"] = nodes[citation["source"] - 1].node.node_id

    def _sources(
        self,
        cite: Citing,
        parts: Sequence[Part],
        answers: Sequence[Answered],
        nodes: Sequence[NodeWithScore],
        here: bool,
    ) -> tuple[CitedBy, list[list[float | None]]] | None:
        """What finds the sources of a response, and for each span its value by each node; ``None`` if nothing can.

        Args:
            cite: how citations are found.
            parts: the parts of the response.
            answers: the answers.
            nodes: the source nodes of the response.
            here: whether the model is in this process.

        Raises:
            ConfigError: attention was asked for, and cannot be measured.
        """
        if cite.by != "lift":
            measured = [_attention_by_node(part, answers[part.answer], nodes) for part in parts]
            values = [of_span for of_part, _ in measured for of_span in of_part]
            why = next((reason for _, reason in measured if reason is not None), None)
            if why == NOT_SEEN and cite.by == "attention":
                raise ConfigError(CANNOT_ATTEND)
            if why is None or (cite.by == "attention" and here):
                return "attention", values
            if not here:
                _warn(f"no citations: {why}, and lift is {_OF_A_SERVER}")
                return None
            logger.warning("citations are by lift, because %s", why)
        elif not here:
            _warn(f"no citations: lift is {_OF_A_SERVER}")
            return None
        return "lift", [of_span for part in parts for of_span in _by_node(part, answers[part.answer], nodes)]

    def _add_lift(
        self, report: dict[str, Any], parts: Sequence[Part], answers: Sequence[Answered], nodes: Sequence[NodeWithScore]
    ) -> None:
        missing = False
        spans = iter(report["spans"])
        for part in parts:
            lifts = lift_of(answers[part.answer].generation, answers[part.answer].start, nodes)
            entries = [next(spans) for _ in part.spans]
            missing = missing or lifts is None
            if lifts is not None:
                add_context_lift(entries, [lifts[number] for number, _ in part.spans])
        if missing:
            _warn(
                "no context lift: the prompt of this answer contains no text of the source nodes, so there is "
                "nothing to leave out."
            )

    def read(
        self,
        deltas: Iterator[str],
        metadata: dict[str, Any],
        nodes: Sequence[NodeWithScore],
        sources: Sequence[ToolOutput] = (),
    ) -> Generator[str, None, None]:
        """Pass a stream on, and fill ``metadata`` when it has been read to its end."""
        text = ""
        try:
            while True:
                with self:  # not across the yield, which would add the collector to the context of the reader
                    delta = next(deltas, _END)
                if delta is _END:
                    break
                text += delta
                yield delta
        finally:
            if isinstance(deltas, Generator):
                deltas.close()
        self.write(metadata, text, nodes, sources)

    async def aread(
        self,
        deltas: AsyncIterator[str],
        metadata: dict[str, Any],
        nodes: Sequence[NodeWithScore],
        sources: Sequence[ToolOutput] = (),
    ) -> AsyncGenerator[str, None]:
        """Like :meth:`read`."""
        text = ""
        try:
            while True:
                with self:
                    delta = await anext(deltas, _END)
                if delta is _END:
                    break
                text += delta
                yield delta
        finally:
            if isinstance(deltas, AsyncGenerator):
                await deltas.aclose()
        await self.awrite(metadata, text, nodes, sources)

    async def awrite(
        self,
        metadata: dict[str, Any],
        text: str,
        nodes: Sequence[NodeWithScore],
        sources: Sequence[ToolOutput] = (),
    ) -> None:
        """Like :meth:`write`, without blocking the event loop."""
        await asyncio.to_thread(self.write, metadata, text, nodes, sources)


def _engine_inside(
    text: str, metadata: dict[str, Any], sources: Sequence[ToolOutput]
) -> tuple[dict[str, Any], EditedText | None]:
    """What an engine of ours inside wrote of this text to a source or to the metadata, and the text by its report."""
    outputs = [source.raw_output for source in reversed(sources)]
    written = [output.metadata or {} for output in outputs if isinstance(output, get_args(RESPONSE_TYPE))]
    for one in [*written, metadata]:
        report = one.get(RISK_KEY)
        if report is not None and (shown := EditedText.find(text, report)) is not None:
            return {key: one[key] for key in (RISK_KEY, CITATIONS_KEY, TRIES_KEY) if key in one}, shown
    return {}, None


def _sort_by_source_node(answer: Answered, nodes: Sequence[NodeWithScore]) -> None:
    """Order the attention of the spans of an answer by the source nodes of the response, as in its other answers."""
    if not answer.node_ids:  # the caller named the sources
        return
    for entry in answer.report["spans"]:
        measured = entry.pop("passage_attention", None)
        if measured and (values := by_source_node(measured, answer.node_ids, nodes)) is not None:
            entry["passage_attention"] = values


def _by_node(part: Part, answer: Answered, nodes: Sequence[NodeWithScore]) -> list[list[float | None]]:
    """For each span of a part, its lift by each node, in nats; ``None`` if the node was not in the prompt."""
    of_nodes = [lift_of(answer.generation, answer.start, nodes, only=number) for number in range(len(nodes))]
    return [[None if lifts is None else lift_in_nats(lifts[number]) for lifts in of_nodes] for number, _ in part.spans]


def _attention_by_node(
    part: Part, answer: Answered, nodes: Sequence[NodeWithScore]
) -> tuple[list[list[float | None]], str | None]:
    """The attention of each span of a part on each node, and why it is not that on all nodes of the prompt.

    It was measured while the answer was written, unless the nodes of the response are others than those that were
    retrieved. Then the answer is fed again.

    Returns:
        For each span its values, ``None`` for a node that was not in the prompt as it is; and ``NOT_SEEN`` or
        ``NOT_FOUND``, or ``None`` if nothing is missing.
    """
    entries = answer.report["spans"]
    known = [entries[number].get("passage_attention") if answer.node_ids else None for number, _ in part.spans]
    nothing: list[float | None] = [None] * len(nodes)
    complete = [nothing if values is None else list(values) for values in known]
    if answer.start is None:
        return complete, NOT_FOUND if nodes and known and not any(known) else None
    asked = answer.start()
    engine = answer.start.engine
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
        complete = [spread(fed_again[number], in_prompt, len(nodes)) for number, _ in part.spans]
    return complete, why


def _warn(message: str) -> None:
    warnings.warn(message, MissingRiskWarning, stacklevel=4)
