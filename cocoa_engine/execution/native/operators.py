"""The kernels on tensors, which are on the CPU and float32, but that weights may be bfloat16; threads are torch's."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cocoa_engine.execution.native.build import built
from cocoa_engine.execution.native.structures import Joined

SLOTS_IN_PART = 32
"""At least so many slots of a key-value head are worth a thread's while."""


def multiplies(weights: Sequence[Tensor]) -> bool:
    """Whether :class:`Linears` can read these: on the CPU, all float32 or all bfloat16, without gaps.

    And no number lies across two places for one, as it may in a file that is read where it is.
    """
    dtypes = {weight.dtype for weight in weights}
    return dtypes in ({torch.float32}, {torch.bfloat16}) and all(
        weight.device.type == "cpu" and weight.is_contiguous() and weight.data_ptr() % weight.element_size() == 0
        for weight in weights
    )


def attends(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether :func:`attend` can read these."""
    alike = keys.shape == values.shape and keys.stride() == values.stride()
    return all(map(readable, (query, keys, values))) and alike and keys.stride(1) == keys.shape[2] == query.shape[2]


class Linears:
    """``x W^T + b`` of linear layers that read the same input, on the weights where they are.

    Args:
        weights: each ``[out, in]``, such as :func:`multiplies` says.
        biases: of each ``[out]``, or none.

    Attributes:
        total: the layers' outputs.
        joined: what the kernels know of them.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        exact = [None if bias is None else bias.float().contiguous() for bias in biases]
        pointers, count = ctypes.c_void_p * len(weights), len(weights)
        arrays = (
            pointers(*(weight.data_ptr() for weight in weights)),
            pointers(*(None if bias is None else bias.data_ptr() for bias in exact)),
            (ctypes.c_long * count)(*(weight.shape[0] for weight in weights)),
        )
        self._inputs = weights[0].shape[1]
        self.total = sum(weight.shape[0] for weight in weights)
        halved = weights[0].dtype == torch.bfloat16
        self.joined = Joined(count, *(ctypes.addressof(array) for array in arrays), self._inputs, halved)
        self._kept = (*weights, *exact, *arrays)  # the addresses are theirs
        self._run = handle().cocoa_linear

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, in]`` to ``[rows, out]``, the layers' outputs side by side, in x's own precision.

        Products are summed up in float32 whatever the weights are.

        Raises:
            RuntimeError: x is of another width, or elsewhere.
        """
        if x.dim() != 2 or x.shape[1] != self._inputs or x.device.type != "cpu":
            raise RuntimeError(f"needs x [rows, {self._inputs}] on the CPU, got {list(x.shape)} on {x.device}")
        dtype = x.dtype
        x = x.float()
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        y = x.new_empty(rows, self.total)
        self._run(
            ctypes.byref(self.joined),
            x.data_ptr(),
            x.stride(0),
            rows,
            y.data_ptr(),
            self.total,
            torch.get_num_threads(),
        )
        return y.to(dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, masked_from: int, *, scale: float
) -> Tensor:
    """softmax(q k^T * scale + mask) v.

    Args:
        query: ``[heads, W, head_dim]``, as are these, such as :func:`attends` says.
        keys, values: ``[kv_heads, S, head_dim]``.
        mask: additive, ``[W, S - masked_from]``, contiguous; none sees everything.
        masked_from: slots below are seen by every token.

    Returns:
        ``[W, heads * head_dim]``.
    """
    heads, width, head_dim = query.shape
    kv_heads, slots, _ = keys.shape
    threads = torch.get_num_threads()
    out = query.new_empty(width, heads * head_dim)
    handle().cocoa_attend(
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0),
        None if mask is None else mask.data_ptr(),
        masked_from,
        out.data_ptr(),
        heads,
        kv_heads,
        width,
        head_dim,
        slots,
        scale,
        parts(threads, kv_heads, slots),
        threads,
    )
    return out


def parts(threads: int, kv_heads: int, slots: int) -> int:
    """How many parts the slots of a key-value head are divided into, for threads to share."""
    return min(threads // math.gcd(threads, kv_heads), max(1, slots // SLOTS_IN_PART))


def ranks(logits: Tensor) -> bool:
    """Whether :func:`next_tokens` can read these."""
    return readable(logits)


def next_tokens(logits: Tensor, count: int) -> Tensor:
    """The most probable next tokens of each row, equally probable ones by ascending id.

    Args:
        logits: ``[W, V]``, such as :func:`ranks` says.

    Returns:
        ``[W, 2 * count + 1]`` float64: log p of each, -inf where no more are allowed, their ids, and the entropy of the
        distribution in nats. NaN where the logits are NaN or +inf, or allow no token.
    """
    rows, vocabulary = logits.shape
    out = logits.new_empty(rows, 2 * count + 1, dtype=torch.float64)
    # a team of another size than torch's, but for one of one, makes OpenMP end threads and start them again
    threads = 1 if rows == 1 else torch.get_num_threads()
    handle().cocoa_next_tokens(logits.data_ptr(), logits.stride(0), rows, vocabulary, count, out.data_ptr(), threads)
    return out


def readable(tensor: Tensor) -> bool:
    """Whether it is float32, on the CPU, and its last dimension without gaps."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.stride(-1) == 1


@functools.cache
def handle() -> ctypes.CDLL:
    """The kernels' library, which :mod:`cocoa_engine.execution.native.trial` has found to be right."""
    library = built().handle
    assert library is not None, "trial.obstacle() is None"
    return library
