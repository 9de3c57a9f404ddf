"""Answers of gpt-oss are read as OpenAI's own package openai-harmony reads them, and histories written as it does."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from cocoa_engine import CocoaEngine
from cocoa_engine.model.gguf_tokenizer import PRE_TOKENIZERS
from cocoa_integrations.tool_calling import Plan, ToolRequest
from tests.conformance.llama_cpp_files import TEMPLATES
from tests.conformance.tools import SuiteError, Tools
from tests.helpers.streamed_calls import added_up, pieces_of
from tests.helpers.tiny_models import tiny_model

_VOCABULARY = "fb374d419588a4632f3f557e76b4b70aebbca790"  # o200k_base.tiktoken, as litellm has it
_PROPERTIES = {"text": {"type": "string", "description": "It."}, "days": {"type": "integer"}}
_FUNCTIONS = [
    {"name": name, "description": "Do it.", "parameters": {"type": "object", "properties": _PROPERTIES}}
    for name in ("look_up", "put-away")
]
_ANALYSIS, _COMMENTARY, _FINAL = (f"<|channel|>{name}<|message|>" for name in ("analysis", "commentary", "final"))
_NEXT = "<|end|><|start|>assistant"
_THOUGHTS = "", f"{_ANALYSIS}I.{_NEXT}", f"{_ANALYSIS}{_NEXT}", f"{_ANALYSIS}A.{_NEXT}{_ANALYSIS}B.{_NEXT}"
_LEADS = [f"{thought}{text}" for thought in _THOUGHTS for text in ("", f"{_COMMENTARY}I look.{_NEXT}")]
_NAMES = "functions.look_up", "functions.put-away", "look_up", "browser.find"
_KINDS = "", " json", " code", "<|constrain|>json", " <|constrain|>json"
_SPELLED = f"a{_NEXT}{_FINAL}b<|call|> to=functions.look_up<|channel|>commentary json<|message|>{{}}"
_ARGUMENTS = (
    '{"text": "é 😀 \\n \\"q\\" }", "more": [1, {"k": null}], "days": -3}',
    json.dumps({"text": _SPELLED}),
    "{}",
)

Read = tuple[str, str, list[tuple[Any, Any]]]
"""The reasoning, the text, and the name of each call with its arguments, which are ``None`` if they are incomplete."""


def _answers() -> Iterator[tuple[str, str, str]]:
    """Answers: what has tags, a text that may spell some, and the token that ends the answer."""
    for lead in [*_LEADS, f"{_COMMENTARY}I look.{_NEXT}{_ANALYSIS}Hm.{_NEXT}"]:
        for name, kind, channel, arguments in product(_NAMES, _KINDS, ("commentary", "analysis"), _ARGUMENTS):
            yield f"{lead}<|channel|>{channel} to={name}{kind}<|message|>", arguments, "<|call|>"
            yield f"{lead} to={name}<|channel|>{channel}{kind}<|message|>", arguments, "<|call|>"
        for kind, text in product(_KINDS, ("Hi 😀.", '{"a": 1}\n\n- x', _SPELLED, "")):
            yield f"{lead}<|channel|>final{kind}<|message|>", text, "<|return|>"


def _engine(encoding: Any, vocabulary: Path, template: str) -> CocoaEngine:
    converter = TikTokenConverter(vocab_file=str(vocabulary), pattern=PRE_TOKENIZERS["gpt-4o"][0])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=converter.converted())
    names = {encoding.encode(name, allowed_special="all")[0]: name for name in encoding.special_tokens_set}
    for token_id in range(len(tokenizer), max(names) + 1):
        tokenizer.add_tokens(AddedToken(names[token_id], normalized=False), special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<|return|>", template
    return CocoaEngine(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer, calibrator=None)


def _theirs(parser: Any) -> Read:
    parts = [(each.channel, each.recipient, each.content[0].text) for each in parser.messages]
    if parser.state.name == "CONTENT":
        parts.append((parser.current_channel, parser.current_recipient, parser.current_content))
    texts, calls = {"analysis": list[str](), "text": list[str]()}, list[tuple[Any, Any]]()
    for channel, recipient, written in parts:
        if recipient and not recipient.startswith(("<|", "json", "code")):  # the type of a final answer
            calls.append((recipient.removeprefix("functions."), _value(written)))
        elif written.strip():
            texts["analysis" if channel == "analysis" else "text"].append(written.strip())
    return "\n\n".join(texts["analysis"]), "\n\n".join(texts["text"]), calls


def _ours(plan: Plan, ids: list[int], size: int) -> Read:
    """What is passed on of an answer in spans of some tokens."""
    track, parts, tokens = plan.engine.detokenizer(), list[str](), list[list[int]]()
    for at in range(0, len(ids), size):
        start = len(track.text)
        for token_id in ids[at : at + size]:
            track.push(token_id)
        parts.append(track.text[start:])
        tokens.append(ids[at : at + size])
    pieces, reading = pieces_of(plan, parts, tokens)
    text, *calls = added_up(pieces)
    if [call.arguments for call in reading.calls] != [_value(written) for _, written, _ in calls]:
        raise SuiteError(f"{reading.calls} at the end of a stream with {calls}")
    return "".join(piece.reasoning for piece in pieces), text.strip(), [(name, _value(each)) for name, each, _ in calls]


def _value(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return None


def _read(plan: Plan, package: Any, encoding: Any) -> Iterator[str]:
    """Each answer, whole and token by token, and some of them up to each token: an empty text, or what is wrong."""
    for number, (tags, text, end) in enumerate(_answers()):
        special, plain = {"allowed_special": "all"}, {"disallowed_special": ()}
        ids = encoding.encode(tags, **special) + encoding.encode(text, **plain) + encoding.encode(end, **special)
        parser = package.StreamableParser(encoding, package.Role.ASSISTANT)
        for size, token_id in enumerate(ids, 1):
            parser.process(token_id)
            if size < len(ids) and number % 97:
                continue
            expected, in_header = _theirs(parser), parser.state.name == "HEADER"
            for step in (1, size):
                read = _ours(plan, ids[:size], step)
                if size < len(ids):  # a call whose header is cut off has no name yet, or is text
                    calls = [call for call in read[2] if call[0] is not None]
                    begins = in_header and read[1].startswith(expected[1])
                    read = read[0], expected[1] if begins else read[1], calls
                yield "" if read == expected else f"{encoding.decode(ids[:size])!r}: {read} instead of {expected}"
        whole = encoding.parse_messages_from_completion_tokens(ids, package.Role.ASSISTANT)
        if whole != parser.messages:
            raise SuiteError(f"openai-harmony reads {whole} and {parser.messages}")


def _prompts(plan: Plan, package: Any, encoding: Any) -> Iterator[bool]:
    """Whether prompts are the same tokens: up to a question, to the result of a call, and to the next question.

    It is the template that writes a result as JSON, and the text beside a call as reasoning.
    """
    system = package.SystemContent.new().with_conversation_start_date(date.today().isoformat())
    tools = [package.ToolDescription.new(each["name"], each["description"], each["parameters"]) for each in _FUNCTIONS]
    developer = package.DeveloperContent.new().with_instructions("Be brief.").with_function_tools(tools)
    user, arguments, result = {"role": "user", "content": "Say <|end|>."}, {"text": "é <|end|>"}, "It is."
    answer, name, to = {"role": "assistant", "content": "Yes."}, "functions.look_up", {"channel": "commentary"}
    thought = {"role": "assistant", "channel": "analysis", "content": "I think.\n\nI look."}
    call = {"role": "assistant", "content": json.dumps(arguments, ensure_ascii=False), "recipient": name, **to}
    call["content_type"] = "json"
    received = {"role": "tool", "name": name, "content": json.dumps(result), "recipient": "assistant", **to}
    called = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    beside = {"role": "assistant", "content": "I look.", "reasoning_content": "I think.", "tool_calls": [called]}
    turns = [
        ([{"role": "system", "content": "Be brief."}, user], [user]),
        ([beside, {"role": "tool", "tool_call_id": "abcdefghi", "content": result}], [thought, call, received]),
        ([answer, user], [{**answer, "channel": "final"}, user]),
    ]
    ours = list[dict[str, Any]]()
    theirs = [*map(package.Message.from_role_and_content, ("system", "developer"), (system, developer))]
    for messages, parts in turns:
        ours += messages
        theirs += map(package.Message.from_dict, parts)
        conversation = package.Conversation.from_messages(theirs)
        chat, options = plan.prompt(ours)
        expected = encoding.render_conversation_for_completion(conversation, package.Role.ASSISTANT)
        yield plan.engine.encode_chat(chat, **options) == expected


def run_harmony(tools: Tools) -> str:
    [packages] = Path(tools.python).parents[1].glob("lib/python*/site-packages")
    vocabulary = tools.folder / "o200k_base.tiktoken"
    shutil.copy(packages / "litellm" / "litellm_core_utils" / "tokenizers" / _VOCABULARY, vocabulary)
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(tools.folder)
    sys.path.append(str(packages))
    import openai_harmony as package

    encoding = package.load_harmony_encoding("HarmonyGptOss")
    template = tools.source("llama-cpp-python") / TEMPLATES / "openai-gpt-oss-120b.jinja"
    engine = _engine(encoding, vocabulary, template.read_text(encoding="utf-8"))
    plan = Plan(ToolRequest.of([{"type": "function", "function": function} for function in _FUNCTIONS]), engine)
    if not {*encoding.stop_tokens_for_assistant_actions()} <= {*engine.end_token_ids, *plan.call_ends}:
        raise SuiteError(f"answers end at {engine.end_token_ids} and {plan.call_ends}")
    prompts, read = [*_prompts(plan, package, encoding)], [*_read(plan, package, encoding)]
    if not all(prompts) or any(read):
        raise SuiteError(f"prompts equal: {prompts}; read otherwise: " + "\n".join(filter(None, read)))
    return f"{len(prompts)} prompts of equal tokens, {len(read)} answers and beginnings of answers read alike"
