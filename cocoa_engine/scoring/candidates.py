"""Candidate spans at the risk points of given texts.

A text is fed to the model (teacher forcing). At each position where several tokens compete, branches are grown as in
decoding. Branches of many positions share forward passes, and tokens that they have in common are fed once.
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
from cocoa_engine.scoring.text_tree import opened, prefixes
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
        return [self._grown(list(prompt), tuple(text)) for text in texts]

    def _grown(self, prompt: list[int], text: Path) -> list[list[Candidate]]:
        """The candidates at each token of a text, which is processed and committed in pieces."""
        reserve = len(text) + RESERVED_ROWS_PER_TOKEN * min(len(text), self._width)
        with opened(self._backend, prompt, reserve, self._capture) as tree:
            width = self._width if tree.keeps_rest else 1
            grown: list[list[Candidate]] = []
            before, committed = self._top(self._backend.prefill(tree)[None])[0], prompt
            for part in (text[start : start + width] for start in range(0, len(text), width)):
                known: Known = {}
                if tree.keeps_rest:  # the text first: its distributions say where branches start
                    self._feed(tree, prefixes([part]), known)
                grown += self._grow(tree, committed, part, before, known)
                if len(grown) < len(text):
                    if not tree.keeps_rest:
                        tree.commit(())
                        self._feed(tree, [part], known)
                    before, committed = known[part].next, [*committed, *part]
                    tree.commit(part)
            return grown

    def _grow(
        self, tree: TokenTree, committed: list[int], part: Path, before: NextTokens | None, known: Known
    ) -> list[list[Candidate]]:
        """The candidates at each token of a part, which follows the committed tokens.

        Args:
            before: the distribution before the part.
            known: the outputs of paths that were fed already. New outputs are added to it.
        """
        bases = [part[:length] for length in range(len(part))]
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
        return [found.get(base, []) for base in bases]

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
