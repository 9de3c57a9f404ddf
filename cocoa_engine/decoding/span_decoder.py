"""The decode loop, which is Algorithm 1 of the paper.

    prompt -> [greedy run | risk point -> branches -> scores -> kept span]* -> end

:meth:`SpanDecoder.decode` is a coroutine: it yields the paths to feed, is sent what the forward pass said of them, and
never runs the model itself. One sequence and a ragged batch of them therefore run the same loop. The loop asks for
tokens by their paths; ``token_feed.py`` and ``speculation.py`` decide in which pass they are fed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from cocoa_engine.calibration import RiskCalibrator
from cocoa_engine.decoding.answer_history import AnswerHistory
from cocoa_engine.decoding.branch import Branch, DecidedSpan, branch_mlds
from cocoa_engine.decoding.distributions import Distributions, TokenOutput
from cocoa_engine.decoding.next_tokens import NextTokens
from cocoa_engine.decoding.rules import Rules
from cocoa_engine.decoding.span_scoring import log_prob_and_score, reaches_max_risk, reported_risk
from cocoa_engine.decoding.speculation import FreeRows, Speculation
from cocoa_engine.decoding.token_feed import Feeding, TokenFeed
from cocoa_engine.execution.backends import FeedRequest, Path, StepOutput, TokenTree
from cocoa_engine.methods import METHODS
from cocoa_engine.model.detokenizer import TextTrack
from cocoa_engine.spans import Candidate, FinishReason


class SpanDecoder:
    """The decode loop of one sequence, and the spans that it has decided.

    Args:
        prompt: token ids.
        track: the answer's text, empty.
        draft_tokens: guesses fed after each leaf, at most.
        free_rows: see :data:`~cocoa_engine.decoding.speculation.FreeRows`.
        native: the kernels read the logits.
        calibrator: gives the spans' risk, which ``max_risk`` limits; `None` leaves the raw MLDS.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        rules: Rules,
        track: TextTrack,
        *,
        draft_tokens: int = 0,
        free_rows: FreeRows = lambda: 1,
        native: bool = False,
        calibrator: RiskCalibrator | None = None,
    ) -> None:
        self.prompt = list(prompt)
        self.rules = rules
        self.config = rules.config
        self.method = METHODS[rules.config.method]
        self.track = track
        self.decided: list[DecidedSpan] = []
        self.finish_reason: FinishReason | None = None
        self._token_ids = list(prompt)  # the prompt and what was kept
        self._calibrator = calibrator
        self._history = AnswerHistory(self.prompt)
        self._distributions = Distributions(rules, native=native)
        self._speculation = Speculation(prompt, rules, draft_tokens, free_rows)
        self._feed = TokenFeed(self._distributions, self._speculation)

    def decode(self, tree: TokenTree, first: Tensor | None) -> Generator[FeedRequest, StepOutput, None]:
        """Run to the end.

        Args:
            tree: the sequence, its prompt fed; of a contrasting method, all but the prompt's last token.
            first: ``[V]``, the logits after the prompt; `None` for a contrasting method.
        """
        following = yield from self._begin(tree, first)
        run = Branch(self.track)
        while not self.has_ended():
            candidates = self._competing(following)
            at_risk_point = len(candidates.token_ids) > 1
            if at_risk_point:
                run = self._close(run)
                if self.has_ended():  # the risk of the run reached max_risk
                    break
            if at_risk_point and self.method.branches:
                branches = yield from self.grow(candidates)
                kept = self._choose(branches, (yield from self._mutual_information(branches)))
                taken = kept.path
                run = Branch(kept.track)
            else:
                kept = run
                taken = yield from self._extend(run, following)
            self._commit(tree, kept, taken)
            following = kept.next or following
        self._close(run)

    def has_ended(self) -> bool:
        """Whether nothing more is decoded."""
        return self.finish_reason is not None

    def grow(self, candidates: NextTokens) -> Generator[Sequence[Path], StepOutput | list[TokenOutput], list[Branch]]:
        """Open a branch for each candidate and grow the branches in step to their common boundary.

        It is sent what a pass says of the paths it yields, or the outputs that were made of that already.
        """
        longest = min(self.config.max_span_tokens, self._tokens_left)
        branches = [Branch(self.track.fork()) for _ in candidates.token_ids]
        for rank, branch in enumerate(branches):
            self._append(branch, candidates, rank)
        live, length = branches, 1
        while live:
            paths = [branch.path for branch in live]
            growing = [branch.path for branch in live if not branch.ended]
            finished = [branch for branch in branches if branch.stands_at is not None]
            self._absorb(live, (yield from self._fed(paths, growing, finished)), paths)
            for branch in live:
                if branch.stands_at is None and (length == longest or self._at_own_boundary(branch)):
                    branch.stands_at = length
            live = self._live(branches)
            for branch in live:
                assert branch.next is not None
                self._append(branch, branch.next)
            length += 1
        return branches

    def weigh(self, branches: Sequence[Branch], pmi: Sequence[float] = ()) -> list[Candidate]:
        """The branches of a risk point as candidates with their scores; the first is the greedy one.

        Args:
            pmi: PMI(S; x) of each, for a method that reads the prompt back.
        """
        con, f = branch_mlds(branches)
        start = len(self.track.text)
        candidates = []
        for number, branch in enumerate(branches):
            log_prob, score = log_prob_and_score(
                self.config, branch.log_probs, con[number], f[number], pmi=pmi[number] if pmi else 0.0
            )
            candidates.append(
                Candidate(
                    text=branch.track.text[start : branch.track.stop_at],
                    token_ids=branch.token_ids,
                    token_log_probs=branch.log_probs,
                    token_entropies=branch.entropies,
                    token_margins=branch.margins,
                    log_prob=log_prob,
                    con_mlds=con[number],
                    f_mlds=f[number],
                    score=score,
                    is_greedy=number == 0,
                )
            )
        return candidates

    @property
    def _tokens_left(self) -> int:
        """How many tokens the answer may still have."""
        return self.config.max_new_tokens - (len(self._token_ids) - len(self.prompt))

    def _begin(self, tree: TokenTree, first: Tensor | None) -> Generator[FeedRequest, StepOutput, NextTokens]:
        """The distribution after the prompt."""
        self._speculation.enabled = tree.keeps_rest and not self.method.reads_back
        if first is None:
            output = yield [(self.prompt[-1],)]
            tree.commit((self.prompt[-1],))
            tree.fed_tokens = 0  # this token belongs to the prompt
            last = TokenOutput(output.logits[0], others=None if output.others is None else output.others[:, 0])
        else:
            last = TokenOutput(first)
        self._feed.last = last
        return self._distributions.after(self._token_ids, [()], [last])[0]

    def _extend(self, run: Branch, following: NextTokens) -> Generator[Sequence[Path], StepOutput, Path]:
        """Add the best next token to a greedy run, and feed it."""
        self._append(run, following)
        taken = run.path[-1:]
        self._absorb([run], (yield from self._fed([taken], [] if run.ended else [taken])), [taken])
        return taken

    def _mutual_information(self, branches: Sequence[Branch]) -> Generator[FeedRequest, StepOutput, list[float]]:
        """PMI(S; x) of each branch, where the method ranks by it, else zeros."""
        if not self.method.reads_back:
            return [0.0] * len(branches)
        return (yield from self._feed.read_back(self.prompt, [branch.path for branch in branches]))

    def _choose(self, branches: Sequence[Branch], pmi: Sequence[float]) -> Branch:
        """Score the branches, keep one, and record the span with all that competed."""
        candidates = self.weigh(branches, pmi)
        scores = [candidate.score for candidate in candidates]
        if self.config.temperature > 0:
            below_best = torch.tensor(scores, dtype=torch.float64) - max(scores)  # divided, it cannot overflow upwards
            weights = torch.softmax(below_best / self.config.temperature, dim=0)
            chosen = int(torch.multinomial(weights, 1, generator=self.rules.generator))
        else:
            chosen = scores.index(max(scores))  # the first of equals: the more probable first token
        one = candidates[chosen]
        self._record(branches[chosen], one.con_mlds, one.f_mlds, candidates, chosen, pmi[chosen])
        for branch in branches:
            if branch is not branches[chosen]:
                self._speculation.note(branch.token_ids)
        return branches[chosen]

    def _close(self, run: Branch) -> Branch:
        """Record a greedy run, unless it is empty, as a span; returns the next, empty one."""
        if run.token_ids:
            (con,), (f,) = branch_mlds([run])
            self._record(run, con, f)
        return Branch(run.track)

    def _record(
        self,
        span: Branch,
        con: float,
        f: float,
        candidates: Sequence[Candidate] = (),
        chosen: int | None = None,
        pmi: float = 0.0,
    ) -> None:
        log_prob, score = log_prob_and_score(self.config, span.log_probs, con, f, contrasts=span.contrasts, pmi=pmi)
        copied, before = self._history.extend(span.token_ids, span.log_probs, span.entropies)
        decided = DecidedSpan(
            token_ids=span.token_ids,
            token_log_probs=span.log_probs,
            token_entropies=span.entropies,
            token_margins=span.margins,
            log_prob=log_prob,
            con_mlds=con,
            f_mlds=f,
            score=score,
            candidates=list(candidates),
            chosen=chosen,
            text_end=len(span.track.text),
            token_copied=copied,
            preceding=before,
        )
        self.decided.append(decided)
        if self.config.max_risk is None:
            return  # the risk is computed when the result is built
        if reaches_max_risk(self.config, reported_risk(self.config, self._calibrator, decided)):
            self.finish_reason = "risk"

    def _commit(self, tree: TokenTree, kept: Branch, taken: Path) -> None:
        """Go on from the end of what was kept."""
        likely = (kept.next.best, *self._competing(kept.next).token_ids) if kept.next is not None else ()
        self._feed.commit(tree, taken, likely)
        self.track = kept.track
        self._token_ids.extend(taken)
        if self.finish_reason is None:  # a risk that reaches max_risk comes first
            self.finish_reason = kept.ended or ("length" if self._tokens_left < 1 else None)

    def _competing(self, following: NextTokens) -> NextTokens:
        """The candidate set."""
        return following.competing(self.config.gamma, self.config.max_candidates)

    def _at_own_boundary(self, branch: Branch) -> bool:
        """Whether a branch is at its own next risk point, or cannot go on."""
        if branch.ended:
            return True
        assert branch.next is not None
        return self.config.span_boundary != "fixed" and len(self._competing(branch.next).token_ids) > 1

    def _live(self, branches: Sequence[Branch]) -> list[Branch]:
        """The branches that grow by another token, by the boundary rule."""
        short = [branch for branch in branches if branch.stands_at is None]
        if self.config.span_boundary == "own":
            return short
        if self.config.span_boundary == "left":
            return short if len(short) == len(branches) else []
        return [branch for branch in branches if not branch.ended] if short else []  # right, fixed: to the latest

    def _fed(self, paths: Sequence[Path], growing: Sequence[Path], finished: Sequence[Branch] = ()) -> Feeding:
        """What the model says after some paths."""
        return self._feed.feed(paths, growing, finished, self._tokens_left)

    def _append(self, branch: Branch, following: NextTokens, rank: int | None = None) -> None:
        """Take one of the next tokens, by default the best."""
        branch.add_token(following, rank)
        token_id = branch.token_ids[-1]
        branch.track.push(token_id)
        if token_id in self.rules.eos:
            branch.ended = "eos"
        elif (
            token_id in self.rules.stop_ids
            or branch.track.stop_at is not None
            or self.rules.criteria_met(self._token_ids, self._uncommitted(branch))
        ):
            branch.ended = "stop"

    def _absorb(self, branches: Sequence[Branch], outputs: Sequence[TokenOutput], paths: Sequence[Path]) -> None:
        """Take in what the model said of the last token of each branch."""
        for branch, output in zip(branches, outputs, strict=True):
            branch.add_states(output.hidden)
        # processors are not asked what may follow an end: a grammar would have no answer
        left = self._tokens_left
        open_ended = [at for at, branch in enumerate(branches) if not branch.ended and len(paths[at]) < left]
        if open_ended:
            following = self._distributions.after(
                self._token_ids, [paths[at] for at in open_ended], [outputs[at] for at in open_ended]
            )
            for at, distribution in zip(open_ended, following, strict=True):
                branches[at].next = distribution

    def _uncommitted(self, branch: Branch) -> Path:
        """The branch's tokens that are not committed yet: all of a candidate's, the last one of a greedy run."""
        return branch.path[-1:] if branch.track is self.track else branch.path
