"""Candidate spans at the risk points of given texts.

A text is fed to the model (teacher forcing). At each position where several tokens compete, branches are grown as in
decoding. Branches of many positions share forward passes, and tokens that they have in common are fed once.
"""

from collections.abc import Generator, Sequence

from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import Branch
from cocoa_engine.decoding.distributions import Distributions, TokenOutput, source_values
from cocoa_engine.decoding.next_tokens import NextTokens, next_tokens, non_finite
from cocoa_engine.decoding.request import Rules, capture_spec
from cocoa_engine.decoding.span_decoder import SpanDecoder
from cocoa_engine.decoding.token_feed import TokenFeed
from cocoa_engine.execution.backends import Path, StepOutput, TokenTree
from cocoa_engine.execution.session import Session
from cocoa_engine.interruptions import Cancellation
from cocoa_engine.model.detokenizer import Detokenizer
from cocoa_engine.model.generation_config import eos_token_ids
from cocoa_engine.scoring.text_tree import opened, prefixes
from cocoa_engine.spans import Candidate

_Loop = Generator[Sequence[Path], StepOutput | list[TokenOutput], list[Branch]]

Outputs = dict[Path, TokenOutput]
"""The model's output for each path that was fed after the committed tokens."""

MOST_FED = 8192  # branch tokens grown together, at most; the model's output for each stays in memory until they end
RESERVED_ROWS_PER_TOKEN = 10  # branch tokens, for each token of a text, that memory is initially reserved for


class CandidateGrower:
    """Grows the candidates at every risk point of given texts, and scores them by CoCoA-SIG.

    Probabilities are the model's own: no logits processor applies, and stop texts do not end branches.

    Args:
        config: the settings of risk points, branches and scores. The method is replaced by ``"cocoa-sig"``.
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
        """Grow the candidates of some texts after one prompt, each of which fits the context window with it.

        Returns:
            For each text and each of its tokens, the candidates that compete there, ordered by the probability of their
            first token. The list is empty where only one token is possible.
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
                outputs: Outputs = {}
                if tree.keeps_rest:  # the text first: its distributions say where branches start
                    self._feed(tree, prefixes([part]), outputs)
                grown += self._grow(tree, committed, part, before, outputs)
                if len(grown) < len(text):
                    if not tree.keeps_rest:
                        tree.commit(())
                        self._feed(tree, [part], outputs)
                    before, committed = outputs[part].next, [*committed, *part]
                    tree.commit(part)
            return grown

    def _grow(
        self, tree: TokenTree, committed: list[int], part: Path, before: NextTokens | None, outputs: Outputs
    ) -> list[list[Candidate]]:
        """The candidates at each token of a part, which follows the committed tokens.

        Args:
            before: the distribution before the part.
            known: the outputs of paths that were fed already. New outputs are added to it.
        """
        config, window = self._config, self._session.model.context_window
        grown: list[list[Candidate]] = [[] for _ in part]
        growing: dict[int, tuple[SpanDecoder, _Loop, Sequence[Path]]] = {}  # by position, with the paths it needs next
        for at in range(len(part)):
            ids, following = [*committed, *part[:at]], outputs[part[:at]].next if at else before
            if following is None:
                raise non_finite(len(ids))
            candidates = following.competing(config.gamma, config.max_candidates)
            if len(candidates.token_ids) > 1:
                rules = Rules(config, self._eos, window_left=None if window is None else window - len(ids))
                feed = TokenFeed(ids, Distributions(rules))
                decoder = SpanDecoder(ids, rules, Detokenizer(self._session.tokens), feed)
                loop = decoder.grow(candidates)
                growing[at] = decoder, loop, next(loop)
        while growing:
            wanted = dict.fromkeys(part[:at] + path for at, (_, _, paths) in growing.items() for path in paths)
            self._feed(tree, [path for path in wanted if path not in outputs], outputs)
            for at, (decoder, loop, paths) in [*growing.items()]:
                try:
                    growing[at] = decoder, loop, loop.send([outputs[part[:at] + path] for path in paths])
                except StopIteration as done:
                    del growing[at]
                    grown[at] = decoder.score_candidates(done.value)
        return grown

    def _feed(self, tree: TokenTree, paths: Sequence[Path], outputs: Outputs) -> None:
        """Feed paths, and add the model's output for each to ``outputs``."""
        width = self._backend.paths_per_step
        for start in range(0, len(paths), width):
            some = paths[start : start + width]
            self._cancellation.check()
            output = self._backend.step([(tree, some)])[0]
            source = source_values(output)
            for row, (path, following) in enumerate(zip(some, self._top(output.logits), strict=True)):
                # if no token can be chosen, the decode loop raises the error, which needs the logits
                outputs[path] = TokenOutput(
                    output.logits[row] if following is None else None,
                    output.hidden[:, row],
                    following,
                    source=source[row],
                )

    def _top(self, logits: Tensor) -> list[NextTokens | None]:
        """The distribution of each row of logits, ``[W, V]``; `None` for a row that is not finite."""
        return next_tokens(logits, max(2, self._config.max_candidates), native=self._backend.native)
