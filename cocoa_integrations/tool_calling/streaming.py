"""Parsing of a streamed answer into new reasoning, new text and new parts of tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from cocoa_engine import Span
from cocoa_engine.report import Part
from cocoa_integrations.tool_calling.plan import Plan
from cocoa_integrations.tool_calling.reading import Call, Reading


@dataclass(frozen=True)
class CallDelta:
    """The new part of a call.

    Attributes:
        number: the index of the call in the answer.
        name: the name, in the first part of a call.
        written: the new text of the arguments.
        error: the error, in the last part of an invalid call.
    """

    number: int
    name: str | None
    written: str
    error: str | None = None


@dataclass(frozen=True)
class Piece:
    """What a span adds to an answer.

    Attributes:
        number: the index of the span; the last piece has none.
        span: the span.
        part: the part that the span belongs to; ``None`` if the model did not reason.
        reasoning: the new reasoning.
        content: the new text.
        calls: the new parts of calls.
    """

    number: int | None
    span: Span | None
    part: Part | None
    reasoning: str
    content: str
    calls: list[CallDelta]


class GrowingAnswer:
    """Parses an answer span by span. A call begins when its name is complete.

    Spans are held back until it is known whether the answer begins with reasoning: in most cases, until the first
    visible character.

    Args:
        plan: the plan, whose prompt has been made.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._splitter = plan.splitter()
        self._held: list[Span] = []
        self._passed_on = 0  # spans
        self._end = 0  # of the text of these spans
        self._reasoning = 0  # characters returned so far
        self._content = 0
        self._written: list[int] = []  # the same of the arguments of each call

    @property
    def has_reasoning(self) -> bool:
        """Whether the answer has visible reasoning. It does not change once a piece has been returned."""
        return bool(self._splitter.reasoning)

    def add(self, span: Span) -> list[Piece]:
        """Add a span, and return the pieces that can be passed on."""
        self._held.append(span)
        self._splitter.add(span)
        return self._released() if self._splitter.settled else []

    def finish(self) -> tuple[list[Piece], Reading]:
        """The remaining pieces, the last of which has no span, and the parsed answer."""
        self._splitter.finish()
        pieces = self._released()
        reading = self._plan.read(self._splitter.text, start=self._splitter.answer_start)
        rest = Piece(None, None, None, self._new_reasoning(), *self._new_parts(reading.content, reading.calls))
        return [*pieces, rest], reading

    def _released(self) -> list[Piece]:
        pieces = []
        for span in self._held:
            self._end += len(span.text)
            text = self._splitter.text[: self._end]
            reading = self._plan.read(text, done=False, start=min(self._splitter.answer_start, self._end))
            allowed = list(takewhile(lambda call: call.error is None, reading.calls))
            parts = self._new_parts(reading.content, allowed)
            reasoning = self._new_reasoning() if span is self._held[-1] else ""
            pieces.append(Piece(self._passed_on, span, self._splitter.part(span), reasoning, *parts))
            self._passed_on += 1
        self._held = []
        return pieces

    def _new_reasoning(self) -> str:
        new = self._splitter.reasoning[self._reasoning :]
        self._reasoning += len(new)
        return new

    def _new_parts(self, content: str, calls: Sequence[Call]) -> tuple[str, list[CallDelta]]:
        new_content = content[self._content :]
        self._content += len(new_content)
        deltas = []
        for number, call in enumerate(calls):
            begins = number == len(self._written)
            if begins:
                if call.name is None and call.error is None:
                    break
                self._written.append(0)
            written = call.written[self._written[number] :]
            self._written[number] += len(written)
            if begins or written or call.error is not None:
                deltas.append(CallDelta(number, call.name if begins else None, written, call.error))
        return new_content, deltas
