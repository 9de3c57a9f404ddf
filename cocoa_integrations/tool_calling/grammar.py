"""Grammars of answers that call tools in a format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cocoa_engine import json_rule
from cocoa_engine.integration import unenforced_here
from cocoa_integrations.tool_calling.call_format import ID, NAME, NUMBER, PLACEHOLDER, CallFormat, Parameters
from cocoa_integrations.tool_calling.request import ToolRequest
from cocoa_integrations.tool_calling.values import kinds_of, texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHAR = r"(.|\n)"
_ANY = f"TEXT: /{_CHAR}*/"
_WITHOUT_CALL = r"TEXT: /[^\s{\[](.|\n)*/"
_PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_TERMS = {ID: "/[A-Za-z0-9]{9}/", NUMBER: "/[0-9]{1,3}/"}


def call_grammar(
    style: CallFormat,
    request: ToolRequest,
    schemas: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    other: str | None,
    foot: str = "",
) -> str:
    """The grammar of an answer that can call functions; ``other`` is that of one without a call, else any text.

    ``foot`` is what ends such a text, if calls begin with the same token.
    """
    several = style.several and (not request.required if request.parallel is None else request.parallel)
    lead = PLACEHOLDER.split(style.opening)[0]
    begun = style.head + style.before
    inside = begun[begun.find(lead) + len(lead) :] if lead else begun.lstrip()
    rules, names = list[str](), [function["name"] for function in request.callable_tools]
    for number, (name, schema) in enumerate(zip(names, schemas, strict=True)):
        shown = name if style.members is None else json.dumps(name, ensure_ascii=False)[1:-1]
        begin, first, between, after = (
            terms(text.replace(NAME, shown), tokenizer)
            for text in (style.before, inside, shown + style.between, style.after)
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
    tail = style.tail.rstrip() if foot else style.tail  # the lexer takes white space for that before the next call
    rules.append(f"inside: first {more} {terms(tail, tokenizer)}")
    # a header goes on after the role, so that its first token has the space
    calls = f'" "? {opening} inside' if re.match(" [^ ]", begun) else f"{opening} inside"
    if request.required:
        start = calls
    elif other is not None:
        start = f"{calls} | answer"
        rules.append(f"answer: {other}")
    elif style.tagged:
        lazy = "[lazy]" if opening.startswith('"') else ""  # the text before a call ends at the first opening
        start = f"(trigger inside){'*' if several else '?'} text"
        rules += [f"trigger{lazy}: TEXT {opening}", f"text: TEXT{' | TEXT foot' if foot else ''}", _ANY]
        if foot:
            following = opening.partition("> ")[2]
            words = json.JSONDecoder().raw_decode(following)[0].strip() if following.startswith('"') else ""
            call = _slashed(rf"~\s*{re.escape(words)}{_CHAR}*")
            rules += [f"foot: {terms(foot, tokenizer)} REST", f"REST: /{_CHAR}*/{f' & {call}' if words else ''}"]
    else:
        start = f"{calls} | TEXT"
        rules.append(_WITHOUT_CALL)
    if any(": STRING " in rule for rule in rules):
        rules.append(_ANY.replace("TEXT", "STRING"))
    return "\n".join([f"start: {start}", *rules])


def after_reasoning(grammar: str, tokenizer: PreTrainedTokenizerBase, closing: str) -> str:
    """The grammar of an answer that begins inside the reasoning: any text, the closing tag, then the given grammar."""
    end = terms(closing, tokenizer)
    lazy = "[lazy]" if end.startswith('"') else ""
    rules = r"start: reasoning /\s{0,4}/ answered", f"reasoning{lazy}: REASONING {end}", r"REASONING: /(.|\n)*/"
    return "\n".join([*rules, grammar.replace("start:", "answered:", 1)])


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
        texts = [
            _text(f"{rule}_text_{number}", parts, own.quote + own.after, tokenizer)
            for number, parts in enumerate(texts_of(part, definitions))
        ]
        texts = [text for text in texts if text and ": STRING " in text[0]][:1] or [*filter(None, texts)]
        rules += [each for text in texts for each in text]
        ways += [f"{begin} {text[0].partition(':')[0].removesuffix('[lazy]')}" for text in texts]
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


def _text(rule: str, parts: Sequence[Mapping[str, Any]], after: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The rules for a text that fits all of some schemas, and for what follows it."""
    end = terms(after, tokenizer)
    listed = [part.get("enum", [part.get("const")]) for part in parts if {"enum", "const"} & part.keys()]
    if listed:
        values = [value for value in listed[0] if isinstance(value, str) and all(value in each for each in listed)]
        return [f"{rule}: {' | '.join(f'{terms(value, tokenizer)} {end}' for value in values)}"] if values else []
    least = max((part.get("minLength", 0) for part in parts), default=0)
    most = min((part["maxLength"] for part in parts if "maxLength" in part), default="")
    regexes = [regex for part in parts if "pattern" in part and (regex := _searched(part["pattern"]))]
    regexes += [f"{_CHAR}{{{least},{most}}}"] if least or most != "" else []
    is_text = end.startswith('"')
    if not regexes:  # it ends where the next tag begins
        return [f"{rule}{'[lazy]' if is_text else ''}: STRING {end}"]
    terminal, literal, rest = rule.upper(), "", end
    if is_text:  # one terminal takes all characters up to the next token
        literal, size = json.JSONDecoder().raw_decode(end)
        literal, rest = f" {end[:size]}", end[size:]
        regexes.append(f"~{_CHAR}*{re.escape(after.strip() or after)}{_CHAR}*")
    return [
        f"{rule}: {terminal} {rest}",
        f"{terminal}: {terminal}_TEXT{literal}",
        f"{terminal}_TEXT: {' & '.join(map(_slashed, regexes))}",
    ]


def _slashed(regex: str) -> str:
    """A regular expression, or one after ``~`` that must not match, as a grammar has it."""
    written = re.sub(
        r"\\.|/|\n", lambda match: {"/": "\\/", "\n": "\\n"}.get(match[0], match[0]), regex, flags=re.DOTALL
    )
    return f"~/{written[1:]}/" if regex.startswith("~") else f"/{written}/"


def _searched(pattern: str) -> str | None:
    """The regular expression of texts in which a pattern is found; ``None`` if it is none of llguidance."""
    if unenforced_here({"type": "string", "pattern": pattern}):
        return None
    ways, depth = [list[str]()], 0
    for piece in _PIECES.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            ways.append([])
        else:
            ways[-1].append(piece)
    regexes = []
    for way in ways:
        begin, end = way[:1] == ["^"], way[-1:] == ["$"]
        inside = way[begin : len(way) - end]
        if {"^", "$"} & {*inside}:
            return None
        regexes.append(f"{'' if begin else _CHAR + '*'}({''.join(inside)}){'' if end else _CHAR + '*'}")
    return "|".join(regexes)


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
