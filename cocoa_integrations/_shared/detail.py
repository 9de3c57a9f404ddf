"""How much of the risk of an answer its metadata has: the full report, a compact one, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import unknown
from cocoa_integrations._shared.edits import EditedText
from cocoa_integrations._shared.metadata import begin_of

Detail = Literal["full", "compact", "none"]
"""``full``: everything that is measured. ``compact``: one report, in which nothing is written twice. ``none``: no
report."""

NOT_KEPT = ("span", "score", "chosen")
"""The keys of a span that a compact report leaves out. Further ones are left out if they can be derived."""

NOT_KEPT_OF_CHECKS = ("kind", "spans")
"""The keys of a claim in ``check`` that a compact report leaves out."""

MLDS = ("con_mlds", "f_mlds")

UNSET: dict[str, Any] = {"flagged": False, "reaches_max_risk": False, "candidates": 0, "source_attention": None}
"""The values of a span that a compact report leaves out."""

MEMBERS = ("spans", "check", "claims", "sentences", "tool_calls", "fields")
"""The keys of a report that list its parts."""


def require_detail(detail: Any) -> None:
    """Refuse an unknown level of detail.

    Raises:
        ConfigError: the level is unknown. The message names the closest one.
    """
    if detail is not None and detail not in get_args(Detail):
        raise ConfigError(f"risk_metadata: {unknown([str(detail)], get_args(Detail), what='value')}")


@dataclass(frozen=True)
class Stored:
    """The texts that a message has beside its report.

    Attributes:
        text: the text of the answer.
        reasoning: the text of the reasoning.
    """

    text: str
    reasoning: str = ""

    def __add__(self, other: Stored) -> Stored:
        return Stored(self.text + other.text, self.reasoning + other.reasoning)


def compact_report(report: dict[str, Any], stored: Stored | None) -> dict[str, Any]:
    """A ``cocoa_risk`` report without what can be derived from the rest of the answer, and without its ``claims``.

    A span has no ``flagged`` or ``reaches_max_risk`` if it is false, no ``candidates`` if there were none, no
    ``source_attention`` if it was not measured, and no ``con_mlds`` or ``f_mlds`` if it is the risk. Spans have no
    texts if the stored texts have them. Spans without visible text keep theirs, so that thresholds can still leave them
    out if the text of the answer is changed later.

    Args:
        report: a report; it is not changed.
        stored: the texts that are stored with the report; ``None`` if there are none.
    """
    compact = {**{key: value for key, value in report.items() if key != "claims"}, "compact": True}
    if "check" in report:
        compact["check"] = [
            {key: value for key, value in one.items() if key not in NOT_KEPT_OF_CHECKS and value != []}
            for one in report["check"]
        ]
    offsets = {} if stored is None else _offsets(report, stored)
    if "reasoning" in report:  # the part of each span says which spans it has
        kept = {key: value for key, value in report["reasoning"].items() if key != "spans"}
        compact["reasoning"] = kept | ({"reasoning_start": offsets["reasoning"]} if "reasoning" in offsets else {})
    if stored is not None and "answer" in offsets and _length(report) != len(stored.text):
        compact["text_length"] = len(stored.text)
    spans = []
    for span in report["spans"]:
        kept = {key: value for key, value in span.items() if key not in NOT_KEPT}
        if stored is not None and span.get("text", "").strip() and _stored_text(span, offsets, stored) == span["text"]:
            del kept["text"]
        derived = {**UNSET, **dict.fromkeys(MLDS, span["risk"])}
        spans.append({key: value for key, value in kept.items() if key not in derived or value != derived[key]})
    return {**compact, "spans": spans}


def expanded_report(report: dict[str, Any] | None, stored: Stored) -> dict[str, Any] | None:
    """A report with what can be derived for its spans: all but ``score`` and ``chosen``.

    A full report is returned as it is. If a text is no longer the one that was stored with the report, its spans get no
    texts.

    Args:
        report: a report, or ``None``.
        stored: the texts that are stored with it.
    """
    if report is None or not report.get("compact") or "spans" not in report:
        return report
    offsets = {"answer": begin_of(report)}
    expanded = {key: value for key, value in report.items() if key != "text_length"}
    if "reasoning" in report:
        reasoning = dict(report["reasoning"])
        if "reasoning_start" in reasoning:
            offsets["reasoning"] = reasoning.pop("reasoning_start")
        numbers = [number for number, span in enumerate(report["spans"]) if span.get("part") == "reasoning"]
        expanded["reasoning"] = {**reasoning, "spans": numbers}
    if report.get("text_length", _length(report)) != len(stored.text):
        del offsets["answer"]
    spans = []
    for number, span in enumerate(report["spans"]):
        text = span.get("text", _stored_text(span, offsets, stored))
        values = {**dict.fromkeys(MLDS, span["risk"]), **UNSET}
        spans.append({"span": number, **({} if text is None else {"text": text}), **values, **span})
    return {**expanded, "spans": spans}


def _offsets(report: dict[str, Any], stored: Stored) -> dict[str, int]:
    """The offsets at which the stored texts begin in the generated text, by part of the text."""
    offsets = {} if EditedText.find(stored.text, report) is None else {"answer": begin_of(report)}
    if stored.reasoning:
        offsets["reasoning"] = "".join(span.get("text", "") for span in report["spans"]).find(stored.reasoning)
    return {part: offset for part, offset in offsets.items() if offset >= 0}


def _length(report: dict[str, Any]) -> int:
    """The number of characters of the text that is shown, unless it was changed at its end."""
    end: int = report["spans"][-1]["end"] if report["spans"] else 0
    return max(end - begin_of(report), 0)


def _stored_text(span: dict[str, Any], offsets: dict[str, int], stored: Stored) -> str | None:
    """The text of a span, from the stored text that has all of it; ``None`` if none has."""
    for part, text in (("reasoning", stored.reasoning), ("answer", stored.text)):
        if span.get("part", "answer") == part and part in offsets:
            start, end = span["start"] - offsets[part], span["end"] - offsets[part]
            if start >= 0 and end <= len(text):
                return text[start:end]
    return None


def summary(report: dict[str, Any] | None) -> dict[str, Any] | None:
    """A compact report without its parts, for a place next to a message that has them. A full report is kept."""
    if report is None or not report.get("compact"):
        return report
    return {key: value for key, value in report.items() if key not in MEMBERS}
