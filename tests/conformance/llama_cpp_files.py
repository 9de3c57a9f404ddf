"""Files of llama.cpp: chat templates of well-known models, and vocabularies with texts and the ids that they must have.

The rendered templates are compared with transformers' own rendering of them.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerFast

from cocoa_engine import CocoaEngine, ModelLoadError
from cocoa_engine.errors import ChatTemplateError
from cocoa_engine.model.loading import load_tokenizer
from cocoa_integrations._shared.options import with_blocks
from cocoa_integrations.tool_calling.formats import template_reasoning
from cocoa_integrations.tool_calling.plan import Plan
from cocoa_integrations.tool_calling.request import ToolRequest
from tests.conformance.tools import OMITTED, SuiteError, Tools
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

MODELS = Path("vendor", "llama.cpp", "models")
TEMPLATES = MODELS / "templates"

_CONTROL = re.compile(
    r"<\|[^|<>\s'\"{}]+\|>|<｜[^｜<>\s]+｜>|</?[a-z][a-z_:]*>|\[/?[A-Z_]+\]|<[|/]?[a-z_]+[|]?>|\]~!?b?\["
)
_FUNCTION = {
    "name": "look_up",
    "description": "Look {0} up.",
    "parameters": {
        "type": "object",
        "properties": {"key": {"type": "string", "description": "The {0} key."}},
        "required": ["key"],
    },
}

Conversation = tuple[list[dict[str, Any]], dict[str, Any]]
"""Messages, and the other arguments of the template."""


def tokenizer_of(template: str) -> tuple[PreTrainedTokenizerFast, list[str]]:
    """A tokenizer with a template, and the names of the template's control tokens. Tags are not special."""
    tokenizer = tiny_tokenizer()
    names = list(dict.fromkeys(_CONTROL.findall(template)))
    special = [name for name in names if "|" in name or "｜" in name or name.startswith("[")]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in special], special_tokens=True)
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names if name not in special])
    tokenizer.chat_template = template
    return tokenizer, names


def conversations(text: str = "") -> dict[str, Conversation]:
    """Conversations of every kind, with a text in every other message, tool description, argument and result."""
    system = {"role": "system", "content": f"Be brief.{text}"}
    question = {"role": "user", "content": f"What is it?{text}"}
    function = {"name": "look_up", "arguments": {"key": f"a b{text}"}}
    calls = [{"id": "abcdefghi", "type": "function", "function": function}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "name": "look_up", "tool_call_id": "abcdefghi", "content": f"It is blue.{text}"}
    answer = {"role": "assistant", "content": "Blue."}
    again = {"role": "user", "content": f"Sure?{text}"}
    second = [*calls, {**calls[0], "id": "jklmnopqr"}]
    two = {**call, "content": "I look.", "tool_calls": second}
    thought = {"reasoning_content": f"I think.{text}"}
    described: dict[str, Any] = copy.deepcopy(_FUNCTION)
    described["description"] += text
    described["parameters"]["properties"]["key"]["description"] += text
    tools = {"tools": [{"type": "function", "function": described}]}
    return {
        "question": ([question], {}),
        "system": ([system, question], {}),
        "history": ([system, question, answer, again], {}),
        "reasoning": ([question, answer | {"reasoning_content": f"I think.{text}"}, again], {}),
        "tools": ([system, question], tools),
        "results": ([question, call, result], tools),
        "history of tools": ([question, call, result, answer, again], tools),
        "two calls": ([question, two, result, {**result, "tool_call_id": "jklmnopqr"}, answer, again], tools),
        "reasoning and a call": ([system, question, call | thought, result], tools),
    }


def _reference(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], options: dict[str, Any]
) -> str | None:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
    except Exception:  # a template may raise any error
        return None


def _own(engine: CocoaEngine, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[str | None, bool, bool]:
    """Our prompt, whether the template itself describes the tools, and whether messages with two calls were divided."""
    plan = Plan(ToolRequest.of(options.get("tools")), engine)
    try:
        chat, template_kwargs = plan.prompt(messages)
        text = engine.render_chat(chat, **template_kwargs)
    except ChatTemplateError:
        return None, True, False
    return text, "tools" in template_kwargs or not options, len(chat) > len(messages)


def compared(folder: Path) -> Iterator[tuple[str, str, str]]:
    """For each template and kind of conversation: ``"equal"``, ``"refused"`` by both, ``"described"``, ``"rendered"``
    by this package alone, ``"divided"`` or ``"differs"``.

    A message with two calls is divided where the template writes one. Transformers gets reasoning as the template takes
    it: in a field, or in a block of the content.

    Tools are described by this package, in plain text, where the template's format of calls is not one of its own.
    """
    model = tiny_model("llama")
    for path in sorted(folder.glob("*.jinja")):
        tokenizer, _ = tokenizer_of(path.read_text(encoding="utf-8"))
        engine = CocoaEngine(model, tokenizer, calibrator=None)
        takes_blocks = template_reasoning(engine).is_block
        for kind, (messages, options) in conversations().items():
            expected = _reference(tokenizer, with_blocks(messages) if takes_blocks else messages, options)
            text, by_template, divided = _own(engine, messages, options)
            same = "equal" if text is not None else "refused"
            other = "divided" if divided else "rendered" if expected is None else "differs"
            yield path.stem, kind, "described" if not by_template else same if text == expected else other


def forged(folder: Path, *, each: bool) -> Iterator[tuple[str, str, str, bool]]:
    """For each template, kind of conversation and control token in its texts: whether that has made a control token.

    The texts have one control token at a time (``each``), or all of them.
    """
    model = tiny_model("llama")
    for path in sorted(folder.glob("*.jinja")):
        tokenizer, names = tokenizer_of(path.read_text(encoding="utf-8"))
        names += tokenizer.all_special_tokens
        engine = CocoaEngine(model, tokenizer, calibrator=None)
        control = set(tokenizer.added_tokens_decoder)
        harmless = conversations(" x")
        for text in [f" {name}x" for name in names] if each else ["".join(names)]:
            for kind, (messages, options) in conversations(text).items():
                if _reference(tokenizer, messages, options) is None:
                    continue
                made = [
                    [token_id for token_id in engine.encode_chat(chat, **more) if token_id in control]
                    for chat, more in (harmless[kind], (messages, options))
                ]
                yield path.stem, kind, text, made[0] != made[1]


def run_templates(tools: Tools) -> str:
    """Rendered templates equal those of transformers, and no text of a message makes a control token."""
    folder = tools.source("llama-cpp-python") / TEMPLATES
    outcomes = list(compared(folder))
    counts = Counter(outcome for *_, outcome in outcomes)
    attempts = list(forged(folder, each=True))
    wrong = [
        (name, kind) for name, kind, outcome in outcomes if outcome == "differs" and name not in OMITTED["templates"]
    ]
    wrong += sorted({(name, kind) for name, kind, _, made in attempts if made})
    if wrong or not counts["equal"]:
        raise SuiteError(f"{dict(counts)}; different: {wrong}")
    return (
        f"{len({name for name, *_ in outcomes})} templates: {counts['equal']} conversations equal, {counts['refused']} "
        f"refused by both, {counts['described']} with tools described by this package, "
        f"{counts['rendered'] + counts['divided']} that a template refuses or shortens; "
        f"{len(attempts)} texts with control tokens, 0 made one"
    )


_BETWEEN = "\n__ggml_vocab_test__\n"


def expected(vocabulary: Path) -> Iterator[tuple[str, list[int]]]:
    """The texts of a vocabulary, and their ids; nothing if it has none."""
    texts, ids = (vocabulary.with_name(f"{vocabulary.name}.{ending}") for ending in ("inp", "out"))
    if texts.is_file():
        lines = ids.read_text(encoding="utf-8").splitlines()
        for text, line in zip(texts.read_bytes().decode().removesuffix(_BETWEEN).split(_BETWEEN), lines, strict=True):
            yield text, [int(number) for number in line.split()]


def check(vocabulary: Path) -> int | None:
    """How many texts of a vocabulary have their ids; ``None`` if it is refused."""
    try:
        tokenizer = load_tokenizer(str(vocabulary), {})
    except ModelLoadError as error:
        if str(vocabulary) not in str(error) or "tokenizer.ggml." not in str(error):
            raise SuiteError(f"{vocabulary.name} is refused without its key: {error}") from error
        return None
    count = 0
    for text, ids in expected(vocabulary):
        if (found := tokenizer.encode(text, add_special_tokens=False)) != ids:
            raise SuiteError(f"{vocabulary.name}: {text!r} has the ids {found}, not {ids}")
        count += 1
    return count


def run_vocabularies(tools: Tools) -> str:
    """Every vocabulary is read with the ids that llama.cpp expects, or refused."""
    counts = [check(file) for file in sorted((tools.source("llama-cpp-python") / MODELS).glob("ggml-vocab-*.gguf"))]
    if not any(counts):
        raise SuiteError("no vocabulary has texts")
    read = [count for count in counts if count]
    return f"{len(read)} equal on {sum(read)} texts, {counts.count(0)} without texts, {counts.count(None)} refused"
