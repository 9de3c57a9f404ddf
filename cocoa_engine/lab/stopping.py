"""What a threshold on the risk would stop: the share of answers, spans, right and wrong answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ChatTemplateError, ConfigError, DataError
from cocoa_engine.lab.cache import AnswerCache, answered
from cocoa_engine.lab.files import field, plain_text, read_json_lines, read_text
from cocoa_engine.lab.records import Question
from cocoa_engine.model.prompts import Prompt, chat_of
from cocoa_engine.results import Generation
from cocoa_engine.risk.policy import reaches
from cocoa_engine.safe_text import short_repr
from cocoa_engine.spans import RAW

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine


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
        *(None if threshold is None else _finite_number(threshold, where) for threshold in thresholds),
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


SHARES = (0.5, 0.25, 0.1, 0.05)
"""The shares of answers that the suggested thresholds stop at most."""


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
    whole: float | None
    right: bool | None
    risk_source: str | None = None
    flagged: tuple[bool, ...] | None = None
    threshold: float | None = None
    whole_threshold: float | None = None

    @classmethod
    def of(cls, measured: MeasuredAnswer, right: bool | None) -> Answer:
        """The risks of a measured answer."""
        visible = [
            (_finite(span.risk), span.flagged) for span in measured.spans if span.text.strip() and span.risk is not None
        ]
        known = [flagged or math.isinf(risk) for risk, flagged in visible if flagged is not None]
        return cls(
            tuple(risk for risk, _ in visible),
            None if measured.answer_risk is None else _finite(measured.answer_risk),
            right,
            measured.risk_source,
            tuple(known) if len(known) == len(visible) else None,
            measured.threshold,
            measured.answer_threshold,
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

    def record(self) -> dict[str, Any]:
        """The row as plain values."""
        return asdict(self)


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
    for one, values in answered(engine, prompts, asked, config, _values, source=source, cache=cache, advance=advance):
        spans = tuple(MeasuredSpan(*span) for span in values["spans"])
        measured = MeasuredAnswer(**{**values, "spans": spans})
        yield Answer.of(measured, one.is_right(measured.text))


def _sources(
    engine: CocoaEngine, prompts: Sequence[OwnPrompt], asked: Sequence[Prompt], config: CocoaConfig
) -> list[list[str] | None]:
    """The passage of each prompt, as far as the model reads it as it is written.

    No prompt has one if the risks of spans would be of two kinds, which no threshold fits.
    """
    found: list[list[str] | None] = []
    for one, prompt in zip(prompts, asked, strict=True):
        is_read = one.context is not None and one.context.strip() in (
            engine.decode(prompt) if isinstance(prompt, list) else prompt
        )
        found.append([one.context] if one.context is not None and is_read else None)
    calibrator = engine.calibrator_for(config)
    of_one_kind = all(found) or (calibrator is not None and calibrator.span is not None)
    return found if of_one_kind else [None] * len(found)


def _values(generation: Generation) -> dict[str, Any]:
    """What a threshold is compared with, as plain values."""
    return {
        "text": generation.text,
        "spans": [(span.text, span.risk, span.flagged) for span in generation.spans],
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
        _row(threshold, answers, highest, Count(sum(risk >= threshold for risk in spans), len(spans)))
        for threshold in thresholds or suggested(highest)
    ]


def by_answer(answers: Sequence[Answer], thresholds: Sequence[float] = ()) -> list[Row]:
    """The same for the risk of whole answers; empty if they have none."""
    known = [answer for answer in answers if answer.whole is not None]
    risks = [one.whole for one in known if one.whole is not None]
    return [_row(threshold, known, risks, None) for threshold in (thresholds or suggested(risks)) if known]


def by_default(answers: Sequence[Answer]) -> tuple[Row | None, Row | None]:
    """What gates do without a number: the rows of the default thresholds of spans and of whole answers.

    A row is `None` if the answers have no such threshold.
    """
    spans = whole = None
    flagged = [answer.flagged for answer in answers if answer.flagged is not None and answer.threshold is not None]
    if answers and len(flagged) == len(answers):
        of_spans = Count(sum(map(sum, flagged)), sum(map(len, flagged)))
        spans = _stopped(
            _common(answer.threshold for answer in answers), answers, [any(one) for one in flagged], of_spans
        )
    known = [answer for answer in answers if answer.whole is not None]
    if known and all(one.whole_threshold is not None for one in known):
        stopped = [reaches(one.whole, one.whole_threshold) for one in known]
        whole = _stopped(_common(one.whole_threshold for one in known), known, stopped, None)
    return spans, whole


def _common(thresholds: Iterable[float | None]) -> float | None:
    """The only one of these thresholds; `None` if there are several."""
    found = set(thresholds)
    return found.pop() if len(found) == 1 else None


def suggested(risks: Sequence[float]) -> list[float]:
    """The lowest thresholds, to four decimals, that stop at most :data:`SHARES` of the answers with these risks."""
    found: dict[float, None] = {}
    for share in SHARES:
        for risk in sorted({one for one in risks if math.isfinite(one)}):
            threshold = math.ceil(risk * 10_000) / 10_000
            if sum(one >= threshold for one in risks) <= share * len(risks):
                found[threshold] = None
                break
    return list(found)


def _row(threshold: float, answers: Sequence[Answer], risks: Sequence[float], spans: Count | None) -> Row:
    return _stopped(threshold, answers, [risk >= threshold for risk in risks], spans)


def _stopped(threshold: float | None, answers: Sequence[Answer], stopped: Sequence[bool], spans: Count | None) -> Row:
    right = [stop for one, stop in zip(answers, stopped, strict=True) if one.right is True]
    wrong = [stop for one, stop in zip(answers, stopped, strict=True) if one.right is False]
    return Row(
        threshold,
        Count(sum(stopped), len(stopped)),
        spans,
        Count(sum(right), len(right)),
        Count(len(wrong) - sum(wrong), len(wrong)),
    )


def _finite(risk: float) -> float:
    return risk if math.isfinite(risk) else math.inf
