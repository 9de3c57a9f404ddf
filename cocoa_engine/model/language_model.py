"""A causal language model and its structure, and the hidden states that one of its forward passes leaves."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedConfig

from cocoa_engine.errors import CocoaError, UnsupportedModelError
from cocoa_engine.interruptions import at_work, check_current, free_in_child
from cocoa_engine.model.configs import context_window_of, frequencies_of, require_decoder_only, text_part
from cocoa_engine.model.light_model import LightModel

_FAULT = getattr(torch, "AcceleratorError", MemoryError)  # earlier versions of torch raise a RuntimeError
MACHINE_ERRORS: tuple[type[Exception], ...] = (MemoryError, torch.OutOfMemoryError, _FAULT)
"""Too little memory, and faults of the accelerator."""

PASSED_ON: tuple[type[Exception], ...] = (CocoaError, *MACHINE_ERRORS)
"""Errors that are not converted where all others are taken as the fault of a model or its settings."""

_SHORT = 128  # tokens of a pass that need not end before its last layer

_AUTOCAST = ("cpu", "cuda", "xpu", "mps")

# Hooks and forward passes of one model must not interleave, also when several engines wrap it.
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_locks_guard = free_in_child(threading.Lock())

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LanguageModel:
    """A checked Hugging Face causal language model, and its text config.

    ``decoder`` is the module that runs the decoder layers and the final norm, ``vocab_size`` the number of input
    embeddings. ``lock`` is held during a forward pass; all wrappers of the same model share it.
    """

    def __init__(self, model: PreTrainedModel | LightModel) -> None:
        self._hold(model.whole() if isinstance(model, LightModel) and model.is_built else model)
        with _locks_guard:
            self.lock = _locks.setdefault(model, free_in_child(threading.RLock()))

    def _hold(self, model: PreTrainedModel | LightModel) -> None:
        name = type(model).__name__
        if getattr(model, "config", None) is None or not hasattr(model, "get_output_embeddings"):
            raise UnsupportedModelError(
                f"{name} is not a Hugging Face model; pass e.g. AutoModelForCausalLM.from_pretrained(...)."
            )
        require_decoder_only(model.config, name)
        if model.get_output_embeddings() is None:
            raise UnsupportedModelError(f"{name} has no language-modelling head; load it with AutoModelForCausalLM.")
        config = text_part(model.config)
        self.decoder, self.layers = _decoder_and_layers(model, config)
        self.num_layers = len(self.layers)
        embeddings: Any = model.get_input_embeddings()
        if embeddings.weight.is_meta and not hasattr(embeddings, "_hf_hook"):  # which accelerate gives offloaded ones
            raise UnsupportedModelError(f"{name} has no weights yet: they are on the meta device. Load them first.")
        self.vocab_size = int(embeddings.weight.shape[0])
        inner: Any = getattr(model, "_orig_mod", model)  # in a compiled model, which may hold a PEFT adapter
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        self._parameters = frozenset(inspect.signature(inner.forward).parameters)
        self._modules = list(model.modules())
        by_length = [] if frequencies_of(config) is None else self._modules
        self._dynamic = [module for module in by_length if hasattr(module, "max_seq_len_cached")]
        self.config, self._model = config, model

    @property
    def model(self) -> PreTrainedModel | LightModel:
        """The given model. A light one is replaced by its whole one once that exists: it may have hooks then."""
        held = self._model
        return self.whole() if isinstance(held, LightModel) and held.is_built else held

    def whole(self) -> PreTrainedModel:
        """transformers' model. That of a light model is made now, of the same weights, and takes its place."""
        held = self._model
        if not isinstance(held, LightModel):
            return held
        with self.lock, plain_modes():
            whole = held.whole()
            with _locks_guard:
                _locks[whole] = self.lock
            if self._model is held:
                self._hold(whole)
            return whole

    def parts(self) -> tuple[list[nn.Module], list[Tensor]]:
        """The modules and the weights that the model has now."""
        modules = list(self.model.modules())
        weights = (weight for module in modules for weight in module._parameters.values() if weight is not None)
        return modules, list(dict.fromkeys(weights))

    @property
    def forward_parameters(self) -> frozenset[str]:
        self.whole()
        return self._parameters

    @property
    def architecture(self) -> str:
        """The name of the model's class in transformers."""
        model = self.model
        return model.architecture if isinstance(model, LightModel) else type(model).__name__

    @property
    def device(self) -> torch.device:
        """The device of the input embeddings, on which token ids must be."""
        return device_of(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in, which is also the dtype of additive attention masks."""
        return self.model.dtype

    @property
    def context_window(self) -> int | None:
        """The maximum number of tokens in a sequence; `None` if the model's config does not state it."""
        return context_window_of(self.config)

    @property
    def num_heads(self) -> int | None:
        """The number of attention heads of each layer; `None` if the model has none, or another number in each."""
        try:
            count = getattr(self.config, "num_attention_heads", None)
        except Exception:  # transformers refuses to read a field that differs between layers
            return None
        return count if isinstance(count, int) else None

    @functools.cached_property
    def _device_mesh(self) -> Any:
        return next((part.device_mesh for part in self.model.parameters() if hasattr(part, "device_mesh")), None)

    @property
    def is_divided(self) -> bool:
        """Whether tensor parallelism divides the weights among processes."""
        return self._device_mesh is not None

    def fresh_seed(self) -> int:
        """A random seed, the same in all processes of tensor parallelism, which wait for each other's branches."""
        seed = [torch.Generator().seed()]
        mesh = self._device_mesh
        if mesh is not None:
            group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
            distributed.broadcast_object_list(seed, distributed.get_global_rank(group, 0), group, device=self.device)
        return seed[0]

    def forward(self, token_ids: Tensor, *, logits_to_keep: int, **inputs: Any) -> Any:
        """One forward pass over tokens ``[B, W]``, with logits of some last positions only if the model supports it.

        Call it inside :meth:`exclusive`. Logits are NaN where the last layer's state overflows. ``position_ids`` are
        dropped if the model does not take them.
        """
        model = self.whole()
        if "logits_to_keep" in self.forward_parameters:
            inputs["logits_to_keep"] = logits_to_keep
        if "position_ids" not in self.forward_parameters:
            inputs.pop("position_ids", None)
        states: list[Tensor] = []
        thread = threading.get_ident()

        def keep(_module: Any, _args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                states.append(first_tensor(output))

        for rotary in self._dynamic:  # transformers keeps the frequencies of the longest sequence that it has seen
            for name, value in {**vars(rotary), **dict(rotary.named_buffers(recurse=False))}.items():
                if name.endswith("original_inv_freq"):
                    setattr(rotary, name.replace("original_", ""), value.clone())
                if name.endswith("max_seq_len_cached"):
                    setattr(rotary, name, rotary.original_max_seq_len)
        with ExitStack() as hooks:
            hooks.callback(self.layers[-1].register_forward_hook(keep).remove)
            for layer in self.layers if token_ids.numel() > _SHORT else ():
                hooks.callback(layer.register_forward_pre_hook(lambda *_: check_current()).remove)
            output = model(input_ids=token_ids, return_dict=True, **inputs)
        logits: Tensor = output.logits
        if states and states[-1].dim() == 3 and states[-1].shape[1] >= logits.shape[1]:  # not several residual streams
            # the final norm divides a state with an infinite mean square by infinity: all tokens are equally probable
            last = states[-1][:, -logits.shape[1] :]
            overflows = last.float().square().sum(-1, keepdim=True).isinf()
            # on a GPU the test needs a synchronization, which costs more than writing
            if overflows.device.type != "cpu" or overflows.any():
                logits.masked_fill_(overflows.to(logits.device), torch.nan)
        return output

    @contextmanager
    def exclusive(self, *, runs_modules: bool = True) -> Iterator[None]:
        """Lock the model for one forward pass, without dropout and without an autograd graph.

        A pass that uses the weights directly does not run modules, which then need not be switched to evaluation mode.
        """
        # the lock first: whoever has waited for it must not begin a pass if the process is ending now
        with self.lock, at_work, plain_modes():
            modules = self.model.modules() if self.model.training else self._modules
            # checking all modules takes 1 % of a step
            training = [module for module in modules if module.training] if runs_modules else []
            for module in training:
                module.training = False
            try:
                yield
            finally:
                for module in training:
                    module.training = True


@contextmanager
def plain_modes() -> Iterator[None]:
    """Within the block, the thread is in none of torch's modes that its caller may have set: autograd, inference mode,
    autocast, another default device.

    A thread runs passes for others. What it computes for them must not depend on its modes, and tensors that were
    created in inference mode could not be written to outside of it.
    """
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        for kind in _AUTOCAST:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":  # the context slows every operation
            modes.enter_context(torch.device("cpu"))
        yield


def first_tensor(output: Any) -> Tensor:
    """The hidden states in the output of a layer or decoder: a tensor, a tuple or a model output."""
    if isinstance(output, Tensor):
        return output
    state = getattr(output, "last_hidden_state", None)
    return state if isinstance(state, Tensor) else output[0]


def is_changed(module: nn.Module) -> bool:
    """Whether a module has hooks of its forward pass, or another pass than its class."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in module.__dict__


def device_of(module: Any) -> torch.device:
    """The device that a module with a weight runs on."""
    if module.weight.device.type == "meta":  # offloaded by accelerate, whose hook has the device
        execution_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        return torch.device("cpu" if execution_device is None else execution_device)
    return module.weight.device


def _decoder_and_layers(
    model: PreTrainedModel | LightModel, config: PreTrainedConfig
) -> tuple[nn.Module, list[nn.Module]]:
    """The module that runs the decoder layers and the final norm, and those layers in order."""
    if isinstance(model, LightModel):
        return model.model, list(model.model.layers)
    from transformers import PreTrainedModel  # slow to import, and not needed for light models

    count = getattr(config, "num_hidden_layers", None)
    # in some models the decoder is what computes the logits
    roots = [model.get_decoder()] if hasattr(model, "get_decoder") else []
    for root in [*roots, model.base_model]:
        for module in root.modules():
            named = [getattr(module, name, None) for name in ("layers", "h")]
            for layers in [*named, *module.children()]:
                if not isinstance(layers, nn.ModuleList) or len(layers) != count:
                    continue
                decoder = module
                if not isinstance(module, PreTrainedModel):  # some models have the final norm outside of it
                    models = [part for part in root.modules() if isinstance(part, PreTrainedModel)]
                    outer = [part for part in models if any(inner is module for inner in part.modules())]
                    decoder = outer[-1] if outer and outer[-1] is not model else module
                return decoder, list(layers)
    raise UnsupportedModelError(
        f"cannot find the {count} decoder layers of {type(model).__name__}; its hidden states cannot be read."
    )


def dtype_name(model: LanguageModel) -> str:
    """The data type of a model's weights, such as ``"float32"``."""
    return str(model.dtype).removeprefix("torch.")


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
