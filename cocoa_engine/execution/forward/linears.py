"""Linear layers for the few rows of a decoding step on a CPU, where torch's own are slowest.

A step feeds a few rows. torch multiplies ``[rows, in] x [in, out]``; for so few rows MKL then reads the weights at a
fraction of the memory's speed. Three ways are faster:

- native: a kernel of our own on the model's own weights, as fast as the memory; it has to be built on the machine.
- packed: oneDNN's matrix product on weights in its own layout, flat up to 6 rows, at the cost of a second copy.
- shared: ``(W x^T)^T`` on the model's own weights, one row padded to two: slower than packed, and more so with every
  row, but without the copy.

A fourth, off by default, halves what is read: a copy in bfloat16, native or packed. It rounds the weights, so answers
change.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cocoa_engine.execution.forward.weight_fingerprint import WrittenState, written_state
from cocoa_engine.execution.native import operators, trial

Way = Literal["native", "packed", "shared", "stock", "bfloat16"]

_HAS_MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]

IDLE_ROWS = {2: 2, 3: 1}
"""Rows added to a pass of so many rows on packed weights: oneDNN is slower with 2 or 3 rows than with 4."""

SHARED_ROWS = 8
"""Up to this many rows the shared way beats torch's."""


def choose_way(model: nn.Module, asked: str) -> Way:
    """The way the linear layers of a model are run.

    Args:
        asked: ``"auto"`` is native for float32 where the kernels can be had; else it packs if the copy takes less than
            a quarter of the free memory (in bfloat16 oneDNN is the faster by some tenth), and else reads the weights as
            they are.
    """
    weights = _linear_weights(model)
    if asked == "stock" or {weight.device.type for weight in weights} != {"cpu"} or _is_spread(weights):
        return "stock"  # processes that share a model (tensor parallelism) must round alike, whatever memory each has
    native = asked in ("auto", "native", "bfloat16") and why_not_native(model) is None  # asking builds them
    exact = all(weight.dtype == torch.float32 for weight in weights)
    if native and (asked == "native" or (asked == "auto" and exact)):
        return "native"
    if asked == "bfloat16" and (native or can_pack()):
        return "bfloat16"
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    ample = size < psutil.virtual_memory().available // 4
    if can_pack() and (asked == "packed" or (asked != "shared" and ample)):
        return "packed"
    return "native" if native else "shared"


def why_not_native(model: nn.Module) -> str | None:
    """Why the kernels of our own cannot run a model's linear layers, if they cannot."""
    weights = _linear_weights(model)
    if _is_spread(weights):
        return "the model is shared by several processes"
    if not operators.multiplies(weights):
        kinds = sorted({f"{weight.dtype} on {weight.device.type}" for weight in weights})
        return f"they are for weights in float32, or all in bfloat16, on the CPU, not {', '.join(kinds)}"
    return trial.obstacle()


def _linear_weights(model: nn.Module) -> list[Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


def _is_spread(weights: Sequence[Tensor]) -> bool:
    return any(hasattr(weight, "device_mesh") for weight in weights)


def can_pack() -> bool:
    """Whether this build of torch has oneDNN's packed linear operators."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def is_plain(layer: Any) -> bool:
    """Whether a layer is a linear layer and nothing else: no adapter, no quantised weight, no forward of its own."""
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and "forward" not in layer.__dict__
        and not getattr(layer, "parametrizations", None)
    )


def fast_linear(layers: Sequence[nn.Linear], way: Way) -> FastLinear:
    """The :class:`FastLinear` of some layers, made once for every engine on the model and again if weights changed."""
    made = _made.setdefault(layers[0], {})
    known = made.get((len(layers), way))
    if known is None or not known.fresh(layers):
        known = made[len(layers), way] = FastLinear(layers, way)
    return known


class FastLinear:
    """``x W^T + b`` for one linear layer, or for several that read the same input, their outputs side by side.

    Args:
        layers: plain linear layers of one input width.
        way: how few rows are multiplied.
    """

    def __init__(self, layers: Sequence[nn.Linear], way: Way) -> None:
        self.weights = [layer.weight.detach() for layer in layers]  # each [out, in]
        self.biases: list[Tensor | None] = [None if layer.bias is None else layer.bias.detach() for layer in layers]
        self.sizes = [weight.shape[0] for weight in self.weights]
        self.total = sum(self.sizes)
        self._state = _state(self.weights, self.biases)
        self.bias = _side_by_side(self.biases, self.weights)
        dtype, on_cpu = self.weights[0].dtype, self.weights[0].device.type == "cpu"
        self.packed: Tensor | None = None
        self.halved = way == "bfloat16" and on_cpu and dtype == torch.float32
        self.native = self._by_kernels() if way in ("native", "bfloat16") else None
        packs = way in ("packed", "bfloat16") and self.native is None
        if packs and on_cpu and dtype in (torch.float32, torch.bfloat16):
            together = self.weights[0] if len(layers) == 1 else torch.cat(self.weights)
            together = together.bfloat16() if self.halved else together
            self.packed = torch.ops.mkldnn._reorder_linear_weight(together.contiguous(), None)
        shared = way == "shared" and on_cpu and dtype == torch.float32 and _HAS_MKL
        self.in_place = self.weights[0].device.type == "cuda"  # each part goes to its place: no launch to join them
        self.shared_rows = SHARED_ROWS if shared else 0

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, in]`` to ``[rows, out]``, of whatever strides."""
        if self.native is not None:
            return self.native(x)
        rows = x.shape[0]
        if rows <= self.shared_rows:
            return self._shared(x, rows)
        if self.halved:
            half: Tensor = torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.packed, None, "none", [], "")
            return half.float() if self.bias is None else half.float() + self.bias
        if self.packed is not None:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
            return y
        if self.in_place and len(self.weights) > 1:
            return self._in_place(x, rows)
        parts = [F.linear(x, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _by_kernels(self) -> operators.Linears | None:
        weights = [weight.bfloat16() for weight in self.weights] if self.halved else self.weights
        if not operators.multiplies(weights) or trial.obstacle() is not None:
            return None
        return operators.Linears(weights, self.biases)

    def idle_rows(self, rows: int) -> int:
        """How many rows that nobody needs a pass of ``rows`` takes along to be faster."""
        return 0 if self.packed is None or rows <= self.shared_rows else IDLE_ROWS.get(rows, 0)

    def fresh(self, layers: Sequence[nn.Linear]) -> bool:
        """Whether the layers still have the weights that this was made of."""
        return self._state == _state([layer.weight for layer in layers], [layer.bias for layer in layers])

    def _shared(self, x: Tensor, rows: int) -> Tensor:
        if rows == 1:
            x = F.pad(x, (0, 0, 0, 1))
        columns = x.contiguous().t()  # a row-major x seen from the side: the layout MKL is fast on
        product = x.new_empty(self.total, x.shape[0])
        start = 0
        for weight, size in zip(self.weights, self.sizes, strict=True):
            torch.mm(weight, columns, out=product[start : start + size])
            start += size
        y = product[:, :rows].t()
        return y if self.bias is None else y + self.bias

    def _in_place(self, x: Tensor, rows: int) -> Tensor:
        product = x.new_empty(rows, self.total)
        start = 0
        for weight, bias, size in zip(self.weights, self.biases, self.sizes, strict=True):
            place = product[:, start : start + size]
            if bias is None:
                torch.mm(x, weight.t(), out=place)
            else:
                torch.addmm(bias, x, weight.t(), out=place)
            start += size
        return product


def _side_by_side(biases: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    return torch.cat([weight.new_zeros(weight.shape[0]) if bias is None else bias for bias, weight in pairs])


# keyed by the first layer; the values hold its weights' memory, but not the layer
_made: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, str], FastLinear]] = weakref.WeakKeyDictionary()


def _state(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> WrittenState:
    return written_state(tensor for tensor in (*weights, *biases) if tensor is not None)
