"""Captures only the hidden states that MLDS needs, during one forward pass."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cocoa_engine.errors import UnsupportedModelError
from cocoa_engine.model.language_model import LanguageModel, device_of, first_tensor

FinalLayer = Literal["post_norm", "pre_norm"]

FINAL = -1
"""The key of the final layer's state in ``Captured.states``."""


class CaptureSpec(NamedTuple):
    """What a step returns in addition to the logits. Heads are (layer, head) pairs."""

    first: int  # the layers, both inclusive, whose states are returned: the middle layers m..n
    last: int
    final: FinalLayer  # whether the final layer's state is taken before or after the model's final norm
    early: tuple[int, ...] = ()  # layers whose states are also projected to logits, without the final norm
    masked: tuple[tuple[int, int], ...] = ()  # the logits of the model with these heads masked are also returned
    source_heads: tuple[tuple[int, int], ...] = ()  # and their mean mass on the prompt, where the attention is seen
    window: tuple[int, int] | None = None  # m..n if other layers' states are returned too, for a calibrator's probe


class Captured:
    """The hidden states of one forward pass, by layer, ``[B, W, d]``. Hooks fill it during the pass."""

    def __init__(self, spec: CaptureSpec) -> None:
        self.spec = spec
        self.states: dict[int, Tensor] = {}

    def stacked(self, device: torch.device) -> Tensor:
        """The states of layers m..n, then of the final layer: ``[N + 1, B, W, d]`` float32 on ``device``."""
        order = [*range(self.spec.first, self.spec.last + 1), FINAL]
        if skipped := [key for key in order if key not in self.states]:
            raise UnsupportedModelError(
                f"decoder layer {skipped[0]} does not run in every forward pass (a layer for images?): its hidden "
                "states cannot be compared. This model is not supported."
            )
        if any(self.states[key].dim() != 3 for key in order):
            shape = " x ".join(map(str, self.states[order[0]].shape))
            raise UnsupportedModelError(
                f"the decoder layers have several residual streams (a state is {shape}): MLDS is defined for one. This "
                "model is not supported."
            )
        states = [self.states[key].to(device=device, dtype=torch.float32) for key in order]
        if states[-1].shape != states[0].shape:
            raise UnsupportedModelError(
                f"the model's final hidden state has width {states[-1].shape[-1]}, its middle layers "
                f'{states[0].shape[-1]}: they cannot be compared. Use final_layer="pre_norm".'
            )
        return torch.stack(states)

    def early_logits(self, model: LanguageModel, device: torch.device) -> Tensor | None:
        """The logits of the early layers, ``[E, B, W, V]`` float32, while the model is locked; `None` for none."""
        if not self.spec.early:
            return None
        head = model.model.get_output_embeddings()
        runs_on = device_of(head)
        states = torch.stack([self.states[layer].to(runs_on, model.dtype) for layer in self.spec.early])
        if states.shape[-1] != head.weight.shape[-1]:
            raise UnsupportedModelError(
                f"the model's layers have width {states.shape[-1]}, its output layer takes {head.weight.shape[-1]}: "
                'its early layers cannot be projected to logits, which method="dola" needs.'
            )
        logits: Tensor = head(states)
        return logits.to(device, torch.float32)


@contextmanager
def capture(model: LanguageModel, spec: CaptureSpec, keep: slice = slice(None)) -> Iterator[Captured]:
    """Capture the states that ``spec`` names in the forward pass inside the context, at the positions ``keep``.

    Layer l is Hugging Face's ``hidden_states[l]``: layer 0 is the input of the first decoder layer, and layer l the
    output of the l-th. The final layer L is taken after the model's final norm (``"post_norm"``, Hugging Face's
    ``hidden_states[-1]``) or before it (``"pre_norm"``). Hooks are installed on the needed layers only. They capture
    only the passes of this thread, and are removed at the end of the context.
    """
    model.whole()  # hooks need modules that run
    captured = Captured(spec)
    thread = threading.get_ident()
    everything = keep == slice(None)

    def store(state: Tensor, *keys: int) -> None:
        if threading.get_ident() == thread:
            part = state if everything else state[:, keep]  # a slice costs as much as the rest of a hook
            captured.states.update(dict.fromkeys(keys, part))

    def keep_input(_module: Any, args: Any, kwargs: Any) -> None:
        store(args[0] if args else kwargs["hidden_states"], 0)

    with ExitStack() as hooks:

        def keep_output(module: nn.Module, *keys: int) -> None:
            hook = module.register_forward_hook(lambda _module, _args, output: store(first_tensor(output), *keys))
            hooks.callback(hook.remove)

        if spec.first == 0 or 0 in spec.early:
            hook = model.layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)
            hooks.callback(hook.remove)
        middle = range(spec.first, min(spec.last, model.num_layers - 1) + 1)
        for layer in sorted({*middle, *spec.early} - {0}):
            keep_output(model.layers[layer - 1], layer)
        last = (model.num_layers, FINAL) if spec.last == model.num_layers else (FINAL,)
        keep_output(model.layers[-1] if spec.final == "pre_norm" else model.decoder, *last)
        yield captured
