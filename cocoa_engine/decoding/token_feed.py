"""The model's output for each path that was fed, and what is fed ahead of the loop.

These are guesses by prompt lookup, and the continuation of a leading branch.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cocoa_engine.decoding.next_tokens import NextTokens, contrasted, next_tokens, non_finite
from cocoa_engine.decoding.request import Rules
from cocoa_engine.decoding.speculation import PromptLookup
from cocoa_engine.execution.backends import FeedRequest, Path, ReadBack, StepOutput, TokenTree
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model.language_model import CaptureSpec
from cocoa_engine.risk import RiskCalibrator


@dataclass(frozen=True)
class StateReader:
    """Reads captured states of W tokens, or of W pooled spans, ``[captured layers + 1, W, d]``.

    Attributes:
        window: the rows of the MLDS's layers m..n; `None` if no other layers are captured.
        probes: for each field of a span that has a probe's score: the row that the probe reads, its weights, ``[d]``
            float32, and its intercept.
    """

    window: slice | None = None
    probes: Mapping[str, tuple[int, Tensor, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: CaptureSpec, calibrator: RiskCalibrator | None) -> "StateReader":
        """The reader of the states that ``spec`` captures, with the calibrator's probes."""
        window = None
        if spec.window is not None:
            m, n = spec.window
            window = slice(m - spec.first, n - spec.first + 1)
        probes = {} if calibrator is None else calibrator.probes
        return cls(
            window,
            {
                name: (probe.layer - spec.first, torch.tensor(probe.weights, device="cpu"), probe.intercept)
                for name, probe in probes.items()
            },
        )

    def of_mlds(self, states: Tensor) -> Tensor:
        """The states of layers m..n, then of the final layer: ``[N + 1, W, d]``."""
        return states if self.window is None else torch.cat([states[:-1][self.window], states[-1:]])

    def probe_scores(self, states: Tensor) -> dict[str, list[float]]:
        """The scores of W spans by each probe, by their field. A span's score is the mean of its tokens'."""
        return {  # a product of matrices would follow the caller's autocast
            name: ((states[row].float() * weights.to(states.device)).sum(-1) + intercept).tolist()
            for name, (row, weights, intercept) in self.probes.items()
        }


MLDS_ALONE = StateReader()  # reads states of which all are the MLDS's


@dataclass(frozen=True)
class TokenOutput:
    """The model's output for one fed token.

    Attributes:
        logits: ``[V]``; `None` if they are not needed any more.
        hidden: ``[captured layers + 1, d]``, the captured states; `None` for the prompt's last token.
        others: ``[K, V]``, the logits that a contrasting method contrasts with; kept only together with ``logits``.
        source: the token's source attention; `None` if the backend does not measure it.
        passages: the token's attention on each passage; empty if there are none, or if it is not measured.
        next: the next-token distribution; `None` if logits processors still have to be applied or the token drawn,
            or if it is not finite.
    """

    logits: Tensor | None
    hidden: Tensor | None = None
    next: NextTokens | None = None
    others: Tensor | None = None
    source: float | None = None
    passages: Sequence[float] = ()


class Distributions:
    """Computes the next-token distributions of one request.

    Args:
        native: rank tokens with the native kernel; see :func:`~cocoa_engine.decoding.next_tokens.next_tokens`.
    """

    def __init__(self, rules: Rules, *, native: bool = False) -> None:
        self.rules = rules
        self._method = METHODS[rules.config.method]
        self._count = max(2, rules.config.max_candidates, rules.config.top_logprobs)
        self._native = native
        # the distribution after a token is formed only when the loop asks for it
        self._needs_paths = bool(rules.processors) or rules.sampler is not None

    def outputs(self, step: StepOutput) -> list[TokenOutput]:
        """The output of a forward pass, split into one entry for each fed token."""
        source, passages = step.source, step.passages
        distributions = [None] * len(step.logits) if self._needs_paths else self._top(step.logits, step.others)
        outputs = []
        for row, distribution in enumerate(distributions):
            again = distribution is None or self._method.reads_back
            logits = step.logits[row] if again else None
            others = step.others[:, row] if again and step.others is not None else None
            hidden = step.hidden[:, row]
            outputs.append(TokenOutput(logits, hidden, distribution, others, source[row], passages[row]))
        return outputs

    def after(self, prefix: Sequence[int], paths: Sequence[Path], outputs: Sequence[TokenOutput]) -> list[NextTokens]:
        """The next-token distribution after each path, with the logits processors applied.

        Args:
            prefix: the committed token ids before the paths, prompt included.
            outputs: the output for the last token of each path.
        """
        if self._needs_paths:
            others = [output.others for output in outputs if output.others is not None]
            stacked = torch.stack(others, dim=1) if others else None
            distributions = self._top(torch.stack([logits_of(output) for output in outputs]), stacked, prefix, paths)
        else:
            distributions = [
                output.next
                or self._top(logits_of(output)[None], None if output.others is None else output.others[:, None])[0]
                for output in outputs
            ]
        for path, distribution in zip(paths, distributions, strict=True):
            if distribution is None:
                raise non_finite(len(prefix) + len(path))
        return [distribution for distribution in distributions if distribution is not None]

    def _top(
        self, logits: Tensor, others: Tensor | None = None, prefix: Sequence[int] = (), paths: Sequence[Path] = ()
    ) -> list[NextTokens | None]:
        """The distribution of each row of ``[W, V]``, with the most probable tokens to record.

        A contrasting method needs ``others``, ``[K, W, V]``. Without paths, no processors are applied.
        """
        rules, config = self.rules, self.rules.config
        if others is None or not isinstance(self._method, ContrastingMethod):
            processed = rules.processed(prefix, paths, logits) if paths else logits
            rows = next_tokens(processed, self._count, native=self._native)
            if rules.sampler is not None and paths:
                rows = rules.sampler.drawn(rows, processed, [len(prefix) + len(path) for path in paths])
        else:
            contrasts = self._method.contrast(logits.float(), others, config)
            allowed = self._method.plausible(logits.float(), config)
            ranked = rules.processed(prefix, paths, contrasts.clone()) if paths else contrasts
            if allowed is not None:  # ignored in rows where the processors forbid every plausible token
                plausible = ranked.masked_fill(~allowed, -torch.inf)
                ranked = torch.where((plausible > -torch.inf).any(-1, keepdim=True), plausible, ranked)
            rows = contrasted(next_tokens(logits, self._count, native=self._native), logits, contrasts, ranked)
        if not (count := config.top_logprobs):
            return rows
        top = [() if row is None else zip(row.token_ids[:count], row.log_probs[:count], strict=True) for row in rows]
        return [row and replace(row, top=tuple(pairs)) for row, pairs in zip(rows, top, strict=True)]


def logits_of(output: TokenOutput) -> Tensor:
    """The logits of an output that has kept them, ``[V]`` float32."""
    assert output.logits is not None
    return output.logits.float()


Feeding = Generator[Sequence[Path], StepOutput | list[TokenOutput], list[TokenOutput]]
"""A generator that yields paths to feed, and receives the output of the pass or one :class:`TokenOutput` per path. It
returns the outputs of the requested paths."""

_READ_AT_ONCE = 128  # number of prompt tokens in one read-back pass, for all candidates together


class TokenFeed:
    """The outputs of all tokens fed after the committed ones. It chooses what to feed ahead.

    Args:
        prompt: token ids.
        distributions: converts the output of a pass to :class:`TokenOutput`.
        draft_tokens: the maximum number of guessed tokens fed after each leaf.
        free_rows: returns the number of leaves of this sequence that the next pass can feed at little extra cost.
        cost_of_a_row: the cost of a further row in a pass of few rows, as a share of the cost of the first one.

    Attributes:
        distributions: the same.
        last: the output for the last committed token, for :meth:`read_back`.
        feeds_ahead: whether tokens are fed ahead. `False` if the sequence's tree cannot keep them, or if the method
            reads the prompt back.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        distributions: Distributions,
        draft_tokens: int = 0,
        free_rows: Callable[[], int] = lambda: 1,
        cost_of_a_row: float = 0.0,
    ) -> None:
        self.last: TokenOutput | None = None
        self.feeds_ahead = False
        self.distributions, self._eos = distributions, distributions.rules.eos
        self._lookup = PromptLookup(prompt, draft_tokens)
        self._free_rows, self._cost_of_a_row = free_rows, cost_of_a_row
        self._known: dict[Path, TokenOutput] = {}
        # path -> the token guessed after it and the number of matching tokens, until the guess is checked
        self._guesses: dict[Path, tuple[int, int]] = {}
        self._indexed: dict[int, int] = {}  # first token of a branch -> the number of its tokens that are indexed

    def feed(self, paths: Sequence[Path], growing: Sequence[Path], tokens_left: int) -> Feeding:
        """The outputs of some paths. Paths that have not been fed are fed now; free rows of the pass feed others ahead.

        Args:
            growing: those of ``paths`` that another token may follow.
            tokens_left: the number of tokens that may still follow the committed ones.
        """
        self._learn(paths, growing, tokens_left)
        missing = [path for path in paths if path not in self._known]
        if missing:
            fed = [*missing, *self._ahead(missing, growing, tokens_left)]
            step = yield fed
            outputs = step if isinstance(step, list) else self.distributions.outputs(step)
            self._known.update(zip(fed, outputs, strict=True))
        return [self._known[path] for path in paths]

    def _learn(self, paths: Sequence[Path], growing: Sequence[Path], tokens_left: int) -> None:
        """Update the accuracy of guesses, and index the tokens of branches."""
        for parent in {path[:-1] for path in paths} & self._guesses.keys():
            token_id, matched = self._guesses.pop(parent)
            self._lookup.check_guess(matched, (*parent, token_id) in paths)
        if not self.feeds_ahead or (len(growing) == 1 and len(growing[0]) == 1):
            return  # the tokens of a greedy run are indexed when they are committed
        for path in growing:
            end = self._reached(path, tokens_left)
            self._lookup.index_branch(end, self._indexed.get(end[0], 0))
            self._indexed[end[0]] = len(end)

    def _ahead(self, missing: Sequence[Path], growing: Sequence[Path], tokens_left: int) -> list[Path]:
        """The paths to feed ahead, in addition to the missing ones."""
        free = self._free_rows() - len(missing)
        if not self.feeds_ahead or free < 1:
            return []
        ends = {path: self._reached(path, tokens_left) for path in growing}
        ahead = [end for path, end in ends.items() if end != path and end not in self._known][:free]
        leaves = [*(path for path in missing if path in growing), *ahead]
        for path in leaves:
            tokens = self._guess(path, len(leaves), free - len(ahead), tokens_left)
            ahead += [path + tokens[: depth + 1] for depth in range(len(tokens))]
        return ahead

    def _reached(self, path: Path, tokens_left: int) -> Path:
        """A path with the tokens after it that have been fed ahead already, and the next one."""
        while (
            (output := self._known.get(path)) and output.next and path[-1] not in self._eos and len(path) < tokens_left
        ):
            path = (*path, output.next.best)
        return path

    def _guess(self, path: Path, leaves: int, free: int, tokens_left: int) -> tuple[int, ...]:
        """The tokens to feed after a path by prompt lookup. Also records the first guess that is not fed."""
        left = tokens_left - len(path)
        if path[-1] in self._eos or left < 1:
            return ()
        guess, matched = self._lookup.guess(path, min(left, max(free, 1)))
        if not guess:
            return ()
        end = next((depth for depth, token_id in enumerate(guess, 1) if token_id in self._eos), len(guess))
        guess = guess[:end]
        count = min(free, self._lookup.worth(matched, leaves, self._cost_of_a_row))
        for depth, token_id in enumerate(guess[: max(count, 1)]):
            self._guesses[path + guess[:depth]] = token_id, matched
        return guess[:count]

    def output(self, path: Path) -> TokenOutput:
        """The output of a path that was fed after the committed tokens."""
        return self._known[path]

    def commit(self, tree: TokenTree, taken: Path, likely: Sequence[int]) -> None:
        """Commit a path that was fed. Outputs after it are kept only if a ``likely`` next token has been fed ahead."""
        depth = len(taken)
        useful = any((*taken, token_id) in self._known for token_id in likely)
        self.last = self._known[taken]
        later = [path for path in self._known if useful and len(path) > depth and path[:depth] == taken]
        self._known = {path[depth:]: self._known[path] for path in later}
        tree.commit(taken, keep_rest=useful)
        self._guesses = {path[depth:]: guess for path, guess in self._guesses.items() if path[:depth] == taken}
        self._indexed.clear()
        self._lookup.extend(taken)

    def read_back(
        self, prompt: Sequence[int], branches: Sequence[Path]
    ) -> Generator[FeedRequest, StepOutput, list[float]]:
        """PMI(S; x) = log p(x | x, y, S) - log p(x | x, y) of each branch S, with prompt x and committed answer y.

        The prompt is fed again after every branch, which must have been fed, and after the committed tokens. The
        generator yields what to feed, receives the outputs, and returns one value in nats for each branch.
        """
        chains = [(), *branches]
        assert self.last is not None
        before = [self.last, *(self._known[path] for path in branches)]
        targets = torch.tensor(prompt, device="cpu")
        totals = [float(logits_of(output).log_softmax(-1)[prompt[0]]) for output in before]
        width = max(1, _READ_AT_ONCE // len(chains))
        for start in range(0, len(prompt) - 1, width):
            end = min(start + width, len(prompt) - 1)
            step = yield [ReadBack(chain, prompt[start:end]) for chain in chains]
            log_probs = step.logits.log_softmax(-1).view(len(chains), end - start, -1)
            target_ids = targets[start + 1 : end + 1].to(log_probs.device)[None, :, None].expand(len(chains), -1, 1)
            sums = log_probs.gather(2, target_ids).double().sum(dim=(1, 2)).tolist()
            totals = [total + more for total, more in zip(totals, sums, strict=True)]
        return [total - totals[0] for total in totals[1:]]
