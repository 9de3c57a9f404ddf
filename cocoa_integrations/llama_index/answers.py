"""The answers that a model gave on the way to one response, and what the response says of them."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from typing import Any, NamedTuple

from llama_index.core.schema import NodeWithScore

from cocoa_engine import Generation
from cocoa_integrations.llama_index.callbacks import RiskCollector, Start
from cocoa_integrations.llama_index.grounding import lift_of
from cocoa_integrations.metadata import REPORTS_KEY, RISK_KEY, add_context_lift

_END: Any = object()


class MissingRiskWarning(UserWarning):
    """A response carries no risk, or no context lift; the warning says why."""


class Answered(NamedTuple):
    """One answer, what asks for it again, and its report."""

    generation: Generation
    start: Start | None
    report: dict[str, Any]


class Answers(RiskCollector):
    """Collects the answers given inside its ``with`` block and writes their risk into a response's metadata.

    Args:
        lift: whether to measure the context lift of the response's spans.
    """

    def __init__(self, *, lift: bool) -> None:
        super().__init__()
        self._lift = lift
        self._answers: list[Answered] = []

    def take(self, generation: Generation, start: Start | None) -> dict[str, Any]:
        """Take note of an answer."""
        report = super().take(generation, start)
        self._answers.append(Answered(generation, start, report))  # not by its place: threads may answer at once
        return report

    def write(self, metadata: dict[str, Any], text: str, nodes: Sequence[NodeWithScore]) -> None:
        """Fill a response's metadata; the reports are None and empty where no answer was collected.

        The response's own report is that of the last answer whose text it is (what is asked after it, by a memory for
        instance, does not count), or else simply of the last.

        Args:
            metadata: of the response.
            text: the response's text.
            nodes: what was retrieved for it.
        """
        metadata[REPORTS_KEY] = self.reports
        metadata[RISK_KEY] = None
        if not self._answers:
            _warn(
                "the response carries no risk: no CocoaLLM wrote it. Either another LLM did, or nothing was retrieved "
                "and nothing was asked."
            )
            return
        same = [answer for answer in self._answers if answer.generation.text.strip() == text.strip()]
        generation, start, report = (same or self._answers)[-1]
        metadata[RISK_KEY] = report
        if self._lift:
            lifts = lift_of(generation, start, nodes)
            if lifts is None:
                _warn(
                    "no context lift: the text of no source node was found in the prompt of this answer, so there is "
                    "nothing that could be left out."
                )
            else:
                add_context_lift(report["spans"], lifts)

    def read(
        self, deltas: Iterator[str], metadata: dict[str, Any], nodes: Sequence[NodeWithScore]
    ) -> Generator[str, None, None]:
        """Pass a stream on; ``metadata`` is filled when it has been read to its end."""
        text = ""
        try:
            while True:
                with self:  # for what is asked only now; left before each yield, or the reader's context would have it
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
        """As :meth:`read`."""
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
        """As :meth:`write`, off the event loop."""
        await asyncio.to_thread(self.write, metadata, text, nodes)


def _warn(message: str) -> None:
    warnings.warn(message, MissingRiskWarning, stacklevel=3)
