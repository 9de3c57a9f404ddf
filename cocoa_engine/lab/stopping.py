"""What a threshold on the risk would stop: the share of answers, spans, right and wrong answers."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, FiniteFloat

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ChatTemplateError, ConfigError, DataError
from cocoa_engine.lab.cache import AnswerCache, answered
from cocoa_engine.lab.data import ContextRow, Question
from cocoa_engine.lab.files import RowModel, parsed, read_json_lines, read_text, suffix_of
from cocoa_engine.model.prompts import Prompt, chat_of
from cocoa_engine.results import Generation
from cocoa_engine.risk.policy import reaches
from cocoa_engine.spans import RAW

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine

_Known = Annotated[list[str] | None, BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class _Span(RowModel):
    text: str | int | float | None = "?"
    risk: float | None
    flagged: bool | None = None
    risk_source: str | None = None


class _Line(RowModel):
    """A line: a prompt or a question, or an answer that was measured before, as ``cocoa ask --json`` prints it."""

    prompt: str | None = None
    question: str | None = None
    text: str | None = None
    answers: _Known = None
    references: _Known = None
    answer: _Known = None
    spans: list[_Span] | None = None
    answer_risk: float | None = None
    risk_source: str | None = None
    threshold: FiniteFloat | None = None
    answer_threshold: FiniteFloat | None = None


@dataclass(frozen=True)
class Answer:
    """The risks of one answer. A risk that is not a finite number is infinite: it reaches every threshold.

    ``spans`` are those of its spans with visible text, ``whole`` is that of the answer, and ``flagged`` whether each of
    ``spans`` reaches its default threshold. `None` stands for what is not known.
    """

    spans: tuple[float, ...]
    whole: float | None = None
    right: bool | None = None
    risk_source: str | None = None
    flagged: tuple[bool, ...] | None = None
    threshold: float | None = None
    whole_threshold: float | None = None


@dataclass(frozen=True)
class OwnPrompt:
    """One line of a file: a request, the known answers to it and the passage that the answer should come from, if there
    are any; or the risks of an answer that was measured before.

    ``answers`` is empty if the passage does not answer the question, and `None` if that is not known.
    """

    request: str
    answers: tuple[str, ...] | None = None
    context: str | None = None
    measured: Answer | None = None

    def answer(self, line: _Line, text: str) -> Answer:
        """The risks of an answer with a text. It is right as that to a :class:`~cocoa_engine.lab.data.Question` is."""
        unmeasured = (None, False, "source_attention")
        spans = [
            span
            for span in line.spans or ()
            if str(span.text).strip() and (span.risk, span.flagged, span.risk_source) != unmeasured
        ]
        risks = tuple(_finite(span.risk) for span in spans)
        flags = tuple(bool(span.flagged) or math.isinf(risk) for span, risk in zip(spans, risks, strict=True))
        sources = (line.risk_source, *(span.risk_source for span in line.spans or ()))
        return Answer(
            spans=risks,
            whole=None if line.answer_risk is None else _finite(line.answer_risk),
            right=None if self.answers is None else Question("", None, self.answers, "").is_right(text),
            risk_source=next(filter(None, sources), None),
            flagged=None if any(span.flagged is None for span in spans) else flags,
            threshold=line.threshold,
            whole_threshold=line.answer_threshold,
        )


def _finite(risk: float | None) -> float:
    return risk if risk is not None and math.isfinite(risk) else math.inf


def read_own_prompts(path: str | Path) -> list[OwnPrompt]:
    """Read a file of prompts or of measured answers."""
    path = Path(path)
    if suffix_of(path) == ".txt":
        prompts = [OwnPrompt(line.strip()) for line in read_text(path).split("\n") if line.strip()]
    else:
        prompts = [_read(value, where) for where, value in read_json_lines(path)]
    if not prompts:
        raise DataError(f"{path} has no prompts.")
    return prompts


def _read(value: Any, where: str) -> OwnPrompt:
    line = parsed(_Line, value, where)

    def passage() -> str:
        return parsed(ContextRow, value, where).passage or ""

    def known(*lists: list[str] | None) -> tuple[str, ...] | None:
        if answers := next(filter(None, lists), None):
            return tuple(answers)
        return () if [] in lists and line.prompt is None and passage().strip() else None

    if line.spans is not None:
        if line.text is None and line.answer is None:
            raise DataError(f"{where}: the spans of an answer need its text.")
        text = line.text if line.text is not None else " ".join(line.answer or ())
        asked = OwnPrompt("", known(line.answers, line.references, line.answer if line.text is not None else None))
        return replace(asked, measured=asked.answer(line, text))
    request, context = line.prompt, None
    if request is None and line.question is not None:
        context = passage()
        request = Question(line.question, context or None, (), "").request
    if request is None or not request.strip():
        raise DataError(f"{where}: a line has a prompt or a question that is not empty, or the spans of an answer.")
    return OwnPrompt(request, known(line.answers, line.answer), context if (context or "").strip() else None)


def measure(
    engine: "CocoaEngine",
    prompts: Sequence[OwnPrompt],
    config: CocoaConfig,
    *,
    system: str | None = None,
    raw: bool = False,
    cache: AnswerCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[Answer]:
    """Answer prompts that were not measured before, and yield the risks, in order. ``max_risk`` cuts no answer."""
    chat = engine.has_chat_template and not raw
    if system is not None and not chat:
        raise ChatTemplateError(f"{engine.model_name} has no chat template, which a system message needs")
    asked: list[Prompt] = [
        engine.encode_chat(chat_of(prompt.request, system)) if chat else prompt.request for prompt in prompts
    ]
    source: list[list[str] | None] = []  # the passages, as far as the model reads them as they are written
    for line, prompt in zip(prompts, asked, strict=True):
        read = engine.decode(prompt) if isinstance(prompt, list) else prompt
        source.append([line.context] if line.context is not None and line.context.strip() in read else None)
    calibrator = engine.calibrator_for(config)
    if not all(source) and (calibrator is None or calibrator.span is None):
        source = [None] * len(source)  # the risks of spans would be of two kinds, which no threshold fits
    for own, values in answered(engine, prompts, asked, config, _values, source=source, cache=cache, advance=advance):
        yield own.answer(_Line.model_validate(values), values["text"])


def _values(generation: Generation) -> dict[str, Any]:
    """What a threshold is compared with, as plain values."""
    of_spans = {"__all__": {"text", "risk", "flagged", "risk_source"}}
    whole: dict[str, Any] = dict.fromkeys(("text", "answer_risk", "threshold", "answer_threshold"), True)
    return generation.model_dump(include={**whole, "spans": of_spans})


def common_source(answers: Sequence[Answer], thresholds: Sequence[float] = ()) -> str | None:
    """Where the risks of spans of all answers come from; `None` if no answer tells. If they differ in it, no threshold
    fits all, and a ConfigError is raised; also for thresholds as by :func:`require_scale`."""
    sources = sorted({answer.risk_source for answer in answers if answer.risk_source is not None})
    if len(sources) > 1:
        raise ConfigError(
            f"the answers have risks of different sources ({', '.join(sources)}), which no threshold fits; measure all "
            "with one, such as --risk token_probability"
        )
    for source in sources:
        require_scale(source, thresholds)
    return sources[0] if sources else None


def require_scale(source: str, thresholds: Sequence[float]) -> None:
    """Refuse thresholds outside [0, 1] for a risk that is not a raw MLDS, with a ConfigError."""
    if source not in RAW and not all(0 <= threshold <= 1 for threshold in thresholds):
        shown = ", ".join(f"{threshold:g}" for threshold in thresholds)
        raise ConfigError(
            f"--at takes thresholds in [0, 1], as the risk (got {shown}); for the raw MLDS give --risk f_mlds"
        )


@dataclass(frozen=True)
class Count:
    """How many of some items a threshold stops, or lets pass."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number / self.of:.0%} ({self.number} of {self.of})" if self.of else "–"


@dataclass(frozen=True)
class Row:
    """What one threshold does.

    Attributes:
        threshold: the threshold; a risk that reaches it is stopped. `None`: each answer has a default of its own.
        answers: answers that are stopped.
        spans: spans that reach it; `None` for the risk of whole answers.
        right_stopped, wrong_passed: of the answers with known answers.
    """

    threshold: float | None
    answers: Count
    spans: Count | None
    right_stopped: Count
    wrong_passed: Count


def by_span(answers: Sequence[Answer], thresholds: Sequence[float] = ()) -> list[Row]:
    """What thresholds (default: :func:`suggested`) stop: answers with a span whose risk reaches the threshold."""
    highest = [max(answer.spans, default=-math.inf) for answer in answers]
    spans = [risk for answer in answers for risk in answer.spans]
    return [
        _row([threshold], answers, [risk >= threshold for risk in highest], [risk >= threshold for risk in spans])
        for threshold in thresholds or suggested(highest)
    ]


def by_answer(answers: Sequence[Answer], thresholds: Sequence[float] = ()) -> list[Row]:
    """The same for the risk of whole answers; empty if they have none."""
    measured = [answer for answer in answers if answer.whole is not None]
    risks = [answer.whole for answer in measured if answer.whole is not None]
    return [
        _row([threshold], measured, [risk >= threshold for risk in risks])
        for threshold in thresholds or suggested(risks)
        if measured
    ]


def by_default(answers: Sequence[Answer]) -> tuple[Row | None, Row | None]:
    """What gates do without a number: the rows of the default thresholds of spans and of whole answers, if they have
    some."""
    spans = whole = None
    flags = [answer.flagged for answer in answers if answer.flagged is not None and answer.threshold is not None]
    if answers and len(flags) == len(answers):
        of_spans = [flag for of_answer in flags for flag in of_answer]
        spans = _row([answer.threshold for answer in answers], answers, list(map(any, flags)), of_spans)
    measured = [answer for answer in answers if answer.whole is not None]
    if measured and all(answer.whole_threshold is not None for answer in measured):
        stopped = [reaches(answer.whole, answer.whole_threshold) for answer in measured]
        whole = _row([answer.whole_threshold for answer in measured], measured, stopped)
    return spans, whole


def _row(
    thresholds: Iterable[float | None],
    answers: Sequence[Answer],
    stopped: Sequence[bool],
    spans: Sequence[bool] | None = None,
) -> Row:
    threshold, *others = {*thresholds}
    right = [stop for answer, stop in zip(answers, stopped, strict=True) if answer.right is True]
    wrong = [not stop for answer, stop in zip(answers, stopped, strict=True) if answer.right is False]
    counts = [None if items is None else Count(sum(items), len(items)) for items in (stopped, spans, right, wrong)]
    return Row(None if others else threshold, *counts)  # type: ignore[arg-type]


SHARES = (0.5, 0.25, 0.1, 0.05)
"""The shares of answers that the suggested thresholds stop at most."""


def suggested(risks: Sequence[float]) -> list[float]:
    """The lowest thresholds, to four decimals, that stop at most :data:`SHARES` of the answers with these risks."""
    ordered = sorted(risks)
    thresholds = dict.fromkeys(math.ceil(risk * 10_000) / 10_000 for risk in ordered if math.isfinite(risk))
    stopped = {threshold: len(ordered) - bisect_left(ordered, threshold) for threshold in thresholds}
    lowest = [next((at for at in thresholds if stopped[at] <= share * len(risks)), None) for share in SHARES]
    return [threshold for threshold in dict.fromkeys(lowest) if threshold is not None]
