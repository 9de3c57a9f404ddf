"""The format of calls is derived from what a chat template writes, and reads what it writes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from types import FrameType
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_integrations._shared.reasoning import ReasoningTags
from cocoa_integrations.chat_service import ChatCall, LocalChat
from cocoa_integrations.tool_calling import Plan, ToolRequest, reading
from cocoa_integrations.tool_calling.formats import template_format, template_reasoning
from cocoa_integrations.tool_calling.values import value_at
from tests.helpers import tool_templates
from tests.helpers.in_threads import Dictated
from tests.helpers.streamed_calls import added_up, pieces_of, tokens_of, written
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

TEMPLATES = {**tool_templates.DERIVED, "hermes": tool_templates.HERMES, "llama": tool_templates.LLAMA}
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "open": {"type": "boolean"},
    "list": {"type": "array", "items": {}},
    "inner": {"type": "object"},
    "maybe": {"type": ["string", "null"]},
}
NAMES = ("look_up", "put-away")
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "Do.", "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in NAMES
]


@cache
def engine_of(template: str, special: tuple[str, ...] = ()) -> CocoaEngine:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*special]})
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return CocoaEngine(tiny_model("llama", seed=3, vocab_size=len(tokenizer), max_position_embeddings=4096), tokenizer)


def answer_of(engine: CocoaEngine, text: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """An answer as the template writes it, without its end."""
    answer = written(engine, TOOLS, calls, text)
    assert answer is not None
    answer = answer.removeprefix("</think>")  # the prompt ends inside the reasoning
    return answer.rpartition("<|end|>")[0] or answer.removesuffix("<|im_end|>\n").rstrip("\n")


def parsed(plan: Plan, answer: str) -> list[Any]:
    reading = plan.read(answer)
    return [reading.content, *([call.name, call.arguments, call.error] for call in reading.calls)]


def streamed(plan: Plan, parts: list[str], ids: list[list[int]] | None = None, *, splits: bool = False) -> list[Any]:
    """The text and the calls of an answer whose parts came one after the other."""
    text, *calls = added_up(pieces_of(plan, parts, ids, splits=splits)[0])
    return [text, *([name, json.loads(arguments), error] for name, arguments, error in calls)]


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("look_up", {"text": "a é", "count": -3, "share": 2.5, "open": False, "list": [1, "a, b", {"c": None}]}),
    ("put-away", {}),
    ("look_up", {"inner": {"k": "v"}, "maybe": "true", "text": "12"}),
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_calls_are_read_as_the_template_writes_them(template: str) -> None:
    engine = engine_of(template)
    style, described = template_format(engine)
    assert style is not None
    assert described
    plan = Plan(ToolRequest.of(TOOLS), engine)
    for text, calls in (("", CALLS[:1]), ("Let me see.", CALLS), ("", CALLS[1:])):
        calls = calls if style.several else calls[:1]
        answer = answer_of(engine, "" if template in ("channels", "llama") else text, calls)
        reading = plan.read(answer)
        assert [(call.name, call.arguments, call.error) for call in reading.calls] == [(*call, None) for call in calls]
        assert reading.content.strip() == ("" if template in ("channels", "llama") else text)
        for call in reading.calls:
            for name, (start, end) in call.values.items():
                value = (call.arguments or {})[name]
                assert value in (answer[start:end], value_at(f'"{answer[start:end]}"', 0)[0]) or (
                    value == value_at(answer[start:end], 0, "<|q|>")[0]
                )
        assert streamed(plan, [*answer])[1:] == [[call.name, call.arguments, None] for call in reading.calls]


ROLE = "<|end|>\n\nfunction call<|role|>\n"
FIRST = f'{ROLE}{{"name": "look_up", "arguments": {{"text": "x"}}}}'
SECOND = f'{ROLE}{{"name": "put-away", "arguments": {{}}}}'
PARTS = '<|close|>text<|sep|><|open|>tools<|sep|><|open|>look_up<|sep|>{"text": "x"}<|close|>call<|sep|>'
MORE = "<|open|>put-away<|sep|>{}<|close|>call<|sep|>"
LOOKED_UP = ["look_up", {"text": "x"}, None]
PUT_AWAY = ["put-away", {}, None]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("template", "answer", "rest", "expected"),
    [
        ("end before a call", f"I look.{FIRST}<|end|>", "\n<|user|>", ["I look.", LOOKED_UP]),
        ("end before a call", f"{FIRST}<|end|>", "\n\nfunction", ["", LOOKED_UP]),
        ("end before a call", "I look.<|end|>\n<", "|user|>", ["I look."]),
        ("end before calls", f"I look.{FIRST}{SECOND}<|end|>\n<", "|user|>", ["I look.", LOOKED_UP, PUT_AWAY]),
        ("end before calls", f"I look.{FIRST}<|end|>\n\nfa", "st", ["I look.", LOOKED_UP]),
        ("ends of parts", f"I look.{PARTS}{MORE}<|close|>tools<|sep|>", "<|close|>", ["I look.", LOOKED_UP, PUT_AWAY]),
        ("ends of parts", "I look.<|close|>text<|sep|><|close|>", "answer<|sep|>", ["I look."]),
    ],
)
def test_a_token_that_calls_have_too_ends_an_answer_after_them(
    template: str, answer: str, rest: str, expected: list[Any], strict: bool
) -> None:
    engine = engine_of(template, ("<|end|>", "<|role|>", "<|close|>", "<|sep|>", "<|open|>"))
    chat, token_ids = LocalChat(engine), engine.tokenizer.encode(answer + rest, add_special_tokens=False)

    def asking(tools: ToolRequest) -> ChatCall:
        call = ChatCall([{"role": "user", "content": "Hi"}], config=CocoaConfig(max_new_tokens=300), tools=tools)
        return replace(call, logits_processor=[Dictated(len(chat.prompt_ids(call)), token_ids)])

    call = asking(ToolRequest.of(TOOLS, strict=strict))
    pieces: list[Any] = []
    for made in (chat.answer(call), chat.answer(call, pieces.append)):
        assert [made.content, *([each.name, each.arguments, each.error] for each in made.calls)] == expected
        assert made.finish_reason == "stop"
        assert made.generation is not None
        assert engine.tokenizer.decode(made.generation.token_ids) == answer
    assert "".join(piece.content for piece in [*pieces, made.rest]) == expected[0]
    assert [delta.name for piece in pieces for delta in piece.calls if delta.name] == [
        name for name, *_ in expected[1:]
    ]
    for tools in (ToolRequest.of(), ToolRequest.of(TOOLS, tool_choice="none")):
        made = chat.answer(asking(tools))
        assert (made.content, made.calls, made.finish_reason) == (expected[0], [], "eos")
    assert {engine.tokenizer.eos_token_id} < engine.end_token_ids


@pytest.mark.slow
@pytest.mark.parametrize("template", ["end before a call", "end before calls", "ends of parts"])
def test_a_required_call_ends_at_a_token_that_it_has_too(template: str) -> None:
    engine = engine_of(template, ("<|end|>", "<|role|>", "<|close|>", "<|sep|>", "<|open|>"))
    parameters = {"type": "object", "properties": {"up": {"type": "boolean"}}, "required": ["up"]}
    tool = {"type": "function", "function": {**MOVE["function"], "parameters": parameters}}
    tools, config = ToolRequest.of([tool], tool_choice="required"), CocoaConfig(max_new_tokens=300, gamma=0.6)
    made = LocalChat(engine).answer(ChatCall([{"role": "user", "content": "Hi"}], config=config, tools=tools))
    (call,) = made.calls
    assert (call.name, call.error, made.content) == ("move", None, "")
    assert made.finish_reason != "length"


MOVE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move.",
        "parameters": {
            "type": "object",
            "properties": {
                "up": {"type": "boolean"},
                "unit": {"enum": ["m", "km"]},
                "steps": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
                "note": {"type": "string", "maxLength": 4},
            },
            "required": ["up", "unit"],
        },
    },
}
TAGS = ("<|calls|>", "<|call|>", "<|arguments|>", "[TOOL_CALLS]", "<tool_call>", "<|q|>", "<|channel|>", "<|message|>")


@pytest.mark.slow
@pytest.mark.parametrize("special", [(), TAGS])
@pytest.mark.parametrize("template", tool_templates.DERIVED)
def test_a_required_call_is_held_to_the_format(template: str, special: tuple[str, ...]) -> None:
    engine = engine_of(template, special)
    plan = Plan(ToolRequest.of([MOVE], tool_choice="required"), engine)
    messages, options = plan.prompt([{"role": "user", "content": "Move up a km."}])
    plan.inside_reasoning = False
    answer = engine.chat(
        messages, template_kwargs=options, max_new_tokens=300, gamma=0.6, logits_processor=plan.processors()
    )
    split = plan.split(answer)
    reading = plan.read(answer.text, start=split.answer_start, marks=split.marks)
    call = reading.calls[0]
    assert call.name == "move"
    assert answer.finish_reason in ("eos", "length")
    if answer.finish_reason == "eos":
        assert reading.content.strip() == ""
        assert call.arguments is not None
        assert isinstance(call.arguments["up"], bool)
        assert call.arguments["unit"] in ("m", "km")
        start, end = call.values["unit"]
        assert answer.text[start:end] == call.arguments["unit"]


TEXTS = {
    "type": "object",
    "$defs": {"colour": {"enum": ["red", "light blue"]}},
    "properties": {
        "code": {"type": "string", "pattern": r"^[A-Z]{2}/\d{3}$"},
        "short": {"type": "string", "minLength": 2, "maxLength": 5},
        "colour": {"$ref": "#/$defs/colour"},
        "maybe": {"anyOf": [{"type": "string", "pattern": "x", "maxLength": 4}, {"type": "null"}]},
        "fixed": {"type": "string", "const": "as it is"},
        "either": {"allOf": [{"type": "string", "pattern": "^a|[^<|]b$"}, {"maxLength": 6}]},
    },
}
TEXTS["required"] = [*TEXTS["properties"]]
FILL = {"type": "function", "function": {"name": "fill", "description": "Fill.", "parameters": TEXTS}}


@pytest.mark.slow
@pytest.mark.parametrize("special", [(), TAGS, ("</parameter>", "</arg_value>", "</|parameter>", "<|q|>")])
@pytest.mark.parametrize("template", ["parameters", "keys and values", "kinds", "own quotes"])
def test_texts_of_a_required_call_fit_their_schema(template: str, special: tuple[str, ...]) -> None:
    """Length, pattern, enumeration and constant, whatever a model with random weights would write."""
    engine = engine_of(template, special)
    plan = Plan(ToolRequest.of([FILL], tool_choice="required"), engine)
    messages, options = plan.prompt([{"role": "user", "content": "Fill it in."}])
    plan.inside_reasoning = False
    for seed in range(2):
        answer = engine.chat(
            messages,
            template_kwargs=options,
            method="sample",
            seed=seed,
            max_new_tokens=400,
            logits_processor=plan.processors(),
        )
        split = plan.split(answer)
        (call,) = plan.read(answer.text, start=split.answer_start, marks=split.marks).calls[:1]
        assert answer.finish_reason == "eos"
        assert call.error is None
        jsonschema.validate(call.arguments, TEXTS)


@pytest.mark.parametrize("template", tool_templates.DERIVED)
def test_tags_may_be_special_tokens_which_decoding_removes(template: str) -> None:
    engine = engine_of(template, TAGS)
    style, _ = template_format(engine)
    assert style is not None
    calls = CALLS if style.several else CALLS[:1]
    text = "" if template == "channels" else "Let me see."
    answer = answer_of(engine, text, calls)
    parts, ids = tokens_of(engine, answer)
    assert ("".join(parts) == answer) == (not any(tag in answer for tag in TAGS))
    plan = Plan(ToolRequest.of(TOOLS), engine)
    content, *read = streamed(plan, parts, ids, splits=True)
    assert content.strip() == text
    assert read == [[*call, None] for call in calls]


ANALYSIS, COMMENTARY, FINAL = (f"<|channel|>{name}<|message|>" for name in ("analysis", "commentary", "final"))
NEXT = "<|end|><|assistant|>"
LOOK_UP = '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"text": "x"}'


@pytest.mark.parametrize("special", [(), ("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|assistant|>")])
@pytest.mark.parametrize(
    ("answer", "reasoning", "expected"),
    [
        (f"{ANALYSIS}I think.{NEXT}{LOOK_UP}", "I think.", ["", LOOKED_UP]),
        (f"{ANALYSIS}I think.{NEXT}{FINAL}Hi.", "I think.", ["Hi."]),
        (f"{FINAL}Hi.", "", ["Hi."]),
        ("Hi.", "", ["Hi."]),
        (f"{COMMENTARY}I look.{NEXT}{LOOK_UP}", "", ["I look.", LOOKED_UP]),
        (f"{ANALYSIS}I think.{NEXT}{COMMENTARY}I look.{NEXT}{LOOK_UP}", "I think.", ["I look.", LOOKED_UP]),
        (f"{COMMENTARY}I look.{NEXT}{ANALYSIS}Hm.{NEXT}{LOOK_UP}", "Hm.", ["I look.", LOOKED_UP]),
        (f"{ANALYSIS}A.{NEXT}{ANALYSIS}B.{NEXT}{FINAL}Hi.", "A.\n\nB.", ["Hi."]),
        (f"{COMMENTARY}I look.{NEXT}{FINAL}Hi.", "", ["I look.\n\nHi."]),
        (f"{COMMENTARY}I look.{NEXT}{ANALYSIS}Hm", "Hm", ["I look."]),
        (f"{ANALYSIS}I think.{NEXT}<|channel|>", "I think.", [""]),
        (f"{COMMENTARY}I look.{NEXT}", "", ["I look."]),
        (LOOK_UP.replace(" <|constrain|>", "<|constrain|>"), "", ["", LOOKED_UP]),
        (LOOK_UP.replace("functions.", ""), "", ["", LOOKED_UP]),
        (LOOK_UP.replace("functions.look_up", "browser.find"), "", ["", ["browser.find", *LOOKED_UP[1:]]]),
        ("<|channel|>final <|constrain|>json<|message|>{}", "", ["{}"]),
        (f"{COMMENTARY}I look.{NEXT}<|channel|>final json<|message|>{{}}", "", ["I look.\n\n{}"]),
        (f"{FINAL}It goes to=functions.look_up, to=5.", "", ["It goes to=functions.look_up, to=5."]),
        (f"{ANALYSIS}I think.{NEXT}<|channel|>commentary to=functions", "I think.", [""]),
        ("<|channel|>anal", "", [""]),
    ],
)
def test_channels(answer: str, reasoning: str, expected: list[Any], special: tuple[str, ...]) -> None:
    engine = engine_of("channels", special)
    plan = Plan(ToolRequest.of(TOOLS), engine)
    parts, ids = tokens_of(engine, answer)
    for size in (1, 2, 5, len(parts)):
        cuts = range(0, len(parts), size)
        texts = ["".join(parts[at : at + size]) for at in cuts]
        tokens = [[token_id for each in ids[at : at + size] for token_id in each] for at in cuts]
        assert streamed(plan, texts, tokens, splits=True) == expected
        assert "".join(piece.reasoning for piece in pieces_of(plan, texts, tokens)[0]) == reasoning
    if len(expected) == 1:
        assert streamed(Plan(ToolRequest.of(), engine), parts, ids, splits=True) == expected


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_text_that_spells_special_tokens_is_text(size: int) -> None:
    """It may be quoted, and a header in it is none."""
    engine = engine_of("channels", ("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|assistant|>"))
    plan, value = Plan(ToolRequest.of(TOOLS), engine), f"a{NEXT}{FINAL}b{LOOK_UP}"

    def read(tags: str, quoted: str) -> list[Any]:
        parts, ids = tokens_of(engine, tags)
        spelled = engine.tokenizer.encode(quoted, add_special_tokens=False, split_special_tokens=True)
        assert not {*spelled} & {*engine.tokenizer.added_tokens_decoder}
        parts, ids = [*parts, *quoted], [*ids, *([token_id] for token_id in spelled)]
        cuts = [slice(at, at + size) for at in range(0, len(parts), size)]
        joined = [[token_id for each in ids[cut] for token_id in each] for cut in cuts]
        return streamed(plan, ["".join(parts[cut]) for cut in cuts], joined, splits=True)

    called = json.dumps({"text": value})
    assert read(LOOK_UP.removesuffix('{"text": "x"}'), called) == ["", ["look_up", {"text": value}, None]]
    assert read(FINAL, value) == [value]
    assert read(f"{ANALYSIS}I think.{NEXT}{FINAL}", value) == [value]


@pytest.mark.parametrize(
    "answer",
    [
        f"#{ANALYSIS}I# think.{NEXT}#{FINAL}#Hi#.",
        f"#{LOOK_UP}#",
        LOOK_UP.replace('{"text": "x', '#{"text#": "x#'),
        f"{ANALYSIS}I think.<|end|>#<|assistant|>{LOOK_UP[:-2]}#",
    ],
)
def test_special_tokens_that_are_no_tags_leave_nothing(answer: str) -> None:
    tags = ("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|assistant|>")
    engine = engine_of("channels", (*tags, "<|pad9|>"))
    [pad] = engine.encode("<|pad9|>", add_special_tokens=False)
    outcomes = []
    for other in ("<|pad9|>", engine.tokenizer.eos_token, ""):
        parts, ids = tokens_of(engine, answer.replace("#", other))
        assert [pad] not in ids or other == "<|pad9|>"
        plan = Plan(ToolRequest.of(TOOLS), engine)
        pieces, _ = pieces_of(plan, parts, ids)
        outcomes.append((added_up(pieces), "".join(piece.reasoning for piece in pieces)))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_required_call_may_begin_with_the_space_of_its_header() -> None:
    engine = engine_of("channels", ("<|channel|>", "<|message|>", "<|end|>", "<|assistant|>"))
    [processor] = Plan(ToolRequest.of(TOOLS, tool_choice="required"), engine).processors()
    scores = processor(torch.tensor([[0]]), torch.zeros(1, engine.model.config.vocab_size))[0]
    assert {engine.tokenizer.decode(at)[0] for at in scores.isfinite().nonzero()} == {" ", "t"}


def test_headers_may_begin_alike_and_end_alike() -> None:
    template = TEMPLATES["channels"].replace("<|end|><|assistant|>", "<|next|>")
    tags = template_reasoning(engine_of(template))
    assert tags == ReasoningTags(ANALYSIS, "<|next|>", FINAL)
    plan = Plan(ToolRequest.of(TOOLS), engine_of(template))
    answer = f"{ANALYSIS}I think.<|next|>{COMMENTARY}I look.<|next|>{LOOK_UP}"
    assert streamed(plan, [*answer], splits=True) == ["I look.", LOOKED_UP]


@pytest.mark.parametrize("special", [(), ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]")])
def test_reasoning_may_be_a_block_of_the_content(special: tuple[str, ...]) -> None:
    engine = engine_of("reasoning in blocks", special)
    plan = Plan(ToolRequest.of(TOOLS), engine)
    thought = {"role": "assistant", "content": "I look.", "reasoning_content": "I think."}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": {"text": "x"}}}
    user = {"role": "user", "content": "Hi"}
    messages, options = plan.prompt([user, thought | {"tool_calls": [call]}, user])
    answer = '[THINK]I think.[/THINK]I look.[TOOL_CALLS]look_up[ARGS]{"text": "x"}'
    assert f"<|assistant|>{answer}<|end|>" in engine.render_chat(messages, **options)
    parts, ids = tokens_of(engine, answer)
    assert streamed(plan, parts, ids, splits=True) == ["I look.", LOOKED_UP]
    assert "".join(piece.reasoning for piece in pieces_of(plan, parts, ids)[0]) == "I think."


def test_templates_that_write_one_call_get_results_and_reasoning_beside_it() -> None:
    """As that of gpt-oss: text of a call is reasoning, and the name of a result is that of the last call."""
    beside = (
        "{% if message.content and message.thinking %}{{ raise_exception('Not both') }}{% endif %}"
        f"{{% if message.content or message.thinking %}}{ANALYSIS}{{{{ message.content or message.thinking }}}}{NEXT}"
        "{% endif %}"
    )
    alone = TEMPLATES["channels"].replace("message.reasoning_content", "message.thinking")
    alone = alone.replace("{% if message.tool_calls %}", "{% if message.tool_calls %}" + beside, 1)
    engine = engine_of(alone)
    calls = [
        {"id": f"abcdefgh{number}", "type": "function", "function": {"name": name, "arguments": {"text": str(number)}}}
        for number, name in enumerate(NAMES)
    ]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "I think.", "tool_calls": calls},
        *({"role": "tool", "content": name, "tool_call_id": f"abcdefgh{at}"} for at, name in enumerate(NAMES)),
    ]
    rendered, options = Plan(ToolRequest.of(TOOLS), engine).prompt(messages)
    wanted = [
        f"<|assistant|>{ANALYSIS}I think.\n\nI look.{NEXT} to=functions.look_up<|channel|>commentary json<|message|>"
        '{"text": "0"}<|end|>\n<|tool|>look_up<|end|>',
        '<|assistant|> to=functions.put-away<|channel|>commentary json<|message|>{"text": "1"}<|end|>\n'
        "<|tool|>put-away<|end|>",
    ]
    assert "\n".join(wanted) in engine.render_chat(rendered, **options)


def test_a_response_template_is_used_where_no_format_is_derived() -> None:
    engine = engine_of(tool_templates.HERMES.replace("message.tool_calls or []", "[]"))
    plan = Plan(ToolRequest.of(TOOLS), engine)
    engine.tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {},
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    answer = 'Sure.<call>{"name": "look_up", "arguments": {"text": "x"}}</call>'
    expected = ["Sure.", ["look_up", {"text": "x"}, None]]
    assert parsed(plan, answer) == expected
    assert streamed(plan, [*answer]) == expected
    hermes = '<tool_call>{"name": "look_up", "arguments": {"text": "x"}}</tool_call>'
    assert parsed(plan, hermes) == ["", expected[1]]
    assert parsed(plan, "Sure.") == ["Sure."]


@pytest.mark.parametrize("template", ["hermes", "parameters", "keyword arguments", "llama"])
@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ("Sure.\n```json\nCALL\n```\nDone.", "Sure.\n\nDone."),
        ("CALL", ""),
        ("Sure.\nCALL", "Sure.\n"),
        ("```\n[CALL, CALL]\n```", ""),
    ],
)
def test_a_call_in_a_fence_or_alone_is_one(template: str, answer: str, content: str) -> None:
    plan = Plan(ToolRequest.of(TOOLS), engine_of(template))
    text = answer.replace("CALL", '{"name": "look_up", "arguments": {"text": "a {b}"}}')
    expected = ["look_up", {"text": "a {b}"}, None]
    read = parsed(plan, text)
    assert read == [content, *[expected] * answer.count("CALL")]
    assert streamed(plan, [*text]) == read


@pytest.mark.parametrize(
    "template", ["hermes", "parameters", "keyword arguments", "channels", "python list", "arguments as text"]
)
@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "Paris", "arguments": {"text": "x"}}',
        '```json\n{"name": "look_up", "version": "1.0"}\n```',
        '```json\n{"name": "look_up"}\n```',
        '{"name": "look_up"',
        'Write `{"name": "look_up", "arguments": {}}` for a call.',
        '```python\nlook_up(text="x")\n```',
        "It is 1 < 2, [so](there).",
        '```json\n{"city": "Lyon"}\n```',
        '{"name": "Lyon"}',
        "[1, 2]\n{3}",
        "look_up is a tool.",
    ],
)
def test_json_and_text_about_a_tool_are_no_call(template: str, answer: str, caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan(ToolRequest.of(TOOLS), engine_of(template))
    assert parsed(plan, answer) == [answer]
    assert streamed(plan, [*answer]) == [answer]
    assert not caplog.records


class CountingPattern:
    """A regular expression that adds up the characters between the beginning and the end of each search."""

    def __init__(self, pattern: Any, counts: Counter[str]) -> None:
        self._pattern, self._counts = pattern, counts

    def search(self, text: str, *places: int, partial: bool = False) -> Any:
        at, end = (*places, 0)[0], len(text) if len(places) < 2 else places[1]
        match = self._pattern.search(text, at, end, partial=partial)
        self._counts["characters"] += max(0, (end if match is None else match.end()) - at)
        return match

    def match(self, text: str, at: int = 0, *, partial: bool = False) -> Any:
        return self._counted(self._pattern.match(text, at, partial=partial), text, at)

    def fullmatch(self, text: str, at: int = 0, *, partial: bool = False) -> Any:
        return self._counted(self._pattern.fullmatch(text, at, partial=partial), text, at)

    def _counted(self, match: Any, text: str, at: int) -> Any:
        passed = at + 1 if match is None else match.end()
        self._counts["characters"] += max(passed, len(text) - len(text[at:].lstrip())) - at
        return match

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pattern, name)


def steps_of(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """The lines of this package that run, and the characters that its regular expressions pass."""
    counts, compiled = Counter[str](), reading.compiled

    def traced(frame: FrameType, event: str, argument: Any) -> Any:
        counts["lines"] += event == "line"
        return traced if "cocoa_integrations" in frame.f_code.co_filename else None

    with monkeypatch.context() as patch:
        patch.setattr(reading, "compiled", lambda pattern: CountingPattern(compiled(pattern), counts))
        before = sys.gettrace()
        sys.settrace(traced)
        try:
            work()
        finally:
            sys.settrace(before)
    return counts.total()


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "llama"])
@pytest.mark.parametrize("repeated", ["\t\n", " ", "<", "OPENING", "```\n[\n", "look_up "])
def test_the_work_for_an_answer_grows_with_its_length(
    template: str, repeated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(ToolRequest.of(TOOLS), engine_of(template))
    start = plan.style.write("look_up", {"text": "a"})
    text = repeated.replace("OPENING", plan.style.opening)
    for size in (len(start) // 2, start.index("look_up"), len(start)):
        short, long = (
            steps_of(partial(plan.read, (start[:size] + text * length)[:length], done=False), monkeypatch)
            for length in (2000, 8000)
        )
        assert long < 6 * short + 1000


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_text_without_an_end_has_no_format(end: str) -> None:
    template = TEMPLATES["parameters"].replace("</parameter>", end)
    assert template != TEMPLATES["parameters"]
    assert template_format(engine_of(template)) == (None, False)


def test_another_chat_template_of_a_tokenizer_has_its_own_format() -> None:
    engine = engine_of("hermes", ("<|own|>",))
    assert template_format(engine) is template_format(engine)
    assert template_reasoning(engine) is template_reasoning(engine)
    engine.tokenizer.chat_template = TEMPLATES["parameters"]
    assert template_format(engine) == template_format(engine_of("parameters"))


def test_a_bare_call_can_follow_the_reasoning_in_its_line() -> None:
    plan = Plan(ToolRequest.of(TOOLS), engine_of("keys and values"))
    thought = "<think>I look.</think>"
    answer = f'{thought}{{"name": "look_up", "arguments": {{"text": "x"}}}}'
    (call,) = plan.read(answer, start=len(thought)).calls
    assert (call.name, call.arguments, call.error) == ("look_up", {"text": "x"}, None)
    assert streamed(plan, [*answer], splits=True) == ["", ["look_up", {"text": "x"}, None]]


@pytest.mark.parametrize("code", [r"\U99999999", r"\U00110000", r"\ud800"])
def test_a_code_of_no_character_is_no_error_of_ours(code: str) -> None:
    answer = f"<|calls|>[look_up(text='{code}')]<|/calls|>"
    (call,) = Plan(ToolRequest.of(TOOLS), engine_of("keyword arguments")).read(answer).calls
    assert (call.arguments is None) == (call.error is not None)


@pytest.mark.parametrize(
    "answer",
    [
        '```json\n{"name": "look_up", "arguments": {"count": "many"}}\n```',
        '```json\n{"name": "look_up", "arguments": {"text": \n```',
        'I use {"name": "look_up", "arguments": {"text": "x"}} for this.',
        "<function=look_up>{}</function>",
        "<tool_call>look_up(text='x')",
        "<tool name='look_up'><text>x</text></tool>",
        '```tool_code\nlook_up(text="x")\n```',
        '<|tool_start|>look_up {"text": "x"}<|tool_end|>',
    ],
)
def test_what_looks_like_a_call_is_never_a_silent_answer(answer: str, caplog: pytest.LogCaptureFixture) -> None:
    (call,) = Plan(ToolRequest.of(TOOLS), engine_of("hermes")).read(answer).calls
    assert call.error is not None
    assert call.error in caplog.text


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=6,
)
STRANGE = [
    "</tool_call>",
    "a</parameter>",
    "</arg_value>b",
    "<|done|>",
    "<|/call|>",
    "[ARGS]",
    "<tool_call>",
    "{",
    "', '",
]
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text() | st.sampled_from(STRANGE),
        "count": st.integers(-(2**53), 2**53),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "open": st.booleans(),
        "list": st.lists(VALUES, max_size=3),
        "inner": st.dictionaries(st.text("abc", min_size=1), VALUES, max_size=3),
    },
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*TEMPLATES]),
    st.text(),
    st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_any_call_is_read_whole_and_in_parts(template: str, text: str, calls: list[Any], random: Any) -> None:
    engine = engine_of(template)
    style, _ = template_format(engine)
    assert style is not None
    plan = Plan(ToolRequest.of(TOOLS), engine)
    answer = answer_of(engine, "" if template in ("channels", "llama") else text, calls if style.several else calls[:1])
    content, *read = parsed(plan, answer)
    expected = calls if style.several else calls[:1]
    assert [[name, given] for name, given, _ in read] == [[name, given] for name, given in expected]
    cuts = sorted({0, len(answer), *(random.randrange(len(answer) + 1) for _ in range(len(answer) // 3))})
    assert streamed(plan, [answer[start:end] for start, end in pairwise(cuts)]) == [content, *read]
