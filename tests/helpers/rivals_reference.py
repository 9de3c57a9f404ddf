"""Naive decoders of the rival methods, from their formulas: full forward passes, and hooks where heads are masked."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cocoa_engine.results import Generation
from tests.helpers.reference import Branch, FullForward, Reference, ReferenceGeneration, ReferenceSpan


class Contrasting(Reference):
    """Takes the token with the highest contrast; a span scores the sum of its tokens' contrasts."""

    branches = False  # type: ignore[assignment]
    penalty = 1.0

    def generate(self, prompt: Sequence[int]) -> ReferenceGeneration:
        self.known: dict[tuple[int, ...], Tensor] = {}  # of this call: a contrast counts for its margin
        return super().generate(prompt)

    def score(self, prompt: Sequence[int], given: Sequence[int]) -> ReferenceGeneration:
        self.known = {}
        return super().score(prompt, given)

    def contrasts(self, answer: Sequence[int]) -> Tensor:
        """``[V]``, of every token after the prompt and ``answer``."""
        if (found := self.known.get(tuple(answer))) is None:
            found = self.known[tuple(answer)] = self.measured(answer)
        return found

    def measured(self, answer: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def allowed(self, answer: Sequence[int]) -> Tensor:
        return torch.ones(self.full_forward(self.prompt, answer)[0].shape[-1], dtype=torch.bool)

    def best(self, tip: Branch, most_probable: int) -> int:
        answer = [*tip.before, *tip.token_ids]
        ranked = self.contrasts(answer).clone()
        ranked[~self.allowed(answer)] = -torch.inf
        for token in {*self.prompt, *answer}:
            ranked[token] *= self.penalty if ranked[token] < 0 else 1 / self.penalty
        first, second = ranked.topk(2).values.tolist()
        self.near(first - second)
        return int(ranked.argmax())

    def score_of(self, branch: Branch, log_prob: float, mlds: float) -> float:
        values = [
            float(self.contrasts([*branch.before, *branch.token_ids[:number]])[token])
            for number, token in enumerate(branch.token_ids)
        ]
        return sum(values) / (len(values) if self.config.span_log_prob == "mean" else 1)


class DolaReference(Contrasting):
    """log p_N - log p_l, with l the candidate layer of the largest divergence from the last."""

    penalty = 1.2

    @property
    def layers(self) -> list[int]:
        """The candidate layers: every second one of the upper or lower half, or of 20 in models above 40 layers."""
        count = self.num_layers
        if self.config.dola_layers == "high":
            return list(range(count // 2 if count <= 40 else count - 20, count, 2))
        if self.config.dola_layers == "low":
            first = 2 if self.model.config.tie_word_embeddings else 0
            return list(range(first, count // 2 if count <= 40 else 20, 2))
        return [int(layer) for layer in self.config.dola_layers.split(",")]

    @torch.no_grad()
    def measured(self, answer: Sequence[int]) -> Tensor:
        final = self.full_forward(self.prompt, answer)[0][0].double().log_softmax(-1)
        states = self.full_forward.last(self.prompt, answer)
        best, chosen = -1.0, final
        for layer in self.layers:
            logits = self.model.get_output_embeddings()(states[layer])
            early = logits.double().log_softmax(-1)
            middle = (final.exp() + early.exp()) / 2
            # F.kl_div(a, b) is KL(b || exp(a))
            kl = torch.nn.functional.kl_div
            divergence = 0.5 * float(kl(final, middle, reduction="sum") + kl(early, middle, reduction="sum"))
            self.near((best - divergence) / max(best, divergence))
            if divergence > best:
                best, chosen = divergence, early
        return (final - chosen).float()

    def allowed(self, answer: Sequence[int]) -> Tensor:
        log_p = self.full_forward(self.prompt, answer)[0][0].double().log_softmax(-1)
        distance = log_p - log_p.max() - torch.tensor(self.config.dola_relative_top).double().log()
        self.near(float(distance.abs().min()))
        return distance >= 0


class MaskedForward(FullForward):
    """Passes of the model with masked heads, which reads the prompt's last token and the answer."""

    def __init__(self, model: Any, heads: Sequence[tuple[int, int]]) -> None:
        super().__init__(model)
        self.heads = heads

    @torch.no_grad()
    def _forward(self, token_ids: list[int], start: int) -> tuple[Tensor, Tensor, Tensor]:
        read = torch.tensor([token_ids[: start - 1]])
        keys_and_values = self.model(read, use_cache=True).past_key_values if start > 1 else None
        rest = torch.tensor([token_ids[start - 1 :]])
        with masked(self.model, self.heads):
            logits = self.model(rest, past_key_values=keys_and_values, use_cache=True).logits[0]
        return logits, torch.empty(0, 0), torch.empty(0)


class DecoreReference(Contrasting):
    """(1 + a) log p - a log p_masked, normalised."""

    masked_forward: MaskedForward

    def foresee(self, prompt: Sequence[int], answer: Generation) -> None:
        super().foresee(prompt, answer)
        self.masked_forward.foresee(prompt, answer)

    def score(self, prompt: Sequence[int], given: Sequence[int]) -> ReferenceGeneration:
        self.masked_forward(prompt, given)  # first: its beginnings are free
        return super().score(prompt, given)

    def measured(self, answer: Sequence[int]) -> Tensor:
        log_p, log_masked = (
            forward(self.prompt, answer)[0][0].double().log_softmax(-1)
            for forward in (self.full_forward, self.masked_forward)
        )
        entropy = -(log_p.exp() * log_p).sum()
        return ((1 + entropy) * log_p - entropy * log_masked).log_softmax(-1).float()


class DiverReference(Reference):
    """log p_S + w (log p(x | x, y, S) - log p(x | x, y)); log p_S alone where nothing competed."""

    reads = False

    def risk_point(self, here: Branch, competing: list[int]) -> tuple[ReferenceSpan, Branch]:
        self.reads = True
        outcome = super().risk_point(here, competing)
        self.reads = False
        return outcome

    def score(self, prompt: Sequence[int], given: Sequence[int]) -> ReferenceGeneration:
        self.reads = True
        outcome = super().score(prompt, given)
        self.reads = False
        return outcome

    def score_of(self, branch: Branch, log_prob: float, mlds: float) -> float:
        if not self.reads:
            return log_prob
        texts = tuple(branch.before), (*branch.before, *branch.token_ids)
        before, after = (log_prob_of_prompt(self.model, tuple(self.prompt), text) for text in texts)
        return log_prob + self.config.diver_weight * (after - before)


@cache
@torch.no_grad()
def log_prob_of_prompt(model: Any, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """Of the prompt as it is read again after the answer. Many settings walk the same sequences."""
    ids = torch.tensor([[*prompt, *answer, *prompt]])
    start = len(prompt) + len(answer)
    log_p = model(ids, use_cache=False).logits[0, start - 1 : -1].double().log_softmax(-1)
    return sum(float(row[token]) for row, token in zip(log_p, prompt, strict=True))


@contextmanager
def masked(model: Any, heads: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Zero some heads' query before it is turned by its position."""
    hooks = []
    try:
        layers = model.base_model.h if hasattr(model.base_model, "h") else model.base_model.layers
        for number, layer in enumerate(layers):
            own = [head for other, head in heads if other == number]
            fused = hasattr(layer, "attn")  # GPT-2: query, key and value in one
            size = model.config.n_embd // model.config.n_head if fused else layer.self_attn.head_dim

            def zero(_module: Any, _inputs: Any, output: Tensor, own: list[int] = own, size: int = size) -> Tensor:
                output = output.clone()
                for head in own:
                    output[..., head * size : (head + 1) * size] = 0
                return output

            hooks.append((layer.attn.c_attn if fused else layer.self_attn.q_proj).register_forward_hook(zero))
        yield
    finally:
        for hook in hooks:
            hook.remove()
