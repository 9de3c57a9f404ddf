"""The experts of a mixture: which layers have them, where their weights are, and how their outputs are mixed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cocoa_engine.model.blocks import BlockTensor

_FUSED = ("Qwen3MoeExperts",)
"""transformers' modules that hold the weights of all experts as ``gate_up_proj`` and ``down_proj``."""
_IN_GGUF = {"GraniteMoeSharedExperts", "GraniteMoeHybridExperts"}  # those of this layout in further GGUF files


class ExpertLinears(nn.Module):
    """One linear layer of each expert, ``[experts, out, in]``, which may be a :class:`BlockTensor`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias: nn.Parameter | None = None  # ``[experts, out]``

    def forward(self, x: Tensor, number: int) -> Tensor:
        return F.linear(x, self.weight[number], None if self.bias is None else self.bias[number])


class SeparateExperts(nn.Module):
    """Experts without weights, whose gate and input are two tensors, as in GGUF files. transformers' have one."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        count, inner, width = experts.num_experts, experts.intermediate_dim, experts.hidden_dim
        empty = experts.down_proj.new_empty
        self.gate_proj = ExpertLinears(empty(count, inner, width))
        self.up_proj = ExpertLinears(empty(count, inner, width))
        self.down_proj = ExpertLinears(empty(count, width, inner))
        self.act_fn = experts.act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return mixed(hidden_states, top_k_index, top_k_weights, self._run)

    def _run(self, number: int, x: Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x, number)) * self.up_proj(x, number), number)


class SeparateBiasedExperts(nn.Module):
    """The experts of gpt-oss without weights, as :class:`SeparateExperts`. transformers' gate and input alternate."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        count, inner, width = experts.num_experts, experts.intermediate_size, experts.hidden_size
        empty = experts.down_proj.new_empty
        for name, shape in {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}.items():
            linears = ExpertLinears(empty(count, *shape))
            linears.bias = nn.Parameter(empty(count, shape[0]), requires_grad=False)
            setattr(self, f"{name}_proj", linears)
        self.alpha, self.limit = experts.alpha, experts.limit

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        return mixed(hidden_states, router_indices, routing_weights, self._run)

    def _run(self, number: int, x: Tensor) -> Any:
        parts: Any = self
        gate = parts.gate_proj(x, number).clamp(max=self.limit)
        up = parts.up_proj(x, number).clamp(-self.limit, self.limit)
        return parts.down_proj((up + 1) * gate * torch.sigmoid(gate * self.alpha), number)


OWN = (SeparateExperts, ExpertLinears)
"""The modules of this package that a model may have."""


def separate(model: nn.Module, *, in_gguf: bool = False) -> None:
    """Replace the experts of a model by modules for their matrices one by one, whose weights are to be set.

    ``in_gguf``: also those that only GGUF files have one by one.
    """
    for path, module in list(model.named_modules()):
        if are_experts(module) or (in_gguf and type(module).__name__ in _IN_GGUF):
            model.set_submodule(path, SeparateExperts(module))
        elif in_gguf and type(module).__name__ == "GptOssExperts":
            model.set_submodule(path, SeparateBiasedExperts(module))


def fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model whose experts are :class:`SeparateExperts`, by the names in transformers' own model."""
    named = dict(weights)
    for gate in [name for name in weights if name.endswith(".experts.gate_proj.weight")]:
        path = gate.removesuffix("gate_proj.weight")
        inside, out = (named.pop(gate), named.pop(f"{path}up_proj.weight")), named.pop(f"{path}down_proj.weight")
        if f"{path}gate_proj.bias" not in named:
            named[f"{path}gate_up_proj"], named[f"{path}down_proj"] = torch.cat(inside, dim=1), out
            continue
        biases = [named.pop(f"{path}{part}_proj.bias") for part in ("gate", "up", "down")]
        named[f"{path}gate_up_proj"] = torch.stack(inside, dim=2).flatten(1, 2).transpose(1, 2).contiguous()
        named[f"{path}gate_up_proj_bias"] = torch.stack(biases[:2], dim=2).flatten(1)
        named[f"{path}down_proj"], named[f"{path}down_proj_bias"] = out.transpose(1, 2).contiguous(), biases[2]
    return named


def are_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of experts that :func:`stacks_of` can read."""
    return hold_experts(type(module)) and obstacle(module) is None


def hold_experts(kind: type[nn.Module]) -> bool:
    """Whether modules of a class hold the weights of experts."""
    return SeparateExperts in kind.__mro__ or any(
        base.__name__ in _FUSED and base.__module__.startswith("transformers.") for base in kind.__mro__
    )


def obstacle(module: Any) -> str | None:
    """Why the experts of a module cannot be read, or ``None``. A module that holds none has no obstacle."""
    if not hold_experts(type(module)):
        return None
    if getattr(module, "_is_expert_parallel", False):
        return "several processes share its experts"
    parts = list(module.modules())
    weights = [parameter for part in parts for parameter in part._parameters.values()]
    is_adapted = any(getattr(part, "parametrizations", None) for part in parts)
    if is_adapted or any(type(weight) not in (nn.Parameter, BlockTensor) for weight in weights):
        return "its experts are adapted or quantised"
    if isinstance(module, SeparateExperts):
        return None
    count, inner, width = module.num_experts, module.intermediate_dim, module.hidden_dim
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    turned = getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True)
    if turned or shapes != {"gate_up_proj": (count, 2 * inner, width), "down_proj": (count, width, inner)}:
        return "its experts have another layout"
    return None


def stacks_of(module: Any) -> tuple[list[Tensor], Tensor]:
    """The weights of all experts, for a module that :func:`are_experts` accepts.

    First of the gate and the input, ``[experts, out, d]``, in one tensor or two; then of the output, ``[experts, d,
    inner]``.
    """
    if isinstance(module, SeparateExperts):
        return [module.gate_proj.weight.detach(), module.up_proj.weight.detach()], module.down_proj.weight.detach()
    return [module.gate_up_proj.detach()], module.down_proj.detach()


def mixed(x: Tensor, chosen: Tensor, shares: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The sum of the outputs of each row's experts, weighted by ``shares [rows, k]``, in float32.

    Each expert runs once, ``(its number, x [rows, d]) -> [rows, d]``, on all rows that chose it. ``x`` is on the CPU,
    ``chosen`` has the numbers of each row's experts, ``[rows, k]``.
    """
    numbers = chosen.flatten()
    order, sizes = numbers.argsort(stable=True), numbers.bincount()
    hit = sizes.nonzero().flatten()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    factors = shares.flatten().float()[:, None]
    for number, places in zip(hit.tolist(), torch.split(order, sizes[hit].tolist()), strict=True):
        rows = places // chosen.shape[1]
        total.index_add_(0, rows, expert(number, x[rows]).float() * factors[places])
    return total.to(x.dtype)
