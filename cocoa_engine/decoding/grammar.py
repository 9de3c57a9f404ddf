"""Constrains answers to a JSON schema, a regular expression or a grammar, with a logits processor around llguidance.

llguidance runs in worker processes: grammars are compiled there, and say there what tokens may follow an answer. So
limits of time and memory hold for every grammar, and what overflows llguidance's stack ends no more than a worker.
"""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from cocoa_engine.arguments import of_type
from cocoa_engine.confined import CPU_SECONDS, FORKS, Budget, Load, Worker, current_budget, give_back, started
from cocoa_engine.decoding import matchers
from cocoa_engine.decoding.matchers import json_rule, json_schema_grammar, regex_grammar, require_size, unenforced
from cocoa_engine.errors import ConfigError, need, safe_logger
from cocoa_engine.interruptions import Cancellation, current_cancellation, free_in_child

__all__ = ["GrammarProcessor", "constraint", "json_rule", "json_schema_grammar", "regex_grammar", "unenforced"]

logger = safe_logger(__name__)

MOST_COMPILED = 128  # grammars that are kept compiled, each in a process; earlier ones are compiled again when used
MASK_SECONDS = 0.01  # processor time of each answer for each token, on average; it takes less than a tenth of that

_tokenizers: weakref.WeakKeyDictionary[Any, dict[Any, Load]] = weakref.WeakKeyDictionary()
_compiled: list[weakref.ref[_Grammar]] = []
_numbers = itertools.count()
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
        ConfigError: the grammar is invalid, takes too much time or memory, nothing matches it, or the tokenizer is not
            fast or has no token that ends a text.
        MissingExtraError: llguidance is not installed.
        RequestCancelledError: the calling code was cancelled; see :meth:`Cancellation.run`.
    """

    def __init__(
        self, grammar: str, tokenizer: PreTrainedTokenizerBase, *, eos_token_ids: Collection[int] | None = None
    ) -> None:
        need("llguidance", extra="tools", what="a grammar")
        if eos_token_ids is None:
            own = getattr(tokenizer, "eos_token_id", None)
            eos_token_ids = [] if own is None else [own]
        self._ends = frozenset(eos_token_ids)
        load = _load_of(tokenizer, self._ends)
        try:
            of_type(grammar, str, "grammar").encode()
        except UnicodeEncodeError as error:
            half = ascii(grammar[error.start])
            raise ConfigError(f"the grammar contains {half}, a lone surrogate, which is not valid Unicode.") from None
        self._grammar = _Grammar(require_size(grammar, "the grammar"), tokenizer, load)
        self.warnings = self._grammar.compile()
        self._begin(None, None)

    def _begin(self, prompt_length: int | None, cancellation: Cancellation | None) -> None:
        self._prompt_length, self._cancellation = prompt_length, cancellation
        self._budget = current_budget()
        self._request = next(_numbers)

    def for_prompt(self, prompt: Sequence[int]) -> GrammarProcessor:
        """A processor with the same grammar for a single request, with the token ids of its prompt."""
        other = GrammarProcessor.__new__(GrammarProcessor)
        other._ends, other._grammar, other.warnings = self._ends, self._grammar, self.warnings
        other._begin(len(prompt), current_cancellation())
        return other

    def __deepcopy__(self, memo: object = None) -> GrammarProcessor:
        other = self.for_prompt([])
        other._prompt_length, other._cancellation = self._prompt_length, self._cancellation
        return other

    __copy__ = __deepcopy__

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GrammarProcessor cannot be pickled: make it where it is used.")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """A copy of the scores, ``[B, V]``, with -inf for banned tokens. ``input_ids``: ``[B, t]``, prompt and answer.

        Raises:
            ConfigError: the answer so far does not match the grammar, because a processor after this one allowed a
                banned token; no text that matches the grammar begins with it; or the grammar takes too much time or
                memory.
        """
        if self._prompt_length is None:
            self._prompt_length = input_ids.shape[1]
        answers = enumerate(input_ids[:, self._prompt_length :].tolist())
        # a row may have ended; `generate` pads it while other rows continue
        rows = {row: answer for row, answer in answers if self._ends.isdisjoint(answer)}
        if not rows:
            return scores.clone()
        banned = torch.zeros(scores.shape, dtype=torch.bool, device="cpu")
        self._budget.left = min(CPU_SECONDS, self._budget.left + MASK_SECONDS * len(rows))
        cancellation = self._cancellation or current_cancellation()
        allowed = self._grammar.next_tokens(self._request, rows, cancellation, self._budget)
        for row, following in zip(rows, allowed, strict=True):
            banned[row] = _banned(following, scores.shape[-1])
        return scores.masked_fill(banned.to(scores.device), -torch.inf)


def _banned(following: int | bytes, vocab_size: int) -> Tensor:
    """The tokens that may not follow, ``[V]``, from a result of :func:`matchers.next_tokens`."""
    banned = torch.ones(vocab_size, dtype=torch.bool, device="cpu")
    if isinstance(following, int):
        if following >= vocab_size:
            raise ConfigError(
                f"the grammar needs token {following}, which is outside the model's vocabulary of {vocab_size}; "
                "load the model's own tokenizer."
            )
        banned[following] = False
        return banned
    bits = torch.frombuffer(bytearray(following), dtype=torch.uint8)
    bits = (bits[:, None] >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1).view(-1)[:vocab_size]
    banned[: len(bits)] = bits == 0
    if banned.all():
        raise ConfigError(
            f"the grammar allows only tokens outside the model's vocabulary of {vocab_size} here, such as an "
            "end-of-sequence token; load the model's own tokenizer."
        )
    return banned


class _Grammar:
    """A grammar, and the worker process that has compiled it."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase, load: Load) -> None:
        self._text, self._tokenizer, self._load = text, tokenizer, load  # the load needs the tokenizer
        self._number = next(_numbers)
        self._workers: list[Worker] = []  # at most one
        weakref.finalize(self, give_back, self._workers).atexit = False
        self._lock = free_in_child(threading.Lock())
        if not FORKS:
            weakref.finalize(self, matchers.forget, self._number)

    def compile(self, budget: Budget | None = None) -> list[str]:
        """Compile it in a new worker, and return what llguidance warns of."""
        key, text = self._load.key, self._text
        arguments = (self._number, key, text)
        worker, warnings = started(
            self._load, matchers.compile_grammar, *arguments, what="the grammar", data=text, budget=budget
        )
        self._workers[:] = [worker]
        with _guard:
            _compiled[:] = [reference for reference in _compiled if reference() not in (None, self)]
            if len(_compiled) >= MOST_COMPILED:
                any(grammar.rest() for reference in _compiled if (grammar := reference()) is not None)
            _compiled.append(weakref.ref(self))
        return warnings

    def rest(self) -> bool:
        """End the worker, unless it works or has ended. The next use compiles the grammar again."""
        if not self._workers or not self._lock.acquire(blocking=False):
            return False
        self._workers.clear()
        self._lock.release()
        return True

    def next_tokens(
        self, request: int, answers: Mapping[int, list[int]], cancellation: Cancellation, budget: Budget
    ) -> list[int | bytes]:
        """See :func:`matchers.next_tokens`. One caller at a time has the worker."""
        with self._lock:
            if not self._workers or self._workers[0].ended:
                cancellation.run(self.compile, budget)
            arguments = (self._number, request, answers)
            return self._workers[0].call(
                matchers.next_tokens, *arguments, what="the grammar", budget=budget, cancellation=cancellation
            )


def constraint(
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Collection[int],
    *,
    json_schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    grammar: str | None = None,
) -> GrammarProcessor:
    """A processor for one of a JSON schema, a regular expression and a grammar; see :meth:`CocoaEngine.constrain`."""
    if json_schema is not None and (left_out := unenforced(json_schema)):
        raise ConfigError(
            f"the JSON schema cannot be enforced: {'; '.join(left_out)}. Take this out of the schema, and check the "
            "finished answer for it"
        )
    grammars = [] if grammar is None else [grammar]
    if json_schema is not None:
        grammars.append(json_schema_grammar(json_schema))
    if regex is not None:
        grammars.append(regex_grammar(regex))
    if len(grammars) != 1:
        raise ConfigError("constrain takes exactly one of json_schema, regex and grammar")
    processor = GrammarProcessor(grammars[0], tokenizer, eos_token_ids=eos_token_ids)
    # a grammar may be of a schema that a stranger sent to a server, whose log has no texts
    for message in processor.warnings if json_schema is not None else ():
        logger.warning("grammar: %s", message)
    return processor


def _load_of(tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]) -> Load:
    """llguidance's version of a tokenizer, which workers load once for each tokenizer and set of end tokens."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("a grammar needs a fast tokenizer (one of Hugging Face's tokenizers library).")
    if not ends:
        raise ConfigError("a grammar needs an end-of-sequence token, and the tokenizer has none: set its eos_token.")
    reference = weakref.ref(tokenizer)

    def arguments() -> tuple[str, list[int]]:
        backend = copy.copy(reference().backend_tokenizer)  # type: ignore[union-attr]  # a grammar holds it
        backend.no_padding()
        backend.no_truncation()
        return backend.to_str(), sorted(ends)

    with _guard:
        loads = _tokenizers.setdefault(tokenizer, {})
        key = (ends, len(tokenizer))
        if key not in loads:
            loads[key] = Load(next(_numbers), matchers.load_tokenizer, arguments)
        return loads[key]
