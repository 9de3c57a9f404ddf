"""Runs every kernel once on small tensors and compares it with torch, before the kernels are used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cocoa_engine.execution.native import operators
from cocoa_engine.execution.native.build import built
from cocoa_engine.execution.native.layers import DecoderLayer, KeyValuePointers, Layers, Leaves, Mask
from cocoa_engine.model.blocks import BLOCK_KINDS, BlockTensor, unpack_with

TOLERANCE = 1e-4
"""Largest allowed difference from torch. The values are about 1."""

Pairs = Iterator[tuple[Tensor, Tensor]]
"""Pairs of a kernel's result and torch's."""


@functools.cache
def obstacle() -> str | None:
    """Why this machine cannot use the kernels, or ``None``. The first call compiles and tries them."""
    library = built()
    if library.handle is None:
        return library.reason
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for name, pairs in TRIALS.items():
                if not all(torch.allclose(found, expected, atol=TOLERANCE) for found, expected in pairs(_Random())):
                    return f"{name} does not compute what torch computes"
    except RuntimeError as error:
        return f"the kernels could not be tried: {error}"
    return None


@functools.cache
def block_obstacle() -> str | None:
    """Why the kernels cannot read the blocks of GGUF files here, or ``None``. They then unpack them everywhere."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for kind in BLOCK_KINDS:
            if not all(torch.allclose(*pair, atol=TOLERANCE) for pair in _blocks(_Random(), kind)):
                return f"the kernels unpack {kind} blocks in another way than gguf does"
    unpack_with(operators.unpack_blocks)
    return None


def _blocks(random: _Random, kind: str) -> Pairs:
    weight = sample_blocks(kind, 21, 256, random.generator)
    exact, x = weight.dequantized(), random(64, 256) / 16
    linears = operators.Linears([weight], [None])
    for rows in (1, 3, 20, 64):  # each takes another path through the kernel
        yield linears(x[:rows]), F.linear(x[:rows], exact)
    yield operators.unpack(weight, torch.tensor([20, 3])), exact[[20, 3]]


def sample_blocks(kind: str, rows: int, columns: int, generator: torch.Generator) -> BlockTensor:
    """A matrix of random blocks, whose numbers are about 1."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = torch.randint(0, 256, (rows * columns // numbers, size), dtype=torch.uint8, generator=generator)
    scale = torch.rand(blocks.shape[0], 2, generator=generator) * 2 ** _EXPONENTS.get(kind, 0)
    halves = scale.to(torch.float16).view(torch.uint8)
    if kind in ("F16", "BF16"):
        values = torch.rand(rows, columns, generator=generator).to(torch.float16 if kind == "F16" else torch.bfloat16)
        return BlockTensor(values.view(torch.uint8), kind)
    if kind == "Q6_K":
        blocks[:, -2:] = halves[:, :2]
    elif kind in ("Q4_0", "Q5_0", "Q8_0"):
        blocks[:, :2] = halves[:, :2]
    else:
        blocks[:, :4] = halves
    return BlockTensor(blocks.view(rows, -1), kind)


_EXPONENTS = {"Q4_0": -3, "Q4_1": -3, "Q5_0": -4, "Q5_1": -4, "Q8_0": -7, "Q4_K": -9, "Q5_K": -10, "Q6_K": -12}


class _Random:
    """Reproducible float32 numbers on the CPU; independent of torch's defaults."""

    def __init__(self) -> None:
        self.generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator, dtype=torch.float32, device="cpu")


def _linear(random: _Random) -> Pairs:
    weight, bias, x = random(37, 43), random(37), random(64, 43)
    for weights, inputs in ((weight, x), (weight.bfloat16(), x), (weight.bfloat16(), x.bfloat16().float())):
        linears = operators.Linears([weights], [bias], rounds_inputs=inputs is not x)
        expected = F.linear(inputs, weights.float(), bias)
        for rows in (1, 5, 8, 20, 64):  # each takes another path through the kernel
            yield linears(inputs[:rows]), expected[:rows]


def _attend(random: _Random) -> Pairs:
    query, keys, values = random(4, 3, 24), random(2, 70, 24), random(2, 70, 24)
    mask = _hiding(3, 70, [(0, range(50, 70))])
    expected = _attention(query, keys, values, mask, 0.5)
    yield operators.attend(query, keys, values, mask[:, 50:].contiguous(), 50, scale=0.5), expected


def _next_tokens(random: _Random) -> Pairs:
    logits = random(6, 43)
    log_probs = logits.log_softmax(dim=-1)
    found = operators.next_tokens(logits, 3).float()
    highest = log_probs.topk(3).values
    yield found[:, :3], highest
    yield log_probs.gather(1, found[:, 3:6].long()), highest
    yield found[:, 6], -(log_probs.exp() * log_probs).sum(dim=-1)


def _move(random: _Random) -> Pairs:
    keys, values = ([random(2, 8, 24) for _ in range(2)] for _ in range(2))
    stores = [*keys, *values]
    expected = [store.clone() for store in stores]
    for store in expected:
        store[:, 1:4] = store[:, [2, 4, 7]]
    KeyValuePointers(keys, values).move([2, 4, 7], 1)
    yield from zip(stores, expected, strict=True)


# vectors of 4, 8 and 16 numbers all fill a part of half a head, of the width and of the inner width, and leave a rest
_HEADS, _KV_HEADS, _HEAD_DIM, _WIDTH, _INNER, _EPS, _SCALE = 4, 2, 36, 42, 38, 1e-5, 0.3


_SOURCE, _SOURCE_HEADS = range(1, 5), ((1, 3), (0, 0), (1, 1))
_PASSAGES = ((range(1, 3), range(3, 3), range(2, 5)), (range(4, 6),))  # of each sequence


class _Sequence(NamedTuple):
    start: int
    tokens: int
    full_mask: Tensor  # additive, [tokens, start + tokens]
    window_mask: Tensor  # the same for layers with a window


def _layers(random: _Random) -> Pairs:
    """Two layers, the second in bfloat16 with biases, norms of queries and keys, and a window; two sequences."""
    layers = [_layer(random, plain) for plain in (True, False)]
    norm, x, slots = random(_WIDTH), random(4, _WIDTH), 9
    cos, sin = random(2, 4, _HEAD_DIM)
    sequences = [
        _Sequence(5, 3, _hiding(3, 8, [(0, [6, 7]), (1, [7])]), _hiding(3, 8, [(0, [6, 7]), (2, range(6))])),
        _Sequence(6, 1, _hiding(1, 7, []), _hiding(1, 7, [(0, range(4))])),
    ]
    caches = [random(2, 2, _KV_HEADS, slots, _HEAD_DIM) for _ in sequences]  # keys and values, by layer
    own = [cache.clone() for cache in caches]
    expected, masses = _decoded(layers, norm, x, cos, sin, sequences, caches)
    kernels = Layers(
        [layer.weights for layer in layers],
        norm,
        heads=_HEADS,
        kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        eps=_EPS,
        scale=_SCALE,
    )
    found = [torch.empty_like(x) for _ in expected]
    leaves = [
        Leaves(
            pointers=KeyValuePointers(*(list(part) for part in cache)),
            start=each.start,
            tokens=each.tokens,
            full_mask=_tail(each.full_mask, each.start),
            window_mask=Mask(each.window_mask, 0),
            source=_SOURCE,
            passages=_PASSAGES[number],
        )
        for number, (each, cache) in enumerate(zip(sequences, own, strict=True))
    ]
    taps = [(number, states.data_ptr()) for number, states in enumerate(found)]
    found_masses = kernels(x.clone(), cos, sin, leaves, taps, _SOURCE_HEADS)
    yield from zip((*found, *own, found_masses), (*expected, *caches, masses), strict=True)


TRIALS: dict[str, Callable[[_Random], Pairs]] = {
    "cocoa_linear": _linear,
    "cocoa_attend": _attend,
    "cocoa_next_tokens": _next_tokens,
    "cocoa_move": _move,
    "cocoa_layers": _layers,
}
"""The trial of each exported kernel."""


class _Layer(NamedTuple):
    weights: DecoderLayer
    matrices: list[list[Tensor]]  # of qkv, out, gate_up and down, each [out, in]
    biases: list[list[Tensor | None]]

    def linear(self, number: int, x: Tensor) -> list[Tensor]:
        pairs = zip(self.matrices[number], self.biases[number], strict=True)
        return [F.linear(x, weight.float(), bias) for weight, bias in pairs]


def _layer(random: _Random, plain: bool) -> _Layer:
    mixed = _HEADS * _HEAD_DIM
    kv = _KV_HEADS * _HEAD_DIM
    sizes = [([mixed, kv, kv], _WIDTH), ([_WIDTH], mixed), ([_INNER, _INNER], _WIDTH), ([_WIDTH], _INNER)]
    matrices = [[random(out, width) * width**-0.5 for out in outs] for outs, width in sizes]
    if not plain:
        matrices = [[matrix.bfloat16() for matrix in each] for each in matrices]
    biases: list[list[Tensor | None]] = [[None if plain else random(out) for out in outs] for outs, _ in sizes]
    qkv, out, gate_up, down = (operators.Linears(*pair) for pair in zip(matrices, biases, strict=True))
    weights = DecoderLayer(
        attention_norm=random(_WIDTH),
        q_norm=None if plain else random(_HEAD_DIM),
        k_norm=None if plain else random(_HEAD_DIM),
        mlp_norm=random(_WIDTH),
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
        windowed=not plain,
    )
    return _Layer(weights, matrices, biases)


def _decoded(
    layers: Sequence[_Layer],
    norm: Tensor,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    sequences: Sequence[_Sequence],
    caches: Sequence[Tensor],
) -> tuple[list[Tensor], Tensor]:
    """torch's states before each layer, after the last one and after the norm, and the masses of the source heads.

    Writes keys and values to the caches.
    """
    states = []
    masses = x.new_zeros(len(_SOURCE_HEADS), 1 + max(map(len, _PASSAGES)), len(x))
    for number, layer in enumerate(layers):
        known = layer.weights
        states.append(x)
        parts = layer.linear(0, _normed(x, known.attention_norm))
        query, keys, values = (part.view(len(x), -1, _HEAD_DIM).transpose(0, 1) for part in parts)  # [heads, T, dim]
        if known.q_norm is not None and known.k_norm is not None:
            query, keys = _normed(query, known.q_norm), _normed(keys, known.k_norm)
        query, keys = (part * cos + part.roll(_HEAD_DIM // 2, -1) * sin for part in (query, keys))
        mixed, row = [], 0
        for number_of_sequence, (each, cache) in enumerate(zip(sequences, caches, strict=True)):
            rows, end = slice(row, row + each.tokens), each.start + each.tokens
            cache[0, number, :, each.start : end] = keys[:, rows]
            cache[1, number, :, each.start : end] = values[:, rows]
            seen = cache[:, number, :, :end]
            mask = each.window_mask if known.windowed else each.full_mask
            mixed.append(_attention(query[:, rows], seen[0], seen[1], mask, _SCALE))
            for probe, (layer_number, head) in enumerate(_SOURCE_HEADS):
                if layer_number == number:
                    keys_of_head = seen[0][head // (_HEADS // _KV_HEADS)]
                    weights = (query[head, rows] @ keys_of_head.T * _SCALE + mask).softmax(dim=-1)
                    for column, slots in enumerate((_SOURCE, *_PASSAGES[number_of_sequence])):
                        masses[probe, column, rows] = weights[:, slots.start : slots.stop].sum(dim=-1)
            row += each.tokens
        x = x + layer.linear(1, torch.cat(mixed))[0]
        gate, up = layer.linear(2, _normed(x, known.mlp_norm))
        x = x + layer.linear(3, F.silu(gate) * up)[0]
    return [*states, x, _normed(x, norm)], masses


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + _EPS).rsqrt() * weight


def _attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``[W, heads * dim]`` of ``[heads, W, dim]`` over ``[kv_heads, S, dim]``."""
    groups = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    out = F.scaled_dot_product_attention(query, keys, values, mask, scale=scale)
    return out.transpose(0, 1).reshape(query.shape[1], -1)


def _hiding(rows: int, slots: int, hidden: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
    """An additive mask ``[rows, slots]`` that hides some slots of some rows."""
    mask = torch.zeros(rows, slots, dtype=torch.float32, device="cpu")
    for row, columns in hidden:
        mask[row, list(columns)] = torch.finfo(torch.float32).min
    return mask


def _tail(mask: Tensor, start: int) -> Mask:
    """The mask from the first new slot on; without values if it hides nothing."""
    return Mask(mask[:, start:].contiguous() if mask.any() else None, start)
