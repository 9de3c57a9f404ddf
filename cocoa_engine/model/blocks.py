"""Weights that stay in the quantised blocks of a GGUF file."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

BLOCK_KINDS = ("BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""The types of blocks that the kernels read, by gguf's names."""

ROWS_AT_ONCE = 1024  # unpacked where a whole matrix is multiplied


class BlockTensor(Tensor):
    """A matrix in the quantised blocks of a GGUF file. To torch it is float32 ``[out, in]`` and cannot be trained.

    Linear layers and embeddings unpack the rows that they need. Any other operation unpacks the whole matrix and
    returns an ordinary tensor. Several matrices of one shape may be stacked, ``[n, out, in]``; an index of the first
    dimension gives one of them, with the same memory.
    """

    blocks: Tensor  # ``[..., out, bytes of a row]``, uint8 on the CPU, which may be part of a memory-mapped file
    kind: str  # gguf's name of the block type, such as ``"Q4_K"``

    @staticmethod
    def __new__(cls, blocks: Tensor, kind: str) -> "BlockTensor":
        numbers, size = block_size(kind)
        if blocks.dtype != torch.uint8 or blocks.dim() not in (2, 3) or blocks.shape[-1] % size:
            raise ValueError(
                f"needs rows of whole {kind} blocks ({size} bytes), got {list(blocks.shape)} {blocks.dtype}"
            )
        shape = (*blocks.shape[:-1], blocks.shape[-1] // size * numbers)
        made: BlockTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=blocks.device)
        made.blocks, made.kind = blocks, kind
        return made

    def rows(self, index: Tensor) -> Tensor:
        """Some rows, ``[*index.shape, in]`` float32. The rows of stacked matrices are counted through."""
        return _unpacked(self.blocks.flatten(0, -2)[index.reshape(-1)], self.kind).view(*index.shape, self.shape[-1])

    def dequantized(self) -> Tensor:
        """All numbers, in this tensor's shape, float32."""
        rows = self.blocks.flatten(0, -2)
        whole = rows.new_empty(rows.shape[0], self.shape[-1], dtype=torch.float32)
        for start in range(0, rows.shape[0], ROWS_AT_ONCE):
            end = start + ROWS_AT_ONCE
            whole[start:end] = _unpacked(rows[start:end], self.kind)
        return whole.view(self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BlockTensor({self.kind}, {list(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockTensor":
        """A copy of its own. Part of a memory-mapped file is copied into memory."""
        return memo.setdefault(id(self), _made(self.blocks.clone(), self.kind, isinstance(self, nn.Parameter)))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _made, (self.blocks.clone(), self.kind, isinstance(self, nn.Parameter))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = _FUNCTIONS.get(func)
        if own is not None and (result := own(*args, **(kwargs or {}))) is not NotImplemented:
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default) and isinstance(args[0], cls):
            return cls(args[0].blocks, args[0].kind)
        if func is torch.ops.aten.select.int and args[1] == 0 and args[0].dim() == 3:
            return cls(args[0].blocks[args[2]], args[0].kind)
        options = kwargs or {}
        keeps_type = func is torch.ops.aten._to_copy.default and options.get("dtype") in (None, torch.float32)
        stays = keeps_type and torch.device(options.get("device") or "cpu").type == "cpu"
        if stays or func is torch.ops.aten.clone.default:
            return cls(args[0].blocks.clone(), args[0].kind)
        unpack: Callable[[Any], Any] = lambda value: value.dequantized() if isinstance(value, cls) else value  # noqa: E731
        return func(*pytree.tree_map(unpack, tuple(args)), **pytree.tree_map(unpack, dict(options)))


def _made(blocks: Tensor, kind: str, is_parameter: bool) -> BlockTensor:
    made = BlockTensor(blocks, kind)
    return nn.Parameter(made, requires_grad=False) if is_parameter else made  # type: ignore[return-value]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b``, unpacked tile by tile."""
    if not isinstance(weight, BlockTensor) or isinstance(x, BlockTensor):
        return NotImplemented
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    for start in range(0, weight.shape[0], ROWS_AT_ONCE):
        end = start + ROWS_AT_ONCE
        tile = _unpacked(weight.blocks[start:end], weight.kind).to(x.dtype)
        out[..., start:end] = F.linear(x, tile, None if bias is None else bias[start:end])
    return out


def _embedding(ids: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Tensor:
    """The rows of some tokens. The options matter to training only, except ``max_norm``."""
    if not isinstance(weight, BlockTensor) or options.get("max_norm") is not None or (len(rest) > 1 and rest[1]):
        return NotImplemented
    return weight.rows(ids)


def _detached(weight: Tensor) -> Tensor:
    """The same blocks. The dispatch of a torch operator would import the tracer of ``torch.compile``, which is slow."""
    return type(weight)(weight.blocks, weight.kind) if isinstance(weight, BlockTensor) else NotImplemented


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    Tensor.detach: _detached,
    # modules that are converted then replace the parameter, instead of its data
    torch._has_compatible_shallow_copy_type: lambda old, new: type(old) is type(new) and NotImplemented,
}


def joined(matrices: Sequence[Tensor]) -> Tensor:
    """The rows of some matrices, one after the other; in blocks if all have blocks of one kind."""
    if len(matrices) == 1:
        return matrices[0]
    if len({getattr(matrix, "kind", None) for matrix in matrices}) == 1 and isinstance(matrices[0], BlockTensor):
        return BlockTensor(torch.cat([matrix.blocks for matrix in matrices]), matrices[0].kind)  # type: ignore[attr-defined]
    return torch.cat([matrix.dequantized() if isinstance(matrix, BlockTensor) else matrix for matrix in matrices])


_OF_MXFP4 = torch.tensor(
    [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4], dtype=torch.uint8, device="cpu"
)


def q5_0_of(blocks: Tensor) -> Tensor:
    """The numbers of MXFP4 blocks, uint8 ``[..., bytes of a row]``, as blocks of Q5_0, which the kernels read.

    Both hold 32 numbers in one order. A scale is a power of 2; below float16's least, 2^-24, the numbers are 0.
    """
    rows = blocks.reshape(-1, blocks.shape[-1] // 17, 17)
    made = rows.new_empty(*rows.shape[:-1], 22, dtype=torch.uint8)
    bits = torch.arange(8, dtype=torch.uint8, device=rows.device)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        exponents, codes = part[..., :1], part[..., 1:]
        scales = (exponents.float() - 128).exp2().half()
        numbers = _OF_MXFP4[torch.cat((codes & 15, codes >> 4), dim=-1).int()]
        high = ((numbers >> 4).view(*numbers.shape[:-1], 4, 8) << bits).sum(-1, dtype=torch.uint8)
        low = (numbers[..., :16] & 15) | (numbers[..., 16:] << 4)
        torch.cat((scales.view(torch.uint8), high, low), dim=-1, out=made[start : start + ROWS_AT_ONCE])
    return made.flatten(-2).view(*blocks.shape[:-1], -1)


def block_size(kind: str) -> tuple[int, int]:
    """How many numbers a block holds, and its size in bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return numbers, size


_faster: list[Callable[[Tensor, str], Tensor]] = []


def unpack_with(unpack: Callable[[Tensor, str], Tensor] | None) -> None:
    """Unpack all block tensors by ``(blocks [rows, bytes of a row], kind) -> [rows, in]`` float32; `None`: by gguf."""
    _faster[:] = [] if unpack is None else [unpack]


def _unpacked(blocks: Tensor, kind: str) -> Tensor:
    """The numbers in some rows of blocks, ``[rows, in]`` float32."""
    if _faster and kind in BLOCK_KINDS:
        return _faster[0](blocks, kind)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if blocks.shape[0] == 0:
        numbers, size = block_size(kind)
        return blocks.new_empty(0, blocks.shape[1] // size * numbers, dtype=torch.float32)
    return torch.from_numpy(dequantize(blocks.contiguous().numpy(), GGMLQuantizationType[kind]))
