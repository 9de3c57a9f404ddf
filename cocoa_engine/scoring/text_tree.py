"""Given texts fed after a prompt: many as branches of one tree after a prompt that is prefilled once, or one alone.

In a tree, tokens of a common prefix are fed once. Texts are fed in groups. A group is fed in steps, each with at most
as many tokens as the backend feeds at once.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import Branch
from cocoa_engine.decoding.next_tokens import NextTokens, next_tokens, non_finite
from cocoa_engine.decoding.request import Rules, capture_spec
from cocoa_engine.decoding.span_decoder import SpanDecoder
from cocoa_engine.decoding.token_feed import Distributions, TokenFeed, TokenOutput
from cocoa_engine.execution.backends import Backend, Path, StepOutput, TokenTree
from cocoa_engine.execution.forward.source_attention import SourceProbe, observed_attention, probe_of
from cocoa_engine.execution.session import Session
from cocoa_engine.interruptions import Cancellation
from cocoa_engine.model.generation_config import eos_token_ids
from cocoa_engine.model.language_model import CaptureSpec, LanguageModel, capture
from cocoa_engine.model.tokenizer import Detokenizer
from cocoa_engine.spans import Candidate


@contextmanager
def opened(
    backend: Backend, prompt: Sequence[int], reserve_tokens: int, capture: CaptureSpec, passages: Sequence[range] = ()
) -> Iterator[TokenTree]:
    """Open a tree whose branches can be dropped, and close it at the end of the block."""
    (tree,) = backend.open([prompt], reserve_tokens, capture)
    tree.keep_committed = True
    tree.passages = passages
    try:
        yield tree
    finally:
        tree.close()


@dataclass(frozen=True)
class Step:
    """W tokens that were fed at once.

    Attributes:
        rows: for the index of each text with tokens in the step, the rows of these tokens in the output.
        output: the model's output for each token.
        token_ids: ``[W]``.
        logits: ``[W + 1, V]``: before the step, then after each of its tokens; `None` after an empty prompt.
        parents: ``[W]``, the row of :attr:`logits` that predicts each token.
        passes: for the index of each text, the number of forward passes that fed its tokens.
        prompt_passes: the number of forward passes of the prompt.
    """

    rows: dict[int, list[int]]
    output: StepOutput
    token_ids: Tensor
    logits: Tensor | None
    parents: Tensor
    passes: dict[int, int]
    prompt_passes: int = 0


@contextmanager
def fed(
    backend: Backend,
    prompt: Sequence[int],
    texts: Sequence[Sequence[int]],
    capture: CaptureSpec,
    *,
    rows_per_step: int | None = None,
    passages: Sequence[range] = (),
    probe: SourceProbe | None = None,
    cancellation: Cancellation | None = None,
) -> Iterator[Iterator[Step]]:
    """Feed texts after a prompt: ``with fed(...) as steps: for step in steps: ...``.

    A text that does not fit a step has several, in order.

    Args:
        prompt: token ids. May be empty if :attr:`Step.logits` is not used.
        texts: the token ids of each text, at least one.
        rows_per_step: the maximum number of tokens in a step. Default: the backend's ``paths_per_step``.
        passages: the positions of passages of the prompt whose attention mass is measured.
        probe: takes the attention of the texts instead, if the backend masks heads.
        cancellation: ends the work.
    """
    width = rows_per_step or backend.paths_per_step
    numbers = list(groups(texts, width))
    reserve = max(len(prefixes(texts[number] for number in group)) for group in numbers)
    with opened(backend, prompt, reserve, capture, passages) as tree:
        tree.probe = probe

        def steps() -> Iterator[Step]:
            first = backend.prefill(tree) if prompt else None
            prompt_passes = tree.forward_passes
            for group in numbers:
                paths, before = prefixes(texts[number] for number in group), first
                ranks = {path: rank for rank, path in enumerate(paths)}
                of_texts = {number: [ranks[path] for path in prefixes([texts[number]])] for number in group}
                for start in range(0, len(paths), width):
                    part = paths[start : start + width]
                    if cancellation is not None:
                        cancellation.check()
                    earlier = tree.forward_passes
                    output = backend.step([(tree, part)])[0]
                    passes = tree.forward_passes - earlier  # one for all paths, or one for each
                    rows = {
                        number: [rank - start for rank in own if start <= rank < start + width]
                        for number, own in of_texts.items()
                    }
                    device = output.logits.device
                    yield Step(
                        rows=rows,
                        output=output,
                        token_ids=torch.tensor([path[-1] for path in part], device=device),
                        logits=None if before is None else torch.cat([before[None], output.logits]),
                        # only a text alone takes several steps: the first path of one extends the last before it
                        parents=torch.tensor(
                            [ranks.get(path[:-1], start - 1) - start + 1 for path in part], device=device
                        ),
                        passes={number: min(passes, len(own)) for number, own in rows.items()},
                        prompt_passes=prompt_passes,
                    )
                    before = output.logits[-1]
                tree.commit(())

        yield steps()


def fed_alone(
    model: LanguageModel,
    prompt: Sequence[int],
    text: Sequence[int],
    spec: CaptureSpec,
    passages: Sequence[range] = (),
    probe: SourceProbe | None = None,
) -> Step:
    """Feed a prompt and a text in one forward pass, without a cache.

    Args:
        prompt, text: token ids, at least one each.
        spec: the hidden states of the text that are captured.
        passages, probe: as for :func:`fed`. Any backend's model is observed.
    """
    token_ids = torch.tensor([[*prompt, *text]], device=model.device)
    inputs = {"use_cache": False} if "use_cache" in model.forward_parameters else {}
    probe = probe or probe_of(spec.source_heads, len(prompt), passages)
    with (
        model.exclusive(),
        capture(model, spec, keep=slice(len(prompt), None)) as captured,
        observed_attention(model, probe, len(text), token_ids.shape[1]),
    ):
        logits = model.forward(token_ids, logits_to_keep=len(text) + 1, **inputs).logits[0, -len(text) - 1 :]
        masses = None if probe is None else probe.means()
        output = StepOutput(logits[1:], captured.stacked(logits.device)[:, 0], masses=masses)
    rows = torch.arange(len(text), device=logits.device)
    return Step({0: rows.tolist()}, output, torch.tensor(text, device=logits.device), logits, rows, {0: 1})


def groups(texts: Sequence[Sequence[int]], limit: int) -> Iterator[list[int]]:
    """Group texts (indices) by common prefixes, with at most ``limit`` distinct tokens, or one longer text."""
    group: list[int] = []
    size = 0
    for number in sorted(range(len(texts)), key=lambda number: tuple(texts[number])):
        text = texts[number]
        # in sorted order, no earlier text shares a longer prefix than the one just before
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(texts[group[-1]] if group else [], text, strict=False))
        new = len(text) - len(list(shared))
        if group and size + new > limit:
            yield group
            group, size, new = [], 0, len(text)
        group.append(number)
        size += new
    yield group


def prefixes(texts: Iterable[Sequence[int]]) -> list[Path]:
    """Every distinct non-empty prefix of the texts, each after its own prefixes."""
    return list(dict.fromkeys(tuple(text[:length]) for text in texts for length in range(1, len(text) + 1)))


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
            source = output.source
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
