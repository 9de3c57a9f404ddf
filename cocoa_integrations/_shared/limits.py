"""Thresholds on the risk of an answer, and marks around its risky spans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cocoa_engine.errors import ConfigError, HallucinationRiskError
from cocoa_engine.messages import unknown
from cocoa_integrations._shared.finite import severity
from cocoa_integrations._shared.metadata import is_reasoning
from cocoa_integrations._shared.reasoning import CLOSING

Metric = Literal["risk", "con_mlds", "f_mlds", "self_information"]
"""The values of a span that a threshold can be compared with; higher is riskier."""

Mark = str | Callable[[str, dict[str, Any]], str]
"""How a risky span is marked: a template with ``{text}`` and ``{value}``, or a function of the text and its entry of
``cocoa_spans``."""


def require_metric(metric: str) -> None:
    """Refuse an unknown metric.

    Raises:
        ConfigError: the metric is unknown. The message names the closest one.
    """
    if metric not in get_args(Metric):
        raise ConfigError(unknown([metric], get_args(Metric), what="metric"))


def metric_of(span: dict[str, Any], metric: Metric) -> float:
    """The value of a metric for an entry of ``cocoa_spans``; ``self_information`` is -log p of the span, in nats.

    A value that is not a finite number is infinite: it reaches every threshold.
    """
    if metric == "self_information":
        return severity(None if span["log_prob"] is None else -span["log_prob"])
    return severity(span[metric])


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


def highest(spans: Sequence[dict[str, Any]], metric: Metric) -> float:
    """The highest value of any span with visible text; 0.0 without such spans."""
    return max((metric_of(span, metric) for span in visible_spans(spans)), default=0.0)


@dataclass(frozen=True)
class Limit:
    """A threshold for the spans of an answer. An answer is too risky if one of its spans reaches the threshold.

    Spans that contain only whitespace do not count. A value that is not a finite number reaches every threshold.

    Attributes:
        threshold: in the unit of the metric. ``risk`` is a probability with a calibrator; without one it is the raw
            MLDS, whose typical level depends on the model.
        metric: the value that is compared.

    Raises:
        ConfigError: the threshold is not a finite number, or the metric is unknown.
    """

    threshold: float
    metric: Metric = "risk"

    def __post_init__(self) -> None:
        require_metric(self.metric)
        is_number = isinstance(self.threshold, (int, float)) and not isinstance(self.threshold, bool)
        if not is_number or not math.isfinite(self.threshold):
            raise ConfigError(f"threshold takes a finite number, not {self.threshold!r}")

    def risky(self, spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The spans that reach the threshold."""
        return [span for span in visible_spans(spans) if metric_of(span, self.metric) >= self.threshold]

    def error(self, report: dict[str, Any]) -> HallucinationRiskError:
        """The error for an answer that is too risky."""
        worst = max(visible_spans(report["spans"]), key=lambda span: metric_of(span, self.metric))
        value = metric_of(worst, self.metric)
        raw = "" if report["calibrated"] or self.metric != "risk" else " (raw MLDS: no calibrator was given)"
        named = repr(worst["text"]) if "text" in worst else f"characters {worst['start']} to {worst['end']}"
        return HallucinationRiskError(
            f"{self.metric} of {named} is {value:.4g}, which reaches the threshold of {self.threshold:.4g}{raw}",
            report=report,
            value=value,
            threshold=self.threshold,
            metric=self.metric,
        )

    def with_marks(self, text: str, spans: Sequence[dict[str, Any]], mark: Mark) -> str:
        """The text with each risky span marked. Whitespace at the ends of a span stays outside the mark.

        Args:
            text: the complete answer, or the part of it that ``spans`` cover.
            spans: entries of ``cocoa_spans``, in order.
            mark: how to mark a span.

        Raises:
            ConfigError: the text is not the text of the spans.
        """
        covered = covering(text, spans)
        if covered is None:
            raise ConfigError("the text differs from the text of its spans; mark an answer before changing its text")
        risky = self.risky(covered)
        return "".join(self._marked(span, mark) if span in risky else span["text"] for span in covered)

    def _marked(self, span: dict[str, Any], mark: Mark) -> str:
        core = span["text"].strip()
        before, _, after = span["text"].partition(core)
        value = metric_of(span, self.metric)
        marked = mark.format(text=core, value=value) if isinstance(mark, str) else mark(core, span)
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
