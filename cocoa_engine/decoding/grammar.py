"""Constrains answers to a JSON schema, a regular expression or a grammar, with a logits processor around llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from cocoa_engine.arguments import of_type
from cocoa_engine.errors import ConfigError, safe_cause
from cocoa_engine.forks import free_in_child
from cocoa_engine.logs import safe_logger
from cocoa_engine.optional import need
from cocoa_engine.safe_text import shortened

logger = safe_logger(__name__)

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
"""JSON on one line, as ``json.dumps`` writes it. Keywords that cannot be enforced are left out of the grammar."""

_DEEPEST = 200
"""References inside each other. llguidance overflows its stack at some more, which ends the process."""
_MOST = 2**62
"""llguidance computes limits in 64 bits. Where they overflow, it refuses every number or ends the process."""
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

_tokenizers: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()  # building one takes about a second
_guard = free_in_child(threading.Lock())


class GrammarProcessor(LogitsProcessor):
    """A logits processor that bans every token after which the answer could no longer match a grammar.

    An end-of-sequence token is allowed only where the grammar may end. All branches are constrained, because a
    processor is called with the tokens of each branch.
    Text that the grammar forces is split into tokens as by the tokenizer, and these have log-probability 0.

    The engine calls :meth:`for_prompt` for each request, so one processor can serve any number of requests. In
    transformers' ``generate`` a processor serves one call only.

    An answer cut off by ``max_new_tokens`` or a stop text is only the beginning of a matching text.

    Args:
        grammar: a grammar in llguidance's dialect of Lark, such as from :func:`json_schema_grammar` or
            :func:`regex_grammar`.
        tokenizer: a fast tokenizer.
        eos_token_ids: tokens that end the text; by default the tokenizer's.

    Attributes:
        warnings: what llguidance warns of in the grammar.

    Raises:
        ConfigError: the grammar is invalid, nothing matches it, or the tokenizer is not fast or has no token that ends
            a text.
        MissingExtraError: llguidance is not installed.
    """

    def __init__(
        self, grammar: str, tokenizer: PreTrainedTokenizerBase, *, eos_token_ids: Collection[int] | None = None
    ) -> None:
        llguidance = need("llguidance", extra="tools", what="a grammar")
        if eos_token_ids is None:
            own = getattr(tokenizer, "eos_token_id", None)
            eos_token_ids = [] if own is None else [own]
        self._ends = frozenset(eos_token_ids)
        self._tokenizer = _llguidance_tokenizer(tokenizer, self._ends)
        try:
            of_type(grammar, str, "grammar").encode()
        except UnicodeEncodeError as error:
            half = ascii(grammar[error.start])
            raise ConfigError(f"the grammar contains {half}, a lone surrogate, which is not valid Unicode.") from None
        self.warnings = _validated(grammar, self._tokenizer)
        self._start = llguidance.LLMatcher(self._tokenizer, grammar)
        _allowed_tokens(self._start.deep_copy())
        self._matchers: dict[int, _MatcherState] = {}
        self._prompt_length: int | None = None

    def for_prompt(self, prompt: Sequence[int]) -> GrammarProcessor:
        """A processor with the same grammar for a single request.

        Args:
            prompt: token ids of the request's prompt.
        """
        fresh = GrammarProcessor.__new__(GrammarProcessor)
        fresh._ends, fresh._tokenizer, fresh._start = self._ends, self._tokenizer, self._start
        fresh._matchers, fresh._prompt_length = {}, len(prompt)
        return fresh

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Set the scores of banned tokens to -inf.

        Args:
            input_ids: ``[B, t]``, the prompt and the answer so far.
            scores: ``[B, V]``.

        Returns:
            A new tensor ``[B, V]``.

        Raises:
            ConfigError: the answer so far does not match the grammar, because a processor after this one allowed a
                banned token; or no text that matches the grammar begins with it.
        """
        if self._prompt_length is None:
            self._prompt_length = input_ids.shape[1]
        answers = input_ids[:, self._prompt_length :].tolist()
        return torch.stack([self._restricted(*row) for row in zip(range(len(answers)), answers, scores, strict=True)])

    def _restricted(self, number: int, answer: list[int], scores: Tensor) -> Tensor:
        """The restricted scores ``[V]`` of one row of the batch."""
        if not self._ends.isdisjoint(answer):  # this row has ended; `generate` pads it while other rows continue
            return scores
        position = self._matchers.get(number)
        if position is None:
            position = self._matchers[number] = _MatcherState(self._start)
        position.move_to(answer)
        banned = torch.ones(scores.shape[-1], dtype=torch.bool)
        if forced := position.matcher.compute_ff_tokens():
            if forced[0] >= len(banned):
                raise ConfigError(
                    f"the grammar needs token {forced[0]}, which is outside the model's vocabulary of {len(banned)}; "
                    "load the model's own tokenizer."
                )
            banned[forced[0]] = False
        else:
            allowed = _allowed_tokens(position.matcher)[: len(banned)]
            banned[: len(allowed)] = allowed == 0
            if banned.all():
                raise ConfigError(
                    f"the grammar allows only tokens outside the model's vocabulary of {len(banned)} here, such as an "
                    "end-of-sequence token; load the model's own tokenizer."
                )
        return scores.masked_fill(banned.to(scores.device), -torch.inf)


def _validated(grammar: str, tokenizer: Any = None) -> list[str]:
    """What llguidance warns of in a grammar.

    Raises:
        ConfigError: it is invalid, or nothing matches it.
    """
    matcher = need("llguidance", extra="tools", what="a grammar").LLMatcher
    failed, messages = matcher.validate_grammar_with_warnings(grammar, tokenizer)
    if failed:  # the source of the grammar, with line numbers, ends the message
        reason = re.split(r"\n *\d+ \| ", messages[0])[0].rpartition("failed to compile JSON schema: ")[2]
        lines = [line.strip() for line in reason.splitlines() if line.strip(" ^")]
        raise ConfigError(f"the grammar cannot be enforced: {' '.join(lines)}")
    return [shortened(message, 300) for message in messages]


def _allowed_tokens(matcher: Any) -> Tensor:
    """Which tokens a matcher allows next: 0 or 1 for each token of the tokenizer, and for a few more.

    Raises:
        ConfigError: no text can continue the answer. llguidance would allow the end of the answer, as if it matched.
    """
    bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
    if matcher.is_error():
        raise ConfigError(
            f"no text can match the grammar from here on ({_reason(matcher)}); does a $ref or a rule in it lead "
            "only to itself?"
        )
    return (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(-1)


def _reason(matcher: Any) -> str:
    """Why a matcher has failed, without its state and its grammar; empty if it has not."""
    return shortened(str(matcher.get_error()).partition("\n")[0], 200)


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

    def move_to(self, tokens: list[int]) -> None:
        """Return to the common prefix with ``tokens``, then consume the rest of them."""
        pairs = enumerate(zip(self._tokens, tokens, strict=False))
        shared = next((at for at, (old, new) in pairs if old != new), min(len(self._tokens), len(tokens)))
        if shared < len(self._tokens):
            if shared < self._branch_length:
                self._branch_point, self._branch_length = self._start.deep_copy(), 0
            self._branch_point.try_consume_tokens(tokens[self._branch_length : shared])
            self.matcher, self._branch_length = self._branch_point.deep_copy(), shared
        shared += self.matcher.try_consume_tokens(tokens[shared:])
        self._tokens = tokens[:shared]
        if shared < len(tokens) or self.matcher.is_error():
            raise ConfigError(
                f"the answer does not fit the grammar from its token {shared} on; put the grammar last among the "
                f"logits processors. {_reason(self.matcher)}".rstrip()
            )


def constraint(
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Collection[int],
    *,
    json_schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    grammar: str | None = None,
) -> GrammarProcessor:
    """A processor for exactly one of a JSON schema, a regular expression and a grammar.

    Args:
        tokenizer: a fast tokenizer.
        eos_token_ids: tokens that end the text.
        json_schema: a JSON schema; the answer is JSON on one line.
        regex: a regular expression of Rust's regex crate that the whole answer matches.
        grammar: a grammar in llguidance's dialect of Lark.

    Raises:
        ConfigError: none or several are given, the given one is invalid, the schema has a keyword that no grammar
            enforces, or the tokenizer is not fast.
        MissingExtraError: llguidance is not installed (the extra ``tools``).
    """
    if json_schema is not None and (left_out := unenforced(json_schema)):
        raise ConfigError(
            f"the JSON schema cannot be enforced: {'; '.join(left_out)}. Take this out of the schema, and check the "
            "finished answer for it"
        )
    grammars = [
        json_schema_grammar(json_schema) if json_schema is not None else None,
        regex_grammar(regex) if regex is not None else None,
        grammar,
    ]
    given = [each for each in grammars if each is not None]
    if len(given) != 1:
        raise ConfigError("constrain takes exactly one of json_schema, regex and grammar")
    made = GrammarProcessor(given[0], tokenizer, eos_token_ids=eos_token_ids)
    if json_schema is not None:  # a grammar may be of a schema that a stranger sent to a server, whose log has no texts
        for message in made.warnings:
            logger.warning("grammar: %s", message)
    return made


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of a JSON value, on one line, that matches a schema.

    Raises:
        ConfigError: the schema is not a mapping that can be written as JSON.
    """
    return f"start: {json_rule(schema)}"


def unenforced(schema: Mapping[str, Any]) -> list[str]:
    """What of a JSON schema no grammar enforces, in llguidance's words, which name the keyword.

    An unknown format is not listed: formats are annotations.

    Raises:
        ConfigError: the schema is not a JSON schema, or no value fits it.
        MissingExtraError: llguidance is not installed (the extra ``tools``).
    """
    warnings = _validated(json_schema_grammar(schema))
    wide = [f"{key}: {part[key]} is too far from zero" for part, key in _wide_limits(schema)]
    return [*wide, *(each for each in warnings if not each.startswith("Unknown format"))]


def regex_grammar(pattern: str) -> str:
    """The grammar of a text that matches, as a whole, a regular expression of Rust's regex crate.

    Raises:
        ConfigError: the expression is not a text.
    """
    of_type(pattern, str, "regex")
    escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return f"start: /{escaped}/".replace("\n", "\\n")


def json_rule(schema: Mapping[str, Any]) -> str:
    """A term for use in grammar rules: a JSON value that matches a schema, but for what is :func:`unenforced`.

    Raises:
        ConfigError: the schema is not a mapping that can be written as JSON, or has a value that a grammar rounds.
    """
    try:
        plain = json.loads(json.dumps({**schema}, allow_nan=False))
        inexact = next(_inexact(plain), None)
        for part, key in [*_wide_limits(plain)]:
            del part[key]
        finite = _without_endless(plain)
    except (TypeError, ValueError) as error:  # ValueError: the schema contains itself
        raise ConfigError(f"a JSON schema must be a dict of plain JSON values: {error}") from None
    except RecursionError:
        raise ConfigError("the JSON schema, or the references in it, are nested too deeply.") from None
    if inexact is not None:
        raise ConfigError(f"the JSON schema cannot be enforced: {inexact}, which is beyond 2**53; make it a string")
    if finite is False:
        raise ConfigError("no value fits the JSON schema: a $ref in it leads only to itself")
    return "%json " + json.dumps({**finite, "x-guidance": _LAYOUT})


def _without_endless(schema: dict[str, Any]) -> Any:
    """The schema with `False` for each reference that leads only to itself, which no finite value fits.

    A grammar would allow the beginning of such a value, and nothing after it.
    """
    references = [node.get("$ref") for node in _nodes(schema) if isinstance(node, dict)]
    targets = {each: _target(schema, each) for each in references if isinstance(each, str) and each.startswith("#")}
    followed: set[str] = set()

    def follow(part: Any, depth: int) -> None:
        if depth > _DEEPEST:
            raise RecursionError
        for node in _nodes(part):
            reference = node.get("$ref") if isinstance(node, dict) else None
            if isinstance(reference, str) and reference in targets and reference not in followed:
                followed.add(reference)
                follow(targets[reference], depth + 1)

    follow({key: part for key, part in schema.items() if key not in ("$defs", "definitions")}, 0)
    endless = {*targets}
    while finite := {reference for reference in endless if _has_value(targets[reference], endless)}:
        endless -= finite
    return _replaced(schema, endless) if endless else schema


def _nodes(node: Any) -> Iterator[Any]:
    """A JSON value and all values inside it."""
    yield node
    for inner in node.values() if isinstance(node, Mapping) else node if isinstance(node, (list, tuple)) else ():
        yield from _nodes(inner)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _inexact(schema: Mapping[str, Any]) -> Iterator[str]:
    """The values of a schema that a grammar would round."""
    for part in _nodes(schema):
        for key in ("const", "enum") if isinstance(part, dict) else ():
            yield from (f"{key} has {each}" for each in _nodes(part.get(key)) if _is_number(each) and abs(each) > 2**53)


def _wide_limits(schema: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The parts of a schema, and their keywords, that limit numbers beyond what llguidance can compute."""
    for part in _nodes(schema):
        for key in (*_LOWER, *_UPPER) if isinstance(part, dict) else ():
            value = part.get(key)
            if _is_number(value) and (value < -_MOST if key in _LOWER else value > _MOST):
                yield part, key


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


def _llguidance_tokenizer(tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]) -> Any:
    """llguidance's version of a tokenizer, built once for each tokenizer and set of end tokens."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("a grammar needs a fast tokenizer (one of Hugging Face's tokenizers library).")
    if not ends:
        raise ConfigError("a grammar needs an end-of-sequence token, and the tokenizer has none: set its eos_token.")
    key = (ends, len(tokenizer))
    with _guard:
        made = _tokenizers.setdefault(tokenizer, {})
        if key not in made:
            from_tokenizer = need("llguidance.hf", extra="tools", what="a grammar").from_tokenizer
            try:
                made[key] = from_tokenizer(tokenizer, eos_token=sorted(ends))
            except Exception as error:  # such as of an end token that the tokenizer does not have
                raise ConfigError(f"a grammar cannot be enforced with this tokenizer: {error}") from safe_cause(error)
        return made[key]
