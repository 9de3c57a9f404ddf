"""Runs the model's Hugging Face modules over packed tokens, with this package's attention or the model's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cocoa_engine.execution.forward.attention import attend, usual_attention
from cocoa_engine.execution.forward.base import Forward, PassOutput, Segment
from cocoa_engine.execution.forward.linears import (
    FastLinear,
    LinearBackend,
    by_kernels,
    cost_of_a_row,
    fast_experts,
    fast_linear,
    is_plain,
)
from cocoa_engine.execution.forward.observed_attention import observed_attention
from cocoa_engine.execution.forward.source_attention import of_segments
from cocoa_engine.model import hidden_states
from cocoa_engine.model.configs import Windows, frequencies_of
from cocoa_engine.model.experts import SeparateExperts, are_experts
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.model.language_model import LanguageModel

_Mask = Tensor | dict[str, Tensor] | None
"""An attention mask for all layers, or one for each kind of layer."""


class Modules(Forward):
    """The model's modules, with attention over each sequence's own keys and values.

    Args:
        model: the model.
        linear_backend: how linear layers multiply few rows.

    Raises:
        NotImplementedError: the model does not use transformers' ``AttentionInterface``, or its layers cannot hold
            branches.
    """

    name = "modules"

    def __init__(self, model: LanguageModel, linear_backend: LinearBackend) -> None:
        super().__init__(model)
        if "position_ids" not in model.forward_parameters:
            raise NotImplementedError("the model takes no position_ids")
        self.windows = Windows(model.config)
        self._length_matters = frequencies_of(model.config) is not None
        self.linears = _FastLinears(model.model, linear_backend)
        self.native = by_kernels(linear_backend)
        self.cost_of_a_row = cost_of_a_row(model.model, linear_backend)

    @property
    def whole_prompts(self) -> bool:
        return self._length_matters

    @property
    def max_sequences(self) -> int | None:
        return 1 if self._length_matters else None  # otherwise the longest sequence would set the frequencies of all

    def padding_rows(self, rows: int) -> int:
        return self.linears.padding_rows(rows)

    def __call__(self, segments: Sequence[Segment], capture: CaptureSpec | None) -> PassOutput:
        with self._own_attention(segments):
            return self._run(segments, capture, _SegmentCache(segments, self.model.num_layers), None)

    def _run(self, segments: Sequence[Segment], capture: CaptureSpec | None, cache: Cache, mask: _Mask) -> PassOutput:
        model, device = self.model, self.model.device
        token_ids = torch.tensor([[token_id for segment in segments for token_id in segment.token_ids]], device=device)
        positions = torch.tensor([[position for segment in segments for position in segment.positions]], device=device)
        kept = 1 if capture is None and len(segments) == 1 else token_ids.shape[1]
        capturing = nullcontext() if capture is None else hidden_states.capture(model, capture)
        with self.linears.installed(), capturing as captured:
            output = model.forward(
                token_ids,
                logits_to_keep=kept,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
            early = None if captured is None else captured.early_logits(model, output.logits.device)
        logits = output.logits[0, -kept:]  # [kept, V]
        if captured is None:
            return PassOutput(logits[_last_rows(segments, kept)], None)
        probes = [(segment.source, segment.width) for segment in segments]
        source, passages = of_segments(probes)
        hidden, others = captured.stacked(logits.device)[:, 0], None if early is None else early[:, 0]
        return PassOutput(
            logits,
            hidden,
            others,
            None if source is None else source.to(logits.device),
            None if passages is None else passages.to(logits.device),
        )

    @contextmanager
    def _own_attention(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Make the model's attention modules call :func:`attend` in passes of this thread inside the context."""
        config = self.model.config
        original = config._attn_implementation
        plan = _Plan(segments, self.windows, self.native)
        config._attn_implementation = _registered(original)
        _current.plan = plan
        try:
            yield
        finally:
            _current.plan = None
            config._attn_implementation = original
        if not plan.used:
            raise NotImplementedError("the model does not use transformers' AttentionInterface")


class MaskedModules(Modules):
    """The model's modules with its own attention. A pass takes one sequence; a mask separates its branches."""

    name = "masked_modules"
    masks_heads = False

    @property
    def max_sequences(self) -> int | None:
        return 1

    def __call__(self, segments: Sequence[Segment], capture: CaptureSpec | None) -> PassOutput:
        (segment,) = segments
        cache = _SegmentCache(segments, self.model.num_layers, read=True)
        with observed_attention(self.model, segment.source, segment.width, segment.end):
            return self._run(segments, capture, cache, self._mask(segment))

    def _mask(self, segment: Segment) -> _Mask:
        def mask(window: int | None) -> Tensor | None:
            made = segment.mask(window, 1, self.model.dtype, self.model.device)
            return None if made is None else made[None, None]

        if all(segment.is_prompt(window) for window in self.windows.by_kind.values()):
            return None
        masks = {kind: mask(window) for kind, window in self.windows.by_kind.items()}
        if all(made is None for made in masks.values()):
            return None
        width, end = segment.width, segment.end
        empty = torch.zeros(1, 1, width, end, dtype=self.model.dtype, device=self.model.device)
        filled = {kind: empty if made is None else made for kind, made in masks.items()}
        return filled if len(filled) > 1 else next(iter(filled.values()))


class _Plan:
    """The inputs of the attention modules in the current pass. ``used`` is set when an attention module has run."""

    def __init__(self, segments: Sequence[Segment], windows: Windows, native: bool) -> None:
        self.segments = segments
        self.windows = windows
        self.native = native
        self.used = False


class _Current(threading.local):
    plan: _Plan | None = None


_current = _Current()


def _registered(original: str) -> str:
    """Register this module's attention and return its name. Passes of other threads use the original implementation."""
    name = f"cocoa_over_{original}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _attention_over(original))
        if original in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, _mask_over(original))
    return name


def _attention_over(original: str) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> Any:
        plan = _current.plan
        if plan is None:  # a pass of another thread
            function = usual_attention(module, original)
            if softcap is not None:
                options["softcap"] = softcap
            return function(module, query, key, value, attention_mask, scaling=scaling, **options)
        if options.get("s_aux") is not None:
            raise NotImplementedError("attention sinks")
        plan.used = True
        layer: int = module.layer_idx  # type: ignore[assignment]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        window = plan.windows[layer]
        rows, start = [], 0
        for segment in plan.segments:
            own_query = query[0, :, start : start + segment.width]  # [heads, W, head_dim]
            rows.append(
                attend(segment, layer, own_query, scale=scale, window=window, softcap=softcap, native=plan.native)
            )
            start += segment.width
        out = rows[0] if len(rows) == 1 else torch.cat(rows)
        return out.view(1, query.shape[2], query.shape[1], -1), None

    return attention


def _mask_over(original: str) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        return None if _current.plan is not None else ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **kwargs)

    return mask


class _SegmentLayer(CacheLayerMixin):
    """Writes a layer's keys and values to the stores of their sequences."""

    is_sliding = False  # every slot is kept; the mask implements sliding windows

    def __init__(self, segments: Sequence[Segment], layer: int, read: bool) -> None:
        super().__init__()
        self.segments = segments
        self.layer = layer
        self.read = read
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the stores allocate their own memory."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values ``[1, heads, T, head_dim]``.

        Returns:
            The given tensors; if ``read`` is set, the keys and values of all used slots, ``[1, heads, end, head_dim]``.
        """
        start = 0
        for segment in self.segments:
            end = start + segment.width
            segment.store.write(self.layer, segment.start, key_states[0, :, start:end], value_states[0, :, start:end])
            start = end
        if not self.read:
            return key_states, value_states
        keys, values = self.segments[0].store.read(self.layer, self.segments[0].end)
        return keys[None], values[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.segments[0].start + query_length, 0

    def get_seq_length(self) -> int:
        return self.segments[0].start

    def get_max_length(self) -> int:
        return self.segments[0].store.capacity

    get_max_cache_shape = get_max_length  # its former name in transformers


class _SegmentCache(Cache):
    def __init__(self, segments: Sequence[Segment], num_layers: int, *, read: bool = False) -> None:
        super().__init__(layers=[_SegmentLayer(segments, layer, read) for layer in range(num_layers)])


class _FastLinears:
    """Replaces the ``forward`` of plain linear layers, and of experts in blocks, by a faster one during a pass."""

    def __init__(self, model: nn.Module, linear_backend: LinearBackend) -> None:
        layers = [module for module in model.modules() if linear_backend != "stock" and is_plain(module)]
        self._linears = [fast_linear([layer], linear_backend) for layer in layers]  # type: ignore[list-item]
        self.forwards: list[tuple[nn.Module, Callable[..., Tensor]]] = [
            (layer, _forward_of(linear)) for layer, linear in zip(layers, self._linears, strict=True)
        ]
        if linear_backend == "native":
            mixtures = [module for module in model.modules() if type(module) is SeparateExperts and are_experts(module)]
            self.forwards += [(each, fast_experts(each, each.act_fn, linear_backend)) for each in mixtures]

    def padding_rows(self, rows: int) -> int:
        """See :meth:`FastLinear.padding_rows`."""
        return self._linears[0].padding_rows(rows) if self._linears else 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Use the fast forwards inside the context."""
        try:
            for layer, forward in self.forwards:
                layer.__dict__["forward"] = forward
            yield
        finally:
            for layer, _ in self.forwards:
                layer.__dict__.pop("forward", None)


def _forward_of(linear: FastLinear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return linear(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

    return forward


def _last_rows(segments: Sequence[Segment], kept: int) -> list[int]:
    if kept == 1:
        return [0]
    ends, total = [], 0
    for segment in segments:
        total += segment.width
        ends.append(total - 1)
    return ends
