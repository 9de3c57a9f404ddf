"""llguidance's matchers, which say what tokens a grammar allows next.

Workers of :mod:`cocoa_engine.confined` run this module, so it imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from cocoa_engine.confined import FORKS, loaded
from cocoa_engine.errors import ConfigError, safe_cause
from cocoa_engine.optional import need
from cocoa_engine.safe_text import shortened


class Move(NamedTuple):
    """Where an answer goes.

    Attributes:
        row: the number of the answer in its batch.
        kept: the number of tokens that it has in common with the answer at the row's last move.
        tokens: those after them.
    """

    row: int
    kept: int
    tokens: list[int]


_compiled: dict[int, tuple[Any, dict[tuple[int, int], _MatcherState]]] = {}
"""By grammar: the matcher at the beginning of an answer, and the matchers of requests and rows."""


def load_tokenizer(tokenizer: str, ends: list[int]) -> Any:
    """llguidance's version of a tokenizer. Building it takes about a second.

    Args:
        tokenizer: the JSON of the tokenizers library.
        ends: tokens that end the text.

    Raises:
        ConfigError: no grammar can be enforced with it, such as for an end token that it does not have.
    """
    llguidance = need("llguidance", extra="tools", what="a grammar")
    try:
        return llguidance.LLTokenizer(tokenizer, eos_token=ends)
    except Exception as error:
        raise ConfigError(f"a grammar cannot be enforced with this tokenizer: {error}") from safe_cause(error)


def validated(grammar: str) -> list[str]:
    """What llguidance warns of in a grammar, without a tokenizer.

    Raises:
        ConfigError: it is invalid, or nothing matches it.
    """
    matcher = need("llguidance", extra="tools", what="a grammar").LLMatcher
    failed, messages = matcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise _invalid(messages[0])
    return [shortened(message, 300) for message in messages]


def compile_grammar(number: int, tokenizer: object, grammar: str) -> list[str]:
    """Compile a grammar.

    Args:
        number: its number in other calls.
        tokenizer: the key of :func:`load_tokenizer`.
        grammar: the grammar.

    Returns:
        What llguidance warns of.

    Raises:
        ConfigError: it is invalid, or nothing matches it.
    """
    llguidance = need("llguidance", extra="tools", what="a grammar")
    start = llguidance.LLMatcher(loaded(tokenizer), grammar, log_level=0)
    if start.is_error():
        raise _invalid(start.get_error())
    _allowed_tokens(start.deep_copy())
    if FORKS:
        _compiled.clear()  # a worker has one grammar at a time
    _compiled[number] = start, {}
    return [shortened(message, 300) for message in start.get_grammar_warnings()]


def next_tokens(number: int, request: int, moves: Sequence[Move], over: Collection[int]) -> list[int | bytes]:
    """What may follow some answers.

    Args:
        number: that of the grammar.
        request: the number of the request.
        moves: where its answers go.
        over: the numbers of requests that have ended.

    Returns:
        For each answer the only token that may follow, or a bit for each token of the tokenizer, and a few more.

    Raises:
        ConfigError: an answer does not match the grammar, or no text that matches begins with it.
    """
    start, states = _compiled[number]
    for key in [key for key in states if key[0] in over]:
        del states[key]
    following: list[int | bytes] = []
    for row, kept, tokens in moves:
        state = states.get((request, row))
        if state is None:
            state = states[request, row] = _MatcherState(start)
        state.move(kept, tokens)
        forced = state.matcher.compute_ff_tokens()
        following.append(forced[0] if forced else _allowed_tokens(state.matcher))
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

    def move(self, kept: int, tokens: list[int]) -> None:
        """Return to the first ``kept`` tokens, then consume ``tokens``."""
        if kept < len(self._tokens):
            if kept < self._branch_length:
                self._branch_point, self._branch_length = self._start.deep_copy(), 0
            self._branch_point.try_consume_tokens(self._tokens[self._branch_length : kept])
            self.matcher, self._branch_length = self._branch_point.deep_copy(), kept
            del self._tokens[kept:]
        consumed = self.matcher.try_consume_tokens(tokens)
        self._tokens += tokens
        if consumed < len(tokens) or self.matcher.is_error():
            _require_simple(self.matcher)
            raise ConfigError(
                f"the answer does not fit the grammar from its token {kept + consumed} on; put the grammar last among "
                f"the logits processors. {_reason(self.matcher)}".rstrip()
            )


def _allowed_tokens(matcher: Any) -> bytes:
    """Which tokens a matcher allows next.

    Raises:
        ConfigError: no text can continue the answer. llguidance would allow the end of the answer, as if it matched.
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
