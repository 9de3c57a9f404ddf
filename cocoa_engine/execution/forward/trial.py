"""Runs every kernel once on small tensors and compares it with torch, before the kernels are used."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

from cocoa_engine.execution.forward.attention import attend, attend_all, write_all
from cocoa_engine.execution.forward.base import KeyValuePointers, KeyValues, Segment
from cocoa_engine.execution.forward.kernel_layers import KernelLayers, decoder_layer
from cocoa_engine.execution.forward.source_attention import SourceProbe, of_segments
from cocoa_engine.execution.native import operators
from cocoa_engine.execution.native.build import built
from cocoa_engine.model.blocks import BLOCK_KINDS, BlockTensor, unpack_with
from cocoa_engine.model.configs import Windows
from cocoa_engine.model.language_model import CaptureSpec, plain_modes

TOLERANCE = 1e-4
"""Largest allowed difference from torch. The values are about 1."""

Pairs = Iterator[tuple[Tensor, Tensor]]
"""Pairs of a kernel's result and torch's."""

Random = Callable[..., Tensor]


@cache
def obstacle() -> str | None:
    """Why this machine cannot use the kernels, or ``None``. The first call compiles and tries them."""
    library = built()
    if library.handle is None:
        return library.reason
    try:
        with plain_modes():
            for name, pairs in TRIALS.items():
                if not all(torch.allclose(result, expected, atol=TOLERANCE) for result, expected in pairs(_random())):
                    return f"{name} does not compute what torch computes"
    except RuntimeError as error:
        return f"the kernels could not be tried: {error}"
    return None


@cache
def block_obstacle() -> str | None:
    """Why the kernels cannot read the blocks of GGUF files here, or ``None``. They then unpack them everywhere."""
    with plain_modes():
        for kind in BLOCK_KINDS:
            if not all(torch.allclose(*pair, atol=TOLERANCE) for pair in _blocks(kind)):
                return f"the kernels unpack {kind} blocks in another way than gguf does"
    unpack_with(operators.unpack_blocks)
    return None


def _blocks(kind: str) -> Pairs:
    random = _random()
    weight = sample_blocks(kind, 21, 256, random.keywords["generator"])
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


def _random() -> partial[Tensor]:
    """Reproducible float32 numbers on the CPU; independent of torch's defaults."""
    return partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")


def _linear(random: Random) -> Pairs:
    weight, bias, x = random(37, 43), random(37), random(64, 43)
    for weights, inputs in ((weight, x), (weight.bfloat16(), x), (weight.bfloat16(), x.bfloat16().float())):
        linears = operators.Linears([weights], [bias], rounds_inputs=inputs is not x)
        expected = F.linear(inputs, weights.float(), bias)
        for rows in (1, 5, 8, 20, 64):  # each takes another path through the kernel
            yield linears(inputs[:rows]), expected[:rows]


def _attend(random: Random) -> Pairs:
    segment, query = _segment(random(2, 1, 2, 70, 24), 3, [[], [67], []]), random(4, 3, 24)
    by_kernel, by_torch = (attend(segment, 0, query, scale=0.5, window=None, native=native) for native in (True, False))
    yield by_kernel, by_torch


def _segment(cache: Tensor, width: int, seen: Sequence[Sequence[int]] | None) -> Segment:
    """The last tokens of a sequence with these keys and values, ``[2, L, kv_heads, slots, dim]``, in a new store.

    ``seen`` holds the further slots that each token sees. Without it, the tokens are a chain.
    """
    store, end = KeyValues(cache.shape[1], cache.shape[3]), cache.shape[3]
    for layer in range(cache.shape[1]):
        store.write(layer, 0, *cache[:, layer])
    start = end - width
    chains = None if seen is None else [(slots, 1) for slots in seen]
    positions = range(start, end) if seen is None else [start + len(slots) for slots in seen]
    return Segment(store, start, positions, positions, start, chains=chains, tail_positions=positions)


def _next_tokens(random: Random) -> Pairs:
    logits = random(6, 43)
    log_probs = logits.log_softmax(dim=-1)
    result = operators.next_tokens(logits, 3).float()
    highest = log_probs.topk(3).values
    yield result[:, :3], highest
    yield log_probs.gather(1, result[:, 3:6].long()), highest
    yield result[:, 6], -(log_probs.exp() * log_probs).sum(dim=-1)


def _move(random: Random) -> Pairs:
    keys, values = ([random(2, 8, 24) for _ in range(2)] for _ in range(2))
    stores = [*keys, *values]
    expected = [store.clone() for store in stores]
    for store in expected:
        store[:, 1:4] = store[:, [2, 4, 7]]
    KeyValuePointers(keys, values).move([2, 4, 7], 1)
    yield from zip(stores, expected, strict=True)


# vectors of 4, 8 and 16 numbers all fill a part of half a head, of the width and of the inner width, and leave a rest
_HEADS, _KV_HEADS, _HEAD_DIM, _WIDTH, _INNER, _EPS, _SCALE = 4, 2, 36, 42, 38, 1e-5, 0.3
_CAPTURE = CaptureSpec(0, 2, "pre_norm", source_heads=((1, 3), (0, 0), (1, 1)))
_PASSAGES = ((range(1, 3), range(3, 3), range(2, 5)), (range(4, 6),))  # of each sequence


def _layers(random: Random) -> Pairs:
    """Two layers, the second in bfloat16 with biases, norms of queries and keys, and a window; two sequences."""
    layers = [_Layer(random, plain) for plain in (True, False)]
    norm, x, (cos, sin) = random(_WIDTH), random(4, _WIDTH), random(2, 4, _HEAD_DIM)
    windows = Windows(SimpleNamespace(sliding_window=3, layer_types=["full_attention", "sliding_attention"]))
    caches = [random(2, 2, _KV_HEADS, slots, _HEAD_DIM) for slots in (8, 7)]
    own, expected = ([_segment(caches[0], 3, [[], [5], []]), _segment(caches[1], 1, None)] for _ in range(2))
    for segments in (own, expected):
        for segment, passages in zip(segments, _PASSAGES, strict=True):
            segment.source = SourceProbe(_CAPTURE.source_heads, range(1, 5), passages)
    structures, heads = [layer.structure for layer in layers], (_HEADS, _KV_HEADS, _HEAD_DIM)
    kernels = KernelLayers(structures, norm, _INNER, windows, heads, _EPS, _SCALE)
    leaves = kernels.leaves(own)
    assert leaves is not None
    last, states, _, masses = kernels(x.clone(), cos, sin, leaves, _CAPTURE)
    inputs = []
    for number, layer in enumerate(layers):
        inputs.append(x)
        parts = layer.linear(0, _normed(x, layer.norms[0]))
        query, keys, values = (part.view(len(x), -1, _HEAD_DIM).transpose(0, 1) for part in parts)  # [heads, T, dim]
        query, keys = _normed(query, layer.norms[1]), _normed(keys, layer.norms[2])
        query, keys = (part * cos + part.roll(_HEAD_DIM // 2, -1) * sin for part in (query, keys))
        write_all(expected, number, keys, values)
        x = x + layer.linear(1, attend_all(expected, number, query, scale=_SCALE, window=windows[number]))[0]
        gate, up = layer.linear(2, _normed(x, layer.norms[3]))
        x = x + layer.linear(3, F.silu(gate) * up)[0]
    expected_masses = of_segments([(segment.source, segment.width) for segment in expected])
    assert states is not None and masses is not None and expected_masses is not None  # noqa: PT018 - for mypy
    yield from ((states, torch.stack([*inputs, x, x])), (last, _normed(x, norm)), (masses, expected_masses))
    for segment, other in zip(own, expected, strict=True):
        for (block,), (written,) in zip(segment.store.blocks, other.store.blocks, strict=True):
            yield block, written


class _Layer:
    def __init__(self, random: Random, plain: bool) -> None:
        mixed, kv = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
        sizes = [([mixed, kv, kv], _WIDTH), ([_WIDTH], mixed), ([_INNER, _INNER], _WIDTH), ([_WIDTH], _INNER)]
        dtype = torch.float32 if plain else torch.bfloat16
        self.matrices = [[(random(out, width) * width**-0.5).to(dtype) for out in outs] for outs, width in sizes]
        self.biases = [[None if plain else random(out) for out in outs] for outs, _ in sizes]
        of_heads = [None if plain else random(_HEAD_DIM) for _ in range(2)]
        self.norms = [random(_WIDTH), *of_heads, random(_WIDTH)]
        linears = [operators.Linears(*pair) for pair in zip(self.matrices, self.biases, strict=True)]
        self.structure = decoder_layer(self.norms, linears, windowed=not plain)

    def linear(self, number: int, x: Tensor) -> list[Tensor]:
        pairs = zip(self.matrices[number], self.biases[number], strict=True)
        return [F.linear(x, weight.float(), bias) for weight, bias in pairs]


def _normed(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * (x.square().mean(dim=-1, keepdim=True) + _EPS).rsqrt() * weight


TRIALS: dict[str, Callable[[Random], Pairs]] = {
    "cocoa_linear": _linear,
    "cocoa_attend": _attend,
    "cocoa_next_tokens": _next_tokens,
    "cocoa_move": _move,
    "cocoa_layers": _layers,
}
"""The trial of each exported kernel."""
