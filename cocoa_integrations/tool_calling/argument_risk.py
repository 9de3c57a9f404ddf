"""The risk of the values in a JSON answer and in the arguments of a tool call, from the spans that contain them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cocoa_engine import Generation
from cocoa_engine.report import CallReport, RiskReport, ValueReport, finite, severity
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations.tool_calling.json_values import field_offsets, member_path
from cocoa_integrations.tool_calling.plan import Plan
from cocoa_integrations.tool_calling.reading import Call

ROOT = ("$.", "$[")
"""A key of ``arguments`` that begins so is the path of a value inside an argument; others are names of arguments."""


def parts_of_report(generation: Generation, plan: Plan, split: Split, calls: Sequence[Call]) -> dict[str, Any]:
    """What the parsed answer adds to its report: ``tool_calls`` if it has calls, ``fields`` if JSON was asked for.

    ``fields`` is the risk of every value of the JSON, by its path. An argument of a call is listed by its name, and
    every value in it by its path, such as ``$.people[0].age``. For a value, ``risk`` is the highest risk of the spans
    that overlap it, ``con_mlds`` and ``f_mlds`` are means over these spans, and ``log_prob`` is the sum over the tokens
    of the value. Tokens that the grammar forces have log-probability 0. ``start`` and ``end`` are offsets in the
    generated text; the quotes of a string are not included. For a call, ``risk`` is the highest risk of all its spans,
    including those of its name.
    """
    if not calls and plan.request.schema is None:
        return {}
    text, tokens, position = generation.text, list[tuple[int, int, float]](), 0
    for entry in TokenLogprobs(plan.engine).of_answer(generation.spans):
        tokens.append((position, position + len(entry["token"]), entry["logprob"]))
        position = tokens[-1][1]

    def measured(start: int, end: int) -> ValueReport:
        spans = [(n, span) for n, span in enumerate(generation.spans) if span.start < end and span.end > start]
        risks = [severity(span.risk) for _, span in spans if span.risk is not None]
        count = max(1, len(spans))
        return ValueReport(
            risk=finite(max(risks, default=0.0)),
            con_mlds=finite(sum(span.con_mlds for _, span in spans) / count),
            f_mlds=finite(sum(span.f_mlds for _, span in spans) / count),
            log_prob=finite(sum(log_prob for first, last, log_prob in tokens if first < end and last > start)),
            start=start,
            end=end,
            spans=[number for number, _ in spans],
        )

    if not calls:
        return {"fields": {path: measured(*at) for path, at in field_offsets(text, split.answer_start).items()}}
    reports = []
    for call in calls:
        offsets = dict(call.values)
        for name, (start, _) in call.values.items():
            # arguments that were written as a string of JSON have no offsets of their own
            if isinstance((call.arguments or {}).get(name), (dict, list)) and text.startswith(("{", "["), start):
                offsets |= field_offsets(text, start, member_path("$", name))
        arguments = {name: measured(*at) for name, at in offsets.items()}
        risk = measured(*call.offsets).risk
        reports.append(CallReport(name=call.name, id=call.id, risk=risk, arguments=arguments, error=call.error))
    return {"tool_calls": reports}


def fields_of_report(report: RiskReport) -> dict[str, ValueReport]:
    """The risk of every field of a structured answer, by path: of a JSON answer, or of its first tool call."""
    if "fields" in report.model_fields_set:
        return report.fields
    for call in report.tool_calls:
        # in the order of the text, an object before the values in it
        arguments = sorted(call.arguments.items(), key=lambda each: (each[1].start, -each[1].end))
        return {name if name.startswith(ROOT) else member_path("$", name): value for name, value in arguments}
    return {}
