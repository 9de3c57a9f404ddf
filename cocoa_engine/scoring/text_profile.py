"""Profiles of given texts: disagreement of layers, token by token."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.next_tokens import token_statistics
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.decoding.speculation import AnswerHistory
from cocoa_engine.equations import con_mlds_of, disagreement, f_mlds_of, mean_pooled
from cocoa_engine.errors import ConfigError, NonFiniteLogitsError, PromptError, UnsupportedModelError
from cocoa_engine.execution.session import Session
from cocoa_engine.methods.retrieval_heads import source_heads
from cocoa_engine.model.detokenizer import Detokenizer
from cocoa_engine.model.hidden_states import CaptureSpec, FinalLayer, capture
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.model.prompts import Prompt, prompt_ids, text_ids
from cocoa_engine.process_exit import at_work
from cocoa_engine.results import Generation, LayerCurve
from cocoa_engine.scoring.text_tree import Step, TextTree
from cocoa_engine.spans import Span


@dataclass(frozen=True)
class TokenProfile(ABC):
    """The statistics of a text of t tokens. Lists have one value per token.

    Attributes:
        prompt: the token ids before the text.
        token_ids, log_probs, entropies, margins: as in :class:`~cocoa_engine.spans.Measured`.
        competing: the number of tokens w that competed in this position: p(w) >= gamma max p, at most max_candidates.
        spreads: log p of the most probable competing token minus that of the least probable, in nats.
        gaps: log p of the most probable token minus that of the text's token, in nats; 0 if they are the same.
        copied: as in ``Span.token_copied``.
        source_attention: as in ``Span.token_source_attention``.
        text: the decoded tokens. Some tokenizers drop the first space.
        ends: the length of the text, in complete characters, after each token.
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

    @property
    @abstractmethod
    def tokens(self) -> LayerProfile:
        """The disagreements of each token as a span of its own."""

    @abstractmethod
    def span(self, start: int, end: int) -> LayerProfile:
        """The disagreements of the tokens ``start`` to ``end`` (exclusive) as one mean-pooled span."""

    @abstractmethod
    def mean_state(self, layer: int, start: int, end: int) -> Tensor:
        """The mean state of the tokens ``start`` to ``end`` (exclusive) at a layer, ``[d]``."""


@dataclass(frozen=True)
class TextProfile(TokenProfile):
    """The statistics of a text of t tokens, and its hidden states.

    Attributes:
        states: ``[L + 1, t, d]`` float32, on the CPU. Layer 0 is the embedding; layer L is before the final norm.
        normed: ``[t, d]`` float32, on the CPU: layer L after the final norm.
    """

    states: Tensor
    normed: Tensor

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return self.states.shape[0] - 1

    @cached_property
    def tokens(self) -> LayerProfile:
        """The disagreements of each token as a span of its own."""
        return LayerProfile.of(self.states, self.normed)

    def span(self, start: int, end: int) -> LayerProfile:
        """The disagreements of the tokens ``start`` to ``end`` (exclusive) as one mean-pooled span."""
        states, normed = self.states[:, start:end], self.normed[start:end]
        return LayerProfile.of(mean_pooled(states)[:, None], mean_pooled(normed)[None])

    def mean_state(self, layer: int, start: int, end: int) -> Tensor:
        """The mean state of the tokens ``start`` to ``end`` (exclusive) at a layer, ``[d]``."""
        return mean_pooled(self.states[layer, start:end])


@dataclass(frozen=True)
class LayerProfile:
    """How the layers of B spans disagree with one another.

    Attributes:
        consecutive: ``[L, B]``, dis(j, j + 1) for j = 0..L-1.
        to_pre_norm: ``[L, B]``, dis(j, L) for j = 0..L-1, layer L before the final norm.
        to_post_norm: the same, with layer L after the final norm.
    """

    consecutive: Tensor
    to_pre_norm: Tensor
    to_post_norm: Tensor

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three comparisons, in this order."""
        return self.consecutive, self.to_pre_norm, self.to_post_norm

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
    """Feeds texts to a model and measures a :class:`TextProfile` of each.

    Args:
        session: the model and its backend.
        config: the settings; ``gamma`` and ``max_candidates`` define which tokens compete.
        heads: the heads whose source attention is measured, for a calibrator; see :func:`.source_heads`.

    Raises:
        UnsupportedModelError: the model's final norm was not found.
    """

    def __init__(self, session: Session, config: CocoaConfig, heads: Sequence[tuple[int, int]] | None = None) -> None:
        self._session, self._config, self._heads = session, config, heads
        self._norm = _final_norm(session.model)

    def __call__(self, prompt: Prompt, texts: Sequence[str | Sequence[int]]) -> list[TextProfile]:
        """Profile texts after one prompt, which is prefilled once.

        Args:
            prompt: text or token ids.
            texts: each as text or token ids.

        Raises:
            PromptError: a text is empty, or does not fit the context window after the prompt.
            NonFiniteLogitsError: the model's logits are NaN or infinite.
        """
        model, tokens = self._session.model, self._session.tokens
        before = prompt_ids(model, tokens, prompt)
        ids = [text_ids(model, tokens, prompt, before, text)[0] for text in texts]
        # layers before the final norm; _normed applies the norm
        heads = source_heads(self._config.decore_heads, model, self._heads)
        spec = CaptureSpec(0, model.num_layers, "pre_norm", source_heads=heads)
        profiles: dict[int, TextProfile] = {}
        with TextTree(self._session.backend, before, ids, spec) as tree:
            for group in tree.groups():
                columns = _Columns([], [], [], [], [], [])
                states, source = [], []
                for step in group.steps():
                    for column, values in zip(columns, self._measured(step), strict=True):
                        column.extend(values)
                    states.append(step.output.hidden[:-1].cpu())
                    source += [] if step.output.source is None else step.output.source.tolist()
                fed = torch.cat(states, dim=1)  # [L + 1, P, d]
                for number, rows in group.rows.items():
                    own = _Columns(*([column[row] for row in rows] for column in columns))
                    of_source = [source[row] for row in rows] if source else []
                    profiles[number] = self._profile(before, ids[number], own, fed[:, rows], of_source)
        return [profiles[number] for number in range(len(texts))]

    def _measured(self, step: Step) -> _Columns:
        """The statistics of each token of a step."""
        statistics = token_statistics(step.logits, step.token_ids, step.parents)
        return _Columns(*statistics, *_competing(step, self._config.gamma, self._config.max_candidates))

    def _profile(
        self, prompt: list[int], token_ids: list[int], columns: _Columns, states: Tensor, source: list[float]
    ) -> TextProfile:
        if not all(-math.inf < value <= 0 for value in columns.log_probs):
            raise NonFiniteLogitsError(
                "the logits of a text are NaN or infinite; load the model in float32 or bfloat16."
            )
        track = Detokenizer(self._session.tokens)
        ends = []
        for token_id in token_ids:
            track.push(token_id)
            ends.append(len(track.text))
        return TextProfile(
            prompt=prompt,
            token_ids=token_ids,
            log_probs=columns.log_probs,
            entropies=columns.entropies,
            margins=columns.margins,
            competing=[int(count) for count in columns.competing],
            spreads=columns.spreads,
            gaps=columns.gaps,
            copied=AnswerHistory(prompt).extend(token_ids, columns.log_probs, columns.entropies)[0],
            text=track.text,
            ends=ends,
            states=states,
            normed=_normed(self._norm, states[-1]),
            source_attention=source,
        )


class _Columns(NamedTuple):
    """Statistics of tokens, as the attributes of :class:`TokenProfile` of the same names."""

    log_probs: list[float]
    entropies: list[float]
    margins: list[float]
    competing: list[float]
    spreads: list[float]
    gaps: list[float]


def _competing(step: Step, gamma: float, most: int) -> tuple[list[float], list[float], list[float]]:
    """The values ``competing``, ``spreads`` and ``gaps`` of :class:`TokenProfile` for each token of a step."""
    logits, rows = step.logits.float(), step.parents
    top = logits.topk(min(most if gamma < 1 else 1, logits.shape[1]), dim=1).values
    below = top[:, :1] - top  # [W, most], 0 first
    competes = below <= -math.log(gamma)
    spread = below.masked_fill(~competes, 0).amax(dim=1)
    gaps = top[rows, 0] - logits[rows, step.token_ids]
    return competes.sum(dim=1)[rows].tolist(), spread[rows].tolist(), gaps.tolist()


@torch.no_grad()
def _normed(norm: nn.Module, states: Tensor) -> Tensor:
    weight = next(norm.parameters())
    result: Any = norm(states.to(device=weight.device, dtype=weight.dtype))
    return torch.as_tensor(result).float().cpu()


def _final_norm(model: LanguageModel) -> nn.Module:
    """The module that turns the last layer's output into the model's final state. Each norm of the decoder is tried.

    Raises:
        UnsupportedModelError: no norm of the decoder does.
    """
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


@at_work
def of_generation(session: Session, prompt: Prompt, generation: Generation, span: Span | int) -> LayerCurve:
    """The curve of one span of an answer; see :meth:`CocoaEngine.layer_profile`.

    Args:
        session: the model and its backend.
        prompt: the prompt of the answer.
        generation: the answer.
        span: one of the answer's spans, or its index.

    Raises:
        ConfigError: the answer has no such span.
        PromptError: the prompt and the answer's prompt have different lengths in tokens.
    """
    spans = generation.spans
    number = span if isinstance(span, int) else spans.index(span) if span in spans else len(spans)
    if not -len(spans) <= number < len(spans):
        raise ConfigError(f"the answer has no such span: give one of its spans, or a number below {len(spans)}.")
    before = prompt_ids(session.model, session.tokens, prompt)
    if len(before) != generation.usage.prompt_tokens:
        raise PromptError(
            f"the answer's prompt had {generation.usage.prompt_tokens} tokens, this one has {len(before)}; give the "
            "same prompt (for a chat, its messages, or the result of engine.encode_chat with the same template_kwargs)."
        )
    number %= len(spans)
    earlier = [token_id for one in spans[:number] for token_id in one.token_ids]
    return layer_curve(session.model, before + earlier, spans[number], generation.config)


def layer_curve(model: LanguageModel, before: list[int], span: Span, config: CocoaConfig) -> LayerCurve:
    """Feed a span once after the tokens before it, and compare its mean-pooled states layer by layer.

    Args:
        model: the model.
        before: the tokens of the prompt and of earlier spans.
        span: the span.
        config: the settings; ``middle_layers`` and ``final_layer`` are used.
    """
    spec = capture_spec(model, config)
    token_ids = torch.tensor([[*before, *span.token_ids]], device=model.device)
    inputs = {"use_cache": False} if "use_cache" in model.forward_parameters else {}
    every = CaptureSpec(0, model.num_layers, config.final_layer)
    with model.exclusive(), capture(model, every, keep=slice(len(before), None)) as captured:
        model.forward(token_ids, logits_to_keep=1, **inputs)
        layers = mean_pooled(captured.stacked(model.device)[:-1, 0])  # [L + 1, d]
    return LayerCurve(
        text=span.text,
        consecutive=disagreement(layers[:-1], layers[1:]).tolist(),
        to_final=disagreement(layers[:-1], layers[-1].expand_as(layers[:-1])).tolist(),
        middle_layers=(spec.first, spec.last),
        final_layer=config.final_layer,
    )
