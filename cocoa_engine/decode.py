"""The decode loop: prompt -> [greedy run | risk point -> branches -> scores -> kept span]* -> end.

:meth:`Sequencer.decode` is a coroutine: it yields the paths to feed, is sent what the forward pass said of them, and
never runs the model itself. So one sequence and a ragged batch of them run the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cocoa_engine.backends import Path, StepOutput, TokenTree
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.measure import log_prob_and_score, mlds
from cocoa_engine.methods import METHODS
from cocoa_engine.next_tokens import NextTokens, next_tokens
from cocoa_engine.results import Candidate, FinishReason
from cocoa_engine.text import TextTrack

Ids = Tensor  # [1, t], as transformers' logits processors and stopping criteria want them


@dataclass
class Rules:
    """What a request asks of every next token, apart from the settings.

    Attributes:
        config: the settings; ``max_new_tokens`` already fits the context window.
        eos: tokens that end the text.
        stop_texts: texts that end it and are cut off.
        stop_ids: special tokens that were given as such texts.
        processors: called as ``(ids [1, t], logits [1, V])`` before p is formed.
        criteria: called as ``(ids [1, t], None)`` after a token is taken; true ends the text.
        generator: draws the branch when ``temperature`` is above 0.
    """

    config: CocoaConfig
    eos: frozenset[int]
    stop_texts: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    processors: Sequence[Callable[..., Any]] = ()
    criteria: Sequence[Callable[..., Any]] = ()
    generator: torch.Generator | None = None


@dataclass
class Branch:
    """A span in the making: a candidate at a risk point, or the trunk's greedy run.

    Attributes:
        hidden: ``[N + 1, d]`` float32: sums over the fed tokens of the states of layers m..n and the final one.
        next: the distribution after the last fed token, if another token may follow.
        track: the text up to the last token.
        ended: why no token may follow.
        stands_at: r_b, the number of tokens after which it stands at its own next risk point or cannot go on.
    """

    track: TextTrack
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    hidden: Tensor | None = None
    next: NextTokens | None = None
    ended: FinishReason | None = None
    stands_at: int | None = None

    @property
    def path(self) -> Path:
        return tuple(self.token_ids)


@dataclass(frozen=True)
class Decided:
    """A finished span; ``text_end`` is where its complete characters end in the text, before any stop text is cut."""

    token_ids: list[int]
    token_log_probs: list[float]
    log_prob: float
    con_mlds: float
    f_mlds: float
    score: float
    candidates: list[Candidate]
    chosen: int | None
    text_end: int


class Sequencer:
    """The decode loop of one sequence, and what it has decided so far."""

    def __init__(self, prompt: Sequence[int], rules: Rules, track: TextTrack) -> None:
        self.rules = rules
        self.config = rules.config
        self.method = METHODS[rules.config.method]
        self.ids = list(prompt)
        self.generated = 0
        self.track = track
        self.decided: list[Decided] = []
        self.finish_reason: FinishReason | None = None

    def decode(self, tree: TokenTree, first: Tensor) -> Generator[Sequence[Path], StepOutput, None]:
        """Run to the end.

        Args:
            tree: the sequence, its prompt fed.
            first: ``[V]``, the logits after the prompt.
        """
        following = self._next_tokens(first[None], [()])[0]
        run = Branch(self.track)
        while self.finish_reason is None:
            candidates = self._competing(following)
            at_risk_point = len(candidates.token_ids) > 1
            if at_risk_point:
                run = self._close(run)
            if at_risk_point and self.method.branches:
                kept = self._choose((yield from self._grow(candidates)))
                taken = kept.path
                run = Branch(kept.track)
            else:
                kept = run
                self._take(run, following)
                taken = run.path[-1:]
                self._absorb([run], (yield [taken]), [taken])
            tree.commit(taken)
            self._advance(kept, taken)
            if kept.next is not None:
                following = kept.next
        self._close(run)

    def _grow(self, candidates: NextTokens) -> Generator[Sequence[Path], StepOutput, list[Branch]]:
        """Open a branch for each candidate and grow them in step to their common boundary."""
        cap = min(self.config.max_span_tokens, self.config.max_new_tokens - self.generated)
        branches = [Branch(self.track.fork()) for _ in candidates.token_ids]
        for branch, token_id, log_prob in zip(branches, candidates.token_ids, candidates.log_probs, strict=True):
            self._append(branch, token_id, log_prob)
        live, length = branches, 1
        while live:
            paths = [branch.path for branch in live]
            self._absorb(live, (yield paths), paths)
            for branch in live:
                if branch.stands_at is None and self._stands(branch, length == cap):
                    branch.stands_at = length
            live = self._live(branches)
            for branch in live:
                assert branch.next is not None
                self._take(branch, branch.next)
            length += 1
        return branches

    def _stands(self, branch: Branch, capped: bool) -> bool:
        """Whether a branch stands at its own next risk point, or cannot go on."""
        if capped or branch.ended:
            return True
        assert branch.next is not None
        return self.config.span_boundary != "fixed" and len(self._competing(branch.next).token_ids) > 1

    def _live(self, branches: Sequence[Branch]) -> list[Branch]:
        """The branches that grow by another token, by the boundary rule."""
        waiting = [branch for branch in branches if branch.stands_at is None]
        if self.config.span_boundary == "own":
            return waiting
        if self.config.span_boundary == "left":
            return waiting if len(waiting) == len(branches) else []
        return [branch for branch in branches if not branch.ended] if waiting else []  # right, fixed: to the latest

    def _choose(self, branches: Sequence[Branch]) -> Branch:
        """Score the branches, keep one, and record the span with all that competed."""
        con, f = self._mlds(branches)
        start = len(self.track.text)
        candidates = []
        for number, branch in enumerate(branches):
            log_prob, score = log_prob_and_score(self.config, branch.log_probs, con[number], f[number])
            candidates.append(
                Candidate(
                    text=branch.track.text[start : branch.track.stop_at],
                    token_ids=branch.token_ids,
                    token_log_probs=branch.log_probs,
                    log_prob=log_prob,
                    con_mlds=con[number],
                    f_mlds=f[number],
                    score=score,
                    is_greedy=number == 0,
                )
            )
        ranked = [candidate.score for candidate in candidates]
        if self.config.temperature > 0:
            below_best = torch.tensor(ranked, dtype=torch.float64) - max(ranked)  # divided, it cannot overflow upwards
            weights = torch.softmax(below_best / self.config.temperature, dim=0)
            chosen = int(torch.multinomial(weights, 1, generator=self.rules.generator))
        else:
            chosen = ranked.index(max(ranked))  # the first of equals: the more probable first token
        self._record(branches[chosen], con[chosen], f[chosen], candidates, chosen)
        return branches[chosen]

    def _close(self, run: Branch) -> Branch:
        """Record a greedy run, unless it is empty, as a span; returns the next, empty one."""
        if run.token_ids:
            (con,), (f,) = self._mlds([run])
            self._record(run, con, f)
        return Branch(run.track)

    def _record(
        self, span: Branch, con: float, f: float, candidates: Sequence[Candidate] = (), chosen: int | None = None
    ) -> None:
        log_prob, score = log_prob_and_score(self.config, span.log_probs, con, f)
        self.decided.append(
            Decided(
                token_ids=span.token_ids,
                token_log_probs=span.log_probs,
                log_prob=log_prob,
                con_mlds=con,
                f_mlds=f,
                score=score,
                candidates=list(candidates),
                chosen=chosen,
                text_end=len(span.track.text),
            )
        )

    def _mlds(self, branches: Sequence[Branch]) -> tuple[list[float], list[float]]:
        """ConMLDS and fMLDS of each branch."""
        pooled = [branch.hidden / len(branch.token_ids) for branch in branches if branch.hidden is not None]
        return mlds(torch.stack(pooled, dim=1))

    def _competing(self, following: NextTokens) -> NextTokens:
        return following.competing(self.config.gamma, self.config.max_candidates)

    def _take(self, branch: Branch, following: NextTokens) -> None:
        """Append the most probable next token."""
        self._append(branch, following.token_ids[0], following.log_probs[0])

    def _append(self, branch: Branch, token_id: int, log_prob: float) -> None:
        branch.token_ids.append(token_id)
        branch.log_probs.append(log_prob)
        branch.track.push(token_id)
        if token_id in self.rules.eos:
            branch.ended = "eos"
        elif token_id in self.rules.stop_ids or branch.track.stop_at is not None or self._criteria_met(branch):
            branch.ended = "stop"

    def _absorb(self, branches: Sequence[Branch], output: StepOutput, paths: Sequence[Path]) -> None:
        """Take in what a forward pass said of the last token of each branch."""
        for number, branch in enumerate(branches):
            state = output.hidden[:, number]
            branch.hidden = state if branch.hidden is None else branch.hidden + state
        # no processor is asked what may follow an end: a grammar would have no answer
        left = self.config.max_new_tokens - self.generated
        going_on = [number for number, branch in enumerate(branches) if not branch.ended and len(paths[number]) < left]
        if going_on:
            following = self._next_tokens(output.logits[going_on], [paths[number] for number in going_on])
            for number, distribution in zip(going_on, following, strict=True):
                branches[number].next = distribution

    def _advance(self, kept: Branch, taken: Path) -> None:
        """Go on from the end of what was kept."""
        self.track = kept.track
        self.ids.extend(taken)
        self.generated += len(taken)
        self.finish_reason = kept.ended or ("length" if self.generated >= self.config.max_new_tokens else None)

    def _next_tokens(self, logits: Tensor, paths: Sequence[Path]) -> list[NextTokens]:
        if self.rules.processors:
            rows = []
            for row, path in zip(logits, paths, strict=True):
                ids, processed = self._ids_after(path, row.device), row[None]
                for processor in self.rules.processors:
                    processed = processor(ids, processed)
                    if not isinstance(processed, Tensor) or processed.shape != row[None].shape:
                        raise ConfigError(
                            f"the logits processor {type(processor).__name__} must return a tensor of the shape of its "
                            f"scores, {list(row[None].shape)}."
                        )
                rows.append(processed)
            logits = torch.cat(rows)
        positions = [len(self.ids) + len(path) for path in paths]
        return next_tokens(logits, max(2, self.config.max_candidates), positions)

    def _criteria_met(self, branch: Branch) -> bool:
        if not self.rules.criteria:
            return False
        ids = self._ids_after(self._path_since_commit(branch), torch.device("cpu"))
        return any(_all_true(criterion, criterion(ids, None)) for criterion in self.rules.criteria)

    def _path_since_commit(self, branch: Branch) -> Path:
        """The branch's tokens that are not in ``ids`` yet: all of a candidate's, the last of the trunk's run."""
        return branch.path[-1:] if branch.track is self.track else branch.path

    def _ids_after(self, path: Path, device: torch.device) -> Ids:
        return torch.tensor([[*self.ids, *path]], device=device)


def _all_true(criterion: Callable[..., Any], met: Any) -> bool:
    if not isinstance(met, (bool, Tensor)):
        raise ConfigError(f"the stopping criterion {type(criterion).__name__} must return a bool or a tensor of them.")
    return bool(torch.as_tensor(met).all())
