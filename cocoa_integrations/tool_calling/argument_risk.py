"""The risk of the values in a JSON answer and in the arguments of a tool call, from the spans that contain them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cocoa_engine import CocoaEngine, Generation, Span
from cocoa_engine.report import CallReport, RiskReport, ValueReport, finite, severity
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations.tool_calling.json_values import field_offsets, member_path
from cocoa_integrations.tool_calling.plan import Plan
from cocoa_integrations.tool_calling.reading import Call

ROOT = ("$.", "$[")
"""A key of ``arguments`` that begins so is the path of a value inside an argument; others are names of arguments."""


def parts_of_report(generation: Generation, plan: Plan, split: Split, calls: Sequence[Call]) -> dict[str, Any]:
    """What the parsed answer adds to its report: ``tool_calls`` if it has calls, ``fields`` if JSON was asked for."""
    if calls:
        return {"tool_calls": tool_call_risks(generation, calls, plan.engine)}
    if plan.request.schema is not None:
        return {"fields": field_risks(generation, plan.engine, start=split.answer_start)}
    return {}


def field_risks(generation: Generation, engine: CocoaEngine, *, start: int = 0) -> dict[str, ValueReport]:
    """``cocoa_risk["fields"]``: the risk of every value of the JSON from ``start`` on, by its path."""
    tokens = _token_offsets(generation, engine)
    offsets = field_offsets(generation.text, start)
    return {path: _value(generation, tokens, offset) for path, offset in offsets.items()}


def tool_call_risks(generation: Generation, calls: Sequence[Call], engine: CocoaEngine) -> list[CallReport]:
    """The entries of ``cocoa_risk["tool_calls"]``, one for each call.

    An argument is listed by its name, and every value in it by its path, such as ``$.people[0].age``. For a value,
    ``risk`` is the highest risk of the spans that overlap it, ``con_mlds`` and ``f_mlds`` are means over these spans,
    and ``log_prob`` is the sum over the tokens of the value. Tokens that the grammar forces have log-probability 0.
    ``start`` and ``end`` are offsets in the generated text, which contains the tool calls; the quotes of a string are
    not included. For a call, ``risk`` is the highest risk of all its spans, including those of
    its name, and ``error`` says why the call is invalid, or is ``None``.
    """
    tokens = _token_offsets(generation, engine)
    reports = []
    for call in calls:
        offsets = {**call.values, **_inside_arguments(generation.text, call)}
        arguments = {name: _value(generation, tokens, offset) for name, offset in offsets.items()}
        risk = _highest(span for _, span in _overlapping(generation.spans, call.offsets))
        reports.append(CallReport(name=call.name, id=call.id, risk=risk, arguments=arguments, error=call.error))
    return reports


def fields_of_report(report: RiskReport) -> dict[str, ValueReport]:
    """The risk of every field of a structured answer, by path: of a JSON answer, or of its first tool call."""
    if "fields" in report.model_fields_set:
        return report.fields
    for call in report.tool_calls:
        # in the order of the text, an object before the values in it
        arguments = sorted(call.arguments.items(), key=lambda each: (each[1].start, -each[1].end))
        return {name if name.startswith(ROOT) else member_path("$", name): value for name, value in arguments}
    return {}


def _inside_arguments(text: str, call: Call) -> dict[str, tuple[int, int]]:
    """The offsets of the values inside the arguments that are objects or lists, by path."""
    offsets: dict[str, tuple[int, int]] = {}
    for name, (start, _) in call.values.items():
        # arguments that were written as a string of JSON have no offsets of their own
        if isinstance((call.arguments or {}).get(name), (dict, list)) and text.startswith(("{", "["), start):
            offsets |= field_offsets(text, start, member_path("$", name))
    return offsets


def _highest(spans: Iterable[Span]) -> float | None:
    """The highest measured risk; ``None`` if one is not a finite number."""
    return finite(max((severity(span.risk) for span in spans if span.risk is not None), default=0.0))


def _value(generation: Generation, tokens: Sequence[tuple[int, int, float]], offsets: tuple[int, int]) -> ValueReport:
    spans = _overlapping(generation.spans, offsets)
    start, end = offsets
    count = max(1, len(spans))
    return ValueReport(
        risk=_highest(span for _, span in spans),
        con_mlds=finite(sum(span.con_mlds for _, span in spans) / count),
        f_mlds=finite(sum(span.f_mlds for _, span in spans) / count),
        log_prob=finite(sum(log_prob for first, last, log_prob in tokens if first < end and last > start)),
        start=start,
        end=end,
        spans=[number for number, _ in spans],
    )


def _overlapping(spans: Sequence[Span], offsets: tuple[int, int]) -> list[tuple[int, Span]]:
    start, end = offsets
    return [(number, span) for number, span in enumerate(spans) if span.start < end and span.end > start]


def _token_offsets(generation: Generation, engine: CocoaEngine) -> list[tuple[int, int, float]]:
    """Start and end of the text of each token, and its log-probability."""
    offsets, position = [], 0
    for entry in TokenLogprobs(engine).of_answer(generation.spans):
        offsets.append((position, position + len(entry["token"]), entry["logprob"]))
        position += len(entry["token"])
    return offsets
