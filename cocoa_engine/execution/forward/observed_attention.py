"""Measures source attention in a plain forward pass of the model, beside the model's own attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cocoa_engine.execution.forward.modules import usual_attention
from cocoa_engine.execution.forward.source_attention import Heads, SourceProbe
from cocoa_engine.execution.forward.windows import Windows
from cocoa_engine.model.language_model import LanguageModel


class Observer:
    """Measures the layers of one pass.

    Args:
        probe: adds up the masses.
        windows: the layers' sliding windows.
        rows: the number of tokens at the end of the sequence that are measured.
    """

    def __init__(self, probe: SourceProbe, windows: Windows, rows: int) -> None:
        self.probe = probe
        self._windows = windows
        self._rows = rows
        self._masks: dict[tuple[int | None, torch.dtype, torch.device], Tensor] = {}

    def see(self, layer: int, query: Tensor, keys: Tensor, scale: float, softcap: float | None) -> None:
        """Measure one layer.

        Args:
            query: ``[heads, S, head_dim]``, of the whole sequence.
            keys: ``[kv_heads, S, head_dim]``.
        """
        if not self.probe.heads_of(layer):
            return
        visible = self._visible(self._windows[layer], keys)
        self.probe.add(layer, query[:, -self._rows :], keys, visible, scale=scale, softcap=softcap)

    def _visible(self, window: int | None, keys: Tensor) -> Tensor:
        key = (window, keys.dtype, keys.device)
        if key not in self._masks:
            length = keys.shape[1]
            row = torch.arange(length - self._rows, length, device=keys.device)[:, None]
            slot = torch.arange(length, device=keys.device)
            hidden = slot > row if window is None else (slot > row) | (row - slot >= window)
            lowest = torch.finfo(keys.dtype).min
            visible = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device)
            self._masks[key] = visible.masked_fill_(hidden, lowest)
        return self._masks[key]


class _Current(threading.local):
    observer: Observer | None = None


_current = _Current()


@contextmanager
def observed_attention(
    model: LanguageModel, heads: Heads, source: range, rows: int, passages: Sequence[range] = ()
) -> Iterator[SourceProbe]:
    """Measure the source attention of the pass over one whole sequence that this thread runs inside the context.

    Nothing is measured if the model does not use transformers' ``AttentionInterface``, or if the window of its layers
    is not known.

    Args:
        model: the model. Hold its lock.
        heads: the (layer, head) pairs that count; with none, nothing is measured.
        source: the positions of the source.
        rows: the number of tokens at the end of the sequence that are measured.
        passages: the positions of each passage.
    """
    probe = SourceProbe(heads, source, passages)
    original = getattr(model.config, "_attn_implementation", None)
    if not heads or not source or original is None:
        yield probe
        return
    try:
        windows = Windows(model.config)
    except NotImplementedError:
        yield probe
        return
    _current.observer = Observer(probe, windows, rows)
    model.config._attn_implementation = _registered(original)
    try:
        yield probe
    finally:
        _current.observer = None
        model.config._attn_implementation = original


def _registered(original: str) -> str:
    """Register the observing attention over an implementation, and return its name."""
    name = f"cocoa_observed_{original}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _observing(original))
        if original in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    return name


def _observing(original: str) -> Callable[..., Any]:
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        observer = _current.observer
        if observer is not None and options.get("s_aux") is None:  # sinks take mass that the keys do not show
            scale = options.get("scaling")
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            layer: int = module.layer_idx  # type: ignore[assignment]
            observer.see(layer, query[0], key[0], scale, options.get("softcap"))
        return usual_attention(module, original)(module, query, key, value, *args, **options)

    return attention
