"""Source attention: how much of its attention a token puts on the source, in the heads that copy from the context.

The source is the prompt. Passages are parts of it whose mass is measured as well.

The mass is recomputed from the query and the cached keys of a few heads, because fused attention returns no weights. In
passes of a model's own modules, a function takes the place of their attention, and measures beside it.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cocoa_engine.model.language_model import LanguageModel

Heads = Sequence[tuple[int, int]]
"""(layer, head) pairs, both counted from 0."""


def attention_weights(
    query: Tensor,
    keys: Tensor,
    heads: Sequence[int],
    visible: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention of W tokens on S slots in some heads of one layer: ``[len(heads), W, S]`` float32.

    Args:
        query: ``[heads, W, head_dim]``, of all heads of the layer; keys are ``[kv_heads, S, head_dim]``.
        visible: additive mask ``[W, S]``, or ``[len(heads), W, S]``; `None` if every token sees all slots.
        softcap: c in c * tanh(score / c), as in Gemma 2.
        sinks: scores of attention sinks, which take their share, as in gpt-oss: ``[heads]``, or ``[heads, W, 1]``.
    """
    groups = query.shape[0] // keys.shape[0]
    # one product for each head, because a batch of them would need a copy of the keys
    scores = torch.stack([query[head] @ keys[head // groups].T for head in heads]) * scale  # [n, W, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores + visible
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    of_sinks = torch.stack([sinks[head] for head in heads]).to(scores.dtype).view(len(heads), -1, 1)
    scores = torch.cat([scores, of_sinks.expand(-1, scores.shape[1], 1)], dim=-1)
    return scores.softmax(dim=-1, dtype=torch.float32)[..., :-1]


class SourceProbe:
    """Measures the source attention of one segment while its layers run.

    Its ``slots`` are those of the source, which every token may see, then of each passage.
    """

    def __init__(self, heads: Heads, source: range, passages: Sequence[range] = ()) -> None:
        self.slots = (source, *passages)
        self._by_layer: dict[int, list[int]] = {}
        for layer, head in heads:
            self._by_layer.setdefault(layer, []).append(head)
        self._total: Tensor | None = None
        self._measured = 0  # heads

    def heads_of(self, layer: int) -> list[int]:
        """The heads of a layer that count."""
        return self._by_layer.get(layer, [])

    def take(self, layer: int, weights: Tensor, first: int) -> None:
        """Take the weights of some heads of one layer, ``[n, W, S]`` float32; ``first`` is the position of slot 0."""
        columns = [slice(max(0, slots.start - first), max(0, slots.stop - first)) for slots in self.slots]
        mass = torch.stack([weights[..., column].sum(dim=-1).sum(dim=0) for column in columns])
        self._total = mass if self._total is None else self._total + mass.to(self._total.device)
        self._measured += len(weights)

    def means(self) -> Tensor | None:
        """The mean mass of the heads taken on the source and on each passage, ``[W, 1 + P]``; `None` without heads."""
        return None if self._total is None else self._total.T / self._measured


def probe_of(heads: Heads, prompt_tokens: int, passages: Sequence[range] = ()) -> SourceProbe | None:
    """The probe of a prompt; `None` without heads, and for a prompt of one token.

    The first token attracts attention whatever it is, and is no part of the source.
    """
    source = range(1, prompt_tokens)
    return SourceProbe(heads, source, passages) if heads and source else None


def of_segments(probes: Sequence[tuple[SourceProbe | None, int]]) -> Tensor | None:
    """The attention of all tokens of a pass on their source and on each of its passages, ``[T, 1 + P]``.

    ``probes`` holds the probe of each segment, if it has one, and its number of tokens. P is the largest number of
    passages; other columns are 0. The result is `None` if nothing was measured.
    """
    means = [None if probe is None else probe.means() for probe, _ in probes]
    measured = [mean for mean in means if mean is not None]
    if not measured:
        return None
    none, columns = measured[0].new_zeros(1, 1), max(mean.shape[1] for mean in measured)
    rows = [
        none.expand(width, columns) if mean is None else F.pad(mean, (0, columns - mean.shape[1])).to(none.device)
        for mean, (_, width) in zip(means, probes, strict=True)
    ]
    return torch.cat(rows)


_current = threading.local()  # the function, and whether masks are made, in a thread that runs a pass


@contextmanager
def replaced_attention(model: LanguageModel, attention: Callable[..., Any], *, makes_masks: bool) -> Iterator[None]:
    """Call a function in place of the model's attention in the passes that this thread runs inside the context.

    It is called in modules that use transformers' ``AttentionInterface``, with the usual function before the arguments.
    Transformers makes the masks that it is given if ``makes_masks`` is set. Hold the model's lock.
    """
    original = model.config._attn_implementation
    _current.replaced = attention, makes_masks
    model.config._attn_implementation = _registered(original)
    try:
        yield
    finally:
        del _current.replaced
        model.config._attn_implementation = original


@cache
def _registered(original: str) -> str:
    """Register the attention that calls the function, and return its name. Other threads get the original one."""
    from transformers import AttentionInterface  # slow to import, as the others
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module: nn.Module, *args: Any, **options: Any) -> Any:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        usual = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
        run, _ = getattr(_current, "replaced", (None, True))
        return usual(module, *args, **options) if run is None else run(usual, module, *args, **options)

    def mask(*args: Any, **options: Any) -> Any:
        _, makes_masks = getattr(_current, "replaced", (None, True))
        return ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **options) if makes_masks else None

    name = f"cocoa_{original}"
    AttentionInterface.register(name, attention)
    if original in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, mask)
    return name


def observer(probe: SourceProbe, rows: int, length: int) -> Callable[..., Any]:
    """A function for :func:`replaced_attention` that measures each layer of a pass, and runs it as usual.

    Masks of flex attention cannot be read. A cache may have dropped the first keys. A mask of fewer dimensions than 4
    is read as none: a token then sees the keys before it within the window. Arguments as for
    :func:`observed_attention`.
    """

    @cache
    def causal(window: int | None, slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        row = torch.arange(slots - rows, slots, device=device)[:, None]
        slot = torch.arange(slots, device=device)
        hidden = slot > row if window is None else (slot > row) | (row - slot >= window)
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)

    def observe(
        usual: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        layer, slots = getattr(module, "layer_idx", None), key.shape[2]
        heads = [] if layer is None else [head for head in probe.heads_of(layer) if head < query.shape[1]]
        if layer is not None and heads and (attention_mask is None or isinstance(attention_mask, Tensor)):
            if attention_mask is None or attention_mask.ndim != 4:
                visible = causal(options.get("sliding_window"), slots, key.dtype, key.device)
            else:  # [1, 1 or heads, W, S], additive, or True where a token sees a key
                visible = attention_mask[0, heads if attention_mask.shape[1] > 1 else slice(None), -rows:, :slots]
                if visible.dtype == torch.bool:
                    lowest = torch.finfo(key.dtype).min
                    visible = key.new_zeros(visible.shape).masked_fill_(~visible, lowest)
            if (bias := options.get("position_bias")) is not None:  # [1, heads, W, S]
                visible = visible + bias[0, heads, -rows:, :slots]
            sinks, scale = options.get("sinks"), options.get("scaling")
            weights = attention_weights(
                query[0, :, -rows:],
                key[0],
                heads,
                visible,
                scale=query.shape[-1] ** -0.5 if scale is None else scale,
                softcap=options.get("softcap"),
                sinks=options.get("s_aux") if sinks is None else sinks[0, :, -rows:],
            )
            probe.take(layer, weights, length - slots)
        return usual(module, query, key, value, attention_mask, *args, **options)

    return observe


@contextmanager
def observed_attention(model: LanguageModel, probe: SourceProbe | None, rows: int, length: int) -> Iterator[None]:
    """Measure the source attention of the pass over one sequence that this thread runs inside the context.

    Nothing is measured in layers that do not use transformers' ``AttentionInterface``. Hold the model's lock. The last
    ``rows`` tokens are measured; ``length`` is the number of all tokens, those of the cache included.
    """
    model.whole()  # whose modules are observed
    if probe is None or getattr(model.config, "_attn_implementation", None) is None:
        yield
        return
    with replaced_attention(model, observer(probe, rows, length), makes_masks=True):
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
