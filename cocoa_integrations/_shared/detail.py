"""How much of the risk of an answer its metadata has: the full report, a compact one, or none."""

from __future__ import annotations

from typing import Any, Literal, get_args

from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import unknown

Detail = Literal["full", "compact", "none"]
"""``full``: everything that is measured. ``compact``: one report, in which nothing is written twice. ``none``: no
report."""

NOT_KEPT = ("span", "score", "chosen")
"""The keys of a span that a compact report leaves out. Further ones are left out if they can be derived."""

MLDS = ("con_mlds", "f_mlds")

MEMBERS = ("spans", "tool_calls", "fields")
"""The keys of a report that list its parts."""


def require_detail(detail: Any) -> None:
    """Refuse an unknown level of detail.

    Raises:
        ConfigError: the level is unknown. The message names the closest one.
    """
    if detail is not None and detail not in get_args(Detail):
        raise ConfigError(f"risk_metadata: {unknown([str(detail)], get_args(Detail), what='value')}")


def compact_report(report: dict[str, Any], text: str | None) -> dict[str, Any]:
    """A ``cocoa_risk`` report without what can be derived from the rest of the answer.

    A span has no ``reaches_max_risk`` if it is false, no ``candidates`` if there were none, and no ``con_mlds`` or
    ``f_mlds`` if it is the risk. Spans have no texts if ``text`` is the concatenation of these texts. Spans without
    visible text keep theirs, so that thresholds can still leave them out if the text of the answer is changed later.

    Args:
        report: a report; it is not changed.
        text: the text that is stored with the report; ``None`` if there is none.
    """
    derivable = "".join(span.get("text", "") for span in report["spans"]) == text
    spans = []
    for span in report["spans"]:
        kept = {key: value for key, value in span.items() if key not in NOT_KEPT}
        if derivable and span["text"].strip():
            del kept["text"]
        derived = {"reaches_max_risk": False, "candidates": 0, **dict.fromkeys(MLDS, span["risk"])}
        spans.append({key: value for key, value in kept.items() if key not in derived or value != derived[key]})
    return {**report, "compact": True, "spans": spans}


def expanded_report(report: dict[str, Any] | None, text: str) -> dict[str, Any] | None:
    """A report with what can be derived for its spans: all but ``score`` and ``chosen``.

    A full report is returned as it is. If the text is no longer
    that of the answer, spans get no texts.

    Args:
        report: a report, or ``None``.
        text: the text of the answer.
    """
    if report is None or not report.get("compact") or "spans" not in report:
        return report
    unchanged = not report["spans"] or report["spans"][-1]["end"] == len(text)
    spans = []
    for number, span in enumerate(report["spans"]):
        derived = {} if "text" in span or not unchanged else {"text": text[span["start"] : span["end"]]}
        values = {**dict.fromkeys(MLDS, span["risk"]), "reaches_max_risk": False, "candidates": 0}
        spans.append({"span": number, **derived, **values, **span})
    return {**report, "spans": spans}


def summary(report: dict[str, Any] | None) -> dict[str, Any] | None:
    """A compact report without its parts, for a place next to a message that has them. A full report is kept."""
    if report is None or not report.get("compact"):
        return report
    return {key: value for key, value in report.items() if key not in MEMBERS}
