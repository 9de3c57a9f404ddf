"""Parsing of a streamed answer into new text and new parts of tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


class GrowingAnswer:
    """Parses an answer piece by piece. A call begins when its name is complete."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._text = ""
        self._content = 0  # characters returned so far
        self._written: list[int] = []  # characters returned so far of the arguments of each call

    def add(self, text: str) -> tuple[str, list[CallDelta]]:
        """Add a piece, and return the new text and the new parts of calls."""
        self._text += text
        reading = self._plan.read(self._text, done=False)
        return self._new_parts(reading.content, reading.valid)

    def finish(self) -> tuple[str, list[CallDelta], Reading]:
        """The remaining text and parts of calls, and the parsed answer."""
        reading = self._plan.read(self._text)
        return *self._new_parts(reading.content, reading.calls), reading

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
