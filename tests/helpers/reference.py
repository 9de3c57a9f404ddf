"""A naive decoder written for clarity, against which the engine is checked.

No cache, one branch at a time: every next-token distribution is a full forward pass over the whole sequence, with the
hidden states of every layer. The equations are written out again here; nothing of the engine's decoding is imported,
only its settings and, for the comparison, its results.

It also records ``margin``: how near the nearest decision was to falling the other way. Two correct programs may
differ where that is of the order of float32 rounding.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.results import Generation
from cocoa_engine.spans import Measured
from tests.helpers.alike import is_near

End = Literal["stop", "eos", "length"]
Processor = Callable[[Tensor, Tensor], Tensor]  # ([1, T] ids, [1, V] scores) -> [1, V]
Criterion = Callable[[Tensor, Tensor], Any]  # ([1, T] ids, [1, V] scores) -> bool or [1]


@dataclass(frozen=True)
class Figures:
    token_ids: list[int]
    token_log_probs: list[float]
    token_entropies: list[float]
    token_margins: list[float]
    log_prob: float
    con_mlds: float
    f_mlds: float
    score: float


@dataclass(frozen=True)
class ReferenceSpan:
    """One span of the answer; a greedy one has no candidates."""

    kind: Literal["greedy", "risk_point", "given"]
    figures: Figures
    candidates: list[Figures] = field(default_factory=list)
    chosen: int | None = None


@dataclass(frozen=True)
class ReferenceGeneration:
    text: str
    token_ids: list[int]
    spans: list[ReferenceSpan]
    finish_reason: End | None
    risk_points: int
    margin: float


@dataclass(frozen=True)
class State:
    scores: Tensor  # [V] float32, the next token's processed logits
    hidden: Tensor  # [L + 1, t, d] float32, of the answer's tokens

    @property
    def log_p(self) -> Tensor:
        return self.scores.double().log_softmax(-1)  # float32 loses 1e-5 over a large vocabulary

    @property
    def entropy_and_margin(self) -> tuple[float, float]:
        allowed = self.log_p[self.log_p > -math.inf].sort(descending=True)[0]
        margin = (allowed[0] - allowed[1]).item() if len(allowed) > 1 else math.inf
        return -(allowed.exp() * allowed).sum().item(), margin


@dataclass(frozen=True)
class Branch:
    """Tokens after an answer so far: a candidate, or the open greedy run."""

    before: list[int]  # the answer before it
    token_ids: list[int]
    token_log_probs: list[float]
    chosen_from: list[tuple[float, float]]  # of each token, entropy and margin of the distribution
    state: State  # after its last token
    end: End | None  # why the answer ends with it, if it does

    def followed_by_nothing_yet(self) -> "Branch":
        """An empty branch that starts where this one ends."""
        return Branch([*self.before, *self.token_ids], [], [], [], self.state, self.end)


class FullForward:
    """Full forward passes of one model, each done once.

    Nothing is carried from one pass to the next. Results are kept because many settings walk the same sequences: a
    pass over a sequence also tells how the model stood after each of its beginnings.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.num_layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
        self.cuts_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.done: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Next-token logits ``[1, V]`` after ``prompt`` and ``answer``, and hidden states of the answer's tokens.

        They are ``[L + 1, t, d]``, the last after the final norm, and ``[t, d]``, the last before it.
        """
        if (tuple(prompt), tuple(answer)) not in self.done:
            logits, hidden, before_norm = self._forward([*prompt, *answer], len(prompt))
            for t in range(len(answer) + 1):
                known = (logits[t : t + 1], hidden[:, : t + 1], before_norm[:t])
                self.done.setdefault((tuple(prompt), tuple(answer[:t])), known)
        logits, hidden, before_norm = self.done[tuple(prompt), tuple(answer)]
        return logits, hidden[:, 1:], before_norm

    def last(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Hidden states of the last token, ``[L + 1, d]``."""
        self(prompt, answer)
        return self.done[tuple(prompt), tuple(answer)][1][:, -1]

    def foresee(self, prompt: Sequence[int], answer: Generation) -> None:
        """Pass over the longest sequences that a reference meets if the answer is right: their beginnings are free."""
        before: list[int] = []
        met = [answer.token_ids]
        for span in answer.spans:
            met += [[*before, *candidate.token_ids] for candidate in span.candidates]
            before += span.token_ids
        for sequence in sorted(met, key=len, reverse=True):
            self(prompt, sequence)

    @torch.no_grad()
    def _forward(self, token_ids: list[int], start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and hidden states from the prompt's last token on, and the states before the norm after it."""
        before_norm: list[Tensor] = []

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            before_norm.append(output[0] if isinstance(output, (tuple, list)) else output)

        hook = self._last_decoder_layer().register_forward_hook(keep)
        try:
            ids = torch.tensor([token_ids], device=self.model.device)
            kept = {"logits_to_keep": len(token_ids) - start + 1} if self.cuts_logits else {}
            output = self.model(input_ids=ids, use_cache=False, output_hidden_states=True, **kept)
        finally:
            hook.remove()
        layers = list(output.hidden_states)
        # Mamba's list has no embedding, but the last layer before the norm too
        if torch.equal(layers[-2], before_norm[-1]):
            layers = [self.model.get_input_embeddings()(ids), *layers[:-2], layers[-1]]
        if len(layers) != self.num_layers + 1:
            raise AssertionError(f"{len(layers)} hidden states of a model with {self.num_layers} layers")
        hidden = torch.stack([layer[0, start - 1 :].float() for layer in layers])
        logits = output.logits[0] if kept else output.logits[0, start - 1 :]
        return logits.float(), hidden, before_norm[-1][0, start:].float()

    def _last_decoder_layer(self) -> torch.nn.Module:
        lists = (module for module in self.model.modules() if isinstance(module, torch.nn.ModuleList))
        return next(layers for layers in lists if len(layers) == self.num_layers)[-1]


class Reference:
    """Decodes one prompt with one configuration: every setting but ``temperature`` and ``seed`` is followed.

    Args:
        choices: the candidate to keep at each risk point, instead of the one with the best score. With it a sampled
            decode can be checked.
    """

    def __init__(
        self,
        forward: FullForward,
        tokenizer: Any,
        config: CocoaConfig,
        *,
        logits_processor: Sequence[Processor] = (),
        stopping_criteria: Sequence[Criterion] = (),
        choices: Iterable[int] | None = None,
    ) -> None:
        self.full_forward = forward
        self.model = forward.model
        self.tokenizer = tokenizer
        self.config = config
        self.processors = list(logits_processor)
        self.criteria = list(stopping_criteria)
        self.choices = None if choices is None else iter(choices)
        self.limit: float = config.max_new_tokens
        self.stops = True  # whether stop texts and criteria end what grows
        self.margin = math.inf

        self.num_layers = forward.num_layers  # L
        self.m, self.n = config.middle_layers or (self.num_layers // 3, 2 * self.num_layers // 3)
        eos = self.model.generation_config.eos_token_id
        self.eos = {tokenizer.eos_token_id, *([] if eos is None else [eos] if isinstance(eos, int) else eos)}

    # The walk of the method.

    def foresee(self, prompt: Sequence[int], answer: Generation) -> None:
        """As :meth:`FullForward.foresee`."""
        self.full_forward.foresee(prompt, answer)

    def generate(self, prompt: Sequence[int]) -> ReferenceGeneration:
        self.prompt = list(prompt)
        self.margin = math.inf
        spans: list[ReferenceSpan] = []
        tip = Branch([], [], [], [], self.forward([]), None)  # the open greedy run

        while tip.end is None:
            competing = self.competing(tip.state)
            if len(competing) == 1:
                tip = self.step(tip, self.best(tip, competing[0]))
                continue
            if tip.token_ids:
                spans.append(ReferenceSpan("greedy", self.measure(tip)))
            tip = tip.followed_by_nothing_yet()
            if not self.branches:
                tip = self.step(tip, self.best(tip, competing[0]))
            else:
                span, winner = self.risk_point(tip, competing)
                spans.append(span)
                tip = winner.followed_by_nothing_yet()
        if tip.token_ids:
            spans.append(ReferenceSpan("greedy", self.measure(tip)))

        token_ids = tip.before + tip.token_ids
        return ReferenceGeneration(
            text=self.text(token_ids),
            token_ids=token_ids,
            spans=spans,
            finish_reason=tip.end,
            risk_points=sum(span.kind == "risk_point" for span in spans),
            margin=self.margin,
        )

    def score(self, prompt: Sequence[int], given: Sequence[int]) -> ReferenceGeneration:
        """Teacher forcing: ``given`` after ``prompt`` as one span."""
        self.prompt = list(prompt)
        end = self.forward(given)  # first: its beginnings are free
        states = [self.forward(given[:i]) for i in range(len(given))]
        log_probs = [state.log_p[token].item() for state, token in zip(states, given, strict=True)]
        chosen_from = [state.entropy_and_margin for state in states]
        figures = self.measure(Branch([], list(given), log_probs, chosen_from, end, None))
        return ReferenceGeneration(
            text=text_of(self.tokenizer, list(given)),
            token_ids=list(given),
            spans=[ReferenceSpan("given", figures)],
            finish_reason=None,
            risk_points=0,
            margin=math.inf,
        )

    def risk_point(self, here: Branch, competing: list[int]) -> tuple[ReferenceSpan, Branch]:
        """Grow a branch from each competing token to the boundary and keep the best."""
        window = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        cap = int(min(self.config.max_span_tokens, window - len(self.prompt) - len(here.before)))
        self.limit, self.stops = math.inf, False  # they cut the span that is kept, and nothing else
        grown = []  # of each branch, what it was at length 1, 2, ...
        for token in competing:  # each to its own next risk point
            stages = [self.step(here, token)]
            while stages[-1].end is None and len(stages) < cap and len(self.competing(stages[-1].state)) == 1:
                stages.append(self.greedy_step(stages[-1]))
            grown.append(stages)

        reached = [len(stages) for stages in grown]  # r_b
        lengths = {
            "right": [max(reached)] * len(grown),
            "left": [min(reached)] * len(grown),
            "own": reached,
            "fixed": [cap] * len(grown),
        }[self.config.span_boundary]
        branches = []
        for stages, length in zip(grown, lengths, strict=True):
            while stages[-1].end is None and len(stages) < length:
                stages.append(self.greedy_step(stages[-1]))
            branches.append(stages[min(length, len(stages)) - 1])

        candidates = [self.measure(branch, branches) for branch in branches]
        ends = [branch.end is not None for branch in branches]
        chosen = self.choose([candidate.score for candidate in candidates], ends)
        self.limit, self.stops = self.config.max_new_tokens, True
        kept, figures = branches[chosen], candidates[chosen]
        for stage in grown[chosen][: len(kept.token_ids)]:
            if (end := self.ended([*here.before, *stage.token_ids], stage.state.scores)) is not None:
                if len(stage.token_ids) < len(kept.token_ids):
                    figures = self.measure(stage, scored_as=branches[chosen])
                kept = replace(stage, end=end)
                break
        return ReferenceSpan("risk_point", figures, candidates, chosen), kept

    def choose(self, scores: list[float], ends: list[bool]) -> int:
        """The best score; a tie goes to the more probable first token."""
        if self.config.span_log_prob == "greedy_end":  # an end is kept only if it is greedy decoding's
            scores = [
                -math.inf if b and end else score for b, (score, end) in enumerate(zip(scores, ends, strict=True))
            ]
        if self.choices is not None:
            return next(self.choices)
        best = max(range(len(scores)), key=lambda b: (scores[b], -b))
        for b, score in enumerate(scores):
            if b != best:
                self.near((scores[best] - score) / max(1.0, abs(score)))
        return best

    def greedy_step(self, branch: Branch) -> Branch:
        """The branch with its most probable next token, whether or not others compete."""
        ordered, tokens = branch.state.log_p.sort(descending=True, stable=True)
        self.near((ordered[0] - ordered[1]).item())
        return self.step(branch, int(tokens[0]))

    def step(self, branch: Branch, token: int) -> Branch:
        answer = [*branch.before, *branch.token_ids, token]
        return Branch(
            before=branch.before,
            token_ids=[*branch.token_ids, token],
            token_log_probs=[*branch.token_log_probs, branch.state.log_p[token].item()],
            chosen_from=[*branch.chosen_from, branch.state.entropy_and_margin],
            state=self.forward(answer),
            end=self.ended(answer, branch.state.scores),
        )

    def ended(self, answer: list[int], scores: Tensor) -> End | None:
        if answer[-1] in self.eos:
            return "eos"
        if not self.stops:
            return None
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        if any(stop in text for stop in self.config.stop):
            return "stop"
        ids = torch.tensor([self.prompt + answer], device=self.model.device)
        if any(bool(criterion(ids, scores.unsqueeze(0))) for criterion in self.criteria):
            return "stop"
        return "length" if len(answer) >= self.limit else None

    def text(self, token_ids: list[int]) -> str:
        text = text_of(self.tokenizer, token_ids)
        return text[: min((text.find(stop) for stop in self.config.stop if stop in text), default=None)]

    # The model.

    def forward(self, answer: Sequence[int]) -> State:
        logits, hidden, before_norm = self.full_forward(self.prompt, answer)
        if self.config.final_layer == "pre_norm":
            hidden = torch.cat([hidden[:-1], before_norm.unsqueeze(0)])

        ids = torch.tensor([[*self.prompt, *answer]], device=self.model.device)
        scores = logits.clone()
        penalty = self.model.generation_config.repetition_penalty or 1.0
        for token in set(ids[0].tolist()):
            scores[0, token] *= penalty if scores[0, token] < 0 else 1 / penalty
        for processor in self.processors:
            scores = processor(ids, scores)
        return State(scores=scores[0], hidden=hidden)

    # The equations.

    def competing(self, state: State) -> list[int]:
        """C = {w : p(w) >= gamma * max p}, most probable first, at most ``max_candidates``; gamma = 1 is greedy."""
        ordered, tokens = state.log_p.sort(descending=True, stable=True)  # ties: the lower id first
        most = self.config.max_candidates
        if self.config.gamma == 1 or most == 1:
            self.near((ordered[0] - ordered[1]).item())
            return [int(tokens[0])]
        distance = ordered - ordered[0] - math.log(self.config.gamma)  # >= 0: competes
        self.near(float(distance.abs().min()))
        count = int((distance >= 0).sum())
        for higher, lower in pairwise(ordered[: min(count, most + 1)]):
            self.near((higher - lower).item())
        return tokens[: min(count, most)].tolist()

    def measure(self, branch: Branch, rivals: Sequence[Branch] = (), scored_as: Branch | None = None) -> Figures:
        """The figures of a branch as a span, among those of its risk point. Diver reads back after ``scored_as``."""
        state, token_log_probs = branch.state, branch.token_log_probs
        pooled = state.hidden[:, -len(branch.token_ids) :].mean(dim=1)  # H[S, l] in row l
        width = self.n - self.m + 1  # N
        con = sum(dis(pooled[j], pooled[j + 1]) for j in range(self.m, self.n)) / width
        final = sum(dis(pooled[j], pooled[self.num_layers]) for j in range(self.m, self.n + 1)) / width

        log_prob = self.log_p_of(branch, rivals or [branch])
        mlds = final if self.config.metric == "f_mlds" else con
        score = self.score_of(scored_as or branch, log_prob, mlds)
        entropies, margins = map(list, zip(*branch.chosen_from, strict=True))
        return Figures(branch.token_ids, token_log_probs, entropies, margins, log_prob, con, final, score)

    def log_p_of(self, branch: Branch, rivals: Sequence[Branch]) -> float:
        """log p_S of a branch among rivals of other lengths, itself included."""
        rule, values = self.config.span_log_prob, branch.token_log_probs
        if rule == "common_length":
            return sum(values[: min(len(rival.token_ids) for rival in rivals)])
        if rule == "end_mean" and branch.end in ("eos", "stop"):
            open_ended = [rival for rival in rivals if rival.end not in ("eos", "stop")]
            return sum(values) / len(values) * max(len(rival.token_ids) for rival in open_ended or rivals)
        divided_by = {"mean": len(values), "gnmt": ((5 + len(values)) / 6) ** 0.6, "sqrt": len(values) ** 0.5}
        return sum(values) / divided_by.get(rule, 1)

    def score_of(self, branch: Branch, log_prob: float, mlds: float) -> float:
        return {
            "greedy": log_prob,
            "cocoa": log_prob - self.config.alpha * mlds,
            "cocoa-sig": log_prob * (1 + self.config.alpha * mlds),
        }[self.config.method]

    @property
    def branches(self) -> bool:
        return self.config.method != "greedy"

    def best(self, tip: Branch, most_probable: int) -> int:
        """The token that the method takes where it does not branch."""
        return most_probable

    def near(self, distance: float) -> None:
        """Note how far a decision was from falling the other way."""
        self.margin = min(self.margin, abs(distance))


def text_of(tokenizer: Any, token_ids: list[int]) -> str:
    """The text of tokens without a character whose last bytes are missing: without one that further bytes complete."""
    vocabulary = tokenizer.get_vocab()
    further = [vocabulary.get(f"<0x{byte:02X}>", vocabulary.get(letter)) for byte, letter in ((0x80, "Ģ"), (0xA0, "ł"))]
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    if text.endswith("\ufffd") and None not in further:
        for first, more in itertools.product(further, range(3)):
            completed: str = tokenizer.decode([*token_ids, first, *[further[0]] * more], skip_special_tokens=True)
            if not completed.endswith("\ufffd"):
                return completed[:-1]
    return text


def dis(a: Tensor, b: Tensor) -> float:
    """1 - cos(a, b), worked out in float64; a zero vector, such as the embedding of a padding token, has cosine 0."""
    a, b = a.double(), b.double()
    norms = a.norm() * b.norm()
    return 1.0 - float(a @ b / norms) if norms > 0 else 1.0


def assert_same(actual: Generation, expected: ReferenceGeneration) -> None:
    assert actual.token_ids == expected.token_ids
    assert actual.text == expected.text
    assert actual.finish_reason == expected.finish_reason
    assert actual.usage.completion_tokens == len(expected.token_ids)
    assert actual.usage.risk_points == expected.risk_points
    for span, wanted in zip(actual.spans, expected.spans, strict=True):
        assert (span.kind, span.chosen) == (wanted.kind, wanted.chosen)
        assert_same_figures(span, wanted.figures)
        assert [candidate.is_greedy for candidate in span.candidates] == [b == 0 for b in range(len(wanted.candidates))]
        for candidate, figures in zip(span.candidates, wanted.candidates, strict=True):
            assert_same_figures(candidate, figures)


def assert_same_figures(actual: Measured, expected: Figures) -> None:
    assert actual.token_ids == expected.token_ids
    for name in ("token_log_probs", "token_entropies", "token_margins", "log_prob", "con_mlds", "f_mlds", "score"):
        assert is_near(getattr(actual, name), getattr(expected, name)), name
