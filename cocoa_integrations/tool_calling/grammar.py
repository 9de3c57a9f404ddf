"""Grammars of answers that call tools in a format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cocoa_engine import json_rule
from cocoa_integrations.tool_calling.call_format import ID, NAME, NUMBER, PLACEHOLDER, CallFormat, Parameters
from cocoa_integrations.tool_calling.request import ToolRequest
from cocoa_integrations.tool_calling.values import kinds_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANY = r"TEXT: /(.|\n)*/"
_WITHOUT_CALL = r"TEXT: /[^\s{\[](.|\n)*/"
_TERMS = {ID: "/[A-Za-z0-9]{9}/", NUMBER: "/[0-9]{1,3}/"}


def call_grammar(
    style: CallFormat,
    request: ToolRequest,
    schemas: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    other: str | None,
) -> str:
    """The grammar of an answer that can call functions; ``other`` is that of one without a call, else any text."""
    several = style.several and (not request.required if request.parallel is None else request.parallel)
    lead, head, before = _divided(style)
    rules, names = list[str](), [function["name"] for function in request.callable_tools]
    for number, (name, schema) in enumerate(zip(names, schemas, strict=True)):
        shown = name if style.members is None else json.dumps(name, ensure_ascii=False)[1:-1]
        begin, first, between, after = (
            terms(text.replace(NAME, shown), tokenizer)
            for text in (style.before, before, shown + style.between, style.after)
        )
        rules.append(f"named_{number}: {between} arguments_{number} {after}")
        rules.append(f"call_{number}: {begin} named_{number}")
        rules.append(f"first_{number}: {first} named_{number}")
        if style.parameters is None:
            rules.append(f"arguments_{number}: {json_rule(schema)}")
        else:
            rules += _written_one_by_one(f"arguments_{number}", schema, style.parameters, tokenizer)
    opening, more = terms(lead, tokenizer), f"({terms(style.separator, tokenizer)} call)*" if several else ""
    for kind in ("call", "first"):
        rules.append(f"{kind}: {' | '.join(f'{kind}_{number}' for number in range(len(names)))}")
    rules.append(f"inside: {terms(head, tokenizer)} first {more} {terms(style.tail, tokenizer)}")
    calls = f"{opening} inside"
    if request.required:
        start = calls
    elif other is not None:
        start = f"{calls} | answer"
        rules.append(f"answer: {other}")
    elif style.tagged:
        lazy = "[lazy]" if opening.startswith('"') else ""  # the text before a call ends at the first opening
        start = f"(trigger inside){'*' if several else '?'} text"
        rules += [f"trigger{lazy}: TEXT {opening}", "text: TEXT", _ANY]
    else:
        start = f"{calls} | TEXT"
        rules.append(_WITHOUT_CALL)
    if any(" STRING " in rule for rule in rules):
        rules.append(_ANY.replace("TEXT", "STRING"))
    return "\n".join([f"start: {start}", *rules])


def after_reasoning(grammar: str, tokenizer: PreTrainedTokenizerBase, closing: str) -> str:
    """The grammar of an answer that begins inside the reasoning: any text, the closing tag, then the given grammar."""
    end = terms(closing, tokenizer)
    lazy = "[lazy]" if end.startswith('"') else ""
    rules = r"start: reasoning /\s{0,4}/ answered", f"reasoning{lazy}: REASONING {end}", r"REASONING: /(.|\n)*/"
    return "\n".join([*rules, grammar.replace("start:", "answered:", 1)])


def _divided(style: CallFormat) -> tuple[str, str, str]:
    """The tag before the calls, the text between it and the first call, and what is left before the first name."""
    lead = PLACEHOLDER.split(style.opening)[0]
    begin = style.head + style.before
    at = begin.find(lead) + len(lead) if lead else len(begin) - len(begin.lstrip())
    return lead, style.head[at:], style.before[max(0, at - len(style.head)) :]


def _written_one_by_one(rule: str, schema: Any, own: Parameters, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The rules for arguments in the order of the schema, of which some may be left out."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in (schema or {})}
    names = [*properties] if isinstance(properties, Mapping) else []
    required = set(schema.get("required") or ()) if names else set()
    separator = terms(own.separator, tokenizer)
    rules = [f"{rule}: {rule}_none_0"]
    for number, name in enumerate(names):
        value, following = f"value_{rule}_{number}", number + 1
        part = properties[name] if isinstance(properties, Mapping) else True
        rules += _value(value, name, part, definitions, own, tokenizer)
        for state, between in (("none", ""), ("some", separator)):
            skipped = "" if name in required else f" | {rule}_{state}_{following}"
            rules.append(f"{rule}_{state}_{number}: {between} {value} {rule}_some_{following}{skipped}")
    return [*rules, *(f'{rule}_{state}_{len(names)}: ""' for state in ("none", "some"))]


def _value(
    rule: str, name: str, part: Any, definitions: Mapping[str, Any], own: Parameters, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """The rules for one argument: its name, its value, and the texts around them."""
    schema = {**part, **definitions} if isinstance(part, Mapping) else {}
    kinds = kinds_of(part, definitions) or {"string", "number", "boolean", "null", "array", "object"}
    is_quoted, ways, rules = own.quote in ('"', "'"), list[str](), list[str]()
    others = sorted(kinds - {"string"})
    after = terms(own.after, tokenizer)
    if "string" in kinds and not is_quoted:
        begin = terms(f"{own.before}{name}{own.between['string']}{own.quote}", tokenizer)
        end = terms(own.quote + own.after, tokenizer)
        values = part.get("enum") or ([part["const"]] if "const" in part else []) if isinstance(part, Mapping) else []
        texts = [terms(value, tokenizer) or '""' for value in values if isinstance(value, str)]
        if texts:
            rules.append(f"{rule}_text: {' | '.join(f'{text} {end}' for text in texts)}")
        else:
            lazy = "[lazy]" if end.startswith('"') else ""  # a text ends where the next tag begins
            rules.append(f"{rule}_text{lazy}: STRING {end}")
        ways.append(f"{begin} {rule}_text")
    elif is_quoted:
        others = sorted(kinds)
    groups: dict[str, list[str]] = {}
    for kind in others:
        groups.setdefault(own.between.get(kind, own.between["integer"]), []).append(kind)
    for number, (between, group) in enumerate(groups.items()):
        whole = len(groups) == 1 and ("string" not in kinds or is_quoted)
        allowed = schema if whole else {"allOf": [schema, {"type": group}]} if schema else {"type": group}
        rules.append(f"{rule}_{number}: {json_rule(allowed)}")
        ways.append(f"{terms(f'{own.before}{name}{between}', tokenizer)} {rule}_{number} {after}")
    return [f"{rule}: {' | '.join(ways)}", *rules]


def terms(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text as terms of a grammar. An added token is written by its id, because no text matches it."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = {token.content: token_id for token_id, token in added.items() if token.content.strip()}
    special = "|".join(map(re.escape, sorted((name for name in ids if name in text), key=len, reverse=True)))
    cuts = f"([{ID}{NUMBER}]{'|' if special else ''}{special})"
    return " ".join(
        _TERMS.get(piece) or (f"<[{ids[piece]}]>" if piece in ids else json.dumps(piece, ensure_ascii=False))
        for piece in re.split(cuts, text)
        if piece
    )
