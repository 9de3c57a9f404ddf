"""A lean forward pass of Llama and the models built like it, on the model's own weights.

It computes the same as Hugging Face's modules with less overhead: projections that read the same input are one matrix
product, rotary tables are computed once, and masks are built only where they are needed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from cocoa_engine.execution.forward import linears
from cocoa_engine.execution.forward.attention import attend_all, write_all
from cocoa_engine.execution.forward.base import Forward, Segment, StepOutput
from cocoa_engine.execution.forward.kernel_layers import KernelLayers, decoder_layer
from cocoa_engine.execution.forward.linears import Activation, FastLinear, LinearBackend
from cocoa_engine.execution.forward.source_attention import of_segments
from cocoa_engine.execution.native.operators import can_multiply, is_readable, unpack
from cocoa_engine.interruptions import check_current
from cocoa_engine.model import experts, light_model
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.configs import Windows
from cocoa_engine.model.language_model import CaptureSpec, LanguageModel, is_changed

FAMILY = tuple(
    f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3", "Granite", "Olmo2")
)
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # cos and sin depend on the position alone
_IDLE_HOOKS = (
    "transformers.utils.output_capturing"  # hooks that remain after output_hidden_states=True and then do nothing
)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"  # kinds of layers with rotary tables of their own (Gemma 3)

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, q [heads, T, head_dim], k, v [kv_heads, T, head_dim]) -> [T, heads * head_dim]``; stores k and v."""


class Mlp(NamedTuple):
    """The gated MLP of a layer: ``[T, d]`` to ``[T, d]``."""

    gate_up: FastLinear
    down: FastLinear
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(linears.gated(self.gate_up(x), self.activation))


class Mixture(NamedTuple):
    """The experts of a layer, of which each token runs some: ``[T, d]`` to ``[T, d]``.

    Attributes:
        router: the model's module: ``[T, d]`` -> logits, the shares of the experts of each token, and their numbers.
        experts: mixes their outputs. It is the model's own module where the kernels cannot run it.
    """

    router: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    experts: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        _, shares, chosen = self.router(x)
        return self.experts(x, chosen, shares)


class Layer(NamedTuple):
    """The weights of one decoder layer.

    Attributes:
        attention_norm, mlp_norm: ``[d]``, or ``None`` (OLMo2).
        q_norm, k_norm: ``[head_dim]`` (Qwen3, Gemma 3), of all heads together (OLMo2), or ``None``.
        attention_after, mlp_after: norms of what a part of the layer adds, ``[d]`` (Gemma, OLMo2), or ``None``.
        local: the layer has the rotary tables of windowed layers (Gemma 3).
    """

    attention_norm: Tensor | None
    qkv: FastLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: FastLinear
    attention_after: Tensor | None
    mlp_norm: Tensor | None
    mlp: Mlp | Mixture
    mlp_after: Tensor | None
    local: bool


class Lean(Forward):
    """The lean pass.

    Raises:
        NotImplementedError: the model does not qualify, see :func:`lean_obstacle`. The message states the reason.
    """

    name = "lean"
    runs_modules = False

    def __init__(self, model: LanguageModel, linear_backend: LinearBackend) -> None:
        super().__init__(model)
        if obstacle := lean_obstacle(model):
            raise NotImplementedError(obstacle)
        config, decoder = model.config, model.decoder
        self.windows = Windows(config)
        self.native = linears.by_kernels(linear_backend)
        self.cost_of_a_row = linears.cost_of_a_row(model.model, linear_backend)
        attention: Any = model.layers[0].self_attn
        self.head_dim = int(attention.head_dim)
        if hasattr(attention, "qkv_proj"):
            self.kv_heads, self.heads = config.num_key_value_heads, config.num_attention_heads
        else:  # a pruned model may have fewer than its config says
            self.kv_heads = attention.k_proj.out_features // self.head_dim
            self.heads = attention.q_proj.out_features // self.head_dim
        self.scale = float(attention.scaling)
        # Gemma 3 has this setting too and does not use it
        self.softcap: float | None = (
            attention.attn_logit_softcapping if model.architecture == "Gemma2ForCausalLM" else None
        )
        self.eps = float(config.rms_norm_eps)
        self.activation = _ACTIVATIONS[_activation(config)]
        self.embedding: Tensor = model.model.get_input_embeddings().weight.detach()  # [V, d]
        scale = getattr(config, "embedding_multiplier", 1.0)
        self.embedding_scale = config.hidden_size**0.5 if _is_gemma(model) else float(scale)
        self.residual_scale = float(getattr(config, "residual_multiplier", 1.0))
        self.logits_scale = float(getattr(config, "logits_scaling", 1.0))
        self.logits_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.norm = cast(Tensor, _norm_weight(decoder.norm))
        self.head = linears.fast_linear([model.model.get_output_embeddings()], linear_backend)
        self.layers = [_layer(layer, linear_backend, self.activation) for layer in model.layers]
        rotary = cast(nn.Module, decoder.rotary_emb)
        self.local_rotary = _RotaryTable(rotary, self.norm, _LOCAL) if hasattr(rotary, f"{_LOCAL}_inv_freq") else None
        self.rotary = _RotaryTable(rotary, self.norm, None if self.local_rotary is None else _GLOBAL)
        self.kernels = self._kernels()

    def __call__(self, segments: Sequence[Segment], capture: CaptureSpec | None) -> StepOutput:
        device = self.embedding.device
        token_ids = torch.tensor([token_id for segment in segments for token_id in segment.token_ids], device=device)
        places = [position for segment in segments for position in segment.positions]
        positions, length = torch.tensor(places, device=device), 1 + max(places)
        cos, sin = self.rotary(positions, length)
        leaves = None if self.kernels is None else self.kernels.leaves(segments)
        if self.kernels is not None and leaves is not None:
            last, states, early, masses = self.kernels(self._embedded(token_ids), cos, sin, leaves, capture)
        else:

            def attention(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
                check_current()
                write_all(segments, layer, keys, values)
                options = {"scale": self.scale, "softcap": self.softcap, "native": self.native}
                return attend_all(segments, layer, query, window=self.windows[layer], **options)

            local = None if self.local_rotary is None else self.local_rotary(positions, length)
            last, states, early = self.decode(token_ids, cos, sin, attention, capture, local)
            masses = of_segments([(segment.source, segment.width) for segment in segments])
        if states is None:
            return StepOutput(self.logits(last[-1:]), last.new_empty(0))
        early_logits = self.head(torch.cat(early)).float().view(len(early), len(token_ids), -1) if early else None
        return StepOutput(self.logits(last), states, early_logits, masses)

    def logits(self, last: Tensor) -> Tensor:
        """The logits of states after the last norm, ``[T, V]``."""
        logits = self.head(last)
        if self.logits_scale != 1:
            logits = logits / self.logits_scale
        if self.logits_cap is not None:
            logits = self.logits_cap * torch.tanh(logits / self.logits_cap)
        return logits

    def decode(
        self,
        token_ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: Attend,
        capture: CaptureSpec | None,
        local: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Run all layers over T tokens. ``local`` holds cos and sin for windowed layers, if these have their own.

        Returns:
            The last layer's states after the norm, ``[T, d]``; the requested states, ``[N + 1, T, d]`` float32, or
            ``None``; and the states of each early layer, ``[T, d]``.
        """
        x = self._embedded(token_ids)  # [T, d]
        states: list[Tensor] = []
        early: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            if capture is not None and capture.first <= number <= capture.last:
                states.append(x)
            if capture is not None and number in capture.early:
                early.append(x)
            tables = local if layer.local and local is not None else (cos, sin)
            turned, values = self._turned(layer, self._normed(x, layer.attention_norm), *tables)
            mixed = attention(number, turned[: self.heads], turned[self.heads :], values)
            x = self._added(x, layer.out(mixed), layer.attention_after)
            x = self._added(x, layer.mlp(self._normed(x, layer.mlp_norm)), layer.mlp_after)
        last = F.rms_norm(x, x.shape[-1:], self.norm, self.eps)
        # a mean square that overflows makes every state 0, and all tokens equally probable
        last = last.masked_fill(x.float().square().sum(-1, keepdim=True).isinf(), torch.nan)
        if capture is None:
            return last, None, early
        final = x if capture.final == "pre_norm" else last
        if capture.last == len(self.layers):
            states.append(final)
        return last, torch.stack([*states, final]).float(), early

    def _turned(self, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys with their rotary embeddings, ``[heads + kv_heads, T, head_dim]``, and the values."""
        count, split = h.shape[0], [self.heads, self.kv_heads, self.kv_heads]
        qkv = layer.qkv(h)
        if layer.q_norm is not None and layer.q_norm.shape[0] != self.head_dim:  # of all heads together
            query, keys, values = torch.split(qkv, [part * self.head_dim for part in split], dim=-1)
            qkv = torch.cat((self._normed(query, layer.q_norm), self._normed(keys, layer.k_norm), values), dim=-1)
        qkv = qkv.view(count, -1, self.head_dim).transpose(0, 1)  # heads first
        query, keys, values = torch.split(qkv, split)
        if layer.q_norm is not None and layer.q_norm.shape[0] == self.head_dim:
            turned = torch.cat((self._normed(query, layer.q_norm), self._normed(keys, layer.k_norm)))
        else:
            turned = qkv[: self.heads + self.kv_heads]
        rolled = turned.roll(self.head_dim // 2, -1)  # contiguous, and reused for the contiguous result
        return torch.addcmul(turned * cos, rolled, sin, out=rolled), values

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, self.eps)

    def _added(self, x: Tensor, update: Tensor, norm: Tensor | None) -> Tensor:
        """The states after a part of a layer, which adds its normed and scaled output to them."""
        update = self._normed(update, norm)
        return x + (update if self.residual_scale == 1 else update * self.residual_scale)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        if self.native and isinstance(self.embedding, BlockTensor) and can_multiply([self.embedding]):
            x = unpack(self.embedding, token_ids)
        else:
            x = F.embedding(token_ids, self.embedding)
        return x if self.embedding_scale == 1 else x * self.embedding_scale

    def _kernels(self) -> KernelLayers | None:
        """All layers in one kernel call, if the native kernels can run their linear layers and read their norms."""
        if not is_readable(self.norm) or self.activation is not F.silu or self.residual_scale != 1:
            return None
        layers, widths = [], set()
        for number, layer in enumerate(self.layers):
            mlp, norms = layer.mlp, (layer.attention_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
            if norms[0] is None or norms[3] is None or layer.attention_after is not None or isinstance(mlp, Mixture):
                return None
            parts = [part.native for part in (layer.qkv, layer.out, mlp.gate_up, mlp.down) if part.native]
            if len(parts) < 4 or not all(norm is None or is_readable(norm) for norm in norms):
                return None
            layers.append(decoder_layer(norms, parts, self.windows[number] is not None))
            widths.add((layer.qkv.total, mlp.gate_up.total // 2))
        (width, inner), *others = widths
        if others or width != (self.heads + 2 * self.kv_heads) * self.head_dim:
            return None  # the layers of a pruned model may differ in width
        heads = (self.heads, self.kv_heads, self.head_dim)
        return KernelLayers(layers, self.norm, inner, self.windows, heads, self.eps, self.scale)


def lean_obstacle(model: LanguageModel, parts: tuple[list[nn.Module], list[Tensor]] | None = None) -> str | None:
    """Why a model does not qualify for the lean pass, such as another family or hooks. ``None`` if it qualifies.

    ``parts``: the model's, if the caller has them.
    """
    name = model.architecture
    if name not in FAMILY or not _is_known(type(model.model), ("transformers.",)):
        return f"{name} is not of the Llama family"
    config, rotary = model.config, cast(Any, model.decoder).rotary_emb
    if _activation(config) not in _ACTIVATIONS:
        return f"activation {_activation(config)!r}"
    tables = [config.rope_parameters.get(kind) for kind in (_GLOBAL, _LOCAL)]
    for rope in tables if all(tables) else [config.rope_parameters]:
        if rope.get("rope_type", "default") not in _STATIC_ROPE:
            return f"rotary embeddings of type {rope['rope_type']!r} depend on the length"
    frequencies = getattr(rotary, f"{_GLOBAL}_inv_freq" if all(tables) else "inv_freq", None)
    if frequencies is None or 2 * frequencies.shape[0] != cast(Any, model.layers[0]).self_attn.head_dim:
        return "rotary embeddings of a part of each head"
    if getattr(config, "use_bidirectional_attention", None):
        return "attention to later tokens"
    if _is_gemma(model) and model.dtype != torch.float32:
        return "norms that are computed in float32"
    modules, weights = parts or model.parts()
    for module in filter(is_changed, modules):
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(getattr(hook, "__module__", None) != _IDLE_HOOKS for hook in hooks) or "forward" in module.__dict__:
            return "its modules have hooks"
    kinds = dict.fromkeys(map(type, modules))
    for kind in kinds:
        is_known = _is_known(kind, ("transformers.models.", "transformers.activations", "torch.nn."))
        if not is_known and kind not in experts.OWN:
            return f"it has an unknown module, {kind.__name__}"
    if not all(linears.is_plain(module) for module in modules if isinstance(module, nn.Linear)):
        return "its linear layers are adapted or quantised"
    for module in modules if any(map(experts.hold_experts, kinds)) else ():
        if (why := experts.obstacle(module)) is not None:
            return why
    kinds_of_weights = {
        (weight.blocks.device, torch.float32) if isinstance(weight, BlockTensor) else (weight.device, weight.dtype)
        for weight in weights  # blocks answer through Python, slowly
    }
    if len(kinds_of_weights) != 1 or weights[0].is_meta:
        return "its weights are on several devices or have several dtypes"
    return None


def _is_known(kind: type[nn.Module], packages: tuple[str, ...]) -> bool:
    return kind.__module__.startswith((*packages, light_model.__name__))


def _activation(config: PreTrainedConfig) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _is_gemma(model: LanguageModel) -> bool:
    return model.architecture.startswith("Gemma")


def _norm_weight(norm: Any) -> Tensor | None:
    """What a norm multiplies by. Gemma's weights are less 1, so theirs is a copy."""
    if norm is None:
        return None
    weight: Tensor = norm.weight.detach()
    return weight + 1 if type(norm).__name__.startswith("Gemma") else weight


def _layer(layer: Any, linear_backend: LinearBackend, activation: Activation) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    linear = partial(linears.fast_linear, linear_backend=linear_backend)
    after_attention = getattr(layer, "post_attention_layernorm", None)
    before_mlp, after_mlp = (getattr(layer, f"{where}_feedforward_layernorm", None) for where in ("pre", "post"))
    if after_mlp is None:  # Llama's norm before the second part has the name of a norm after the first
        before_mlp, after_attention = after_attention, None
    if hasattr(attention, "qkv_proj"):  # Phi-3
        qkv, gate_up = [attention.qkv_proj], [mlp.gate_up_proj]
    else:
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        gate_up = [] if hasattr(mlp, "experts") else [mlp.gate_proj, mlp.up_proj]
    experts_of: Any = None if gate_up else mlp.experts
    if not gate_up and mlp.gate.weight.device.type == "cpu":
        experts_of = linears.fast_experts(experts_of, activation, linear_backend)
    return Layer(
        attention_norm=_norm_weight(getattr(layer, "input_layernorm", None)),
        qkv=linear(qkv),
        q_norm=_norm_weight(getattr(attention, "q_norm", None)),
        k_norm=_norm_weight(getattr(attention, "k_norm", None)),
        out=linear([attention.o_proj]),
        attention_after=_norm_weight(after_attention),
        mlp_norm=_norm_weight(before_mlp),
        mlp=Mlp(linear(gate_up), linear([mlp.down_proj]), activation) if gate_up else Mixture(mlp.gate, experts_of),
        mlp_after=_norm_weight(after_mlp),
        local=getattr(attention, "is_sliding", False),
    )


class _RotaryTable:
    """cos and sin by position, computed by the model's own rotary module and extended on demand.

    They have the device and dtype of ``like``. ``kind`` names the layers that they are for, if there are several kinds.
    """

    def __init__(self, module: nn.Module, like: Tensor, kind: str | None = None) -> None:
        self.module = module if kind is None else partial(module, layer_type=kind)
        self.like = like
        self.cos = self.sin = like.new_empty(0, 0)

    def __call__(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each ``[T, head_dim]``, for positions below a length; sin carries the sign of rotate_half."""
        self.reserve(length)
        return self.cos[positions], self.sin[positions]

    def reserve(self, length: int) -> None:
        """Extend the tables to at least ``length`` positions."""
        if length > self.cos.shape[0]:
            positions = torch.arange(max(length, 2 * self.cos.shape[0], 1024), device=self.like.device)
            cos, sin = self.module(self.like, positions[None])
            sign = torch.ones_like(sin[0, 0])
            sign[: sign.shape[-1] // 2] = -1
            self.cos, self.sin = cos[0], sin[0] * sign
