"""The candidates that decoding grows where tokens compete, for a given text: what its tokens competed with.

The text is fed token by token. At each token where several compete, the decode loop's own branches grow. The branches
of many tokens and texts grow in the same forward passes, in which what they share is fed once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import Branch
from cocoa_engine.decoding.distributions import TokenOutput
from cocoa_engine.decoding.next_tokens import NextTokens, next_tokens, non_finite
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.decoding.rules import Rules
from cocoa_engine.decoding.span_decoder import SpanDecoder
from cocoa_engine.execution.backends import Path, StepOutput, TokenTree
from cocoa_engine.execution.session import Session
from cocoa_engine.model.detokenizer import TextTrack
from cocoa_engine.model.generation_config import eos_token_ids
from cocoa_engine.scoring.text_tree import beginnings, groups, opened
from cocoa_engine.spans import Candidate

Known = dict[Path, TokenOutput]
"""What the model said of each path after the committed tokens."""


MOST_FED = 8192
"""The most tokens of branches that grow together: the model's output for each is kept in memory until they end."""

USUAL_ROWS = 10
"""Tokens of branches for each token of a text that memory is reserved for at first."""


class _Growing(NamedTuple):
    """The branches at one token of a text, and the paths that they wait for."""

    base: Path
    decoder: SpanDecoder
    loop: Generator[Sequence[Path], StepOutput | list[TokenOutput], list[Branch]]
    paths: Sequence[Path]


class Grower:
    """Grows the candidates of every risk point of given texts, as CoCoA-SIG would weigh them there.

    Args:
        session: the model, and how it is run.
        config: which tokens compete, where branches end, and by which metric, alpha and length rule they are scored.
            Probabilities are the model's own, without processors; stop texts end no branch.

    Raises:
        ConfigError: the layers do not fit the model.
    """

    def __init__(self, session: Session, config: CocoaConfig) -> None:
        self._session = session
        self._config = config.replace(method="cocoa-sig")
        self._capture = capture_spec(session.model, self._config)
        self._eos = eos_token_ids(session.model.model, session.tokens.tokenizer)
        self._backend = session.backend
        most = MOST_FED // (config.max_candidates * config.max_span_tokens)
        self._width = max(1, min(self._backend.paths_per_step, most))

    def __call__(self, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> list[list[list[Candidate]]]:
        """Of each text the candidates at each of its tokens, most probable first token first; none where none compete.

        Args:
            prompt: token ids; with those of any of the texts, they fit the context window.

        Raises:
            NonFiniteLogitsError: the model's logits are NaN or infinite.
        """
        ids = [list(text) for text in texts]
        found: dict[int, list[list[Candidate]]] = {}
        for group in groups(ids, self._width):
            found.update(zip(group, self._grown(list(prompt), [tuple(ids[number]) for number in group]), strict=True))
        return [found[number] for number in range(len(texts))]

    def _grown(self, prompt: list[int], texts: list[Path]) -> list[list[list[Candidate]]]:
        """The candidates at each token of some texts; those of a longer one piece by piece, each then committed."""
        width = self._width
        tokens = sum(map(len, texts))
        reserve = tokens + USUAL_ROWS * min(tokens, width)
        with opened(self._backend, prompt, reserve, self._capture) as tree:
            if not tree.keeps_rest:
                if len(texts) > 1:
                    return [grown for text in texts for grown in self._grown(prompt, [text])]
                width = 1
            (longest,) = texts if len(texts) == 1 else ((),)
            rounds = [[longest[start : start + width]] for start in range(0, len(longest), width)] or [texts]
            grown: list[list[list[Candidate]]] = [[] for _ in texts]
            before, committed = self._top(self._backend.prefill(tree)[None])[0], prompt
            for parts in rounds:
                known: Known = {}
                if tree.keeps_rest:  # the text first: the branches need what the model says within it
                    self._feed(tree, beginnings(map(list, parts)), known)
                at = self._grow(tree, committed, parts, before, known)
                for candidates, part in zip(grown, parts, strict=True):
                    candidates += [at.get(part[:length], []) for length in range(len(part))]
                if parts is not rounds[-1]:
                    (part,) = parts
                    if not tree.keeps_rest:
                        tree.drop_branches()
                        self._feed(tree, [part], known)
                    before, committed = known[part].next, [*committed, *part]
                    tree.commit(part)
            return grown

    def _grow(
        self, tree: TokenTree, committed: list[int], parts: Sequence[Path], before: NextTokens | None, known: Known
    ) -> dict[Path, list[Candidate]]:
        """By beginning, the candidates after it, of some parts that follow what is committed.

        Args:
            before: the distribution before the parts.
            known: what was fed already; what is fed here is added.
        """
        bases = dict.fromkeys(part[:length] for part in parts for length in range(len(part)))
        begun = (self._begin(committed, base, known[base].next if base else before) for base in bases)
        growing = [one for one in begun if one is not None]
        found: dict[Path, list[Candidate]] = {}
        while growing:
            wanted = dict.fromkeys(one.base + path for one in growing for path in one.paths)
            self._feed(tree, [path for path in wanted if path not in known], known)
            waiting, growing = growing, []
            for one in waiting:
                try:
                    paths = one.loop.send([known[one.base + path] for path in one.paths])
                    growing.append(one._replace(paths=paths))
                except StopIteration as done:
                    found[one.base] = one.decoder.weigh(done.value)
        return found

    def _begin(self, committed: list[int], base: Path, following: NextTokens | None) -> _Growing | None:
        """The branches at the end of some tokens; none where nothing competes."""
        ids = [*committed, *base]
        if following is None:
            raise non_finite(len(ids))
        config, window = self._config, self._session.model.context_window
        candidates = following.competing(config.gamma, config.max_candidates)
        if len(candidates.token_ids) < 2:
            return None
        left = config.max_span_tokens if window is None else min(config.max_span_tokens, window - len(ids))
        rules = Rules(config.replace(max_new_tokens=left), self._eos)
        decoder = SpanDecoder(ids, rules, TextTrack(self._session.tokens.decode))
        loop = decoder.grow(candidates)
        return _Growing(base, decoder, loop, next(loop))

    def _feed(self, tree: TokenTree, paths: Sequence[Path], known: Known) -> None:
        """Feed paths, and note what the model says of each."""
        width = self._backend.paths_per_step
        for start in range(0, len(paths), width):
            some = paths[start : start + width]
            output = self._backend.step([(tree, some)])[0]
            for row, (path, following) in enumerate(zip(some, self._top(output.logits), strict=True)):
                # where no token can be chosen, the loop says so: it wants to see the logits
                known[path] = TokenOutput(
                    output.logits[row] if following is None else None, output.hidden[:, row], following
                )

    def _top(self, logits: Tensor) -> list[NextTokens | None]:
        """The distributions of ``[W, V]``."""
        return next_tokens(logits, max(2, self._config.max_candidates), native=self._backend.native)


def risk_points(candidates: Sequence[list[Candidate]]) -> list[list[Candidate]]:
    """The candidates at those places of a text where a decode that writes it would stand and weigh them.

    After such a place the next is looked for where its longest candidate ends, as spans end in a decode.

    Args:
        candidates: at each token, from :class:`Grower`.
    """
    found = []
    at = 0
    while at < len(candidates):
        if candidates[at]:
            found.append(candidates[at])
        at += grown_length(candidates[at])
    return found


def grown_length(candidates: Sequence[Candidate]) -> int:
    """How many tokens the longest of them has, as a span that decoding keeps; 1 where none competed."""
    return max((len(one.token_ids) for one in candidates), default=1)
