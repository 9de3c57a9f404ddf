"""The decode loop: prompt -> [greedy run | risk point -> branches -> scores -> kept span]* -> end.

:meth:`SpanDecoder.decode` is a coroutine: it yields the paths to feed, is sent what the forward pass said of them, and
never runs the model itself. So one sequence and a ragged batch of them run the same loop.

The loop asks for tokens by their paths and does not mind which pass they were fed in. Where a pass has room, tokens are
fed ahead of it: guesses by prompt lookup, and what follows in a branch that got ahead of others by such guesses or has
ended and leads while others grow.
What was fed ahead is used if the loop comes to it, and never changes which token is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cocoa_engine.calibration import RiskCalibrator
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.answer_history import AnswerSoFar
from cocoa_engine.decoding.next_tokens import NextTokens, contrasted, next_tokens, non_finite
from cocoa_engine.decoding.prompt_lookup import PromptLookup
from cocoa_engine.decoding.span_scoring import log_prob_and_score, mlds, reaches_max_risk, reported_risk
from cocoa_engine.errors import ConfigError
from cocoa_engine.execution.backends import FeedRequest, Path, ReadBack, StepOutput, TokenTree
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model.detokenizer import TextTrack
from cocoa_engine.spans import Candidate, FinishReason, Preceding

Ids = Tensor  # [1, t], as transformers' logits processors and stopping criteria want them

COST_OF_A_ROW = 0.04
"""What another row makes a pass of few rows longer by, as a share of it; measured on a CPU."""

_READ_AT_ONCE = 128
"""Tokens of the prompt, read back after all candidates, in one pass."""

Room = Callable[[], int]
"""How many tips of this sequence the next forward pass takes at no extra cost."""


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
    entropies: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    contrasts: list[float] = field(default_factory=list)
    hidden: Tensor | None = None
    next: NextTokens | None = None
    ended: FinishReason | None = None
    stands_at: int | None = None

    @property
    def path(self) -> Path:
        return tuple(self.token_ids)

    def add_token(self, following: NextTokens, place: int | None = None) -> None:
        """Add a next token, and what is known of the distribution it is chosen from.

        Args:
            place: which of the most probable ones; none is the best, by its contrast where a method has one.
        """
        if place is None and following.contrasted is not None:
            token_id, log_prob, contrast = following.contrasted
            self.contrasts.append(contrast)
        else:
            token_id, log_prob = following.token_ids[place or 0], following.log_probs[place or 0]
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.entropies.append(following.entropy)
        self.margins.append(following.margin)

    def add_states(self, states: Tensor | None) -> None:
        """Add those of a fed token, ``[N + 1, d]``."""
        assert states is not None
        self.hidden = states if self.hidden is None else self.hidden + states


@dataclass(frozen=True)
class TokenOutput:
    """What the model said of a fed token.

    Attributes:
        logits: ``[V]``, kept only where they are needed again.
        hidden: ``[N + 1, d]``; none after the prompt.
        others: ``[K, V]``, what a contrasting method holds the logits against; kept with them.
        next: the distribution; none where processors have a say in it, or where it is not finite.
    """

    logits: Tensor | None
    hidden: Tensor | None = None
    next: NextTokens | None = None
    others: Tensor | None = None


@dataclass(frozen=True)
class DecidedSpan:
    """A finished span; ``text_end`` is where its complete characters end in the text, before any stop text is cut."""

    token_ids: list[int]
    token_log_probs: list[float]
    token_entropies: list[float]
    token_margins: list[float]
    log_prob: float
    con_mlds: float
    f_mlds: float
    score: float
    candidates: list[Candidate]
    chosen: int | None
    text_end: int
    token_copied: list[int] = field(default_factory=list)
    preceding: Preceding = field(default_factory=Preceding)


class SpanDecoder:
    """The decode loop of one sequence, and what it has decided so far.

    Args:
        native: our own kernels read the logits; see :func:`next_tokens`.
        calibrator: gives the spans' risk, which ``max_risk`` limits; none leaves the raw MLDS.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        rules: Rules,
        track: TextTrack,
        *,
        draft_tokens: int = 0,
        room: Room = lambda: 1,
        native: bool = False,
        calibrator: RiskCalibrator | None = None,
    ) -> None:
        self.calibrator = calibrator
        self.rules = rules
        self.config = rules.config
        self.method = METHODS[rules.config.method]
        self.prompt = list(prompt)
        self.ids = list(prompt)
        self.generated = 0
        self.track = track
        self.decided: list[DecidedSpan] = []
        self.finish_reason: FinishReason | None = None
        self.lookup = PromptLookup(prompt, draft_tokens)
        self.so_far = AnswerSoFar(self.prompt)
        self.room = room
        self.native = native
        self.feeds_ahead = False
        self.fed: dict[Path, TokenOutput] = {}  # since the last commit, and what was fed ahead before it
        # a path -> the token guessed to follow it and how many tokens matched, until it is known
        self.guesses: dict[Path, tuple[int, int]] = {}
        self.last: Tensor | None = None  # [V], the logits after the committed tokens, for reading back

    def decode(self, tree: TokenTree, first: Tensor | None) -> Generator[FeedRequest, StepOutput, None]:
        """Run to the end.

        Args:
            tree: the sequence, its prompt fed; of a contrasting method, all but the prompt's last token.
            first: ``[V]``, the logits after the prompt; none for a contrasting method.
        """
        self.feeds_ahead = tree.keeps_rest and not self.method.reads_back
        if first is None:
            output = yield [(self.ids[-1],)]
            tree.commit((self.ids[-1],))
            tree.fed_tokens = 0  # that one was the prompt's
            fed = TokenOutput(output.logits[0], others=None if output.others is None else output.others[:, 0])
        else:
            fed = TokenOutput(first)
        self.last = fed.logits
        following = self._distributions([()], [fed])[0]
        run = Branch(self.track)
        while not self.has_ended():
            candidates = self._competing(following)
            at_risk_point = len(candidates.token_ids) > 1
            if at_risk_point:
                run = self._close(run)
                if self.has_ended():  # of a risk that reaches max_risk
                    break
            if at_risk_point and self.method.branches:
                branches = yield from self.grow(candidates)
                pmi = (yield from self._read_back(branches)) if self.method.reads_back else [0.0] * len(branches)
                kept = self._choose(branches, pmi)
                taken = kept.path
                run = Branch(kept.track)
            else:
                kept = run
                self._append(run, following)
                taken = run.path[-1:]
                self._absorb([run], (yield from self._feed([taken], [] if run.ended else [taken])), [taken])
            self._advance(tree, kept, taken)
            if kept.next is not None:
                following = kept.next
        self._close(run)

    def has_ended(self) -> bool:
        """Whether nothing more is decoded."""
        return self.finish_reason is not None

    def grow(self, candidates: NextTokens) -> Generator[Sequence[Path], StepOutput | list[TokenOutput], list[Branch]]:
        """Open a branch for each candidate and grow them in step to their common boundary.

        It is sent what a pass says of the paths it asks for, or what was made of that already.
        """
        cap = min(self.config.max_span_tokens, self.config.max_new_tokens - self.generated)
        branches = [Branch(self.track.fork()) for _ in candidates.token_ids]
        for place, branch in enumerate(branches):
            self._append(branch, candidates, place)
        live, length = branches, 1
        while live:
            paths = [branch.path for branch in live]
            waiting = [branch for branch in branches if branch.stands_at is not None]
            growing = [branch.path for branch in live if not branch.ended]
            self._absorb(live, (yield from self._feed(paths, growing, waiting)), paths)
            for branch in live:
                if branch.stands_at is None and self._stands(branch, length == cap):
                    branch.stands_at = length
            live = self._live(branches)
            for branch in live:
                assert branch.next is not None
                self._append(branch, branch.next)
            length += 1
        return branches

    def _feed(
        self, paths: Sequence[Path], growing: Sequence[Path], waiting: Sequence[Branch] = ()
    ) -> Generator[Sequence[Path], StepOutput | list[TokenOutput], list[TokenOutput]]:
        """What the model says after some paths: those not fed yet are fed now, and others ahead where there is room.

        Args:
            growing: of the paths, those that another token may follow.
            waiting: branches that have ended while others grow.
        """
        for parent in {path[:-1] for path in paths} & self.guesses.keys():
            token_id, matched = self.guesses.pop(parent)
            self.lookup.judge(matched, (*parent, token_id) in paths)
        missing = [path for path in paths if path not in self.fed]
        if missing:
            asked = [*missing, *self._ahead(missing, growing, waiting)]
            output = yield asked
            said = output if isinstance(output, list) else self._said(output)
            self.fed.update(zip(asked, said, strict=True))
        return [self.fed[path] for path in paths]

    def _said(self, output: StepOutput) -> list[TokenOutput]:
        """What a pass says of each token it fed."""
        count = len(output.logits)
        known = [None] * count if self.rules.processors else self._top(output.logits, output.others)
        said = []
        for number, following in enumerate(known):
            again = following is None or self.method.reads_back
            logits = output.logits[number] if again else None
            others = output.others[:, number] if again and output.others is not None else None
            said.append(TokenOutput(logits, output.hidden[:, number], following, others))
        return said

    def _read_back(self, branches: Sequence[Branch]) -> Generator[FeedRequest, StepOutput, list[float]]:
        """PMI(S; x) of each branch S: the prompt x is fed once more after it, and after what it grew from."""
        chains = [(), *(branch.path for branch in branches)]
        before = [self.last, *(self.fed[branch.path].logits for branch in branches)]
        prompt = torch.tensor(self.prompt)
        totals = [float(_logits_of(row).log_softmax(-1)[self.prompt[0]]) for row in before]
        width = max(1, _READ_AT_ONCE // len(chains))
        for start in range(0, len(self.prompt) - 1, width):
            end = min(start + width, len(self.prompt) - 1)
            output = yield [ReadBack(chain, self.prompt[start:end]) for chain in chains]
            log_probs = output.logits.log_softmax(-1).view(len(chains), end - start, -1)
            targets = prompt[start + 1 : end + 1].to(log_probs.device)[None, :, None].expand(len(chains), -1, 1)
            found = log_probs.gather(2, targets).double().sum(dim=(1, 2)).tolist()
            totals = [total + more for total, more in zip(totals, found, strict=True)]
        return [total - totals[0] for total in totals[1:]]

    def _ahead(self, missing: Sequence[Path], growing: Sequence[Path], waiting: Sequence[Branch]) -> list[Path]:
        """Paths to feed beside those that must be fed: where the loop is likely to come to next."""
        room = self.room() - len(missing)
        if not self.feeds_ahead or room < 1:
            return []
        ahead = self._after_the_best(waiting, room)
        ahead += self._further(growing)[: room - len(ahead)]
        tips = [*(path for path in missing if path in growing), *ahead]
        for path in tips:
            tokens = self._guess(path, len(tips), room - len(ahead))
            ahead += [path + tokens[: depth + 1] for depth in range(len(tokens))]
        return ahead

    def _further(self, paths: Sequence[Path]) -> list[Path]:
        """What comes next in the branches that are fed beyond these paths already: they keep ahead of the others."""
        tips = []
        left = self.config.max_new_tokens - self.generated
        for path in paths:
            start = path
            while (known := self.fed.get(path)) and known.next and path[-1] not in self.rules.eos and len(path) < left:
                path = (*path, known.next.best)
            if path != start and path not in self.fed:
                tips.append(path)
        return tips

    def _guess(self, path: Path, tips: int, room: int) -> tuple[int, ...]:
        """What may follow a path by prompt lookup, to be fed; a guess that is not fed is noted too, to learn from."""
        left = self.config.max_new_tokens - self.generated - len(path)
        if path[-1] in self.rules.eos or left < 1:
            return ()
        guess, matched = self.lookup.guess(path, left)
        if not guess:
            return ()
        count = min(room, self.lookup.worth(matched, tips, COST_OF_A_ROW))
        for depth, token_id in enumerate(guess[: max(count, 1)]):
            self.guesses[path + guess[:depth]] = token_id, matched
        return guess[:count]

    def _after_the_best(self, waiting: Sequence[Branch], room: int) -> list[Path]:
        """The tips that grow from the best of the branches that have come to their own next risk point.

        Where those have come to theirs too, also from the best of them, and so on: whole risk points, at most ``room``.
        """
        tips: list[Path] = []
        base: Path = ()
        while waiting and self.config.span_boundary == "own":
            con, f = self._mlds(waiting)
            scores = [
                log_prob_and_score(self.config, branch.log_probs, con[number], f[number])[1]
                for number, branch in enumerate(waiting)
            ]
            best = waiting[scores.index(max(scores))]
            base = (*base, *best.token_ids)
            if best.ended or best.next is None:
                break
            growing, waiting = self._foreseen(base, self._competing(best.next))
            if len(tips) + len(growing) > room:
                break
            tips += growing
        return tips

    def _foreseen(self, base: Path, candidates: NextTokens) -> tuple[list[Path], list[Branch]]:
        """How the branches of a risk point to come stand: what of them is not fed yet, and those that are complete."""
        growing: list[Path] = []
        waiting: list[Branch] = []
        cap = min(self.config.max_span_tokens, self.config.max_new_tokens - self.generated - len(base))
        for place in range(len(candidates.token_ids)):
            branch = Branch(self.track)
            branch.add_token(candidates, place)
            while cap > 0:
                path = (*base, *branch.token_ids)
                known = self.fed.get(path)
                if known is None:
                    growing.append(path)
                    break
                branch.add_states(known.hidden)
                branch.next, branch.ended = known.next, "eos" if path[-1] in self.rules.eos else None
                following = None if known.next is None else self._competing(known.next)
                if branch.ended or following is None or len(following.token_ids) > 1 or len(branch.token_ids) == cap:
                    waiting.append(branch)
                    break
                branch.add_token(following)
        return growing, waiting

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

    def weighed(self, branches: Sequence[Branch], pmi: Sequence[float] | None = None) -> list[Candidate]:
        """The branches of a risk point as candidates, with their scores; the first is the greedy one.

        Args:
            pmi: PMI(S; x) of each, for a method that reads the prompt back.
        """
        con, f = self._mlds(branches)
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

    def _choose(self, branches: Sequence[Branch], pmi: Sequence[float]) -> Branch:
        """Score the branches, keep one, and record the span with all that competed."""
        candidates = self.weighed(branches, pmi)
        ranked = [candidate.score for candidate in candidates]
        if self.config.temperature > 0:
            below_best = torch.tensor(ranked, dtype=torch.float64) - max(ranked)  # divided, it cannot overflow upwards
            weights = torch.softmax(below_best / self.config.temperature, dim=0)
            chosen = int(torch.multinomial(weights, 1, generator=self.rules.generator))
        else:
            chosen = ranked.index(max(ranked))  # the first of equals: the more probable first token
        one = candidates[chosen]
        self._record(branches[chosen], one.con_mlds, one.f_mlds, candidates, chosen, pmi[chosen])
        for branch in branches:
            if branch is not branches[chosen]:
                self.lookup.note(branch.token_ids)
        return branches[chosen]

    def _close(self, run: Branch) -> Branch:
        """Record a greedy run, unless it is empty, as a span; returns the next, empty one."""
        if run.token_ids:
            (con,), (f,) = self._mlds([run])
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
        copied, before = self.so_far.extend(span.token_ids, span.log_probs, span.entropies)
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
            return  # the risk is worked out when the span is assembled
        if reaches_max_risk(self.config, reported_risk(self.config, self.calibrator, decided)):
            self.finish_reason = "risk"

    def _mlds(self, branches: Sequence[Branch]) -> tuple[list[float], list[float]]:
        """ConMLDS and fMLDS of each branch."""
        pooled = [branch.hidden / len(branch.token_ids) for branch in branches if branch.hidden is not None]
        return mlds(torch.stack(pooled, dim=1))

    def _competing(self, following: NextTokens) -> NextTokens:
        return following.competing(self.config.gamma, self.config.max_candidates)

    def _append(self, branch: Branch, following: NextTokens, place: int | None = None) -> None:
        """Take one of the next tokens, by default the best."""
        branch.add_token(following, place)
        token_id = branch.token_ids[-1]
        branch.track.push(token_id)
        if token_id in self.rules.eos:
            branch.ended = "eos"
        elif token_id in self.rules.stop_ids or branch.track.stop_at is not None or self._criteria_met(branch):
            branch.ended = "stop"

    def _absorb(self, branches: Sequence[Branch], fed: Sequence[TokenOutput], paths: Sequence[Path]) -> None:
        """Take in what the model said of the last token of each branch."""
        for branch, said in zip(branches, fed, strict=True):
            branch.add_states(said.hidden)
        # no processor is asked what may follow an end: a grammar would have no answer
        left = self.config.max_new_tokens - self.generated
        going_on = [number for number, branch in enumerate(branches) if not branch.ended and len(paths[number]) < left]
        if going_on:
            following = self._distributions(
                [paths[number] for number in going_on], [fed[number] for number in going_on]
            )
            for number, distribution in zip(going_on, following, strict=True):
                branches[number].next = distribution

    def _advance(self, tree: TokenTree, kept: Branch, taken: Path) -> None:
        """Go on from the end of what was kept."""
        depth = len(taken)
        likely = (kept.next.best, *self._competing(kept.next).token_ids) if kept.next is not None else ()
        useful = any((*taken, token_id) in self.fed for token_id in likely)
        self.last = self.fed[taken].logits
        self.fed = {path[depth:]: known for path, known in self.fed.items() if useful and _goes_on(path, taken)}
        self.guesses = {path[depth:]: guess for path, guess in self.guesses.items() if path[:depth] == taken}
        tree.commit(taken, keep_rest=useful)
        self.track = kept.track
        self.ids.extend(taken)
        self.lookup.extend(taken)
        self.generated += depth
        if self.finish_reason is None:  # the kept span's risk goes before
            self.finish_reason = kept.ended or ("length" if self.generated >= self.config.max_new_tokens else None)

    def _distributions(self, paths: Sequence[Path], fed: Sequence[TokenOutput]) -> list[NextTokens]:
        """The next-token distribution after each path.

        Raises:
            NonFiniteLogitsError: there is one from which no token can be chosen.
        """
        if self.rules.processors:
            others = [each.others for each in fed if each.others is not None]
            known = self._top(
                torch.stack([_logits_of(each.logits) for each in fed]),
                torch.stack(others, dim=1) if others else None,
                paths,
            )
        else:
            known = [
                each.next
                or self._top(_logits_of(each.logits)[None], None if each.others is None else each.others[:, None])[0]
                for each in fed
            ]
        result = []
        for path, distribution in zip(paths, known, strict=True):
            if distribution is None:
                raise non_finite(len(self.ids) + len(path))
            result.append(distribution)
        return result

    def _top(self, logits: Tensor, others: Tensor | None = None, paths: Sequence[Path] = ()) -> list[NextTokens | None]:
        """The distribution of each row.

        Args:
            logits: ``[W, V]``.
            others: ``[K, W, V]``, what a contrasting method holds them against.
            paths: of the rows, if processors have a say.
        """
        count = max(2, self.config.max_candidates)
        if others is None or not isinstance(self.method, ContrastingMethod):
            return next_tokens(self._processed(paths, logits) if paths else logits, count, native=self.native)
        contrasts = self.method.contrast(logits.float(), others, self.config)
        allowed = self.method.plausible(logits.float(), self.config)
        ranked = self._processed(paths, contrasts.clone()) if paths else contrasts
        if allowed is not None:  # unless processors forbid all that is plausible
            kept = ranked.masked_fill(~allowed, -torch.inf)
            ranked = torch.where((kept > -torch.inf).any(-1, keepdim=True), kept, ranked)
        return contrasted(next_tokens(logits, count, native=self.native), logits, contrasts, ranked)

    def _processed(self, paths: Sequence[Path], scores: Tensor) -> Tensor:
        """``[W, V]``: the scores as the processors leave them."""
        rows = []
        for path, row in zip(paths, scores, strict=True):
            ids, processed = self._ids_after(path, row.device), row[None]
            for processor in self.rules.processors:
                processed = processor(ids, processed)
                if not isinstance(processed, Tensor) or processed.shape != row[None].shape:
                    raise ConfigError(
                        f"the logits processor {type(processor).__name__} must return a tensor of the shape of its "
                        f"scores, {list(row[None].shape)}."
                    )
            rows.append(processed)
        return torch.cat(rows)

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


def _logits_of(row: Tensor | None) -> Tensor:
    assert row is not None
    return row.float()


def _goes_on(path: Path, beginning: Path) -> bool:
    return len(path) > len(beginning) and path[: len(beginning)] == beginning


def _all_true(criterion: Callable[..., Any], met: Any) -> bool:
    if not isinstance(met, (bool, Tensor)):
        raise ConfigError(f"the stopping criterion {type(criterion).__name__} must return a bool or a tensor of them.")
    return bool(torch.as_tensor(met).all())
