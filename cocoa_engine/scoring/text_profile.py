"""Profiles of given texts: disagreement of layers, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.speculation import AnswerHistory
from cocoa_engine.equations import con_mlds_of, disagreement, f_mlds_of, mean_pooled
from cocoa_engine.errors import UnsupportedModelError
from cocoa_engine.execution.session import Session
from cocoa_engine.methods.retrieval_heads import source_heads
from cocoa_engine.model.language_model import CaptureSpec, FinalLayer, LanguageModel, capture
from cocoa_engine.model.prompts import Prompt, prompt_ids, text_ids
from cocoa_engine.model.tokenizer import token_ends
from cocoa_engine.scoring.given_texts import TokenRow, require_finite, token_rows
from cocoa_engine.scoring.text_tree import Step, fed

Range = tuple[int, int]
"""The numbers of the first token of a span and of the one after its last."""


@dataclass(frozen=True)
class TokenProfile:
    """The statistics of a text of t tokens. Lists have one value per token, as in :class:`~cocoa_engine.spans.Span`.

    Attributes:
        prompt: the token ids before the text.
        competing: the number of tokens w that competed in this position: p(w) >= gamma max p, at most max_candidates.
        spreads: log p of the most probable competing token minus that of the least probable, in nats.
        gaps: log p of the most probable token minus that of the text's token, in nats; 0 if they are the same.
        text: the decoded tokens. Some tokenizers drop the first space.
        ends: the length of the text, in complete characters, after each token.
        ranges: the whole text and its spans, with the place of each in ``of_spans`` and ``states``.
        of_tokens, of_spans: the disagreements of each token as a span of its own, and of each mean-pooled span.
        states: the mean state of each span after the first layer that was asked for, ``[spans, d]``; or `None`.
        text_states: the mean state of the whole text after each of these layers, ``[k, d]``; or `None`.
    """

    prompt: list[int]
    token_ids: list[int]
    log_probs: list[float]
    entropies: list[float]
    margins: list[float]
    competing: list[int]
    spreads: list[float]
    gaps: list[float]
    copied: list[int]
    text: str
    ends: list[int]
    source_attention: list[float]
    ranges: dict[Range, int]
    of_tokens: LayerProfile
    of_spans: LayerProfile
    states: Tensor | None
    text_states: Tensor | None

    def span(self, start: int, end: int) -> LayerProfile:
        """The disagreements of one of the ``ranges``."""
        at = self.ranges[start, end]
        return LayerProfile(*(values[:, at : at + 1].contiguous() for values in self.of_spans))


def span_ranges(competing: Sequence[int], gaps: Sequence[float]) -> list[Range]:
    """The spans of a text, by values of its :class:`TokenProfile`. Together they cover it.

    A span begins where several tokens compete, and before a token that is not the most probable one.
    """
    cuts = [at for at in range(len(gaps)) if competing[at] > 1 or gaps[at] > 0 or at == 0]
    return list(zip(cuts, [*cuts[1:], len(gaps)], strict=True))


class LayerProfile(NamedTuple):
    """How the layers of B spans disagree with one another.

    Attributes:
        consecutive: ``[L, B]``, dis(j, j + 1) for j = 0..L-1.
        to_pre_norm: ``[L, B]``, dis(j, L) for j = 0..L-1, layer L before the final norm.
        to_post_norm: the same, with layer L after the final norm.
    """

    consecutive: Tensor
    to_pre_norm: Tensor
    to_post_norm: Tensor

    @classmethod
    def of(cls, states: Tensor, normed: Tensor) -> LayerProfile:
        """Compare the pooled states of all layers, ``[L + 1, B, d]``, and of layer L after the norm, ``[B, d]``."""
        middle, last = states[:-1], states[-1]
        return cls(
            disagreement(middle, states[1:]),
            disagreement(middle, last[None].expand_as(middle)),
            disagreement(middle, normed[None].expand_as(middle)),
        )

    def con_mlds(self, window: tuple[int, int]) -> Tensor:
        """ConMLDS of each span for layers m..n, ``[B]``; n < L."""
        return con_mlds_of(self.consecutive, window)

    def f_mlds(self, window: tuple[int, int], final: FinalLayer) -> Tensor:
        """fMLDS of each span for layers m..n, ``[B]``; n < L."""
        return f_mlds_of(self.to_pre_norm if final == "pre_norm" else self.to_post_norm, window)


class Profiler:
    """Feeds texts to a model and measures a :class:`TokenProfile` of each.

    Args:
        config: the settings; ``gamma`` and ``max_candidates`` define which tokens compete.
        heads: the heads whose source attention is measured, for a calibrator; see :func:`.source_heads`.
        layers: the layers whose mean states are kept, for a probe.
    """

    def __init__(
        self,
        session: Session,
        config: CocoaConfig,
        heads: Sequence[tuple[int, int]] | None = None,
        layers: Sequence[int] = (),
    ) -> None:
        self._session, self._config, self._heads, self._layers = session, config, heads, list(layers)
        self._norm = _final_norm(session.model)

    def __call__(self, prompt: Prompt, texts: Sequence[str | Sequence[int]]) -> list[TokenProfile]:
        """Profile texts after one prompt, which is prefilled once, each as text or token ids.

        The spans of each are its :func:`span_ranges`.
        """
        model, tokens = self._session.model, self._session.tokens
        before = prompt_ids(model, tokens, prompt)
        ids = [text_ids(model, tokens, prompt, before, text)[0] for text in texts]
        # layers before the final norm; _normed applies the norm
        heads = source_heads(self._config.decore_heads, model, self._heads)
        spec = CaptureSpec(0, model.num_layers, "pre_norm", source_heads=heads)
        rows: list[list[TokenRow]] = [[] for _ in ids]
        competition: list[list[tuple[int, float, float]]] = [[] for _ in ids]
        states: list[list[Tensor]] = [[] for _ in ids]
        with fed(self._session.backend, before, ids, spec) as steps:
            for step in steps:
                of_step, competing = token_rows(step), self._competing(step)
                hidden = step.output.hidden[:-1].cpu()
                for number, own in step.rows.items():
                    rows[number] += [of_step[row] for row in own]
                    competition[number] += [competing[row] for row in own]
                    states[number].append(hidden[:, own])
        require_finite(rows, "a text")
        profiles = []
        for token_ids, of_text, competed, parts in zip(ids, rows, competition, states, strict=True):
            _, log_probs, entropies, margins, source, _, _ = map(list, zip(*of_text, strict=True))
            counts, spreads, gaps = map(list, zip(*competed, strict=True))
            text, ends = token_ends(tokens, token_ids)
            of_layers = torch.cat(parts, dim=1)  # [L + 1, t, d]; layer L is before the final norm
            normed = _normed(self._norm, of_layers[-1])
            ranges = list(dict.fromkeys([(0, len(token_ids)), *span_ranges(counts, gaps)]))
            of_spans = [
                LayerProfile.of(mean_pooled(of_layers[:, start:end])[:, None], mean_pooled(normed[start:end])[None])
                for start, end in ranges
            ]
            read = of_layers[self._layers]
            profile = TokenProfile(
                prompt=before,
                token_ids=token_ids,
                log_probs=log_probs,
                entropies=entropies,
                margins=margins,
                competing=counts,
                spreads=spreads,
                gaps=gaps,
                copied=AnswerHistory(before).extend(token_ids, log_probs, entropies)[0],
                text=text,
                ends=ends,
                source_attention=[mass for mass in source if mass is not None],
                ranges={of_span: at for at, of_span in enumerate(ranges)},
                of_tokens=LayerProfile.of(of_layers, normed),
                of_spans=LayerProfile(*(torch.cat(same, dim=1) for same in zip(*of_spans, strict=True))),
                states=torch.stack([mean_pooled(read[0, start:end]) for start, end in ranges]) if len(read) else None,
                text_states=mean_pooled(read) if len(read) else None,
            )
            profiles.append(profile)
        return profiles

    def _competing(self, step: Step) -> list[tuple[int, float, float]]:
        """The values ``competing``, ``spreads`` and ``gaps`` of :class:`TokenProfile` for each token of a step."""
        assert step.logits is not None
        logits = step.logits.float()[step.parents]
        count = self._config.max_candidates if self._config.gamma < 1 else 1
        top = logits.topk(min(count, logits.shape[1]), dim=1).values
        below = top[:, :1] - top  # [W, max_candidates], 0 first
        competes = below <= -math.log(self._config.gamma)
        spread = below.masked_fill(~competes, 0).amax(dim=1)
        gaps = top[:, 0] - logits.gather(1, step.token_ids[:, None])[:, 0]
        return list(zip(competes.sum(dim=1).tolist(), spread.tolist(), gaps.tolist(), strict=True))


@torch.no_grad()
def _normed(norm: nn.Module, states: Tensor) -> Tensor:
    weight = next(norm.parameters())
    result: Any = norm(states.to(device=weight.device, dtype=weight.dtype))
    return torch.as_tensor(result).float().cpu()


def _final_norm(model: LanguageModel) -> nn.Module:
    """The module that turns the last layer's output into the model's final state. Each norm of the decoder is tried."""
    token_ids = torch.tensor([[0, 1, 2]], device=model.device)
    last = model.num_layers
    with (
        model.exclusive(),
        capture(model, CaptureSpec(last - 1, last, "pre_norm")) as before,
        capture(model, CaptureSpec(last - 1, last, "post_norm")) as after,
    ):
        model.forward(token_ids, logits_to_keep=1)
    pre, post = (captured.stacked(torch.device("cpu"))[-1] for captured in (before, after))
    for module in model.decoder.modules():
        if "norm" in type(module).__name__.lower() and next(module.parameters(), None) is not None:
            size = next(module.parameters()).shape
            if size == pre.shape[-1:] and torch.allclose(_normed(module, pre), post, rtol=1e-2, atol=1e-2):
                return module
    raise UnsupportedModelError(
        f"the final norm of {model.architecture} was not found among its decoder's modules; "
        "layers cannot be compared before and after it."
    )
