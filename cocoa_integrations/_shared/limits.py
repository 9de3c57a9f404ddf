"""Thresholds on the risk of an answer, and marks around its risky spans."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cocoa_engine import Unit, UnitLevel
from cocoa_engine.errors import ConfigError, HallucinationRiskError, unknown
from cocoa_engine.integration import marked_stretches
from cocoa_engine.report import GateReport, Metric, RiskReport, SpanReport, finite, measured_text, severity
from cocoa_integrations._shared.edits import Change, Edit, EditedText, is_machine_read

GateMetric = Literal["risk", "con_mlds", "f_mlds", "self_information", "answer_risk"]  # of a span, or of the answer
Risky = SpanReport | Unit  # what is compared with a threshold
Mark = str | Callable[[str, Risky], str]  # a template with {text} and {value}, or a function of the text and the span
MARK, ABSTENTION = "[[{text}]]", "I don't know."  # the defaults


def require_known(name: str, value: Any, literal: Any) -> None:
    """Refuse a value that a ``Literal`` does not have, and name the closest one."""
    if value not in get_args(literal):
        raise ConfigError(unknown([str(value)], get_args(literal), what=name))


def require_finite(name: str, value: Any) -> None:
    """Refuse what is not a finite number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ConfigError(f"{name} takes a finite number, not {value!r}")


def reaches(value: float, threshold: float) -> bool:
    """Whether a value is at least a threshold. A value that is not a number reaches every threshold."""
    return not value < threshold


def measured_units(spans: Sequence[SpanReport], metric: Metric, unit: UnitLevel) -> list[tuple[Risky, float]]:
    """The spans with visible text, or the claims or sentences, each with the value of the metric.

    A line break cannot be a hallucination, and reasoning is not the answer. The value of a claim is the highest of its
    spans, that of a sentence the mean of its three highest claims. Spans take the place of claims without texts.
    """
    if unit != "span":
        text = measured_text([span for span in spans if not span.is_reasoning], lambda span: span.value(metric))
        if text is not None:
            return [(part, part.risk or 0.0) for part in text.compared(unit)]
    return [(span, span.value(metric)) for span in spans if span.is_visible]


def highest(spans: Sequence[SpanReport], metric: Metric, unit: UnitLevel = "span") -> float:
    """The highest value of any span with visible text, of any claim or any sentence; 0.0 without any."""
    return max((value for _, value in measured_units(spans, metric, unit)), default=0.0)


def kind_of(metric: str, report: RiskReport) -> tuple[str, str | None]:
    """The metric, and for a risk its source: values of different kinds have no order."""
    if metric == "answer_risk":
        return metric, report.answer_risk_source
    return metric, report.risk_source if metric in ("risk", "max_risk", "mean_risk") else None


@dataclass(frozen=True)
class Limit:
    """A threshold for answers; by default that of the report.

    The default metric is ``answer_risk`` where a report has one; with a threshold or a unit it is ``risk``.
    """

    threshold: float | None = None
    metric: GateMetric | None = None
    unit: UnitLevel = "span"

    def __post_init__(self) -> None:
        require_known("unit", self.unit, UnitLevel)
        if self.metric is None:
            if self.threshold is None and self.unit == "span":
                return
            object.__setattr__(self, "metric", "risk")
        if self.metric == "answer_risk" and self.unit != "span":
            raise ConfigError(f"answer_risk is the risk of the answer as a whole; leave unit={self.unit!r} out")
        require_known("metric", self.metric, GateMetric)
        in_unit_interval = self.metric in ("risk", "answer_risk")
        if self.threshold is None:
            if not in_unit_interval:
                raise ConfigError(f"metric={self.metric!r} has no default threshold; give one")
            return
        require_finite("threshold", self.threshold)
        if in_unit_interval and not 0 <= self.threshold <= 1:
            raise ConfigError(
                f"{self.metric} is in [0, 1], so a threshold of {self.threshold:g} has no meaning; leave it out for "
                "the measured default, or give metric='f_mlds' to compare the raw MLDS"
            )

    def metric_for(self, report: RiskReport) -> GateMetric:
        if self.metric == "answer_risk" and not report.has_answer_risk:
            raise ConfigError(
                "this report has no answer_risk: it is of a part of an answer or of a given text; compare "
                "metric='risk', the risk of its spans"
            )
        return self.metric or ("answer_risk" if report.has_answer_risk else "risk")

    def risky(self, spans: Sequence[SpanReport], report: RiskReport | None = None) -> list[tuple[Risky, float]]:
        """The parts that reach the threshold, by default their own or that of the report, each with its value."""
        if self.metric == "answer_risk":
            return []
        threshold, measured = self.threshold, measured_units(spans, self.metric or "risk", self.unit)
        if threshold is None and self.unit == "span":
            return [(part, value) for part, value in measured if part.flagged or math.isinf(value)]  # type: ignore[union-attr]
        if threshold is None:
            threshold = math.inf if report is None else self.threshold_for(report)
        return [(part, value) for part, value in measured if reaches(value, threshold)]

    def reached(self, report: RiskReport) -> bool:
        threshold = self.threshold_for(report)
        if self.metric_for(report) == "answer_risk":
            return reaches(self.value(report), threshold)
        return bool(self.risky(report.spans, report))

    def value(self, report: RiskReport) -> float:
        metric = self.metric_for(report)
        return severity(report.answer_risk) if metric == "answer_risk" else highest(report.spans, metric, self.unit)

    def threshold_for(self, report: RiskReport) -> float:
        """The threshold that applies to an answer; it must be on the scale of the answer's risks."""
        source, metric = report.risk_source, self.metric_for(report)
        if metric == "risk" and source in ("f_mlds", "con_mlds"):
            raise ConfigError(
                f"the risk of this answer is its raw MLDS, because risk={source!r} was set; give metric={source!r} "
                "and a threshold that was measured for this model"
            )
        if self.threshold is not None:
            return self.threshold
        default = report.answer_threshold if metric == "answer_risk" else report.threshold
        if default is None and report.spans:
            raise ConfigError(
                f"this report has no threshold of {metric}, because another version wrote it or answers with "
                "different sources of risk are joined in it; give a number here"
            )
        return math.inf if default is None else float(default)

    def error(self, report: RiskReport) -> HallucinationRiskError:
        value, threshold, metric = self.value(report), self.threshold_for(report), self.metric_for(report)
        named, source = "the answer", ""
        if metric != "answer_risk":
            worst, _ = max(measured_units(report.spans, metric, self.unit), key=lambda measured: measured[1])
            named = f"characters {worst.start} to {worst.end}" if worst.text is None else repr(worst.text)
        if metric == "risk" and (kind := report.risk_meaning):
            source = f" ({kind})"
        return HallucinationRiskError(
            f"{metric} of {named} is {value:.4g}{source}, which reaches the threshold of {threshold:.4g}",
            report=report,
            value=value,
            threshold=threshold,
            metric=metric,
        )

    def gate(self, report: RiskReport, action: str) -> GateReport:
        unit = {} if self.unit == "span" else {"unit": self.unit}
        return GateReport(
            action=action,
            metric=self.metric_for(report),
            threshold=finite(self.threshold_for(report)),
            value=finite(self.value(report)),
            **unit,
        )

    def with_marks(self, text: str, report: RiskReport, mark: Mark) -> Change:
        edited, answers = EditedText.of(text, report), list[list[SpanReport]]()
        for span in edited.spans(report.spans):
            if answers and answers[-1][-1].end == span.start:
                answers[-1].append(span)
            else:  # the first, or one of a further answer of a LlamaIndex response
                answers.append([span])
        edits: list[Edit] = []
        for spans in answers:
            plain = not is_machine_read("".join(span.text or "" for span in spans), report)
            edits += [edit for edit in self.mark_edits(spans, mark, report) if plain or edit.text is not None]
        return edited.changed(edits)

    def mark_edits(
        self, spans: Sequence[SpanReport], mark: Mark, report: RiskReport | None = None, before: str = ""
    ) -> list[Edit]:
        """The changes that mark each risky span, claim or sentence, in the order of the text.

        A mark holds whole words of one clause. Marks that touch are one, with the highest of their values. One whose
        result does not have the text redacts it; code is only redacted. ``before`` is text before the spans.
        """
        risky, edits = self.risky(spans, report), []
        begin = spans[0].start - len(before) if spans else 0
        text = before + "".join(span.text or "" for span in spans)
        ranges = [(part.start - begin, part.end - begin) for part, _ in risky]
        for start, end, numbers, is_code in marked_stretches(text, ranges, with_code=callable(mark)):
            riskiest, value = max((risky[number] for number in numbers), key=lambda measured: measured[1])
            place = {"text": text[start:end], "start": begin + start, "end": begin + end}
            edit = _marked(riskiest.model_copy(update=place), value, mark)
            if edit.text is not None or not is_code:
                edits.append(edit)
        return edits


def _marked(part: Risky, value: float, mark: Mark) -> Edit:
    text = part.text or ""
    core, end = text.strip(), part.end - len(text) + len(text.rstrip())
    if isinstance(mark, str):
        marked = mark.format(text=core, value=value)
        before, _, after = mark.format(text="\0", value=value).rpartition("\0")
        before = before.replace("\0", core)
    else:
        marked = str(mark(core, part))
        starts = [place.start() for place in re.finditer(f"(?={re.escape(core)})", marked)]
        # the last place where the text is no part of a word
        words = [at for at in starts if not (marked[at + len(core) : at + len(core) + 1] + marked[:at][-1:]).isalnum()]
        at = max(words or starts, default=0)
        before, after = marked[:at], marked[at + len(core) :]
    if f"{before}{core}{after}" == marked:
        around = {name: value for name, value in (("before", before), ("after", after)) if value}
        return Edit(start=end - len(core), end=end, **around)
    return Edit(start=end - len(core), end=end, text=marked)


def require_reaction(on_risk: str, literal: Any, mark: Mark, answer: str) -> None:
    """Check what happens to answers that are too risky: an action that ``literal`` has, a mark, and another text."""
    require_known("on_risk", on_risk, literal)
    if not isinstance(answer, str):
        raise ConfigError(f"answer takes a text, not a {type(answer).__name__}")
    try:
        if callable(mark) or "text" in mark.format(text="text", value=0.5):
            return
    except (AttributeError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"mark takes a function, or a text with the fields {{text}} and {{value}}: {error}") from None
    raise ConfigError(f"mark has no {{text}} field, so it would drop the text of the span: {mark!r}")
