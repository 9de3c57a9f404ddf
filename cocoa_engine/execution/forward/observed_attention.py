"""Measures source attention in a forward pass of the model's own modules, beside the model's own attention."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cocoa_engine.execution.forward.attention import usual_attention
from cocoa_engine.execution.forward.source_attention import SourceProbe
from cocoa_engine.model.language_model import LanguageModel


class Observer:
    """Measures the layers of one pass.

    Args:
        probe: adds up the masses.
        rows: the number of tokens at the end of the pass that are measured.
        length: the number of tokens of the sequence, those of the cache included.
    """

    def __init__(self, probe: SourceProbe, rows: int, length: int) -> None:
        self.probe = probe
        self.rows = rows
        self._length = length
        self._masks: dict[tuple[int | None, int, torch.dtype, torch.device], Tensor] = {}

    def see(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        mask: Tensor | None,
        bias: Tensor | None = None,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Measure one layer. A cache may have dropped the first keys.

        Args:
            layer: its number.
            query: ``[heads, W, head_dim]``.
            keys: ``[kv_heads, S, head_dim]``.
            mask: ``[1 or heads, W, S]``, additive, or ``True`` where a token sees a key. Without one, a token sees the
                keys before it within the window.
            bias: ``[heads, W, S]``, added to the scores as well.
            scale: factor of the scores.
            window: the layer's sliding window.
            softcap: c in c * tanh(score / c).
            sinks: the scores of the attention sinks, see
                :func:`~cocoa_engine.execution.forward.source_attention.attention_weights`.
        """
        heads = [head for head in self.probe.heads_of(layer) if head < query.shape[0]]
        if not heads:
            return
        slots = keys.shape[1]
        if mask is None:
            visible = self._within(window, keys)
        else:
            own = mask[:, -self.rows :, :slots] if mask.shape[0] == 1 else mask[heads, -self.rows :, :slots]
            lowest = torch.finfo(keys.dtype).min
            visible = own if own.dtype != torch.bool else keys.new_zeros(own.shape).masked_fill_(~own, lowest)
        if bias is not None:
            visible = visible + bias[heads, -self.rows :, :slots]
        self.probe.add(
            layer,
            query[:, -self.rows :],
            keys,
            visible,
            heads=heads,
            first=self._length - slots,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )

    def _within(self, window: int | None, keys: Tensor) -> Tensor:
        key = (window, keys.shape[1], keys.dtype, keys.device)
        if key not in self._masks:
            self._masks[key] = self._made_within(window, keys)
        return self._masks[key]

    def _made_within(self, window: int | None, keys: Tensor) -> Tensor:
        slots = keys.shape[1]
        row = torch.arange(slots - self.rows, slots, device=keys.device)[:, None]
        slot = torch.arange(slots, device=keys.device)
        hidden = slot > row if window is None else (slot > row) | (row - slot >= window)
        return keys.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(keys.dtype).min)


class _Current(threading.local):
    observer: Observer | None = None


_current = _Current()


@contextmanager
def observed_attention(model: LanguageModel, probe: SourceProbe | None, rows: int, length: int) -> Iterator[None]:
    """Measure the source attention of the pass over one sequence that this thread runs inside the context.

    Nothing is measured in layers that do not use transformers' ``AttentionInterface``.

    Args:
        model: the model. Hold its lock.
        probe: adds up what is measured; `None` to measure nothing.
        rows: the number of tokens at the end of the pass that are measured.
        length: the number of tokens of the sequence, those of the cache included.
    """
    model.whole()  # whose modules are observed
    original = getattr(model.config, "_attn_implementation", None)
    if probe is None or original is None:
        yield
        return
    _current.observer = Observer(probe, rows, length)
    model.config._attn_implementation = _registered(original)
    try:
        yield
    finally:
        _current.observer = None
        model.config._attn_implementation = original


_observable: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def is_observable(model: LanguageModel) -> bool:
    """Whether :func:`observed_attention` measures anything in a model. The first call runs it over three tokens."""
    known = _observable.get(model.model)
    if known is None:  # asked for every request, which must not wait for a pass of another
        probe = SourceProbe([(layer, 0) for layer in range(model.num_layers)], range(1, 2))
        with model.exclusive(), observed_attention(model, probe, rows=1, length=3):
            model.forward(torch.tensor([[0, 1, 2]], device=model.device) % model.vocab_size, logits_to_keep=1)
        known = _observable[model.model] = probe.mean() is not None
    return known


def _registered(original: str) -> str:
    """Register the observing attention over an implementation, and return its name."""
    from transformers import AttentionInterface  # slow to import, as the others
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = f"cocoa_observed_{original}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _observing(original))
        if original in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    return name


def _observing(original: str) -> Callable[..., Any]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any
    ) -> Any:
        observer, layer = _current.observer, getattr(module, "layer_idx", None)
        if observer is not None and layer is not None and _is_plain(attention_mask):
            scale = options.get("scaling")
            observer.see(
                layer,
                query[0],
                key[0],
                attention_mask[0] if attention_mask is not None and attention_mask.ndim == 4 else None,
                None if (bias := options.get("position_bias")) is None else bias[0],
                scale=query.shape[-1] ** -0.5 if scale is None else scale,
                window=options.get("sliding_window"),
                softcap=options.get("softcap"),
                sinks=options.get("s_aux")
                if (sinks := options.get("sinks")) is None
                else sinks[0, :, -observer.rows :],
            )
        return usual_attention(module, original)(module, query, key, value, attention_mask, *args, **options)

    return attention


def _is_plain(mask: Any) -> bool:
    """Whether a mask can be read; those of flex attention cannot."""
    return mask is None or isinstance(mask, Tensor)
