"""The kernels as functions of tensors: float32 on the CPU; weights may be bfloat16 or in the blocks of a GGUF file.

They use torch's thread count.
"""

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from cocoa_engine.execution.native.build import built
from cocoa_engine.model.blocks import BLOCK_KINDS, BlockTensor, block_size

_LONG, _FLOAT, _POINTER = ctypes.c_long, ctypes.c_float, ctypes.c_void_p


class Joined(ctypes.Structure):
    """Linear layers that read the same input."""

    _fields_ = (
        ("count", _LONG),
        *((name, _POINTER) for name in ("weights", "biases", "outs", "kinds")),
        ("in", _LONG),
    )


class DecoderLayer(ctypes.Structure):
    """The weights of one decoder layer. ``memory`` is what the addresses point to."""

    memory: Any
    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, Joined) for name in ("qkv", "out", "gate_up", "down")),
        ("windowed", _LONG),
    )


class Stack(ctypes.Structure):
    """All decoder layers and the norm after them."""

    _fields_ = (
        *((name, _LONG) for name in ("layers", "width", "heads", "kv_heads", "dim", "inner")),
        *((name, _FLOAT) for name in ("eps", "scale")),
        *((name, _POINTER) for name in ("layer", "norm")),
    )


class Leaves(ctypes.Structure):
    """The tokens that one sequence feeds. ``memory`` is what the addresses point to."""

    memory: Any
    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values")),
        *((name, _LONG) for name in ("kv_head", "start", "count")),
        ("mask", _POINTER * 2),
        ("masked_from", _LONG * 2),
        ("parts", _LONG),
        ("ranges", _POINTER),
        ("range_count", _LONG),
    )


class Tap(ctypes.Structure):
    """A layer, and the address to which the states before it are copied."""

    _fields_ = (("layer", _LONG), ("to", _POINTER))


class Head(ctypes.Structure):
    """An attention head."""

    _fields_ = (("layer", _LONG), ("head", _LONG))


KINDS = {name: number for number, name in enumerate(("F32", *BLOCK_KINDS, "BF16_BOTH"))}
"""The types of weights that the kernels read, and the numbers that they give them. BF16_BOTH is bfloat16 whose inputs
may be rounded to it, too."""

P = ParamSpec("P")
R = TypeVar("R")

SLOTS_IN_PART = 32
"""Smallest number of slots for which another thread pays off."""

SMALL = 2**17
"""Up to this many numbers, unpacking in one thread is faster than waiting for others."""


def untraced(run: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable``, once the tracer is loaded.

    ``torch.compiler.disable`` itself imports the tracer. That takes a second on a slow core and 70 MB.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(run)
    def call(*args: P.args, **options: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return run(*args, **options)
            sys.modules["torch._dynamo"].decorators.skip(call)  # or each wrapper would be compiled by itself
            disabled = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
        return disabled(*args, **options)

    return call


def can_multiply(weights: Sequence[Tensor]) -> bool:
    """Whether :class:`Linears` can read these weights: all float32, all bfloat16, or in blocks; on the CPU, contiguous.

    Every number must be aligned to its own size. Tensors in a memory-mapped file may not be.
    """
    if {weight.dtype for weight in weights} not in ({torch.float32}, {torch.bfloat16}):
        return False
    if any(isinstance(weight, BlockTensor) and weight.kind not in BLOCK_KINDS for weight in weights):
        return False
    stored = [weight.blocks if isinstance(weight, BlockTensor) else weight for weight in weights]
    return all(
        part.device.type == "cpu" and part.is_contiguous() and part.data_ptr() % part.element_size() == 0
        for part in stored
    )


def can_attend(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether :func:`attend` can read these tensors."""
    alike = keys.shape == values.shape and keys.stride() == values.stride()
    return all(map(is_readable, (query, keys, values))) and alike and keys.stride(1) == keys.shape[2] == query.shape[2]


class Linears:
    """``x W^T + b`` for linear layers that read the same input, on the model's own weights.

    Args:
        weights: each ``[out, in]``; :func:`can_multiply` must accept them.
        rounds_inputs: whether inputs of bfloat16 weights may be rounded to bfloat16. They are rounded where the
            processor has an instruction for such products. Inputs in bfloat16 stay as they are.
    """

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, rounds_inputs: bool = False
    ) -> None:
        exact = [None if bias is None else bias.float().contiguous() for bias in biases]
        stored = [weight.blocks if isinstance(weight, BlockTensor) else weight for weight in weights]
        by_dtype = {torch.float32: "F32", torch.bfloat16: "BF16_BOTH" if rounds_inputs else "BF16"}
        kinds = [weight.kind if isinstance(weight, BlockTensor) else by_dtype[weight.dtype] for weight in weights]
        pointers, longs = ctypes.c_void_p * len(weights), ctypes.c_long * len(weights)
        arrays = (
            pointers(*(weight.data_ptr() for weight in stored)),
            pointers(*(None if bias is None else bias.data_ptr() for bias in exact)),
            longs(*(len(weight) for weight in weights)),
            longs(*(KINDS[kind] for kind in kinds)),
        )
        self._inputs = weights[0].shape[1]
        self.total = sum(arrays[2])
        self.joined = Joined(len(weights), *(ctypes.addressof(array) for array in arrays), self._inputs)
        self._kept = (*stored, *exact, *arrays)  # keeps the memory behind the addresses alive
        self._run = handle().cocoa_linear

    @untraced
    def __call__(self, x: Tensor) -> Tensor:
        """Map ``[rows, in]`` to ``[rows, total]``, the layers' concatenated outputs, in the dtype of ``x``.

        Products are summed in float32 for every dtype of the weights.
        """
        if x.dim() != 2 or x.shape[1] != self._inputs or x.device.type != "cpu":
            raise RuntimeError(f"needs x [rows, {self._inputs}] on the CPU, got {list(x.shape)} on {x.device}")
        dtype = x.dtype
        x = x.float()
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        y = x.new_empty(rows, self.total)
        shapes = (x.stride(0), rows, y.data_ptr(), self.total)
        self._run(ctypes.byref(self.joined), x.data_ptr(), *shapes, torch.get_num_threads())
        return y.to(dtype)


@untraced
def unpack(weight: BlockTensor, index: Tensor) -> Tensor:
    """The same as :meth:`BlockTensor.rows`, by the kernels, for blocks that :func:`can_multiply` accepts."""
    return _rows(weight.blocks, weight.kind, weight.shape[1], index.to("cpu", torch.long).contiguous())


@untraced
def unpack_blocks(blocks: Tensor, kind: str) -> Tensor:
    """All numbers in some rows of blocks, for :func:`~cocoa_engine.model.blocks.unpack_with`."""
    blocks = blocks.contiguous()
    numbers, size = block_size(kind)
    return _rows(blocks, kind, blocks.shape[1] // size * numbers, torch.arange(blocks.shape[0], device="cpu"))


def _rows(blocks: Tensor, kind: str, width: int, ids: Tensor) -> Tensor:
    rows = blocks.new_empty(ids.shape[0], width, dtype=torch.float32)
    threads = torch.get_num_threads() if rows.numel() > SMALL else 1
    handle().cocoa_unpack(KINDS[kind], blocks.data_ptr(), width, ids.data_ptr(), ids.shape[0], rows.data_ptr(), threads)
    return rows


@untraced
def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, masked_from: int, *, scale: float
) -> Tensor:
    """softmax(q k^T * scale + mask) v, ``[W, heads * head_dim]``, for what :func:`can_attend` accepts.

    ``mask`` is additive, ``[W, S - masked_from]``, contiguous. Every token sees the slots below ``masked_from``, and
    all slots if there is no mask.
    """
    heads, width, head_dim = query.shape
    kv_heads, slots, _ = keys.shape
    threads = torch.get_num_threads()
    out = query.new_empty(width, heads * head_dim)
    shape = (heads, kv_heads, width, head_dim, slots)
    handle().cocoa_attend(
        *(query.data_ptr(), query.stride(0), query.stride(1)),
        *(keys.data_ptr(), values.data_ptr(), keys.stride(0)),
        *(None if mask is None else mask.data_ptr(), masked_from),
        *(out.data_ptr(), *shape, scale, parts(threads, kv_heads, slots), threads),
    )
    return out


def parts(threads: int, kv_heads: int, slots: int) -> int:
    """Number of parts into which the slots of a key-value head are divided, so that all threads have work."""
    return min(threads // math.gcd(threads, kv_heads), max(1, slots // SLOTS_IN_PART))


def next_tokens(logits: Tensor, count: int) -> Tensor:
    """The ``count`` most probable next tokens of each row of readable logits ``[W, V]``, ties by ascending id.

    Returns:
        ``[W, 2 * count + 1]`` float64: log p of each token (-inf if fewer tokens are allowed), their ids, and the
        entropy of the distribution in nats. Values are NaN if the logits are NaN or +inf, or allow no token.
    """
    rows, vocabulary = logits.shape
    out = logits.new_empty(rows, 2 * count + 1, dtype=torch.float64)
    # OpenMP restarts its threads for a team of another size than torch's; a team of one thread is exempt
    threads = 1 if rows == 1 else torch.get_num_threads()
    handle().cocoa_next_tokens(logits.data_ptr(), logits.stride(0), rows, vocabulary, count, out.data_ptr(), threads)
    return out


def is_readable(tensor: Tensor) -> bool:
    """Whether the tensor is float32 on the CPU and its last dimension is contiguous."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.stride(-1) == 1


@functools.cache
def handle() -> ctypes.CDLL:
    """The loaded library. Call it only if :func:`cocoa_engine.execution.forward.trial.obstacle` returns ``None``."""
    library = built().handle
    assert library is not None, "trial.obstacle() is None"
    return library
