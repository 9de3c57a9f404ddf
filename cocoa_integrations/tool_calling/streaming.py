"""What each further piece of an answer adds to its text and to its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cocoa_integrations.tool_calling.plan import Plan
from cocoa_integrations.tool_calling.reading import Call, Reading


@dataclass(frozen=True)
class CallDelta:
    """What is new of a call.

    Attributes:
        number: counts the calls from 0.
        name: with the first of a call's.
        written: more of the text of its arguments.
        error: with the last of a faulty call's.
    """

    number: int
    name: str | None
    written: str
    error: str | None = None


class GrowingAnswer:
    """Reads an answer piece by piece. A call begins once its name is complete."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._text = ""
        self._content = 0  # characters that were handed out
        self._written: list[int] = []  # of each call that has begun

    def add(self, text: str) -> tuple[str, list[CallDelta]]:
        """The text and the calls that a further piece brings."""
        self._text += text
        reading = self._plan.read(self._text, done=False)
        return self._news(reading.content, reading.valid)

    def finish(self) -> tuple[str, list[CallDelta], Reading]:
        """What was held back, and the whole answer."""
        reading = self._plan.read(self._text)
        return *self._news(reading.content, reading.calls), reading

    def _news(self, content: str, calls: Sequence[Call]) -> tuple[str, list[CallDelta]]:
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
