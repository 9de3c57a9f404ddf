"""Naive decoders of the rival methods, from their formulas: full forward passes, and hooks where heads are masked."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.helpers.reference import Branch, Reference, ReferenceGeneration, ReferenceSpan


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
        ids = torch.tensor([[*self.prompt, *answer]])
        output = self.model(ids, output_hidden_states=True, use_cache=False)
        final = output.logits[0, -1].double().log_softmax(-1)
        best, chosen = -1.0, final
        for layer in self.layers:
            logits = self.model.get_output_embeddings()(output.hidden_states[layer][0, -1])
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


class DecoreReference(Contrasting):
    """(1 + a) log p - a log p_masked, normalised; the masked model reads the prompt's last token and the answer."""

    heads: Sequence[tuple[int, int]] = ()

    @torch.no_grad()
    def measured(self, answer: Sequence[int]) -> Tensor:
        log_p = self.full_forward(self.prompt, answer)[0][0].double().log_softmax(-1)
        cache = None
        if len(self.prompt) > 1:
            cache = copy.deepcopy(self.model(torch.tensor([self.prompt[:-1]]), use_cache=True).past_key_values)
        with masked(self.model, self.heads):
            output = self.model(torch.tensor([[self.prompt[-1], *answer]]), past_key_values=cache, use_cache=True)
        log_masked = output.logits[0, -1].double().log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum()
        return ((1 + entropy) * log_p - entropy * log_masked).log_softmax(-1).float()


class DiverReference(Reference):
    """log p_S + w (log p(x | x, y, S) - log p(x | x, y)); log p_S alone where nothing competed."""

    reads = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.read_back = cache(self.log_prob_of_prompt)

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
        prompt, before = tuple(self.prompt), tuple(branch.before)
        said = (*before, *branch.token_ids)
        return log_prob + self.config.diver_weight * (self.read_back(prompt, said) - self.read_back(prompt, before))

    @torch.no_grad()
    def log_prob_of_prompt(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
        ids = torch.tensor([[*prompt, *answer, *prompt]])
        log_p = self.model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        start = len(prompt) + len(answer)
        return sum(float(log_p[start + number - 1, token]) for number, token in enumerate(prompt))


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
