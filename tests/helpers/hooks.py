"""How many hooks hang on a model."""

from torch import nn

_LEFT_BY_TRANSFORMERS = "transformers.utils.output_capturing"  # after any output_hidden_states=True, for good


def hook_count(model: nn.Module) -> int:
    """Forward hooks and pre-hooks of all modules, without those that transformers itself leaves for good.

    The references ask a shared model for its hidden states: whether that came first depends on the order of the tests.
    """
    return sum(
        getattr(hook, "__module__", None) != _LEFT_BY_TRANSFORMERS
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
