"""Calls as the chat templates of llama.cpp render them, up to the token that ends the answer, read back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cocoa_engine import CocoaEngine
from cocoa_integrations.tool_calling import Plan, ToolRequest
from cocoa_integrations.tool_calling.call_format import CallFormat
from cocoa_integrations.tool_calling.formats import template_format, template_reasoning
from tests.conformance.llama_cpp_files import TEMPLATES, tokenizer_of
from tests.conformance.tools import OMITTED, SuiteError, Tools
from tests.helpers.streamed_calls import added_up, pieces_of, tokens_of, written
from tests.helpers.tiny_models import tiny_model

_PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "exact": {"type": "boolean"},
    "parts": {"type": "array", "items": {"type": "string"}},
    "inner": {"type": "object", "additionalProperties": {"type": "string"}},
    "code": {"type": "string"},
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Do it.",
            "parameters": {
                "type": "object",
                "properties": {key: {**value, "description": "It."} for key, value in _PROPERTIES.items()},
                "required": ["city"],
            },
        },
    }
    for name in ("get-weather", "add")
]
_LONG = {"city": 'Ly"on\n é <b>', "days": -3, "share": 2.5, "exact": False, "parts": ["a, b", "]"], "inner": {"k": "}"}}
_CASES: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("", "", [("get-weather", {**_LONG, "code": "3"})]),
    ("", "Let me see.", [("get-weather", _LONG), ("add", {"city": "true"})]),
    ("", "", [("add", {}), ("get-weather", {"city": ""})]),
    ("I think.", "Let me see.", [("add", {"city": "Lyon"})]),
]


def kind_of(style: CallFormat) -> str:
    """How a format writes calls, in words."""
    if style.parameters is None:
        return "a JSON object" if style.members is not None else "a name and a JSON object"
    return "keyword arguments" if style.parameters.literal else "an element for each argument"


def outcomes(folder: Path) -> Iterator[tuple[str, str, str]]:
    """For each template: how it writes calls, or nothing, and what is wrong, or nothing."""
    for path in sorted(folder.glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        if "tool" not in template:
            continue
        tokenizer, _ = tokenizer_of(template)
        engine = CocoaEngine(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer, calibrator=None)
        style, _ = template_format(engine)
        if style is None:
            yield path.stem, "", ""
            continue
        wrong = [problem for case in _CASES if (problem := _problem(engine, style, *case))]
        yield path.stem, kind_of(style), "; ".join(wrong)


def _problem(engine: CocoaEngine, style: CallFormat, thought: str, text: str, calls: list[tuple[str, Any]]) -> str:
    plan = Plan(ToolRequest.of(_TOOLS), engine)
    expected = calls if style.several else calls[:1]
    answer = written(engine, _TOOLS, expected, text, thought)
    if answer is None or calls[0][0] not in answer:
        return ""  # the template refuses such a message, or leaves out its calls
    plan.prompt([{"role": "user", "content": "Look."}])
    tags = template_reasoning(engine)
    plan.inside_reasoning = plan.inside_reasoning and tags.closing in answer
    is_open = plan.inside_reasoning or tags.opening in answer.partition(tags.closing)[0]
    if thought and thought in answer and not is_open:
        answer = f"{tags.opening}{answer}"  # the prompt has it, with an empty thought
    parts, ids = tokens_of(engine, answer)
    token_ids = [token_id for (token_id,) in ids]
    ends = {*engine.end_token_ids, *plan.call_ends} - plan.inner_ends.keys()
    end = next((at for at, each in enumerate(token_ids, 1) if each in ends or plan.is_over(token_ids[:at])), None)
    answer = engine.tokenizer.decode(token_ids[:end], clean_up_tokenization_spaces=False)
    pieces, reading = pieces_of(plan, parts[:end], ids[:end])
    _, *streamed = added_up(pieces)
    reasoning = "".join(piece.reasoning for piece in pieces)
    if [(call.name, call.arguments) for call in reading.calls] != expected:
        return f"{reading.calls} instead of {expected} in {answer!r}"
    if [(name, json.loads(arguments)) for name, arguments, _ in streamed] != expected:
        return f"{streamed} in a stream instead of {expected} in {answer!r}"
    if text in answer and text not in reading.content and text not in reasoning:
        return f"the text {text!r} is not in {reading.content!r}"
    if thought and thought in answer and thought not in reasoning:
        return f"the reasoning of {answer!r} is not in {reasoning!r}"
    return ""


def run_tool_calls(tools: Tools) -> str:
    """Every call that a template renders is read back equal; prints how each template writes calls."""
    rows = list(outcomes(tools.source("llama-cpp-python") / TEMPLATES))
    kinds = {kind: [name for name, written, _ in rows if written == kind] for _, kind, _ in rows}
    for kind, names in sorted(kinds.items(), key=lambda each: -len(each[1])):
        print(f"| {kind or 'in the format of Hermes, in a system message'} | {len(names)} | {', '.join(names)} |")
    wrong = [(name, problem) for name, _, problem in rows if problem]
    unexplained = [name for name in kinds.get("", ()) if name not in OMITTED["tool-calls"]]
    if wrong or unexplained:
        raise SuiteError(f"not read: {wrong}; in the format of Hermes: {unexplained}")
    return f"{len(rows)} templates: {len(rows) - len(kinds.get('', ()))} in their own format"
