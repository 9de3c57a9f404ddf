"""The prompts of a user, or answers that were measured before, to find out what a threshold would stop.

A file has JSON lines of one of these forms, or is a ``.txt`` file with one prompt a line:

>>> {"prompt": "Write a haiku about rain."}
>>> {"question": "Who wrote Dune?", "context": "Dune is a novel by Frank Herbert.", "answer": "Frank Herbert"}
>>> {"text": "Frank Herbert.", "spans": [{"text": "Frank Herbert.", "risk": 0.4}], "answer_risk": 0.3}

The last form is a line of ``cocoa ask --json``, or a row of ``samples.jsonl`` of ``cocoa eval``: nothing is
decoded for it. The known answers, ``answer`` or ``answers``, are optional. An answer is right if it contains one, as
:meth:`~cocoa_engine.lab.data.questions.Question.is_right` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cocoa_engine.errors import DataError
from cocoa_engine.lab.data.questions import Question
from cocoa_engine.lab.files import field, plain_text, read_json_lines, read_text
from cocoa_engine.safe_text import short_repr


class MeasuredSpan(NamedTuple):
    """A span of an answer that was measured before.

    Attributes:
        text: its text.
        risk: its risk; `None` if it was not measured.
        flagged: whether the risk reaches its default threshold; `None` if that is not known.
    """

    text: str
    risk: float | None
    flagged: bool | None = None


@dataclass(frozen=True)
class MeasuredAnswer:
    """An answer that was measured before.

    Attributes:
        text: its text.
        spans: its spans.
        answer_risk: the risk of the answer as a whole; `None` without a calibrator for answers.
        risk_source: where the risks of spans come from; `None` if that is not known.
        threshold: the default threshold of spans; `None` if it is not known.
        answer_threshold: the default threshold of ``answer_risk``; `None` if it is not known.
    """

    text: str
    spans: tuple[MeasuredSpan, ...]
    answer_risk: float | None
    risk_source: str | None = None
    threshold: float | None = None
    answer_threshold: float | None = None


@dataclass(frozen=True)
class OwnPrompt:
    """One line: a request, or an answer that was measured before, with the known answers if there are any.

    Attributes:
        request: the text that the model is asked.
        measured: the answer that was measured before.
        known: the known answers.
        context: the passage of the request that the answer should come from.
    """

    request: str
    measured: MeasuredAnswer | None
    known: tuple[str, ...]
    context: str | None = None

    def is_right(self, answer: str) -> bool | None:
        """Whether an answer contains a known answer; `None` without known answers."""
        return Question("", None, self.known, "").is_right(answer) if self.known else None


def read_own_prompts(path: str | Path) -> list[OwnPrompt]:
    """Read a file of prompts or of measured answers.

    Raises:
        DataError: the file cannot be read, is empty, or a line has another form.
    """
    path = Path(path)
    if path.suffix.lower() == ".txt":
        lines = [line.strip() for line in read_text(path).split("\n")]
        found = [OwnPrompt(line, None, ()) for line in lines if line]
    else:
        found = [_read(row, where) for where, row in read_json_lines(path)]
    if not found:
        raise DataError(f"{path} has no prompts.")
    return found


def _read(row: Mapping[str, Any], where: str) -> OwnPrompt:
    if "spans" in row:
        return _measured(row, where)
    known, context = _known(row.get("answers", row.get("answer")), where), None
    if "prompt" in row:
        request = field(row, "prompt", str, where)
    elif "question" in row:
        context = field(row, "context", str, where) if row.get("context") is not None else None
        request = Question(field(row, "question", str, where), context, (), "").request
    else:
        raise DataError(f"{where}: a line has a prompt, a question, or the spans of a measured answer.")
    if not request.strip():
        raise DataError(f"{where}: the prompt is empty.")
    return OwnPrompt(request, None, known, context if context is None or context.strip() else None)


def _measured(row: Mapping[str, Any], where: str) -> OwnPrompt:
    text = field(row, "text" if "text" in row else "answer", str, where)
    given = row.get("answers", row.get("references", row.get("answer") if "text" in row else None))
    spans = []
    for span in field(row, "spans", list, where):
        if not isinstance(span, Mapping) or "risk" not in span:
            raise DataError(f"{where}: a span has no risk.")
        flagged = span["flagged"] if isinstance(span.get("flagged"), bool) else None
        spans.append(MeasuredSpan(plain_text(span.get("text", "?"), "text", where), _risk(span, where), flagged))
    whole = row.get("answer_risk")
    thresholds = [row.get(name) for name in ("threshold", "answer_threshold")]
    sources = [row.get("risk_source"), *(span.get("risk_source") for span in row["spans"])]
    source = next((one for one in sources if isinstance(one, str)), None)
    measured = MeasuredAnswer(
        text,
        tuple(spans),
        None if whole is None else _number(whole, where),
        source,
        *(None if one is None else _finite_number(one, where) for one in thresholds),
    )
    return OwnPrompt("", measured, _known(given, where))


def _risk(span: Mapping[str, Any], where: str) -> float | None:
    """The risk of a span; `None` if it was not measured. One that was measured but is not finite is flagged."""
    unmeasured = span["risk"] is None and span.get("flagged") is False and span.get("risk_source") == "source_attention"
    return None if unmeasured else _number(span["risk"], where)


def _number(value: Any, where: str) -> float:
    """A risk. ``None`` and the texts that stand for numbers that are not finite are NaN or infinite."""
    try:
        return float("nan" if value is None else value)
    except (TypeError, ValueError, OverflowError):  # OverflowError: an integer of hundreds of digits
        raise DataError(f"{where}: the risk or threshold {short_repr(value)} is not a number.") from None


def _finite_number(value: Any, where: str) -> float:
    number = _number(value, where)
    if not math.isfinite(number):
        raise DataError(f"{where}: the threshold {short_repr(value)} is not a finite number.")
    return number


def _known(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise DataError(f"{where}: the known answers must be a text or a list of texts.")
    return tuple(values)
