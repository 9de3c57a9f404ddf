"""Thresholds on the risk of an answer, and marks around its risky spans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cocoa_engine import UnitLevel
from cocoa_engine.errors import ConfigError, HallucinationRiskError
from cocoa_engine.messages import unknown
from cocoa_engine.rendering.wording import SOURCES
from cocoa_integrations._shared.finite import is_unmeasured, severity
from cocoa_integrations._shared.metadata import is_reasoning
from cocoa_integrations._shared.reasoning import CLOSING
from cocoa_integrations._shared.units import measured_text

Metric = Literal["risk", "con_mlds", "f_mlds", "self_information"]
"""The values of a span that a threshold can be compared with; higher is riskier."""

GateMetric = Literal["risk", "con_mlds", "f_mlds", "self_information", "answer_risk"]
"""A value of a span, or the risk of the answer as a whole."""

Mark = str | Callable[[str, dict[str, Any]], str]
"""How a risky span is marked: a template with ``{text}`` and ``{value}``, or a function of the text and its entry of
``cocoa_spans``."""


def require_metric(metric: str, known: Any = Metric) -> None:
    """Refuse an unknown metric.

    Args:
        metric: the given name.
        known: the names that are allowed, as a ``Literal``.

    Raises:
        ConfigError: the metric is unknown. The message names the closest one.
    """
    if metric not in get_args(known):
        raise ConfigError(unknown([metric], get_args(known), what="metric"))


def metric_of(span: dict[str, Any], metric: Metric) -> float:
    """The value of a metric for an entry of ``cocoa_spans``; ``self_information`` is -log p of the span, in nats.

    A value that is not a finite number is infinite: it reaches every threshold. A risk that was not measured is 0.0.
    """
    return 0.0 if metric == "risk" and is_unmeasured(span) else value_of(span, metric)


def value_of(entry: dict[str, Any], metric: Metric) -> float:
    """The value of a metric for an entry whose values were all measured, such as that of a tool's argument.

    A value that is not a finite number is infinite: it reaches every threshold.
    """
    if metric == "self_information":
        return severity(None if entry["log_prob"] is None else -entry["log_prob"])
    return severity(entry[metric])


def reaches(value: float, threshold: float) -> bool:
    """Whether a value is at least a threshold. A value that is not a number reaches every threshold."""
    return not value < threshold


def visible_spans(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans of the answer with visible text. A line break or an end-of-sequence token cannot be a hallucination.

    The reasoning of a model does not count: it is not the answer. A span of a compact report has no text if it is
    visible and the text of its message has been changed.
    """
    return [span for span in spans if not is_reasoning(span) and ("text" not in span or span["text"].strip())]


def covering(text: str, spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The spans whose texts concatenate to ``text``, or ``None`` if they do not.

    After reasoning, the closing tag and the whitespace before the answer are cut off the texts of the spans.

    Args:
        text: an answer, or the part of it that ``spans`` cover.
        spans: entries of ``cocoa_spans``, in order.
    """
    answer = [span for span in spans if not is_reasoning(span)]
    if any("text" not in span for span in answer):
        return None
    whole = "".join(span["text"] for span in answer)
    if whole == text:
        return answer
    cut = len(whole) - len(text)
    before = whole[: max(cut, 0)].strip()
    if cut < 0 or not whole.endswith(text) or not any("part" in span for span in spans):
        return None
    if before and not (before.endswith(CLOSING) or CLOSING.endswith(before)):  # a span may begin inside the tag
        return None
    covered = []
    for span in answer:
        size = min(cut, len(span["text"]))
        cut -= size
        covered.append({**span, "text": span["text"][size:]} if size else span)
    return covered


def require_unit(unit: str) -> None:
    """Refuse an unknown unit.

    Raises:
        ConfigError: the unit is unknown. The message names the closest one.
    """
    if unit not in get_args(UnitLevel):
        raise ConfigError(unknown([unit], get_args(UnitLevel), what="unit"))


def measured_units(spans: Sequence[dict[str, Any]], metric: Metric, unit: UnitLevel) -> list[dict[str, Any]]:
    """The spans with visible text, or the claims or sentences, each with the value of the metric as ``value``.

    The value of a claim is the highest of its spans, that of a sentence the mean of its three highest claims. In an
    answer without claims the sentences take their place. A visible span whose value is not a finite number counts in
    every unit. Where a span of the report has no text, the spans take the place of claims and sentences.

    Args:
        spans: entries of ``cocoa_spans``.
        metric: the value.
        unit: ``span``, ``claim`` or ``sentence``.
    """
    text = None
    if unit != "span":
        answer = [span for span in spans if not is_reasoning(span)]
        text = measured_text(answer, lambda span: metric_of(span, metric))
    if unit == "span" or text is None:
        return [{**span, "value": metric_of(span, metric)} for span in visible_spans(spans)]
    return [
        {**one.model_dump(include={"text", "start", "end", "kind", "risk", "spans"}), "value": one.risk or 0.0}
        for one in text.compared(unit)
    ]


def highest(spans: Sequence[dict[str, Any]], metric: Metric, unit: UnitLevel = "span") -> float:
    """The highest value of any span with visible text, of any claim or any sentence; 0.0 without any."""
    return max((one["value"] for one in measured_units(spans, metric, unit)), default=0.0)


def has_answer_risk(report: dict[str, Any]) -> bool:
    """Whether a calibrator measured the answer as a whole. A risk that is not a finite number is `None` in a report."""
    if report["answer_risk"] is not None:
        return True
    return report.get("answer_threshold") is not None and any(not is_reasoning(one) for one in report["spans"])


def _require_answer_risk(report: dict[str, Any]) -> None:
    """Refuse a report without a risk of the answer as a whole.

    Raises:
        ConfigError: it has none.
    """
    if not has_answer_risk(report):
        raise ConfigError(
            "this answer has no answer_risk, because its model has no calibrator for answers; fit one with `cocoa "
            "calibrate --questions`, or compare metric='risk', the risk of its spans"
        )


def kind_of(metric: str, report: dict[str, Any]) -> tuple[str, str | None]:
    """What a value of a report is. Values of different kinds have no order: neither of them is riskier.

    Args:
        metric: the value: a metric of spans, ``answer_risk``, or the ``max_risk`` or ``mean_risk`` of a report.
        report: the report.

    Returns:
        The metric, and the ``risk_source`` of a risk of spans. Other metrics mean the same whatever the source is.
    """
    return metric, report.get("risk_source") if metric in ("risk", "max_risk", "mean_risk") else None


@dataclass(frozen=True)
class Limit:
    """A threshold for answers. An answer is too risky if one of its units, or the answer as a whole, reaches it.

    Spans that contain only whitespace do not count. Claims have no punctuation or function words; an answer without
    claims is compared by its sentences. A value that is not a finite number reaches every threshold, wherever it is.

    Attributes:
        threshold: in the unit of the metric. `None` is the threshold that the report of the answer has: the
            calibrator's, or the measured default of its ``risk_source``.
        metric: the value that is compared. ``risk`` and ``answer_risk`` are in [0, 1]. `None` is ``answer_risk`` where
            a report has one, and otherwise ``risk``; with a threshold or another unit than the span it is ``risk``.
        unit: the parts of the answer that are compared: ``span``, ``claim`` or ``sentence``.

    Raises:
        ConfigError: the threshold is not a finite number, is outside the scale of the metric, or is missing for a
            metric without a default; or the metric or the unit is unknown.
    """

    threshold: float | None = None
    metric: GateMetric | None = None
    unit: UnitLevel = "span"

    def __post_init__(self) -> None:
        require_unit(self.unit)
        if self.metric is None:
            if self.threshold is None and self.unit == "span":
                return
            object.__setattr__(self, "metric", "risk")
        if self.metric == "answer_risk" and self.unit != "span":
            raise ConfigError(f"answer_risk is the risk of the answer as a whole; leave unit={self.unit!r} out")
        require_metric(str(self.metric), GateMetric)
        if self.threshold is None:
            if not self._in_unit_interval:
                raise ConfigError(f"metric={self.metric!r} has no default threshold; give one")
            return
        is_number = isinstance(self.threshold, (int, float)) and not isinstance(self.threshold, bool)
        if not is_number or not math.isfinite(self.threshold):
            raise ConfigError(f"threshold takes a finite number, not {self.threshold!r}")
        if self._in_unit_interval and not 0 <= self.threshold <= 1:
            raise ConfigError(
                f"{self.metric} is in [0, 1], so a threshold of {self.threshold:g} has no meaning; leave it out for "
                "the measured default, or give metric='f_mlds' to compare the raw MLDS"
            )

    def metric_for(self, report: dict[str, Any]) -> GateMetric:
        """The value of an answer that is compared."""
        if self.metric is not None:
            return self.metric
        return "answer_risk" if has_answer_risk(report) else "risk"

    def kind_for(self, report: dict[str, Any]) -> tuple[str, str | None]:
        """The metric of an answer and what its risk is, as of :func:`kind_of`."""
        return kind_of(self.metric_for(report), report)

    def risky(self, spans: Sequence[dict[str, Any]], report: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """The spans, claims or sentences that reach the threshold; none if the metric is that of whole answers.

        Without a metric they are the spans that reach their own default threshold.

        Args:
            spans: entries of ``cocoa_spans``.
            report: the report of the answer, whose default threshold applies to claims and sentences.
        """
        if self.metric == "answer_risk":
            return []
        if self.unit == "span":
            return [span for span in visible_spans(spans) if self._reached_by(span)]
        threshold = self.threshold
        if threshold is None and report is not None:
            threshold = self.threshold_for(report)
        if threshold is None:
            return []
        metric = self._metric_of_spans
        return [one for one in measured_units(spans, metric, self.unit) if reaches(one["value"], threshold)]

    def reached(self, report: dict[str, Any]) -> bool:
        """Whether an answer is too risky.

        Raises:
            ConfigError: the report has no such risk, no default threshold, or a risk on another scale.
        """
        threshold = self.threshold_for(report)
        if self.metric_for(report) == "answer_risk":
            return reaches(self.value(report), threshold)
        return bool(self.risky(report["spans"], report))

    def value(self, report: dict[str, Any]) -> float:
        """The value of an answer: its risk as a whole, or the highest value of its spans.

        Raises:
            ConfigError: the report has no risk of the answer as a whole.
        """
        if self.metric_for(report) != "answer_risk":
            return highest(report["spans"], self._metric_of_spans, self.unit)
        _require_answer_risk(report)
        return severity(report["answer_risk"])

    def threshold_for(self, report: dict[str, Any]) -> float:
        """The threshold that applies to an answer.

        Raises:
            ConfigError: there is no default, or the risks of the answer are on another scale.
        """
        source, metric = report.get("risk_source"), self.metric_for(report)
        if metric == "answer_risk":
            _require_answer_risk(report)
        if metric == "risk" and source in ("f_mlds", "con_mlds"):
            raise ConfigError(
                f"the risk of this answer is its raw MLDS, because risk={source!r} was set; give metric={source!r} "
                "and a threshold that was measured for this model"
            )
        if self.threshold is not None:
            return self.threshold
        default = report.get("answer_threshold" if metric == "answer_risk" else "threshold")
        if default is None and report["spans"]:
            raise ConfigError(
                f"this report has no threshold of {metric}, because another version wrote it or answers with "
                "different sources of risk are joined in it; give a number here"
            )
        return math.inf if default is None else float(default)

    def error(self, report: dict[str, Any]) -> HallucinationRiskError:
        """The error for an answer that is too risky."""
        value, threshold, metric = self.value(report), self.threshold_for(report), self.metric_for(report)
        named, source = "the answer", ""
        if metric != "answer_risk":
            units = measured_units(report["spans"], self._metric_of_spans, self.unit)
            worst = max(units, key=lambda one: one["value"])
            named = repr(worst["text"]) if "text" in worst else f"characters {worst['start']} to {worst['end']}"
        if metric == "risk" and (known := SOURCES.get(report.get("risk_source") or "")):
            source = f" ({known})"
        return HallucinationRiskError(
            f"{metric} of {named} is {value:.4g}{source}, which reaches the threshold of {threshold:.4g}",
            report=report,
            value=value,
            threshold=threshold,
            metric=metric,
        )

    @property
    def _in_unit_interval(self) -> bool:
        return self.metric in ("risk", "answer_risk")

    @property
    def _metric_of_spans(self) -> Metric:
        """The value of a span that is compared where the answer has none as a whole."""
        return "risk" if self.metric is None or self.metric == "answer_risk" else self.metric

    def _reached_by(self, span: dict[str, Any]) -> bool:
        if self.threshold is None:
            return bool(span.get("flagged")) or math.isinf(metric_of(span, "risk"))
        return reaches(metric_of(span, self._metric_of_spans), self.threshold)

    def with_marks(
        self, text: str, spans: Sequence[dict[str, Any]], mark: Mark, report: dict[str, Any] | None = None
    ) -> str:
        """The text with each risky span, claim or sentence marked. Whitespace at its ends stays outside the mark.

        Args:
            text: the complete answer, or the part of it that ``spans`` cover.
            spans: entries of ``cocoa_spans``, in order.
            mark: how to mark it.
            report: as for :meth:`risky`.

        Raises:
            ConfigError: the text is not the text of the spans.
        """
        covered = covering(text, spans)
        if covered is None:
            raise ConfigError("the text differs from the text of its spans; mark an answer before changing its text")
        risky = self.risky(covered, report)
        offset = covered[0]["end"] - len(covered[0]["text"]) if covered else 0
        for one in reversed(risky):
            end = one["end"] - offset
            start = end - len(one["text"])
            text = f"{text[:start]}{self._marked(one, mark)}{text[end:]}"
        return text

    def _marked(self, one: dict[str, Any], mark: Mark) -> str:
        core = one["text"].strip()
        before, _, after = one["text"].partition(core)
        value = 0.0 if self.metric == "answer_risk" else one.get("value", 0.0)
        if "value" not in one and self.metric != "answer_risk":
            value = metric_of(one, self._metric_of_spans)
        marked = mark.format(text=core, value=value) if isinstance(mark, str) else mark(core, one)
        return f"{before}{marked}{after}"


def require_mark(mark: Mark) -> None:
    """Check a mark by trying it.

    Raises:
        ConfigError: it is neither a function nor a template with the known fields.
    """
    if callable(mark):
        return
    try:
        marked = mark.format(text="text", value=0.5)
    except (AttributeError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"mark takes a function, or a text with the fields {{text}} and {{value}}: {error}") from None
    if "text" not in marked:
        raise ConfigError(f"mark has no {{text}} field, so it would drop the text of the span: {mark!r}")
