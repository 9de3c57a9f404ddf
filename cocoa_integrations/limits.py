"""When an answer is too risky, and marks around what is: shared by all that act on risk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cocoa_engine.errors import ConfigError, HallucinationRiskError
from cocoa_engine.messages import unknown

Metric = Literal["risk", "con_mlds", "f_mlds", "self_information"]
"""The figures of a span that a threshold can be set on; of each, higher is riskier."""

Mark = str | Callable[[str, dict[str, Any]], str]
"""What is written instead of a risky text: a template with ``{text}`` and ``{value}``, or a function of the text and
its entry of ``cocoa_spans``."""


def require_metric(metric: str) -> None:
    """Refuse what is no metric.

    Raises:
        ConfigError: naming the nearest one.
    """
    if metric not in get_args(Metric):
        raise ConfigError(unknown([metric], get_args(Metric), what="metric"))


def figure(span: dict[str, Any], metric: Metric) -> float:
    """One figure of an entry of ``cocoa_spans``; ``self_information`` is -log p of the span, in nats."""
    return float(-span["log_prob"] if metric == "self_information" else span[metric])


def claims(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans that say something: nothing can be wrong with a line break or an end-of-sequence token."""
    return [span for span in spans if span["text"].strip()]


def highest(spans: Sequence[dict[str, Any]], metric: Metric) -> float:
    """The highest figure of the spans that say something; 0.0 without any."""
    return max((figure(span, metric) for span in claims(spans)), default=0.0)


@dataclass(frozen=True)
class Limit:
    """A threshold on a figure of the spans of an answer, which is too risky if one of them reaches it.

    Spans of nothing but whitespace do not count.

    Attributes:
        threshold: in the unit of the metric: a probability for ``risk`` with a calibrator, without one the raw MLDS,
            whose usual level differs from model to model.
        metric: the figure.

    Raises:
        ConfigError: the threshold is no finite number, or the metric is unknown.
    """

    threshold: float
    metric: Metric = "risk"

    def __post_init__(self) -> None:
        require_metric(self.metric)
        number = isinstance(self.threshold, (int, float)) and not isinstance(self.threshold, bool)
        if not number or not math.isfinite(self.threshold):
            raise ConfigError(f"threshold takes a finite number, not {self.threshold!r}")

    def risky(self, spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of the spans that reach the threshold."""
        return [span for span in claims(spans) if figure(span, self.metric) >= self.threshold]

    def error(self, report: dict[str, Any]) -> HallucinationRiskError:
        """What to raise for a too risky answer."""
        worst = max(claims(report["spans"]), key=lambda span: figure(span, self.metric))
        value = figure(worst, self.metric)
        raw = "" if report["calibrated"] or self.metric != "risk" else " (raw MLDS: no calibrator was given)"
        return HallucinationRiskError(
            f"{self.metric} of {worst['text']!r} is {value:.4g}, which reaches the threshold of "
            f"{self.threshold:.4g}{raw}",
            report=report,
            value=value,
            threshold=self.threshold,
            metric=self.metric,
        )

    def with_marks(self, text: str, spans: Sequence[dict[str, Any]], mark: Mark) -> str:
        """The text with marks around each risky span; whitespace at a span's ends stays outside of them.

        Args:
            text: the whole answer, or the part that ``spans`` make up.
            spans: entries of ``cocoa_spans``, in order.
            mark: how to mark.

        Raises:
            ConfigError: the text is not the one of the spans.
        """
        if text != "".join(span["text"] for span in spans):
            raise ConfigError("the text is not the one its risk was measured on; mark it before anything changes it")
        risky = self.risky(spans)
        return "".join(self._marked(span, mark) if span in risky else span["text"] for span in spans)

    def _marked(self, span: dict[str, Any], mark: Mark) -> str:
        core = span["text"].strip()
        before, _, after = span["text"].partition(core)
        written = mark.format(text=core, value=figure(span, self.metric)) if isinstance(mark, str) else mark(core, span)
        return f"{before}{written}{after}"


def require_mark(mark: Any) -> None:
    """Try a mark.

    Raises:
        ConfigError: it is neither a template with the known fields nor a function.
    """
    if callable(mark):
        return
    try:
        written = mark.format(text="text", value=0.5)
    except (AttributeError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"mark takes a function, or a text with the fields {{text}} and {{value}}: {error}") from None
    if "text" not in written:
        raise ConfigError(f"mark has no {{text}} field, so it would drop what it marks: {mark!r}")
