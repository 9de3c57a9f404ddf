"""The formats in which models write tool calls, and how a prompt describes the tools to them.

A model whose chat template does not support tools gets them in the format that Hermes and Qwen models were trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cocoa_engine import CocoaEngine, json_rule
from cocoa_engine.errors import ChatTemplateError
from cocoa_integrations._shared.reasoning import CLOSING
from cocoa_integrations.tool_calling.request import ToolRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class CallFormat:
    """A text format of tool calls. Every call is a JSON object with a name and an object of arguments."""

    opening: str  # the text before a call, or before the list of calls
    closing: str
    arguments: str = "arguments"  # the key of the arguments
    listed: bool = False  # whether the calls are a JSON list

    @property
    def tagged(self) -> bool:
        """Whether tags separate calls from other text. Otherwise an answer is either a call or text."""
        return bool(self.opening) and not self.listed

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call as text."""
        call = json.dumps({"name": name, self.arguments: dict(arguments)}, ensure_ascii=False)
        return f"{self.opening}\n{call}\n{self.closing}" if self.tagged else f"[{call}]" if self.listed else call

    def grammar(
        self, request: ToolRequest, schemas: Sequence[Any], tokenizer: PreTrainedTokenizerBase, other: str | None
    ) -> str:
        """The grammar of an answer that can call functions with arguments of these schemas.

        ``other`` is the grammar term for an answer without a call; ``None``: any text. Tags can be single tokens.
        """
        several = not request.required if request.parallel is None else request.parallel
        head, rules = f'{{{{"name": {{}}, "{self.arguments}": ', list[str]()
        for number, (function, schema) in enumerate(zip(request.callable_tools, schemas, strict=True)):
            begin = _literal(head.format(_literal(function["name"])))
            rules.append(f"call_{number}: {begin} arguments_{number} {_literal('}')}")
            rules.append(f"arguments_{number}: {json_rule(schema)}")
        rules.append(f"call: {' | '.join(f'call_{number}' for number in range(len(schemas)))}")
        opening, new_line, calls = _term(self.opening, tokenizer), _literal("\n"), "call"
        if self.tagged:
            calls = f"tagged ({new_line} tagged)*" if several else "tagged"
            rules.append(f"inside: {new_line} call {new_line} {_term(self.closing, tokenizer)}")
            rules.append(f"tagged: {opening} inside")
        elif self.listed:
            more = f" ({_literal(', ')} call)*" if several else ""
            calls = f"{opening} {_literal(' ')}? {_literal('[')} call{more} {_literal(']')}".strip()
        if request.required:
            start = calls
        elif other is not None:
            start = f"{calls} | answer"
            rules.append(f"answer: {other}")
        elif self.tagged:
            lazy = "[lazy]" if opening.startswith('"') else ""  # the text before a call ends at the first opening
            start = f"(trigger inside){'*' if several else '?'} text"
            rules += [f"trigger{lazy}: TEXT {opening}", "text: TEXT", r"TEXT: /(.|\n)*/"]
        else:
            start = f"{calls} | TEXT"
            rules.append(r"TEXT: /[^\s{\[](.|\n)*/")
        return "\n".join([f"start: {start}", *rules])


HERMES = CallFormat("<tool_call>", "</tool_call>")  # also of Qwen 2.5, 3 and many others, and of our own prompt
LLAMA = CallFormat("", "", arguments="parameters")  # of Llama 3.1 to 3.3: the answer is a single call
MISTRAL = CallFormat("[TOOL_CALLS]", "", listed=True)  # of its models up to 2024


def template_format(engine: CocoaEngine) -> CallFormat | None:
    """The format in which a chat template writes tool calls; ``None`` if it ignores tools, or has an unknown format."""
    name, question = "look_it_up", {"role": "user", "content": "Look."}
    function = {"name": name, "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": function}
    call = {"type": "function", "id": "abcdefghi", "function": {"name": name, "arguments": {}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": name, "tool_call_id": "abcdefghi", "content": "Found."}
    try:
        if name not in engine.render_chat([question], tools=[tool]):
            return None
        asked = engine.render_chat([question], tools=[tool], add_generation_prompt=False)
        written = engine.render_chat([question, answer, result], tools=[tool], add_generation_prompt=False)
    except ChatTemplateError:
        return None
    shared = next((at for at, pair in enumerate(zip(asked, written, strict=False)) if pair[0] != pair[1]), len(asked))
    before, found, after = written[shared:].partition(f'"{name}"')
    if not found or '"name":' not in before.replace(" ", ""):
        return None
    tagged = next((style for style in (HERMES, MISTRAL) if style.opening in before), None)
    return tagged or (LLAMA if '"parameters"' in after else None)


def after_reasoning(grammar: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The grammar of an answer that begins inside the reasoning: any text, the closing tag, then the given grammar."""
    closing = _term(CLOSING, tokenizer)
    lazy = "[lazy]" if closing.startswith('"') else ""
    rules = r"start: reasoning /\s{0,4}/ answered", f"reasoning{lazy}: REASONING {closing}", r"REASONING: /(.|\n)*/"
    return "\n".join([*rules, grammar.replace("start:", "answered:", 1)])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _term(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text as a grammar term. An added token is written by its id, because no text matches it."""
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if token.content == text:
            return f"<[{token_id}]>"
    return _literal(text) if text else ""


_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

SCHEMA = """Answer with one JSON object that fits this JSON schema, and with nothing else:
{schema}"""


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """The description of the tools and of the call format, for a system message."""
    shown = ("name", "description", "parameters")
    functions = [{key: tool["function"][key] for key in shown} for tool in tools]
    lines = [json.dumps({"type": "function", "function": each}, ensure_ascii=False) for each in functions]
    return _TOOLS.format(tools="\n".join(lines))


def as_plain_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their tool calls and results as text."""
    plain: list[dict[str, Any]] = []
    for is_result, turn in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:  # one message for all results of a turn: many templates require alternating roles
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in turn]
            plain.append({"role": "user", "content": "\n".join(results)})
            continue
        for message in turn:
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            written = [HERMES.write(each["name"], each["arguments"]) for each in functions]
            content = "\n".join([*filter(None, [message["content"]]), *written]) if written else message["content"]
            plain.append({**rest, "content": content})
    return plain


def one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, of which none has several calls, or text and a call: Llama's template refuses or drops these."""
    divided: list[dict[str, Any]] = []
    for message in messages:
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = message.get("tool_calls") or ()
        if message["content"] or not calls:
            divided.append(rest)
        divided += [{**rest, "content": "", "tool_calls": [call]} for call in calls]
    return divided


def invalid_call_text(name: str | None, written: str) -> str:
    """An invalid call of an earlier answer, as text of a prompt. ``written`` is all of a call without a name."""
    return written if not name else f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written}'


def with_instructions(messages: Sequence[Mapping[str, Any]], text: str, engine: CocoaEngine) -> list[dict[str, Any]]:
    """The messages with a text added to their system message, or before the first if there is no system role."""
    first, rest = messages[0], messages[1:]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *map(dict, rest)]
    system = {"role": "system", "content": text}
    try:
        engine.render_chat([system, {"role": "user", "content": "b"}])
    except ChatTemplateError:
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *map(dict, rest)]
    return [system, *map(dict, messages)]
