"""Linear layers for the few rows of a decoding step on a CPU.

torch multiplies ``[rows, in] x [in, out]``. For few rows, MKL then reads the weights at a fraction of the memory
bandwidth. Three backends are faster:

- native: the native kernel on the model's own weights. It reaches the memory bandwidth. It is compiled on first use.
- packed: oneDNN's matrix product on weights in oneDNN's layout. Its time is constant up to 6 rows. It needs a second
  copy of the weights.
- transposed: ``(W x^T)^T`` on the model's own weights, with one row padded to two. Each row adds to the time.

The optional backend bfloat16 reads half as many bytes, from a bfloat16 copy of the weights, native or packed. It rounds
the weights, and on processors with instructions for such products the inputs too. It can therefore change answers.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
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

_T = TypeVar("_T")

_HAS_MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]

PACKED_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of weights that are packed; others are left to torch's linear layers."""

TRANSPOSED_ROWS = 8
"""Up to this many rows the transposed product is faster than torch's."""


def choose_linear_backend(model: nn.Module, requested: str) -> LinearBackend:
    """Choose the backend of a model's linear layers.

    Weights in the blocks of a GGUF file are multiplied natively or by torch's linear layers. Otherwise ``"auto"``
    selects native for float32 weights if the kernels are available. Otherwise it packs the weights if the copy takes
    less than a quarter of the free memory (in bfloat16, oneDNN was about 10 % faster than the native kernel before that
    multiplied pairs). If the copy takes more, it selects native or transposed.
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
    """The name of the compiled kernels, which differs by processor and compiler; empty if they cannot be used.

    If the setting asks for other linear layers, they are not built for it.
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
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    for inside, out in map(stacks_of, filter(are_experts, model.modules())):
        weights += [*inside, out]
    return weights


def _is_distributed(weights: Sequence[Tensor]) -> bool:
    return any(hasattr(weight, "device_mesh") for weight in weights)


@cache
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
    """Whether a layer is an unmodified ``nn.Linear``: no adapter, no quantised weight, no replaced forward.

    A parametrized one has a class of its own.
    """
    return (
        type(layer) is nn.Linear
        and type(layer.weight) in (nn.Parameter, BlockTensor)
        and "forward" not in layer.__dict__
    )


# keyed by the first layer; the values keep its weights' memory alive, but not the layer
_made: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[WeightFingerprint, Any]]] = weakref.WeakKeyDictionary()


def _made_once(module: nn.Module, name: str, tensors: Sequence[Tensor | None], make: Callable[[], _T]) -> _T:
    """What was made for a module under a name before, unless the tensors that it was made from have changed."""
    state = weight_fingerprint(tensor for tensor in tensors if tensor is not None)
    made = _made.setdefault(module, {})
    if name not in made or made[name][0] != state:
        made[name] = state, make()
    result: _T = made[name][1]
    return result


def fast_linear(layers: Sequence[nn.Linear], linear_backend: LinearBackend) -> "FastLinear":
    """The :class:`FastLinear` of some layers, cached for all engines on the model until the weights change."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor | None] = [layer.bias for layer in layers]
    make = partial(FastLinear, weights, biases, linear_backend)
    return _made_once(layers[0], f"{len(layers)} {linear_backend}", (*weights, *biases), make)


def fast_experts(
    experts: nn.Module, activation: Activation, linear_backend: LinearBackend
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function that mixes the outputs of each row's experts, see :func:`~cocoa_engine.model.experts.mixed`.

    It is cached like :func:`fast_linear`. The gated layers of each expert are made when they are first used.
    """
    inside, out = stacks_of(
        experts
    )  # [experts, 2 * inner, d], or gate and input one after the other; then [.., d, inner]

    def make() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        @cache
        def layers(number: int) -> tuple[FastLinear, FastLinear]:
            weights = [stack[number] for stack in inside]
            gate_up = FastLinear(weights, [None] * len(weights), linear_backend)
            return gate_up, FastLinear([out[number]], [None], linear_backend)

        def run(number: int, x: Tensor) -> Tensor:
            gate_up, down = layers(number)
            return down(gated(gate_up(x), activation))

        return lambda x, chosen, shares: mixed(x, chosen, shares, run)

    return _made_once(experts, linear_backend, (*inside, out), make)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """The input of a gated MLP's last layer, ``[rows, inner]``, from what the others make, ``[rows, 2 * inner]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(activation(gate), up, out=gate.new_empty(gate.shape))


class FastLinear:
    """``x W^T + b`` for one linear layer, or the concatenated outputs of several layers that read the same input."""

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], linear_backend: LinearBackend
    ) -> None:
        self.weights = [weight.detach() for weight in weights]
        self.biases = [None if bias is None else bias.detach() for bias in biases]
        self.total = sum(len(weight) for weight in self.weights)
        first = self.weights[0]
        dtype, on_cpu = first.dtype, first.device.type == "cpu"
        if any(isinstance(weight, BlockTensor) for weight in self.weights) and linear_backend != "native":
            linear_backend = "stock"  # a copy in another layout would be larger than the blocks
        self.in_bfloat16 = linear_backend == "bfloat16" and on_cpu and dtype == torch.float32
        stored = [weight.bfloat16() for weight in self.weights] if self.in_bfloat16 else self.weights
        self.native: operators.Linears | None = None
        self.packed: Tensor | None = None
        if linear_backend in ("native", "bfloat16") and operators.can_multiply(stored) and trial.obstacle() is None:
            self.native = operators.Linears(stored, self.biases, rounds_inputs=True)
        elif linear_backend in ("packed", "bfloat16") and on_cpu and dtype in PACKED_DTYPES:
            together = stored[0] if len(stored) == 1 else torch.cat(stored)
            self.packed = torch.ops.mkldnn._reorder_linear_weight(together.contiguous(), None)
        transposed = linear_backend == "transposed" and on_cpu and dtype == torch.float32 and _HAS_MKL
        self.transposed_rows = TRANSPOSED_ROWS if transposed else 0
        self.in_place = first.device.type == "cuda"  # saves the launch of a concatenation
        self.bias: Tensor | None = None
        if any(bias is not None for bias in self.biases):
            none = [torch.zeros(len(weight), device=first.device, dtype=dtype) for weight in self.weights]
            self.bias = torch.cat([zeros if bias is None else bias for bias, zeros in zip(biases, none, strict=True)])

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``[rows, in]`` to ``[rows, out]``. The result may have any strides."""
        if self.native is not None:
            return self.native(x)
        rows = x.shape[0]
        if rows <= self.transposed_rows:
            # a transposed view of a row-major x: the layout that MKL is fast on
            columns = (F.pad(x, (0, 0, 0, 1)) if rows == 1 else x).contiguous().t()
            product = x.new_empty(self.total, columns.shape[1])
            for weight, part in zip(
                self.weights, torch.split(product, [len(weight) for weight in self.weights]), strict=True
            ):
                torch.mm(weight, columns, out=part)
            y = product[:, :rows].t()
            return y if self.bias is None else y + self.bias
        if self.packed is not None:
            if rows in (2, 3):
                x = F.pad(x, (0, 0, 0, 4 - rows))  # oneDNN is slower with 2 or 3 rows than with 4
            if not self.in_bfloat16:
                packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
                return packed[:rows]
            half = torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.packed, None, "none", [], "")[:rows].float()
            return half if self.bias is None else half + self.bias
        layers = zip(self.weights, self.biases, strict=True)
        if not self.in_place or len(self.weights) == 1:
            parts = [F.linear(x, weight, bias) for weight, bias in layers]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        product, start = x.new_empty(rows, self.total), 0
        for weight, bias in layers:
            target = product[:, start : start + len(weight)]
            if bias is None:
                torch.mm(x, weight.t(), out=target)
            else:
                torch.addmm(bias, x, weight.t(), out=target)
            start += len(weight)
        return product
