"""Candidate spans at the risk points of given texts.

A text is fed to the model (teacher forcing). At each position where several tokens compete, branches are grown as in
decoding. Branches of many positions and texts share forward passes, and tokens that they have in common are fed once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from torch import Tensor

from cocoa_engine.cancellation import Cancellation
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import Branch
from cocoa_engine.decoding.distributions import TokenOutput, source_values
from cocoa_engine.decoding.next_tokens import NextTokens, next_tokens, non_finite
from cocoa_engine.decoding.request import Rules, capture_spec
from cocoa_engine.decoding.span_decoder import SpanDecoder
from cocoa_engine.execution.backends import Path, StepOutput, TokenTree
from cocoa_engine.execution.session import Session
from cocoa_engine.model.detokenizer import Detokenizer
from cocoa_engine.model.generation_config import eos_token_ids
from cocoa_engine.scoring.text_tree import groups, opened, prefixes
from cocoa_engine.spans import Candidate

Known = dict[Path, TokenOutput]
"""The model's output for each path that was fed after the committed tokens."""

MOST_FED = 8192
"""Maximum number of branch tokens grown together. The model's output for each stays in memory until they end."""

RESERVED_ROWS_PER_TOKEN = 10
"""Number of branch tokens, for each token of a text, that memory is initially reserved for."""


class _Growing(NamedTuple):
    """The branches at one position of a text, and the paths whose output they need next."""

    base: Path
    decoder: SpanDecoder
    loop: Generator[Sequence[Path], StepOutput | list[TokenOutput], list[Branch]]
    paths: Sequence[Path]


class CandidateGrower:
    """Grows the candidates at every risk point of given texts, and scores them by CoCoA-SIG.

    Probabilities are the model's own: no logits processor applies, and stop texts do not end branches.

    Args:
        session: the model and its backend.
        config: the settings of risk points, branches and scores. The method is replaced by ``"cocoa-sig"``.
        cancellation: ends the calls.

    Raises:
        ConfigError: the layers do not fit the model.
    """

    def __init__(self, session: Session, config: CocoaConfig, cancellation: Cancellation | None = None) -> None:
        self._session = session
        self._cancellation = cancellation or Cancellation()
        self._config = config.replace(method="cocoa-sig")
        self._capture = capture_spec(session.model, self._config)
        self._eos = eos_token_ids(session.model.model, session.tokens)
        self._backend = session.backend
        most = MOST_FED // (config.max_candidates * config.max_span_tokens)
        self._width = max(1, min(self._backend.paths_per_step, most))

    def __call__(self, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> list[list[list[Candidate]]]:
        """Grow the candidates of some texts after one prompt.

        Args:
            prompt: token ids. The prompt and each text together must fit the context window.
            texts: the token ids of each text.

        Returns:
            For each text and each of its tokens, the candidates that compete there, ordered by the probability of their
            first token. The list is empty where only one token is possible.

        Raises:
            NonFiniteLogitsError: the model's logits are NaN or infinite.
            RequestCancelledError: the call was cancelled.
        """
        ids = [list(text) for text in texts]
        found: dict[int, list[list[Candidate]]] = {}
        for group in groups(ids, self._width):
            found.update(zip(group, self._grown(list(prompt), [tuple(ids[number]) for number in group]), strict=True))
        return [found[number] for number in range(len(texts))]

    def _grown(self, prompt: list[int], texts: list[Path]) -> list[list[list[Candidate]]]:
        """The candidates at each token of some texts. A text that is too long is processed and committed in pieces."""
        width = self._width
        tokens = sum(map(len, texts))
        reserve = tokens + RESERVED_ROWS_PER_TOKEN * min(tokens, width)
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
                if tree.keeps_rest:  # the text first: its distributions say where branches start
                    self._feed(tree, prefixes(map(list, parts)), known)
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
        """The candidates after each prefix of the parts, by prefix. The parts follow the committed tokens.

        Args:
            before: the distribution before the parts.
            known: the outputs of paths that were fed already. New outputs are added to it.
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
                    found[one.base] = one.decoder.score_candidates(done.value)
        return found

    def _begin(self, committed: list[int], base: Path, following: NextTokens | None) -> _Growing | None:
        """Start the branches after some tokens; `None` where only one token competes."""
        ids = [*committed, *base]
        if following is None:
            raise non_finite(len(ids))
        config, window = self._config, self._session.model.context_window
        candidates = following.competing(config.gamma, config.max_candidates)
        if len(candidates.token_ids) < 2:
            return None
        rules = Rules(config, self._eos, window_left=None if window is None else window - len(ids))
        decoder = SpanDecoder(ids, rules, Detokenizer(self._session.tokens))
        loop = decoder.grow(candidates)
        return _Growing(base, decoder, loop, next(loop))

    def _feed(self, tree: TokenTree, paths: Sequence[Path], known: Known) -> None:
        """Feed paths, and add the model's output for each to ``known``."""
        width = self._backend.paths_per_step
        for start in range(0, len(paths), width):
            some = paths[start : start + width]
            self._cancellation.check()
            output = self._backend.step([(tree, some)])[0]
            source = source_values(output)
            for row, (path, following) in enumerate(zip(some, self._top(output.logits), strict=True)):
                # if no token can be chosen, the decode loop raises the error, which needs the logits
                known[path] = TokenOutput(
                    output.logits[row] if following is None else None,
                    output.hidden[:, row],
                    following,
                    source=source[row],
                )

    def _top(self, logits: Tensor) -> list[NextTokens | None]:
        """The distribution of each row of logits, ``[W, V]``; `None` for a row that is not finite."""
        return next_tokens(logits, max(2, self._config.max_candidates), native=self._backend.native)
