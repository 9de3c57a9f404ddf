"""What a threshold on the risk would stop: the share of answers, spans, right and wrong answers."""

from __future__ import annotations

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
from cocoa_engine.lab.files import RowModel, parsed, read_json_lines, read_text
from cocoa_engine.lab.records import Question
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

    @property
    def severity(self) -> float | None:
        """The risk, infinite if it is not a finite number; `None` if it was not measured."""
        if self.risk is None and self.flagged is False and self.risk_source == "source_attention":
            return None
        return _finite(self.risk)


class _Line(RowModel):
    """A line: a prompt or a question, or an answer that was measured before, as ``cocoa ask --json`` prints it."""

    prompt: str | None = None
    question: str | None = None
    context: str | None = None
    text: str | None = None
    answers: _Known = None
    references: _Known = None
    answer: _Known = None
    spans: list[_Span] | None = None
    answer_risk: float | None = None
    risk_source: str | None = None
    threshold: FiniteFloat | None = None
    answer_threshold: FiniteFloat | None = None

    def measured(self) -> Answer:
        """The risks of the answer."""
        spans = [span for span in self.spans or () if span.severity is not None and str(span.text).strip()]
        risks = tuple(_finite(span.severity) for span in spans)
        flagged = tuple(
            bool(span.flagged) or math.isinf(risk)
            for span, risk in zip(spans, risks, strict=True)
            if span.flagged is not None
        )
        sources = (self.risk_source, *(span.risk_source for span in self.spans or ()))
        return Answer(
            spans=risks,
            whole=None if self.answer_risk is None else _finite(self.answer_risk),
            risk_source=next(filter(None, sources), None),
            flagged=flagged if len(flagged) == len(risks) else None,
            threshold=self.threshold,
            whole_threshold=self.answer_threshold,
        )


@dataclass(frozen=True)
class Answer:
    """The risks of one answer. A risk that is not a finite number is infinite: it reaches every threshold.

    Attributes:
        spans: the risks of its spans with visible text.
        whole: the risk of the answer as a whole; `None` without a calibrator for answers.
        right: whether it is right; `None` if that is not known.
        risk_source: where the risks of spans come from; `None` if that is not known.
        flagged: whether each risk of ``spans`` reaches its default threshold; `None` if that is not known.
        threshold: the default threshold of spans; `None` if it is not known.
        whole_threshold: the default threshold of ``whole``; `None` if it is not known.
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
    """One line of a file: a request, or an answer that was measured before.

    Attributes:
        request: the text that the model is asked.
        known: the known answers, if there are any.
        context: the passage of the request that the answer should come from.
        measured: the risks of the answer that was measured before.
    """

    request: str
    known: tuple[str, ...] = ()
    context: str | None = None
    measured: Answer | None = None

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
        prompts = [OwnPrompt(line.strip()) for line in read_text(path).split("\n") if line.strip()]
    else:
        prompts = [_read(parsed(_Line, value, where), where) for where, value in read_json_lines(path)]
    if not prompts:
        raise DataError(f"{path} has no prompts.")
    return prompts


def _read(line: _Line, where: str) -> OwnPrompt:
    if line.spans is not None:
        if line.text is None and line.answer is None:
            raise DataError(f"{where}: the spans of an answer need its text.")
        text = line.text if line.text is not None else " ".join(line.answer or ())
        known = line.answers or line.references or (line.answer if line.text is not None else None)
        asked = OwnPrompt("", tuple(known or ()))
        return replace(asked, measured=replace(line.measured(), right=asked.is_right(text)))
    context = line.context if line.context and line.context.strip() else None
    request = line.prompt
    if request is None and line.question is not None:
        request = Question(line.question, line.context, (), "").request
    if request is None or not request.strip():
        raise DataError(f"{where}: a line has a prompt or a question that is not empty, or the spans of an answer.")
    return OwnPrompt(request, tuple(line.answers or line.answer or ()), None if line.prompt is not None else context)


SHARES = (0.5, 0.25, 0.1, 0.05)
"""The shares of answers that the suggested thresholds stop at most."""


@dataclass(frozen=True)
class Count:
    """How many of some items a threshold stops, or lets pass."""

    number: int
    of: int

    @classmethod
    def of_all(cls, chosen: Sequence[bool]) -> Count:
        """How many of some items are chosen."""
        return cls(sum(chosen), len(chosen))

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


def measure(
    engine: CocoaEngine,
    prompts: Sequence[OwnPrompt],
    config: CocoaConfig,
    *,
    system: str | None = None,
    raw: bool = False,
    cache: AnswerCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[Answer]:
    """Answer prompts and yield the risks, in order.

    Args:
        engine: the engine.
        prompts: the prompts; none that was measured before.
        config: the settings. ``max_risk`` is left out, so that answers are complete.
        system: a system message before each prompt.
        raw: continue the prompts as plain text, also if the model has a chat template.
        cache: answers to prompts that were asked before.
        advance: called with the number of prompts answered since the last call.

    Raises:
        ChatTemplateError: there is a system message, and the model has no chat template.
    """
    chat = engine.has_chat_template and not raw
    if system is not None and not chat:
        raise ChatTemplateError(f"{engine.model_name} has no chat template, which a system message needs")
    asked: list[Prompt] = [
        engine.encode_chat(chat_of(prompt.request, system)) if chat else prompt.request for prompt in prompts
    ]
    source = _sources(engine, prompts, asked, config)
    for prompt, values in answered(
        engine, prompts, asked, config, _values, source=source, cache=cache, advance=advance
    ):
        yield replace(_Line.model_validate(values).measured(), right=prompt.is_right(values["text"]))


def _sources(
    engine: CocoaEngine, prompts: Sequence[OwnPrompt], asked: Sequence[Prompt], config: CocoaConfig
) -> list[list[str] | None]:
    """The passage of each prompt, as far as the model reads it as it is written.

    No prompt has one if the risks of spans would be of two kinds, which no threshold fits.
    """
    sources: list[list[str] | None] = []
    for line, prompt in zip(prompts, asked, strict=True):
        read = engine.decode(prompt) if isinstance(prompt, list) else prompt
        sources.append([line.context] if line.context is not None and line.context.strip() in read else None)
    calibrator = engine.calibrator_for(config)
    of_one_kind = all(sources) or (calibrator is not None and calibrator.span is not None)
    return sources if of_one_kind else [None] * len(sources)


def _values(generation: Generation) -> dict[str, Any]:
    """What a threshold is compared with, as plain values."""
    return {
        "text": generation.text,
        "spans": [
            {"text": span.text, "risk": span.risk, "flagged": span.flagged, "risk_source": span.risk_source}
            for span in generation.spans
        ],
        "answer_risk": generation.answer_risk,
        "risk_source": generation.risk_source,
        "threshold": generation.threshold,
        "answer_threshold": generation.answer_threshold,
    }


def common_source(answers: Sequence[Answer], thresholds: Sequence[float] = ()) -> str | None:
    """Where the risks of spans of all answers come from; `None` if no answer tells.

    Raises:
        ConfigError: the answers differ in it, so that no threshold fits all; or a threshold is outside [0, 1] and the
            risk is not a raw MLDS.
    """
    sources = sorted({answer.risk_source for answer in answers if answer.risk_source is not None})
    if len(sources) > 1:
        raise ConfigError(
            f"the answers have risks of different sources ({', '.join(sources)}), which no threshold fits; measure all "
            "with one, such as --risk token_probability"
        )
    source = sources[0] if sources else None
    if source is not None:
        require_scale(source, thresholds)
    return source


def require_scale(source: str, thresholds: Sequence[float]) -> None:
    """Refuse thresholds that have no meaning for a risk.

    Raises:
        ConfigError: a threshold is outside [0, 1] and the risk is not a raw MLDS.
    """
    if source not in RAW and not all(0 <= threshold <= 1 for threshold in thresholds):
        shown = ", ".join(f"{threshold:g}" for threshold in thresholds)
        raise ConfigError(
            f"--at takes thresholds in [0, 1], as the risk (got {shown}); for the raw MLDS give --risk f_mlds"
        )


def by_span(answers: Sequence[Answer], thresholds: Sequence[float] = ()) -> list[Row]:
    """What thresholds on the risk of spans stop: an answer is stopped if one of its spans reaches the threshold.

    Args:
        answers: the answers.
        thresholds: the thresholds. Default: suggested ones, see :func:`suggested`.
    """
    highest = [max(answer.spans, default=-math.inf) for answer in answers]
    spans = [risk for answer in answers for risk in answer.spans]
    return [
        _row(threshold, answers, [risk >= threshold for risk in highest], [risk >= threshold for risk in spans])
        for threshold in thresholds or suggested(highest)
    ]


def by_answer(answers: Sequence[Answer], thresholds: Sequence[float] = ()) -> list[Row]:
    """The same for the risk of whole answers; empty if they have none."""
    pairs = [(answer, answer.whole) for answer in answers if answer.whole is not None]
    measured, risks = [answer for answer, _ in pairs], [risk for _, risk in pairs]
    return [
        _row(threshold, measured, [risk >= threshold for risk in risks])
        for threshold in thresholds or suggested(risks)
        if measured
    ]


def by_default(answers: Sequence[Answer]) -> tuple[Row | None, Row | None]:
    """What gates do without a number: the rows of the default thresholds of spans and of whole answers.

    A row is `None` if the answers have no such threshold.
    """
    spans = whole = None
    flagged = [answer.flagged for answer in answers if answer.flagged is not None and answer.threshold is not None]
    if answers and len(flagged) == len(answers):
        of_spans = [flag for flags in flagged for flag in flags]
        spans = _row(_common(answer.threshold for answer in answers), answers, list(map(any, flagged)), of_spans)
    measured = [answer for answer in answers if answer.whole is not None]
    if measured and all(answer.whole_threshold is not None for answer in measured):
        stopped = [reaches(answer.whole, answer.whole_threshold) for answer in measured]
        whole = _row(_common(answer.whole_threshold for answer in measured), measured, stopped)
    return spans, whole


def _common(thresholds: Iterable[float | None]) -> float | None:
    """The only one of these thresholds; `None` if there are several."""
    distinct = set(thresholds)
    return distinct.pop() if len(distinct) == 1 else None


def suggested(risks: Sequence[float]) -> list[float]:
    """The lowest thresholds, to four decimals, that stop at most :data:`SHARES` of the answers with these risks."""
    ordered = sorted(risks)
    thresholds = dict.fromkeys(math.ceil(risk * 10_000) / 10_000 for risk in ordered if math.isfinite(risk))
    stopped = {threshold: len(ordered) - bisect_left(ordered, threshold) for threshold in thresholds}
    lowest = [next((one for one in thresholds if stopped[one] <= share * len(risks)), None) for share in SHARES]
    return [threshold for threshold in dict.fromkeys(lowest) if threshold is not None]


def _row(
    threshold: float | None, answers: Sequence[Answer], stopped: Sequence[bool], spans: Sequence[bool] | None = None
) -> Row:
    right = [stop for answer, stop in zip(answers, stopped, strict=True) if answer.right is True]
    wrong = [not stop for answer, stop in zip(answers, stopped, strict=True) if answer.right is False]
    of_spans = None if spans is None else Count.of_all(spans)
    return Row(threshold, Count.of_all(stopped), of_spans, Count.of_all(right), Count.of_all(wrong))


def _finite(risk: float | None) -> float:
    return risk if risk is not None and math.isfinite(risk) else math.inf
