"""Answers that fit a JSON schema, a regular expression or a grammar: a logits processor around llguidance."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessor

from cocoa_engine.errors import ConfigError
from cocoa_engine.optional import need

logger = logging.getLogger(__name__)

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
"""JSON on one line, as ``json.dumps`` writes it; keywords of a schema that cannot be enforced are logged."""

_tokenizers: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()  # each takes about a second to make
_guard = threading.Lock()


class GrammarProcessor(LogitsProcessor):
    """Bans every token after which the answer could no longer fit a grammar, and an end where the grammar has none.

    Every branch is held to it, since a processor is called with the tokens of the branch: the state of the matcher is
    that of the branch asked about last, and is rolled back to where another branch forked off. Where only one text can
    follow, it is written as the tokenizer would split it: no other token competes there, and log p is 0.

    The engine takes :meth:`for_prompt` of it for each request, so one object may be given to any number of them. In
    transformers' ``generate`` it serves one call.

    An answer that ``max_new_tokens`` or a stop text cuts off is only the beginning of a text that fits.

    Args:
        grammar: in llguidance's dialect of Lark; :func:`json_schema_grammar` and :func:`regex_grammar` make one.
        tokenizer: a fast tokenizer.
        eos_token_ids: tokens that end the text; by default the tokenizer's.

    Raises:
        ConfigError: the grammar is not one, or the tokenizer is not fast or has no end-of-sequence token.
        MissingExtraError: llguidance is not installed.
    """

    def __init__(self, grammar: str, tokenizer: Any, *, eos_token_ids: Collection[int] | None = None) -> None:
        llguidance = need("llguidance", extra="tools", what="a grammar")
        if eos_token_ids is None:
            own = getattr(tokenizer, "eos_token_id", None)
            eos_token_ids = [] if own is None else [own]
        self._ends = frozenset(eos_token_ids)
        self._tokenizer = _llguidance_tokenizer(tokenizer, self._ends)
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if failed:
            raise ConfigError(f"the grammar cannot be enforced: {messages[0]}")
        for message in messages:
            logger.warning("grammar: %s", message)
        self._start = llguidance.LLMatcher(self._tokenizer, grammar)
        self._matchers: dict[int, _Position] = {}
        self._prompt_length: int | None = None

    def for_prompt(self, prompt: Sequence[int]) -> GrammarProcessor:
        """One for a single request.

        Args:
            prompt: its token ids.
        """
        fresh = GrammarProcessor.__new__(GrammarProcessor)
        fresh._ends, fresh._tokenizer, fresh._start = self._ends, self._tokenizer, self._start
        fresh._matchers, fresh._prompt_length = {}, len(prompt)
        return fresh

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores, -inf where a token is banned.

        Args:
            input_ids: ``[B, t]``, prompt and answer so far.
            scores: ``[B, V]``.

        Raises:
            ConfigError: the answer so far does not fit the grammar: another processor let a banned token through.
        """
        if self._prompt_length is None:
            self._prompt_length = input_ids.shape[1]
        answers = input_ids[:, self._prompt_length :].tolist()
        return torch.stack([self._restricted(*row) for row in zip(range(len(answers)), answers, scores, strict=True)])

    def _restricted(self, number: int, answer: list[int], scores: Tensor) -> Tensor:
        """``[V]``, those of one row."""
        if not self._ends.isdisjoint(answer):  # its end is padded while other rows of the batch go on
            return scores
        position = self._matchers.get(number)
        if position is None:
            position = self._matchers[number] = _Position(self._start.deep_copy())
        position.move_to(answer)
        banned = torch.ones(scores.shape[-1], dtype=torch.bool)
        if forced := position.matcher.compute_ff_tokens():
            banned[forced[0]] = False
        else:
            bits = torch.frombuffer(bytearray(position.matcher.compute_bitmask()), dtype=torch.uint8)
            allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(-1)[: len(banned)]
            banned[: len(allowed)] = allowed == 0
        return scores.masked_fill(banned.to(scores.device), -torch.inf)


class _Position:
    """A matcher and the tokens it has consumed."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self._tokens: list[int] = []

    def move_to(self, tokens: list[int]) -> None:
        shared = 0
        for old, new in zip(self._tokens, tokens, strict=False):
            if old != new:
                break
            shared += 1
        if shared < len(self._tokens):
            self.matcher.rollback(len(self._tokens) - shared)
        shared += self.matcher.try_consume_tokens(tokens[shared:])
        self._tokens = tokens[:shared]
        if shared < len(tokens) or self.matcher.is_error():
            raise ConfigError(
                f"the answer does not fit the grammar from its token {shared} on; put the grammar last among the "
                f"logits processors. {self.matcher.get_error()}".rstrip()
            )


def constraint(
    tokenizer: Any,
    eos_token_ids: Collection[int],
    *,
    json_schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    grammar: str | None = None,
) -> GrammarProcessor:
    """A processor for exactly one of a JSON schema, a regular expression and a grammar.

    Raises:
        ConfigError: not exactly one is given, it is not valid, or the tokenizer is not fast.
        MissingExtraError: llguidance is not installed (the extra ``tools``).
    """
    grammars = [
        json_schema_grammar(json_schema) if json_schema is not None else None,
        regex_grammar(regex) if regex is not None else None,
        grammar,
    ]
    given = [each for each in grammars if each is not None]
    if len(given) != 1:
        raise ConfigError("constrain takes exactly one of json_schema, regex and grammar")
    return GrammarProcessor(given[0], tokenizer, eos_token_ids=eos_token_ids)


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of a JSON value that fits a schema, written on one line."""
    return f"start: {json_rule(schema)}"


def regex_grammar(pattern: str) -> str:
    """The grammar of a text that matches a regular expression (of Rust's regex crate) as a whole."""
    escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return f"start: /{escaped}/".replace("\n", "\\n")


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON that fits a schema, as a term of a rule of a grammar.

    Raises:
        ConfigError: the schema is not a mapping that can be written as JSON.
    """
    try:
        return "%json " + json.dumps({**schema, "x-guidance": _LAYOUT})
    except TypeError as error:
        raise ConfigError(f"a JSON schema must be a dict of plain JSON values: {error}") from None


def _llguidance_tokenizer(tokenizer: Any, ends: frozenset[int]) -> Any:
    """llguidance's view of a tokenizer, made once for each."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("a grammar needs a fast tokenizer (one of Hugging Face's tokenizers library).")
    if not ends:
        raise ConfigError("a grammar needs an end-of-sequence token, and the tokenizer has none: set its eos_token.")
    key = (ends, len(tokenizer))
    with _guard:
        made = _tokenizers.setdefault(tokenizer, {})
        if key not in made:
            from_tokenizer = need("llguidance.hf", extra="tools", what="a grammar").from_tokenizer
            made[key] = from_tokenizer(tokenizer, eos_token=sorted(ends))
        return made[key]
