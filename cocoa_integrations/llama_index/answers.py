"""The answers that a model gave for one response, and their risk in the metadata of the response."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from typing import Any, NamedTuple

from llama_index.core.schema import NodeWithScore

from cocoa_engine import Generation
from cocoa_integrations._shared.metadata import REPORTS_KEY, RISK_KEY, add_context_lift
from cocoa_integrations.llama_index.callbacks import RiskCollector, Start
from cocoa_integrations.llama_index.context_lift import lift_of

_END: Any = object()


class MissingRiskWarning(UserWarning):
    """A response has no risk, or no context lift. The message gives the reason."""


class Answered(NamedTuple):
    """One answer, the function that repeats its request, and its report."""

    generation: Generation
    start: Start | None
    report: dict[str, Any]


class Answers(RiskCollector):
    """Collects the answers requested inside its ``with`` block and writes their risk to the metadata of a response.

    Args:
        lift: whether to measure the context lift of the spans of the response.
    """

    def __init__(self, *, lift: bool) -> None:
        super().__init__()
        self._lift = lift
        self._answers: list[Answered] = []

    def take(self, generation: Generation, start: Start | None, run_id: str | None) -> dict[str, Any]:
        """Add an answer and return its report."""
        report = super().take(generation, start, run_id)
        self._answers.append(Answered(generation, start, report))  # with its report: threads may interleave
        return report

    def write(self, metadata: dict[str, Any], text: str, nodes: Sequence[NodeWithScore]) -> None:
        """Fill the metadata of a response. Without answers, the report is ``None`` and the list of reports is empty.

        The report of the response is that of the last answer with the text of the response, so that later requests,
        such as those of a memory, do not count. If there is none, it is that of the last answer.

        Args:
            metadata: the metadata of the response.
            text: the text of the response.
            nodes: the nodes retrieved for it.
        """
        metadata[REPORTS_KEY] = self.reports
        metadata[RISK_KEY] = None
        if not self._answers:
            _warn(
                "the response has no risk, because no CocoaLLM generated it: either another LLM did, or nothing was "
                "retrieved and no LLM was called."
            )
            return
        same = [answer for answer in self._answers if answer.generation.text.strip() == text.strip()]
        generation, start, report = (same or self._answers)[-1]
        metadata[RISK_KEY] = report
        if self._lift:
            lifts = lift_of(generation, start, nodes)
            if lifts is None:
                _warn(
                    "no context lift: the prompt of this answer contains no text of the source nodes, so there is "
                    "nothing to leave out."
                )
            else:
                add_context_lift(report["spans"], lifts)

    def read(
        self, deltas: Iterator[str], metadata: dict[str, Any], nodes: Sequence[NodeWithScore]
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
        self.write(metadata, text, nodes)

    async def aread(
        self, deltas: AsyncIterator[str], metadata: dict[str, Any], nodes: Sequence[NodeWithScore]
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
        await self.awrite(metadata, text, nodes)

    async def awrite(self, metadata: dict[str, Any], text: str, nodes: Sequence[NodeWithScore]) -> None:
        """Like :meth:`write`, without blocking the event loop."""
        await asyncio.to_thread(self.write, metadata, text, nodes)


def _warn(message: str) -> None:
    warnings.warn(message, MissingRiskWarning, stacklevel=3)
