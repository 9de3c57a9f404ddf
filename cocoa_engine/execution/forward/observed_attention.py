"""Runs a function in place of a model's attention during a pass, and measures source attention beside it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
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
        self._visible = cache(partial(_visible, rows))

    def __call__(
        self,
        usual: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Measure one attention module, and run it as usual. Masks of flex attention cannot be read."""
        layer = getattr(module, "layer_idx", None)
        if layer is not None and (attention_mask is None or isinstance(attention_mask, Tensor)):
            bias, sinks, scale = (options.get(name) for name in ("position_bias", "sinks", "scaling"))
            self.see(
                layer,
                query[0],
                key[0],
                attention_mask[0] if attention_mask is not None and attention_mask.ndim == 4 else None,
                None if bias is None else bias[0],
                scale=query.shape[-1] ** -0.5 if scale is None else scale,
                window=options.get("sliding_window"),
                softcap=options.get("softcap"),
                sinks=options.get("s_aux") if sinks is None else sinks[0, :, -self.rows :],
            )
        return usual(module, query, key, value, attention_mask, *args, **options)

    def see(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        mask: Tensor | None,
        bias: Tensor | None = None,
        *,
        window: int | None = None,
        **options: Any,
    ) -> None:
        """Measure one layer. A cache may have dropped the first keys.

        Args:
            layer: its number.
            query: ``[heads, W, head_dim]``.
            keys: ``[kv_heads, S, head_dim]``.
            mask: ``[1 or heads, W, S]``, additive, or ``True`` where a token sees a key. Without one, a token sees the
                keys before it within the window.
            bias: ``[heads, W, S]``, added to the scores as well.
            window: the layer's sliding window.
            options: of :func:`~cocoa_engine.execution.forward.source_attention.attention_weights`.
        """
        heads = [head for head in self.probe.heads_of(layer) if head < query.shape[0]]
        if not heads:
            return
        slots = keys.shape[1]
        if mask is None:
            visible = self._visible(window, slots, keys.dtype, keys.device)
        else:
            own = mask[:, -self.rows :, :slots] if mask.shape[0] == 1 else mask[heads, -self.rows :, :slots]
            lowest = torch.finfo(keys.dtype).min
            visible = own if own.dtype != torch.bool else keys.new_zeros(own.shape).masked_fill_(~own, lowest)
        if bias is not None:
            visible = visible + bias[heads, -self.rows :, :slots]
        first = self._length - slots
        self.probe.add(layer, query[:, -self.rows :], keys, visible, heads=heads, first=first, **options)


def _visible(rows: int, window: int | None, slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    row = torch.arange(slots - rows, slots, device=device)[:, None]
    slot = torch.arange(slots, device=device)
    hidden = slot > row if window is None else (slot > row) | (row - slot >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)


class _Current(threading.local):
    attention: Callable[..., Any] | None = None
    makes_masks = True


_current = _Current()


@contextmanager
def replaced_attention(model: LanguageModel, attention: Callable[..., Any], *, makes_masks: bool) -> Iterator[None]:
    """Call a function in place of the model's attention in the passes that this thread runs inside the context.

    It is called in modules that use transformers' ``AttentionInterface``, with the usual function before the arguments.

    Args:
        model: the model. Hold its lock.
        attention: the function.
        makes_masks: whether transformers makes the masks that the function is given.
    """
    original = model.config._attn_implementation
    _current.attention, _current.makes_masks = attention, makes_masks
    model.config._attn_implementation = _registered(original)
    try:
        yield
    finally:
        _current.attention, _current.makes_masks = None, True
        model.config._attn_implementation = original


@cache
def _registered(original: str) -> str:
    """Register the attention that calls the function, and return its name. Other threads get the original one."""
    from transformers import AttentionInterface  # slow to import, as the others
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    def attention(module: nn.Module, *args: Any, **options: Any) -> Any:
        usual, run = usual_attention(module, original), _current.attention
        return usual(module, *args, **options) if run is None else run(usual, module, *args, **options)

    def mask(*args: Any, **options: Any) -> Any:
        return ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **options) if _current.makes_masks else None

    name = f"cocoa_{original}"
    AttentionInterface.register(name, attention)
    if original in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, mask)
    return name


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
    if probe is None or getattr(model.config, "_attn_implementation", None) is None:
        yield
        return
    with replaced_attention(model, Observer(probe, rows, length), makes_masks=True):
        yield


_observable: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def is_observable(model: LanguageModel) -> bool:
    """Whether :func:`observed_attention` measures anything in a model. The first call runs it over three tokens."""
    if model.model not in _observable:  # asked for every request, which must not wait for a pass of another
        probe = SourceProbe([(layer, 0) for layer in range(model.num_layers)], range(1, 2))
        with model.exclusive(), observed_attention(model, probe, rows=1, length=3):
            model.forward(torch.tensor([[0, 1, 2]], device=model.device) % model.vocab_size, logits_to_keep=1)
        _observable[model.model] = probe.means() is not None
    return _observable[model.model]
