"""Linear layers for the few rows of a decoding step on a CPU, where torch's linear layers are slow.

torch multiplies ``[rows, in] x [in, out]``. For few rows, MKL then reads the weights at a fraction of the memory
bandwidth. Three backends are faster:

- native: the native kernel on the model's own weights. It reaches the memory bandwidth. It is compiled on first use.
- packed: oneDNN's matrix product on weights in oneDNN's layout. Its time is constant up to 6 rows. It needs a second
  copy of the weights.
- transposed: ``(W x^T)^T`` on the model's own weights, with one row padded to two. It is slower than packed, and each
  row adds to the time, but it needs no copy.

The optional backend bfloat16 reads half as many bytes, from a bfloat16 copy of the weights, native or packed. It rounds
the weights, and on processors with instructions for such products the inputs too. It can therefore change answers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.forward.base import COST_OF_A_ROW
from cocoa_engine.execution.native import operators
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.experts import are_experts, mixed, stacks_of
from cocoa_engine.model.weight_identity import WeightFingerprint, weight_fingerprint

Activation = Callable[[Tensor], Tensor]

LinearBackend = Literal["native", "packed", "transposed", "stock", "bfloat16"]
"""The implementation of linear layers; ``"stock"`` is torch's own."""

_HAS_MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]

PACKED_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of weights that are packed; others are left to torch's linear layers."""

TRANSPOSED_ROWS = 8
"""Up to this many rows the transposed product is faster than torch's."""


def choose_linear_backend(model: nn.Module, requested: str) -> LinearBackend:
    """Choose the backend of a model's linear layers.

    Args:
        model: the model.
        requested: a backend or ``"auto"``. Weights in the blocks of a GGUF file are multiplied natively or by torch's
            linear layers. Otherwise auto selects native for float32 weights if the kernels are available.
            Otherwise it packs the weights if the copy takes less than a quarter of the free memory (in bfloat16, oneDNN
            was about 10 % faster than the native kernel before that multiplied pairs). If the copy takes more, it
            selects native or transposed.
    """
    weights = _linear_weights(model)
    if requested == "stock" or {weight.device.type for weight in weights} != {"cpu"} or _is_distributed(weights):
        return "stock"  # with tensor parallelism all processes must round alike, whatever their free memory
    native = requested in ("auto", "native", "bfloat16") and native_obstacle(model) is None  # compiles the kernels
    if any(isinstance(weight, BlockTensor) for weight in weights):
        return "native" if native else "stock"
    exact = all(weight.dtype == torch.float32 for weight in weights)
    if native and (requested == "native" or (requested == "auto" and exact)):
        return "native"
    if requested == "bfloat16" and (native or can_pack(torch.bfloat16)):
        return "bfloat16"
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    ample = size < psutil.virtual_memory().available // 4
    packable = all(can_pack(weight.dtype) for weight in weights if weight.dtype in PACKED_DTYPES)
    if packable and (requested == "packed" or (requested != "transposed" and ample)):
        return "packed"
    return "native" if native else "transposed"


def by_kernels(linear_backend: LinearBackend) -> bool:
    """Whether the native kernels run with a backend; they then also attend and rank tokens."""
    return linear_backend == "native" or (linear_backend == "bfloat16" and trial.obstacle() is None)


def cost_of_a_row(model: nn.Module, linear_backend: LinearBackend) -> float:
    """The cost of a further row in a pass of few rows, as a share of the cost of the first one.

    Found by measuring whole answers. Blocks are unpacked in registers and then multiplied, so that each further row
    adds arithmetic. For other weights, reading them from memory takes most of the time, and further rows add little. In
    a mixture of experts each row reads the weights of its own experts.
    """
    if linear_backend not in ("native", "packed", "bfloat16") or any(map(are_experts, model.modules())):
        return COST_OF_A_ROW
    return 0.15 if any(isinstance(weight, BlockTensor) for weight in _linear_weights(model)) else 0.04


def reads_blocks(requested: str) -> bool:
    """Whether the kernels can multiply weights in the blocks of a GGUF file, and the setting allows it."""
    return requested in ("auto", "native") and (trial.obstacle() or trial.block_obstacle()) is None


def kernels_name(requested: str) -> str:
    """The name of the compiled kernels, which differs by processor and compiler.

    It is empty if they cannot be used. If the setting asks for other linear layers, they are not built for it.
    """
    if requested not in ("auto", "native") or trial.obstacle() is not None:
        return ""
    return Path(operators.handle()._name).name


def native_obstacle(model: nn.Module) -> str | None:
    """Why the native kernels cannot run a model's linear layers, or ``None``."""
    weights = _linear_weights(model)
    if _is_distributed(weights):
        return "several processes share the model"
    if not operators.can_multiply(weights):
        kinds = sorted({f"{weight.dtype} on {weight.device.type}" for weight in weights})
        return f"the kernels need weights in float32, or all in bfloat16, on the CPU; found {', '.join(kinds)}"
    in_blocks = any(isinstance(weight, BlockTensor) for weight in weights)
    return trial.obstacle() or (trial.block_obstacle() if in_blocks else None)


def _linear_weights(model: nn.Module) -> list[Tensor]:
    found = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    for module in model.modules():
        if are_experts(module):
            inside, out = stacks_of(module)
            found += [*inside, out]
    return found


def _is_distributed(weights: Sequence[Tensor]) -> bool:
    return any(hasattr(weight, "device_mesh") for weight in weights)


@functools.cache
def can_pack(dtype: torch.dtype = torch.float32) -> bool:
    """Whether oneDNN's packed linear operators run in a dtype here: not every processor can pack bfloat16."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), None)
    except RuntimeError:
        return False
    return True


def is_plain(layer: Any) -> bool:
    """Whether a layer is an unmodified ``nn.Linear``: no adapter, no quantised weight, no replaced forward."""
    return (
        type(layer) is nn.Linear
        and type(layer.weight) in (nn.Parameter, BlockTensor)
        and "forward" not in layer.__dict__
        and not getattr(layer, "parametrizations", None)
    )


def fast_linear(layers: Sequence[nn.Linear], linear_backend: LinearBackend) -> FastLinear:
    """The :class:`FastLinear` of some layers, cached for all engines on the model until the weights change."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor | None] = [layer.bias for layer in layers]
    make = partial(FastLinear, weights, biases, linear_backend)
    return _made_once(layers[0], f"{len(layers)} {linear_backend}", (*weights, *biases), make)


def fast_experts(experts: nn.Module, activation: Activation, linear_backend: LinearBackend) -> FastExperts:
    """The :class:`FastExperts` of a module that holds experts, cached like :func:`fast_linear`."""
    inside, out = stacks_of(experts)
    make = partial(FastExperts, inside, out, activation, linear_backend)
    return _made_once(experts, linear_backend, (*inside, out), make)


class FastLinear:
    """``x W^T + b`` for one linear layer, or the concatenated outputs of several layers that read the same input.

    Args:
        weights: each ``[out, in]``.
        biases: each ``[out]`` or ``None``.
        linear_backend: the implementation for few rows.
    """

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], linear_backend: LinearBackend
    ) -> None:
        self.weights = [weight.detach() for weight in weights]
        self.biases = [None if bias is None else bias.detach() for bias in biases]
        self.sizes = [weight.shape[0] for weight in self.weights]
        self.total = sum(self.sizes)
        self.bias = _concatenated(self.biases, self.weights)
        dtype, on_cpu = self.weights[0].dtype, self.weights[0].device.type == "cpu"
        self.packed: Tensor | None = None
        if any(isinstance(weight, BlockTensor) for weight in self.weights) and linear_backend != "native":
            linear_backend = "stock"  # a copy in another layout would be larger than the blocks
        self.in_bfloat16 = linear_backend == "bfloat16" and on_cpu and dtype == torch.float32
        self.native = self._by_kernels() if linear_backend in ("native", "bfloat16") else None
        packs = linear_backend in ("packed", "bfloat16") and self.native is None
        if packs and on_cpu and dtype in PACKED_DTYPES:
            together = self.weights[0] if len(weights) == 1 else torch.cat(self.weights)
            together = together.bfloat16() if self.in_bfloat16 else together
            self.packed = torch.ops.mkldnn._reorder_linear_weight(together.contiguous(), None)
        transposed = linear_backend == "transposed" and on_cpu and dtype == torch.float32 and _HAS_MKL
        self.in_place = self.weights[0].device.type == "cuda"  # saves the launch of a concatenation
        self.transposed_rows = TRANSPOSED_ROWS if transposed else 0

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``[rows, in]`` to ``[rows, out]``. The result may have any strides."""
        if self.native is not None:
            return self.native(x)
        rows = x.shape[0]
        if rows <= self.transposed_rows:
            return self._transposed(x, rows)
        if self.packed is not None:
            if rows in (2, 3):
                x = F.pad(x, (0, 0, 0, 4 - rows))  # oneDNN is slower with 2 or 3 rows than with 4
            if not self.in_bfloat16:
                y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
                return y[:rows]
            half = torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.packed, None, "none", [], "")[:rows].float()
            return half if self.bias is None else half + self.bias
        if self.in_place and len(self.weights) > 1:
            return self._in_place(x, rows)
        parts = [F.linear(x, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _by_kernels(self) -> operators.Linears | None:
        weights = [weight.bfloat16() for weight in self.weights] if self.in_bfloat16 else self.weights
        if not operators.can_multiply(weights) or trial.obstacle() is not None:
            return None
        return operators.Linears(weights, self.biases, rounds_inputs=True)

    def _transposed(self, x: Tensor, rows: int) -> Tensor:
        if rows == 1:
            x = F.pad(x, (0, 0, 0, 1))
        columns = x.contiguous().t()  # a transposed view of a row-major x: the layout that MKL is fast on
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
            target = product[:, start : start + size]
            if bias is None:
                torch.mm(x, weight.t(), out=target)
            else:
                torch.addmm(bias, x, weight.t(), out=target)
            start += size
        return product


def _concatenated(biases: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    return torch.cat(
        [
            torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device) if bias is None else bias
            for bias, weight in pairs
        ]
    )


class FastExperts:
    """The gated layers of all experts of one mixture, each a pair of :class:`FastLinear` that is made when first used.

    Args:
        inside: what makes the gate and the input, ``[experts, 2 * inner, d]``, or one after the other.
        out: ``[experts, d, inner]``.
        activation: of the gate.
        linear_backend: as for :class:`FastLinear`.
    """

    def __init__(
        self, inside: Sequence[Tensor], out: Tensor, activation: Activation, linear_backend: LinearBackend
    ) -> None:
        self.inside, self.out = inside, out
        self.activation, self.linear_backend = activation, linear_backend
        self._made: dict[int, tuple[FastLinear, FastLinear]] = {}

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Mix the outputs of each row's experts, see :func:`~cocoa_engine.model.experts.mixed`."""
        return mixed(x, chosen, shares, self._run)

    def _run(self, number: int, x: Tensor) -> Tensor:
        if number not in self._made:
            weights = [stack[number] for stack in self.inside]
            gate_up = FastLinear(weights, [None] * len(weights), self.linear_backend)
            self._made[number] = gate_up, FastLinear([self.out[number]], [None], self.linear_backend)
        gate_up, down = self._made[number]
        return down(gated(gate_up(x), self.activation))


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """The input of a gated MLP's last layer, ``[rows, inner]``, from what the others make, ``[rows, 2 * inner]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(activation(gate), up, out=gate.new_empty(gate.shape))


# keyed by the first layer; the values keep its weights' memory alive, but not the layer
_made: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[WeightFingerprint, Any]]] = weakref.WeakKeyDictionary()

_T = TypeVar("_T")


def _made_once(module: nn.Module, name: str, tensors: Iterable[Tensor | None], make: Callable[[], _T]) -> _T:
    """What was made for a module under a name before, unless the tensors that it was made from have changed."""
    state = weight_fingerprint(tensor for tensor in tensors if tensor is not None)
    made = _made.setdefault(module, {})
    known = made.get(name)
    if known is None or known[0] != state:
        known = made[name] = state, make()
    found: _T = known[1]
    return found
