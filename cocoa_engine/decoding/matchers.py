"""Matchers of a grammar, and grammars of JSON schemas."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from cocoa_engine.arguments import of_type
from cocoa_engine.confined import FORKS, loaded, run
from cocoa_engine.errors import ConfigError, need, shortened

MOST_STATES = 256
"""Rows of requests whose place in a grammar is kept. The answers of others are read from their beginning again."""

_compiled: "dict[int, tuple[Any, Any, dict[tuple[int, int], _MatcherState]]]" = {}
"""By grammar: the tokenizer, the matcher at the beginning of an answer, and the matchers of requests and rows."""


def _llguidance() -> Any:
    return need("llguidance", extra="tools", what="a grammar")


def load_tokenizer(tokenizer: str, ends: list[int]) -> Any:
    """llguidance's version of a tokenizer, from the JSON of the tokenizers library. Building it takes about a second.

    Raises:
        ConfigError: no grammar can be enforced with it, such as for an end token that it does not have.
    """
    llguidance = _llguidance()
    try:
        return llguidance.LLTokenizer(tokenizer, eos_token=ends)
    except Exception as error:
        raise ConfigError(f"a grammar cannot be enforced with this tokenizer: {error}") from error


def validated(grammar: str) -> list[str]:
    """What llguidance warns of in a grammar, without a tokenizer.

    Raises:
        ConfigError: it is invalid, or nothing matches it.
    """
    failed, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise _invalid(messages[0])
    return [shortened(message, 300) for message in messages]


def compile_grammar(number: int, tokenizer: object, grammar: str) -> list[str]:
    """Compile a grammar, and return what llguidance warns of.

    Args:
        number: its number in other calls.
        tokenizer: the key of :func:`load_tokenizer`.

    Raises:
        ConfigError: it is invalid, or nothing matches it.
    """
    made = loaded(tokenizer)
    start = _llguidance().LLMatcher(made, grammar, log_level=0)
    if start.is_error():
        raise _invalid(start.get_error())
    _allowed_tokens(start.deep_copy())
    if FORKS:
        _compiled.clear()  # a worker has one grammar at a time
    _compiled[number] = made, start, {}
    return [shortened(message, 300) for message in start.get_grammar_warnings()]


def next_tokens(number: int, request: int, answers: Mapping[int, list[int]]) -> list[int | bytes]:
    """What may follow some answers: the only token, or a bit for each token of the tokenizer, and a few more.

    Args:
        number, request: the numbers of the grammar and of the request.
        answers: the token ids of its answers, by their row in the batch.

    Raises:
        ConfigError: an answer does not match the grammar, or no text that matches begins with it.
    """
    tokenizer, start, states = _compiled[number]
    following: list[int | bytes] = []
    for row, answer in answers.items():
        state = states.pop((request, row), None) or _MatcherState(start)
        state.move(answer)
        forced = state.matcher.compute_ff_tokens()
        if forced and not state.matcher.validate_tokens(forced[:1]):  # a special token, whose text must follow
            forced = tokenizer.greedy_tokenize(state.matcher.compute_ff_bytes().decode(errors="ignore"))
        following.append(forced[0] if forced else _allowed_tokens(state.matcher))
        states[request, row] = state  # the last one now
        for oldest in [*states][:-MOST_STATES]:
            del states[oldest]
    return following


def forget(number: int) -> None:
    """Free a grammar, where it was compiled in this process."""
    _compiled.pop(number, None)


class _MatcherState:
    """A matcher that is moved from branch to branch.

    llguidance's own ``rollback`` keeps what a matcher computed ahead on the branch that it leaves, and mixes it into
    the next one. A take-back therefore goes on with a copy of a second matcher, which stays at the last branch point
    and computes nothing ahead. A copy takes microseconds.
    """

    def __init__(self, start: Any) -> None:
        self.matcher = start.deep_copy()
        self._tokens: list[int] = []  # that it has consumed
        self._start = start
        self._branch_point, self._branch_length = start.deep_copy(), 0

    def move(self, answer: list[int]) -> None:
        """Return to what the answer has in common with the one before, then consume the rest of it."""
        shared = len(self._tokens)
        if answer[:shared] != self._tokens:
            pairs = enumerate(zip(self._tokens, answer, strict=False))
            shared = next((at for at, (old, new) in pairs if old != new), len(answer))
        if shared < len(self._tokens):
            if shared < self._branch_length:
                self._branch_point, self._branch_length = self._start.deep_copy(), 0
            self._branch_point.try_consume_tokens(self._tokens[self._branch_length : shared])
            self.matcher, self._branch_length = self._branch_point.deep_copy(), shared
        consumed = shared + self.matcher.try_consume_tokens(answer[shared:])
        self._tokens = answer
        if consumed < len(answer) or self.matcher.is_error():
            _require_simple(self.matcher)
            raise ConfigError(
                f"the answer does not fit the grammar from its token {consumed} on; put the grammar last among the "
                f"logits processors. {_reason(self.matcher)}".rstrip()
            )


def _allowed_tokens(matcher: Any) -> bytes:
    """Which tokens a matcher allows next.

    If no text can continue the answer, llguidance would allow its end, as if it matched. This is a ConfigError.
    """
    bits: bytes = matcher.compute_bitmask()
    if matcher.is_error():
        _require_simple(matcher)
        raise ConfigError(
            f"no text can match the grammar from here on ({_reason(matcher)}); does a $ref or a rule in it lead "
            "only to itself?"
        )
    return bits


def _require_simple(matcher: Any) -> None:
    """Raise an error if a matcher has reached one of llguidance's limits."""
    if matcher.stop_reason() in ("ParserTooComplex", "LexerTooComplex"):
        raise ConfigError(f"the grammar is too complex to continue the answer; simplify it. {_reason(matcher)}")


def _reason(matcher: Any) -> str:
    """Why a matcher has failed, without its state and its grammar; empty if it has not."""
    return shortened(str(matcher.get_error()).partition("\n")[0], 200)


def _invalid(message: str) -> ConfigError:
    """The error of a grammar that llguidance refuses. Its message ends with the source, which is left out."""
    reason = re.split(r"\n *\d+ \| ", message)[0].rpartition("failed to compile JSON schema: ")[2]
    lines = [line.strip() for line in reason.splitlines() if line.strip(" ^")]
    return ConfigError(f"the grammar cannot be enforced: {' '.join(lines)}")


USES = ("llguidance",)  # the optional packages that its functions import in workers
MAX_CHARS = 2**20  # of a grammar or a schema
SCHEMA = "the JSON schema"  # in messages

_SMALL = 20_000  # characters: the references of a larger schema may take seconds to follow
_TOO_DEEP = "the JSON schema, or the references in it, are nested too deeply."
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
"""JSON on one line, as ``json.dumps`` writes it. Keywords that cannot be enforced are left out of the grammar."""
_MOST = 2**62  # llguidance computes limits in 64 bits; where they overflow, it refuses every number or ends the process
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of a JSON value, on one line, that matches a schema; errors as for :func:`json_rule`."""
    return f"start: {json_rule(schema)}"


def unenforced(schema: Mapping[str, Any]) -> list[str]:
    """What of a JSON schema no grammar enforces, in llguidance's words, which name the keyword.

    An unknown format is not listed: formats are annotations.

    Raises:
        ConfigError: the schema is not a JSON schema, no value fits it, or it takes too much time or memory.
        MissingExtraError: llguidance is not installed (the extra ``tools``).
    """
    return run(unenforced_here, json.loads(written(schema)), what=SCHEMA)


def unenforced_here(schema: Mapping[str, Any]) -> list[str]:
    """Like :func:`unenforced`, in this process and without limits. For code that a worker runs."""
    warnings = validated(f"start: {_json_rule(schema)}")
    wide = [f"{key}: {part[key]} is too far from zero" for part, key in _wide_limits(schema)]
    return [*wide, *(warning for warning in warnings if not warning.startswith("Unknown format"))]


def regex_grammar(pattern: str) -> str:
    """The grammar of a text that matches, as a whole, a regular expression of Rust's regex crate."""
    of_type(pattern, str, "regex")
    escaped = re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], pattern, flags=re.DOTALL)
    return f"start: /{escaped}/".replace("\n", "\\n")


def json_rule(schema: Mapping[str, Any]) -> str:
    """A term for use in grammar rules: a JSON value that matches a schema, but for what is :func:`unenforced`.

    Raises:
        ConfigError: the schema is not a mapping that can be written as JSON, is too large, or has a value that a
            grammar rounds.
    """
    if len(written(schema)) < _SMALL:
        return _json_rule(schema)
    return run(_json_rule, schema, what=SCHEMA)


def written(schema: Mapping[str, Any]) -> str:
    """A schema as JSON; errors as for :func:`json_rule`. This takes little time, whatever is in it."""
    try:
        text = require_size(json.dumps({**schema}, allow_nan=False), SCHEMA)
        exact = ((key, value) for part, key in _keywords(schema, "const", "enum") for value in _nodes(part[key]))
        inexact = next((f"{key} has {value}" for key, value in exact if _is_number(value) and abs(value) > 2**53), None)
    except (TypeError, ValueError) as error:  # ValueError: the schema contains itself
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"a JSON schema must be a dict of plain JSON values: {error}") from None
    except RecursionError:
        raise ConfigError(_TOO_DEEP) from None
    if inexact is not None:
        raise ConfigError(f"the JSON schema cannot be enforced: {inexact}, which is beyond 2**53; make it a string")
    return text


def _json_rule(schema: Mapping[str, Any]) -> str:
    plain = json.loads(written(schema))
    try:
        for part, key in [*_wide_limits(plain)]:
            del part[key]
        finite = _without_endless(plain)
    except RecursionError:
        raise ConfigError(_TOO_DEEP) from None
    except (AttributeError, TypeError, ValueError):  # a keyword has a value of a wrong type, which llguidance names
        finite = plain
    if finite is False:
        raise ConfigError("no value fits the JSON schema: a $ref in it leads only to itself")
    return "%json " + json.dumps({**finite, "x-guidance": _LAYOUT})


def require_size(text: str, what: str) -> str:
    """The text of a grammar or a schema; :class:`.ConfigError` if it is too large to be compiled."""
    if len(text) > MAX_CHARS:
        raise ConfigError(f"{what} has {len(text)} characters, and the limit is {MAX_CHARS}; simplify it")
    return text


def _without_endless(schema: dict[str, Any]) -> Any:
    """The schema with `False` for each reference that leads only to itself, which no finite value fits.

    A grammar would allow the beginning of such a value, and nothing after it.
    """
    references = (part["$ref"] for part, _ in _keywords(schema, "$ref"))
    targets = {name: _target(schema, name) for name in references if isinstance(name, str) and name.startswith("#")}
    endless = {*targets}
    while finite := {reference for reference in endless if _has_value(targets[reference], endless)}:
        endless -= finite
    return _replaced(schema, endless) if endless else schema


def _nodes(node: Any) -> Iterator[Any]:
    """A JSON value and all values inside it."""
    yield node
    for inner in node.values() if isinstance(node, Mapping) else node if isinstance(node, (list, tuple)) else ():
        yield from _nodes(inner)


def _wide_limits(schema: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The parts of a schema, and their keywords, that limit numbers beyond what llguidance can compute."""
    for part, key in _keywords(schema, *_LOWER, *_UPPER):
        if _is_number(part[key]) and (part[key] < -_MOST if key in _LOWER else part[key] > _MOST):
            yield part, key


def _keywords(schema: Mapping[str, Any], *keys: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The parts of a schema that have some keywords, and the keyword."""
    return ((part, key) for part in _nodes(schema) if isinstance(part, dict) for key in keys if key in part)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _target(schema: Any, reference: str) -> Any:
    """The schema that a JSON pointer names; `True` for a name of another kind."""
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        try:
            schema = schema[int(key) if isinstance(schema, list) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            return True
    return schema if reference == "#" or "/" in reference else True


def _has_value(node: Any, endless: Collection[str]) -> bool:
    """Whether a finite value may fit a schema if none fits the references in ``endless``."""
    if not isinstance(node, dict):
        return node is not False
    parts = [
        node["properties"].get(name)
        for name in node.get("required", ())
        if node.get("type") == "object" and isinstance(node.get("properties"), dict)
    ]
    if node.get("type") == "array" and node.get("minItems", 0) > 0:
        least, first = node["minItems"], node.get("prefixItems", [])
        parts += [*first[:least], *([node.get("items")] if least > len(first) else [])]
    return (
        node.get("$ref") not in endless
        and all(_has_value(part, endless) for part in [*parts, *node.get("allOf", ())])
        and all(any(_has_value(part, endless) for part in node[key]) for key in ("anyOf", "oneOf") if node.get(key))
    )


def _replaced(node: Any, endless: Collection[str]) -> Any:
    if isinstance(node, list):
        return [_replaced(inner, endless) for inner in node]
    if not isinstance(node, dict):
        return node
    if node.get("$ref") in endless:
        return False
    data = ("enum", "const", "default", "examples")
    return {key: inner if key in data else _replaced(inner, endless) for key, inner in node.items()}
