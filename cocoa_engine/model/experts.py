"""The experts of a mixture: which layers have them, where their weights are, and how their outputs are mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cocoa_engine.model.blocks import BlockTensor

_FUSED = ("Qwen3MoeExperts",)
"""transformers' modules that hold the weights of all experts as ``gate_up_proj`` and ``down_proj``."""

Expert = Callable[[int, Tensor], Tensor]
"""``(number of the expert, x [rows, d]) -> [rows, d]``."""


def are_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of experts that :func:`stacks_of` can read."""
    return _holds_experts(module) and _obstacle(module) is None


def obstacle(module: nn.Module) -> str | None:
    """Why the experts of a module cannot be read, or ``None``. A module that holds none has no obstacle."""
    return _obstacle(module) if _holds_experts(module) else None


def _holds_experts(module: nn.Module) -> bool:
    return any(kind.__name__ in _FUSED and kind.__module__.startswith("transformers.") for kind in type(module).__mro__)


def _obstacle(experts: Any) -> str | None:
    if getattr(experts, "_is_expert_parallel", False):
        return "several processes share its experts"
    if getattr(experts, "parametrizations", None):
        return "its experts are adapted or quantised"
    inside, out = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if any(type(weight) not in (nn.Parameter, BlockTensor) for weight in (inside, out)):
        return "its experts are adapted or quantised"
    count, inner, width = experts.num_experts, experts.intermediate_dim, experts.hidden_dim
    shapes = [tuple(weight.shape) for weight in (inside, out) if weight is not None]
    turned = getattr(experts, "is_transposed", False) or not getattr(experts, "is_concatenated", True)
    if turned or shapes != [(count, 2 * inner, width), (count, width, inner)]:
        return "its experts have another layout"
    return None


def stacks_of(experts: nn.Module) -> tuple[list[Tensor], Tensor]:
    """The weights of all experts, for a module that :func:`are_experts` accepts.

    Returns:
        What makes the gate and the input, each ``[experts, out, d]``: both in one tensor or one after the other. And
        what makes the output, ``[experts, d, inner]``.
    """
    return [experts.gate_up_proj.detach()], experts.down_proj.detach()  # type: ignore[operator]


def mixed(x: Tensor, chosen: Tensor, shares: Tensor, expert: Expert) -> Tensor:
    """The weighted sum of the outputs of each row's experts. Each expert runs once, on all rows that chose it.

    Args:
        x: ``[rows, d]``, on the CPU.
        chosen: the numbers of each row's experts, ``[rows, k]``.
        shares: what each of their outputs is multiplied by, ``[rows, k]``.
        expert: runs one expert.

    Returns:
        ``[rows, d]`` in the dtype of ``x``; summed in float32.
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
