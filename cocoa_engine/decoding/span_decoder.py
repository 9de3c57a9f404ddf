"""The decode loop: Algorithm 1 of the paper.

    prompt -> [greedy run | risk point -> branches -> scores -> kept span]* -> end

:meth:`SpanDecoder.decode` is a coroutine: it yields the paths to feed, receives the forward pass's output for them with
``send``, and never runs the model itself. A single sequence and a ragged batch therefore run the same loop. The loop
requests tokens by their paths; ``token_feed.py`` decides in which pass each token is fed.
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from cocoa_engine.decoding.branch import (
    NOT_PLACED,
    Branch,
    log_prob_and_score,
    mlds,
    pooled_states,
    span_score,
    with_source_attention,
)
from cocoa_engine.decoding.next_tokens import NextTokens
from cocoa_engine.decoding.request import Rules
from cocoa_engine.decoding.speculation import AnswerHistory
from cocoa_engine.decoding.token_feed import MLDS_ALONE, StateReader, TokenFeed, TokenOutput
from cocoa_engine.equations import may_be_kept, span_log_probs
from cocoa_engine.execution.backends import FeedRequest, Path, StepOutput, TokenTree
from cocoa_engine.methods import METHODS
from cocoa_engine.model.tokenizer import Detokenizer
from cocoa_engine.risk.policy import RiskMeasure, reaches
from cocoa_engine.spans import Candidate, FinishReason, Span


class SpanDecoder:
    """The decode loop of one sequence, and the spans that it has decided.

    Args:
        prompt: token ids.
        rules: the request's settings, end tokens, processors and stopping criteria.
        track: decodes the answer's tokens to text; no token has been pushed yet.
        feed: decides in which pass each token is fed.
        measure: computes the risk of a span, which ``max_risk`` limits; `None` if there is no limit.
        states: divides the captured states.

    Attributes:
        decided: the finished spans, in order, without their texts and risks.
        finish_reason: why decoding ended; `None` before that.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        rules: Rules,
        track: Detokenizer,
        feed: TokenFeed,
        measure: RiskMeasure | None = None,
        states: StateReader = MLDS_ALONE,
    ) -> None:
        self.prompt = list(prompt)
        self.rules, self.config, self.method = rules, rules.config, METHODS[rules.config.method]
        self.track = track
        self.decided: list[Span] = []
        self.finish_reason: FinishReason | None = None
        self._token_ids = list(prompt)  # the prompt and the committed tokens
        self._feed, self._measure, self._states = feed, measure, states
        self._history = AnswerHistory(self.prompt)

    def decode(self, tree: TokenTree, first: Tensor | None) -> Generator[FeedRequest, StepOutput, None]:
        """Decode until the answer ends. Yields what to feed next and receives the output of the pass.

        Args:
            tree: the sequence. Its prompt has been fed; for a contrasting method, all of it but the last token.
            first: ``[V]``, the logits after the prompt; `None` for a contrasting method.
        """
        following = yield from self._begin(tree, first)
        run = Branch(self.track)
        while not self.has_ended():
            candidates = self._competing(following)
            at_risk_point = len(candidates.token_ids) > 1
            if at_risk_point:
                run = self._record_run(run)
                if self.has_ended():  # the risk of the run reached max_risk
                    break
            if at_risk_point and self.method.branches:
                branches = yield from self.grow(candidates)
                pmi = [0.0] * len(branches)
                if self.method.reads_back:
                    pmi = yield from self._feed.read_back(self.prompt, [branch.path for branch in branches])
                branch = self._choose(branches, pmi)
                path = branch.path
                run = Branch(branch.track)
            else:
                branch = run
                path = yield from self._extend(run, following)
            self._commit(tree, branch, path)
            following = branch.next or following
        self._record_run(run)

    def has_ended(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    def grow(self, candidates: NextTokens) -> Generator[Sequence[Path], StepOutput | list[TokenOutput], list[Branch]]:
        """Open a branch for each candidate and extend all branches token by token to their boundary.

        The boundary follows ``CocoaConfig.span_boundary``. It depends neither on ``max_new_tokens`` nor on stops, so
        that they change no choice. The generator yields the paths to feed, and receives the output of the pass or a
        :class:`TokenOutput` for each path. It returns the finished branches.
        """
        boundary, left = self.config.span_boundary, self.rules.window_left
        if left is not None:
            left -= len(self._token_ids) - len(self.prompt)
        longest = self.config.max_span_tokens if left is None else min(self.config.max_span_tokens, left)
        branches = [Branch(self.track.fork()) for _ in candidates.token_ids]
        for rank, branch in enumerate(branches):
            self._append(branch, candidates, rank)
        live, length = branches, 1
        while live:
            paths = [branch.path for branch in live]
            growing = [branch.path for branch in live if not branch.ended]
            outputs = yield from self._feed.feed(paths, growing, max(longest, self._tokens_left))
            self._add_outputs(live, outputs, paths, left)
            for branch in live:
                if branch.ended or length == longest:
                    branch.at_boundary = True
                elif boundary != "fixed" and not branch.at_boundary:
                    assert branch.next is not None
                    branch.at_boundary = len(self._competing(branch.next).token_ids) > 1
            short = [branch for branch in branches if not branch.at_boundary]
            if boundary == "own":
                live = short
            elif boundary == "left":
                live = short if len(short) == len(branches) else []
            else:  # right, fixed: up to the latest
                live = [branch for branch in branches if not branch.ended] if short else []
            for branch in live:
                assert branch.next is not None
                self._append(branch, branch.next)
            length += 1
        return branches

    def score_candidates(self, branches: Sequence[Branch], pmi: Sequence[float] = ()) -> list[Candidate]:
        """Score the branches of a risk point, with PMI(S; x) of each. The first candidate is the greedy one."""
        ended = [bool(branch.ended) for branch in branches]
        log_probs = span_log_probs([branch.log_probs for branch in branches], self.config.span_log_prob, ended)
        start = len(self.track.text)
        measured = zip(branches, log_probs, *self._mlds(branches), pmi or [0.0] * len(branches), strict=True)
        return [
            Candidate(
                **branch.measured(),
                text=branch.track.text[start:],
                log_prob=log_prob,
                con_mlds=con,
                f_mlds=f,
                score=span_score(self.config, log_prob, con, f, of_prompt),
                is_greedy=number == 0,
                ends_answer=ended[number],
            )
            for number, (branch, log_prob, con, f, of_prompt) in enumerate(measured)
        ]

    @property
    def _tokens_left(self) -> int:
        """The number of tokens that may still be added to the answer."""
        return self.config.max_new_tokens - (len(self._token_ids) - len(self.prompt))

    def _begin(self, tree: TokenTree, first: Tensor | None) -> Generator[FeedRequest, StepOutput, NextTokens]:
        """The next-token distribution after the prompt. Feeds the prompt's last token if ``first`` is `None`."""
        self._feed.feeds_ahead = tree.keeps_rest and not self.method.reads_back
        if first is None:
            output = yield [(self.prompt[-1],)]
            tree.commit((self.prompt[-1],))
            tree.fed_tokens = 0  # this token belongs to the prompt
            last = TokenOutput(output.logits[0], others=None if output.others is None else output.others[:, 0])
        else:
            last = TokenOutput(first)
        self._feed.last = last
        return self._feed.distributions.after(self._token_ids, [()], [last])[0]

    def _extend(self, run: Branch, following: NextTokens) -> Generator[Sequence[Path], StepOutput, Path]:
        """Add the best next token to a greedy run, and feed it."""
        self._append(run, following)
        taken = run.path[-1:]
        if self._stops(run, len(run.token_ids), taken):
            run.ended = run.ended or "stop"
        left = self._tokens_left
        outputs = yield from self._feed.feed([taken], [] if run.ended else [taken], left)
        self._add_outputs([run], outputs, [taken], left)
        return taken

    def _choose(self, branches: Sequence[Branch], pmi: Sequence[float]) -> Branch:
        """Score the branches, choose one, and record it as a span with all its candidates.

        The chosen branch is cut where the answer stops or reaches ``max_new_tokens``. Its candidates are not, and the
        PMI of a cut span is that of the whole branch.
        """
        candidates = self.score_candidates(branches, pmi)
        scores = [candidate.score for candidate in candidates]
        allowed = may_be_kept(self.config.span_log_prob, [candidate.ends_answer for candidate in candidates])
        if self.config.temperature > 0:
            values = torch.tensor(scores, dtype=torch.float64, device="cpu")
            values = values.masked_fill(~torch.tensor(allowed, device="cpu"), -torch.inf)
            below_best = values - values.max()  # <= 0: dividing it cannot give +inf
            weights = torch.softmax(below_best / self.config.temperature, dim=0)
            chosen = int(torch.multinomial(weights, 1, generator=self.rules.generator))
        else:  # ties: the more probable first token
            chosen = max((index for index, may in enumerate(allowed) if may), key=lambda index: (scores[index], -index))
        candidate, branch = candidates[chosen], branches[chosen]
        paths = [branch.path[:length] for length in range(1, min(len(branch.token_ids), self._tokens_left) + 1)]
        stop = next((path for path in paths if self._stops(branch, len(path), path)), None)
        paths = paths if stop is None else paths[: len(stop)]
        measured = candidate.con_mlds, candidate.f_mlds, candidate.log_prob, candidate.score
        if len(paths) < len(branch.token_ids):
            branch = branch.cut(self.track.fork(), [self._feed.output(path) for path in paths])
            (con,), (f,) = self._mlds([branch])
            measured = con, f, *log_prob_and_score(self.config, branch.log_probs, con, f, pmi=pmi[chosen])
        if stop is not None:
            branch.ended = branch.ended or "stop"
        self._record(branch, measured, candidates, chosen)
        return branch

    def _record_run(self, run: Branch) -> Branch:
        """Record a greedy run as a span unless it is empty. Returns a new, empty run."""
        if run.token_ids:
            (con,), (f,) = self._mlds([run])
            scored = log_prob_and_score(self.config, run.log_probs, con, f, contrasts=run.contrasts)
            self._record(run, (con, f, *scored))
        return Branch(run.track)

    def _mlds(self, branches: Sequence[Branch]) -> tuple[list[float], list[float]]:
        """ConMLDS and fMLDS of each branch."""
        return mlds(self._states.of_mlds(pooled_states(branches)))

    def _record(
        self, branch: Branch, measured: Sequence[float], candidates: Sequence[Candidate] = (), chosen: int | None = None
    ) -> None:
        """Add a span with both MLDS, log p_S and its score to ``decided``. Decoding ends if it reaches ``max_risk``."""
        con, f, log_prob, score = measured
        probes = self._states.probe_scores(pooled_states([branch])) if self._states.probes else {}
        copied, before = self._history.extend(branch.token_ids, branch.log_probs, branch.entropies)
        span = Span(
            **NOT_PLACED,
            **branch.measured(),
            kind="risk_point" if candidates else "greedy",
            log_prob=log_prob,
            con_mlds=con,
            f_mlds=f,
            score=score,
            candidates=list(candidates),
            chosen=chosen,
            token_ends=branch.ends,
            token_copied=copied,
            preceding=before,
            top_log_probs=branch.top or None,
            **{name: score for name, (score,) in probes.items()},
        )
        span = with_source_attention(span, None if self._measure is None else self._measure.calibrator)
        self.decided.append(span)
        # without a limit, the risk is computed when the result is built
        limit, measure = self.config.max_risk, self._measure
        if limit is not None and measure is not None and reaches(measure(span).value, limit):
            self.finish_reason = "risk"

    def _commit(self, tree: TokenTree, branch: Branch, taken: Path) -> None:
        """Make the tokens of ``taken`` part of the answer, and set the finish reason if it ends there."""
        self.track = branch.track
        self._token_ids.extend(taken)
        if self.finish_reason is None:  # "risk" takes precedence
            self.finish_reason = branch.ended or ("length" if self._tokens_left < 1 else None)
        if self.has_ended() and not tree.keeps_rest:
            return  # such a tree may be unable to commit a cut branch, and is not fed any more
        likely = (branch.next.best, *self._competing(branch.next).token_ids) if branch.next is not None else ()
        self._feed.commit(tree, taken, likely)

    def _competing(self, following: NextTokens) -> NextTokens:
        """The candidate set."""
        return following.competing(self.config.gamma, self.config.max_candidates)

    def _append(self, branch: Branch, following: NextTokens, rank: int | None = None) -> None:
        """Add a next token, by default the best, to a branch, and check whether it ends the text."""
        branch.add_token(following, rank)
        token_id = branch.token_ids[-1]
        branch.track.push(token_id)
        branch.ends.append(len(branch.track.text))
        if token_id in self.rules.eos:
            branch.ended = "eos"

    def _stops(self, branch: Branch, length: int, path: Path) -> bool:
        """Whether the answer stops after the first tokens of a branch, of which ``path`` are not committed yet."""
        return (
            branch.token_ids[length - 1] in self.rules.stop_ids
            or branch.track.stops_at(branch.ends[length - 1])
            or self.rules.criteria_met(self._token_ids, path)
        )

    def _add_outputs(
        self, branches: Sequence[Branch], outputs: Sequence[TokenOutput], paths: Sequence[Path], left: int | None
    ) -> None:
        """Add the output for each branch's last token: its states, and the distribution after it, before ``left``."""
        for branch, output in zip(branches, outputs, strict=True):
            branch.add_output(output)
        # processors are not called after an end: a grammar would allow no token there
        open_ended = [
            at for at, branch in enumerate(branches) if not branch.ended and (left is None or len(paths[at]) < left)
        ]
        if open_ended:
            following = self._feed.distributions.after(
                self._token_ids, [paths[at] for at in open_ended], [outputs[at] for at in open_ended]
            )
            for at, distribution in zip(open_ended, following, strict=True):
                branches[at].next = distribution
