"""How many hooks hang on a model."""

from __future__ import annotations

from torch import nn


def hook_count(model: nn.Module) -> int:
    """Forward hooks and pre-hooks of all modules."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
