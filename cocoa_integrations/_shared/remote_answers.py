"""Answers of a server: its ``cocoa_risk`` and ``cocoa_spans``, as a model in the same process has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cocoa_engine import Candidate, CocoaConfig, Generation, Span, Usage
from cocoa_integrations._shared.metadata import begin_of, is_reasoning
from cocoa_integrations._shared.reasoning import Part, Split


def entries_of(wire: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``cocoa_spans``, without the ``index`` that clients need to join streams."""
    return [{key: value for key, value in entry.items() if key != "index"} for entry in wire]


def report_of(wire: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """``cocoa_risk`` and the engine's finish reason, from the report of a server, which has both."""
    report = {key: value for key, value in wire.items() if key not in ("finish_reason", "verdict")}
    return {**report, "spans": entries_of(wire["spans"])}, wire.get("finish_reason")


def generation_of(
    report: Mapping[str, Any],
    finish_reason: str | None,
    usage: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Generation:
    """The answer that a report describes. What a report lacks is missing: tokens, and settings of the server.

    Args:
        report: the ``cocoa_risk`` report.
        finish_reason: the engine's finish reason.
        usage: OpenAI's token counts.
        settings: the settings that the request gave.
    """
    spans = [span_of(entry, report["risk_source"]) for entry in report["spans"]]
    counts, method = usage or {}, report["method"]
    return Generation.model_validate(
        {
            "text": "".join(span.text for span in spans),
            "token_ids": [],
            "spans": spans,
            "finish_reason": finish_reason,
            "usage": Usage(
                prompt_tokens=counts.get("prompt_tokens") or 0,
                completion_tokens=counts.get("completion_tokens") or 0,
                risk_points=sum(span.kind == "risk_point" for span in spans),
                cached_tokens=(counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            ),
            "config": CocoaConfig(**{**(settings or {}), "method": method}),
            "model_name": report.get("model_name"),
            "answer_risk": report["answer_risk"],
            "threshold": report["threshold"],
            "answer_threshold": report["answer_threshold"],
            "out_of_domain": report.get("out_of_domain", False),
            "source_heads": report.get("source_heads"),
        }
    )


def span_of(entry: Mapping[str, Any], risk_source: str | None = None) -> Span:
    """The span of an entry of ``cocoa_spans``, without its tokens."""
    risk, attention, rivals = entry["risk"], entry["source_attention"], entry.get("rivals", ())
    return Span.model_validate(
        {
            **_statistics(entry),
            "token_source_attention": [] if attention is None else [attention],  # whose mean it is
            "passage_attention": entry.get("passage_attention", []),
            "start": entry["start"],
            "end": entry["end"],
            "kind": entry["kind"],
            "candidates": [Candidate(**_statistics(rival), is_greedy=rival["is_greedy"]) for rival in rivals],
            "chosen": entry["chosen"] if rivals else None,
            "risk": math.nan if risk is None and entry["flagged"] else risk,
            "risk_source": risk_source,
            "flagged": entry["flagged"],
            "out_of_domain": entry.get("out_of_domain", False),
            "reaches_max_risk": entry["reaches_max_risk"],
            "repeats": entry.get("repeats", False),
        }
    )


def split_of(generation: Generation, report: Mapping[str, Any], reasoning: str) -> Split:
    """The reasoning and the answer.

    Args:
        generation: the answer, from :func:`generation_of`.
        report: its report, which says to which part each span belongs.
        reasoning: the text of the reasoning.
    """
    entries = report["spans"]
    if not any("part" in entry for entry in entries):
        return Split("", 0, None, generation)
    parts: tuple[Part, ...] = tuple("reasoning" if is_reasoning(entry) else "answer" for entry in entries)
    spans = [span for span, part in zip(generation.spans, parts, strict=True) if part == "answer"]
    text = "".join(span.text for span in spans)
    answered = generation.model_copy(update={"spans": spans, "text": text})
    return Split(reasoning, begin_of(report), parts, answered)


def _statistics(entry: Mapping[str, Any]) -> dict[str, Any]:
    names = ("log_prob", "con_mlds", "f_mlds", "score")
    values = {name: math.nan if entry[name] is None else entry[name] for name in names}
    tokens = dict.fromkeys(("token_ids", "token_log_probs", "token_entropies", "token_margins"), ())
    return {"text": entry["text"], **{name: list(value) for name, value in tokens.items()}, **values}
