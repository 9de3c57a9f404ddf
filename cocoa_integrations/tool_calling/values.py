"""Values as models write them in calls: as JSON, as Python does, or with quotes of their own."""

import re
from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any

from cocoa_integrations.tool_calling.call_format import json_type
from cocoa_integrations.tool_calling.json_text import DECODER, skip_space

_NONE = "there is no complete value"
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})|(.))", re.DOTALL)
_CLOSED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_QUOTE = re.compile(r"(?<!\\)(?:\\\\)*'\s*")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_MAX_DEPTH = 200
_MAX_STEPS = 8  # of references, and of parts inside of parts
_MAX_WAYS = 64


def value_at(text: str, at: int, quote: str = "", depth: int = 0) -> tuple[Any, int]:
    """The value at an offset and its end. ``quote`` are further quotes, between which a string has no escapes.

    A ``ValueError`` says that there is none.
    """
    at = skip_space(text, at)
    if quote and text.startswith(quote, at):
        end = text.find(quote, at + len(quote))
        if end < 0:
            raise ValueError(_NONE)
        return text[at + len(quote) : end], end + len(quote)
    if depth > _MAX_DEPTH or at == len(text) or (quote and quote.startswith(text[at:])):
        raise ValueError(_NONE)
    if text[at] in "\"'":
        return _string(text, at, ",)" if depth == 0 else ",]}:")
    if text[at] in "[{":
        return _members(text, at, quote, depth)
    if number := _NUMBER.match(text, at):
        return DECODER.decode(number[0]), number.end()
    word = _WORD.match(text, at)
    if word is None or word[0].lower() not in _WORDS:
        raise ValueError(_NONE)
    return _WORDS[word[0].lower()], word.end()


def _string(text: str, at: int, closers: str) -> tuple[str, int]:
    if text[at] == '"':
        if _CLOSED.match(text, at) is None:
            raise ValueError(_NONE)
        value, end = DECODER.raw_decode(text, at)
        return str(value), end
    for match in _QUOTE.finditer(text, at + 1):  # some templates leave out the escapes of quotes
        if match.end() == len(text):
            break
        if text[match.end()] in closers:
            end = text.index("'", match.start())
            return _ESCAPE.sub(_unescaped, text[at + 1 : end]), end + 1
    raise ValueError(_NONE)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    return chr(int(code, 16)) if code else _ESCAPED.get(match[4], match[4] if match[4] in "'\"\\" else match[0])


def _members(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    """A list, or an object, whose keys need no quotes."""
    listed, values, members = text[at] == "[", list[Any](), dict[str, Any]()
    at = skip_space(text, at + 1)
    while not text.startswith("]" if listed else "}", at):
        if not listed:
            key: Any
            if (quote and text.startswith(quote, at)) or text[at : at + 1] in ("'", '"'):
                key, at = value_at(text, at, quote, depth + 1)
            else:
                colon = text.find(":", at)
                if colon < 0:
                    raise ValueError(_NONE)
                key, at = text[at:colon].strip(), colon
            at = skip_space(text, at)
            if not text.startswith(":", at):
                raise ValueError(_NONE)
            at += 1
        value, at = value_at(text, at, quote, depth + 1)
        if listed:
            values.append(value)
        else:
            members[str(key)] = value
        at = skip_space(text, at)
        if text.startswith(",", at):
            at = skip_space(text, at + 1)
        elif not text.startswith("]" if listed else "}", at):
            raise ValueError(_NONE)
    return (values if listed else members), at + 1


def typed(raw: str, schema: Any, key: str, *, is_text: bool | None) -> Any:
    """The value that a text is, which the format calls a string or none, or which the schema of the call tells."""
    kinds = kinds_of(_property(schema, key), schema)
    if is_text or (is_text is None and kinds == {"string"}):
        return raw
    try:
        value, end = value_at(raw, 0)
        if raw[end:].strip():
            raise ValueError(raw)
    except ValueError:
        return raw
    if is_text is not None:
        return value
    kind = json_type(value)
    same = {kind, "number"} if kind == "integer" else {kind}
    if not kinds:
        return raw if kind == "string" else value
    return raw if "string" in kinds and not same & kinds else value


def _property(schema: Any, key: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def kinds_of(part: Any, root: Any, depth: int = 0) -> set[str]:
    """The types that a schema allows, as far as it tells."""
    if not isinstance(part, Mapping) or depth > _MAX_STEPS:
        return set()
    if "$ref" in part:
        return kinds_of(_referenced(part["$ref"], root), root, depth + 1)
    if "type" in part:
        return {part["type"]} if isinstance(part["type"], str) else set(part["type"])
    values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
    kinds = {json_type(value) for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        for inner in part.get(key) or ():
            kinds |= kinds_of(inner, root, depth + 1)
    return kinds


def texts_of(part: Any, root: Any, depth: int = 0) -> list[list[Mapping[str, Any]]]:
    """The ways in which a schema allows a text: for each, the parts of the schema that it must fit together."""
    if not isinstance(part, Mapping) or depth > _MAX_STEPS:
        return [[]]
    if "string" not in (kinds_of({"type": part["type"]}, root) if "type" in part else {"string"}):
        return []
    choices = [[[part]], *(texts_of(inner, root, depth + 1) for inner in part.get("allOf") or ())]
    if "$ref" in part:
        choices.append(texts_of(_referenced(part["$ref"], root), root, depth + 1))
    for key in ("anyOf", "oneOf"):
        if key in part:
            choices.append([way for inner in part[key] for way in texts_of(inner, root, depth + 1)])
    if prod(map(len, choices)) > _MAX_WAYS:
        return [[]]
    return [[each for way in ways for each in way] for ways in product(*choices)]


def _referenced(reference: Any, root: Any) -> Any:
    """The part of a schema that a reference names; ``None`` if it is not in the schema."""
    target = root if str(reference).startswith("#/") else None
    for step in str(reference)[2:].split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return target
