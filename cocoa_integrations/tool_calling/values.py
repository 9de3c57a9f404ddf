"""Values as models write them in calls: as JSON, as Python does, or with quotes of their own."""

import json
import re
from collections.abc import Mapping
from functools import cache
from itertools import product
from math import prod
from typing import Any

from cocoa_integrations.tool_calling.call_format import json_type
from cocoa_integrations.tool_calling.json_text import DECODER

_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_MAX_DEPTH = 200
_MAX_STEPS = 8  # of references, and of parts inside of parts
_MAX_WAYS = 64


@cache
def _token(quote: str, closers: str) -> re.Pattern[str]:
    """A part of a value, by its kind. Quotes in a text that have no escapes do not stand before ``closers``."""
    own = f"{re.escape(quote)}(?P<own>.*?){re.escape(quote)}|" if quote else ""
    texts = rf"""(?P<double>"(?:[^"\\]|\\.)*")|'(?P<single>(?:[^\\]|\\.)*?)'(?=\s*[{closers}])"""
    others = r"""(?P<sign>[\[\]{},:])|(?P<key>[^\[\]{},:"']+?)(?=\s*:)|(?P<word>[-+.\w]+)"""
    return re.compile(rf"\s*(?:{own}{texts}|{others})", re.DOTALL)


def value_at(text: str, at: int, quote: str = "") -> tuple[Any, int]:
    """The value at an offset and its end. ``quote`` are further quotes, between which a string has no escapes.

    A ``ValueError`` says that there is none.
    """
    written, depth = list[str](), 0  # as JSON
    while match := _token(quote, r",\]}:" if depth else ",)").match(text, at):
        at, kind = match.end(), str(match.lastgroup)
        part = match[kind]
        if kind == "word":
            part = _WORDS.get(part.lower(), part)
        elif kind == "single":
            part = json.dumps(_ESCAPE.sub(_unescaped, part))
        elif kind in ("own", "key"):
            part = json.dumps(part)
        elif part in ("]", "}") and written[-1:] == [","]:
            written.pop()
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(part, 0)
        written.append(part)
        if depth == 0:
            return DECODER.decode("".join(written)), at
        if depth > _MAX_DEPTH:
            break
    raise ValueError("there is no complete value")


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    return chr(int(code, 16)) if code else _ESCAPED.get(match[4], match[4] if match[4] in "'\"\\" else match[0])


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
