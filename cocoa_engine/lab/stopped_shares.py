"""What a threshold on the risk would stop: the share of answers, spans, right and wrong answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ChatTemplateError, ConfigError
from cocoa_engine.lab.answer_cache import AnswerCache
from cocoa_engine.lab.answering import answered
from cocoa_engine.lab.data.own_prompts import MeasuredAnswer, MeasuredSpan, OwnPrompt
from cocoa_engine.model.prompts import Prompt, chat_of
from cocoa_engine.rendering.scale import RAW
from cocoa_engine.results import Generation
from cocoa_engine.risk.risk_measure import reaches

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine

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
            (_finite(one.risk), one.flagged) for one in measured.spans if one.text.strip() and one.risk is not None
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
    asked: list[Prompt] = [engine.encode_chat(chat_of(one.request, system)) if chat else one.request for one in prompts]
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
    sources = sorted({one.risk_source for one in answers if one.risk_source is not None})
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
    if source not in RAW and not all(0 <= one <= 1 for one in thresholds):
        raise ConfigError(
            f"--at takes thresholds in [0, 1], as the risk (got {', '.join(f'{one:g}' for one in thresholds)}); for "
            "the raw MLDS give --risk f_mlds"
        )


def by_span(answers: Sequence[Answer], thresholds: Sequence[float] = ()) -> list[Row]:
    """What thresholds on the risk of spans stop: an answer is stopped if one of its spans reaches the threshold.

    Args:
        answers: the answers.
        thresholds: the thresholds. Default: suggested ones, see :func:`suggested`.
    """
    highest = [max(one.spans, default=-math.inf) for one in answers]
    spans = [risk for one in answers for risk in one.spans]
    return [
        _row(threshold, answers, highest, Count(sum(risk >= threshold for risk in spans), len(spans)))
        for threshold in thresholds or suggested(highest)
    ]


def by_answer(answers: Sequence[Answer], thresholds: Sequence[float] = ()) -> list[Row]:
    """The same for the risk of whole answers; empty if they have none."""
    known = [one for one in answers if one.whole is not None]
    risks = [one.whole for one in known if one.whole is not None]
    return [_row(threshold, known, risks, None) for threshold in (thresholds or suggested(risks)) if known]


def by_default(answers: Sequence[Answer]) -> tuple[Row | None, Row | None]:
    """What gates do without a number: the rows of the default thresholds of spans and of whole answers.

    A row is `None` if the answers have no such threshold.
    """
    spans = whole = None
    flagged = [one.flagged for one in answers if one.flagged is not None and one.threshold is not None]
    if answers and len(flagged) == len(answers):
        of_spans = Count(sum(map(sum, flagged)), sum(map(len, flagged)))
        spans = _stopped(_common(one.threshold for one in answers), answers, [any(one) for one in flagged], of_spans)
    known = [one for one in answers if one.whole is not None]
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
