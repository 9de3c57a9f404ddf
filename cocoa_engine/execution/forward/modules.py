"""Runs the model's Hugging Face modules over packed tokens, with this package's attention or the model's own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from cocoa_engine.execution.forward import linears
from cocoa_engine.execution.forward.attention import attend_all, write_all
from cocoa_engine.execution.forward.base import Forward, Segment, StepOutput
from cocoa_engine.execution.forward.linears import FastLinear, LinearBackend
from cocoa_engine.execution.forward.source_attention import observed_attention, of_segments, replaced_attention
from cocoa_engine.model import language_model
from cocoa_engine.model.configs import Windows, frequencies_of
from cocoa_engine.model.experts import SeparateExperts, are_experts
from cocoa_engine.model.language_model import CaptureSpec, LanguageModel


class Modules(Forward):
    """The model's modules, with attention over each sequence's own keys and values.

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
        self.whole_prompts = frequencies_of(model.config) is not None
        # the longest sequence would set the frequencies of all; without masked heads, a mask separates one's branches
        self.max_sequences = 1 if self.whole_prompts or not self.masks_heads else None
        self.native = linears.by_kernels(linear_backend)
        self.cost_of_a_row = linears.cost_of_a_row(model.model, linear_backend)
        modules = list(model.model.modules())
        layers = [module for module in modules if linear_backend != "stock" and linears.is_plain(module)]
        self._forwards: list[tuple[nn.Module, Callable[..., Tensor]]] = [
            (layer, _forward_of(linears.fast_linear([layer], linear_backend))) for layer in layers
        ]
        if linear_backend == "native":
            mixtures = [module for module in modules if type(module) is SeparateExperts and are_experts(module)]
            self._forwards += [(layer, linears.fast_experts(layer, layer.act_fn, linear_backend)) for layer in mixtures]

    def __call__(self, segments: Sequence[Segment], capture: CaptureSpec | None) -> StepOutput:
        has_run = False

        def attention(
            usual: Any,
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Any,
            scaling: float | None = None,
            softcap: float | None = None,
            **options: Any,
        ) -> tuple[Tensor, None]:
            nonlocal has_run
            has_run = True
            if options.get("s_aux") is not None:
                raise NotImplementedError("attention sinks")
            layer: int = module.layer_idx  # type: ignore[assignment]
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            window = self.windows[layer]
            out = attend_all(segments, layer, query[0], scale=scale, window=window, softcap=softcap, native=self.native)
            return out.view(1, query.shape[2], query.shape[1], -1), None

        with replaced_attention(self.model, attention, makes_masks=False):
            output = self._run(segments, capture, None)
        if not has_run:
            raise NotImplementedError("the model does not use transformers' AttentionInterface")
        return output

    def _run(self, segments: Sequence[Segment], capture: CaptureSpec | None, mask: Any) -> StepOutput:
        model, device = self.model, self.model.device
        token_ids = torch.tensor([[token_id for segment in segments for token_id in segment.token_ids]], device=device)
        positions = torch.tensor([[position for segment in segments for position in segment.positions]], device=device)
        rows = 1 if capture is None else token_ids.shape[1]
        layers = [_SegmentLayer(segments, layer, not self.masks_heads) for layer in range(model.num_layers)]
        capturing = nullcontext() if capture is None else language_model.capture(model, capture)
        with self._fast_linears(), capturing as captured:
            output = model.forward(
                token_ids,
                logits_to_keep=rows,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=Cache(layers=layers),
                use_cache=True,
            )
            logits = output.logits[0, -rows:]
            if captured is None:
                return StepOutput(logits, logits.new_empty(0))
            early = captured.early_logits(model, logits.device)
        masses = of_segments([(segment.source, segment.width) for segment in segments])
        return StepOutput(
            logits,
            captured.stacked(logits.device)[:, 0],
            None if early is None else early[:, 0],
            None if masses is None else masses.to(logits.device),
        )

    @contextmanager
    def _fast_linears(self) -> Iterator[None]:
        """Within the block, plain linear layers and experts in blocks have a faster ``forward``."""
        try:
            for layer, forward in self._forwards:
                layer.__dict__["forward"] = forward
            yield
        finally:
            for layer, _ in self._forwards:
                layer.__dict__.pop("forward", None)


class MaskedModules(Modules):
    """The model's modules with its own attention. A pass takes one sequence; a mask separates its branches."""

    name = "masked_modules"
    masks_heads = False

    def __call__(self, segments: Sequence[Segment], capture: CaptureSpec | None) -> StepOutput:
        (segment,) = segments
        windows, (dtype, device) = self.windows.by_kind, (self.model.dtype, self.model.device)
        masks: Any = None
        if not all(segment.is_prompt(window) for window in windows.values()):
            of_kinds = {kind: segment.mask(window, 1, dtype, device) for kind, window in windows.items()}
            if any(mask is not None for mask in of_kinds.values()):
                empty = torch.zeros(segment.width, segment.end, dtype=dtype, device=device)
                masks = {kind: (empty if mask is None else mask)[None, None] for kind, mask in of_kinds.items()}
                masks = masks if len(masks) > 1 else next(iter(masks.values()))
        with observed_attention(self.model, segment.source, segment.width, segment.end):
            return self._run(segments, capture, masks)


class _SegmentLayer(CacheLayerMixin):
    """Writes a layer's keys and values to the stores of their sequences."""

    is_sliding = False  # every slot is kept; the mask implements sliding windows

    def __init__(self, segments: Sequence[Segment], layer: int, read: bool) -> None:
        super().__init__()
        self.segments, self.layer, self.read = segments, layer, read
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the stores allocate their own memory."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values, and return them; if ``read`` is set, return those of all used slots."""
        write_all(self.segments, self.layer, key_states[0], value_states[0])
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


def _forward_of(linear: FastLinear) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)
