"""A lean forward pass of the Llama family (Llama, Mistral, Phi-3, Qwen2, Qwen3) on the model's own weights.

It computes the same as Hugging Face's modules with less overhead: projections that read the same input are one matrix
product, rotary tables are computed once, and masks are built only where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cocoa_engine.execution.forward.attention import attend
from cocoa_engine.execution.forward.base import Forward, PassOutput, Segment
from cocoa_engine.execution.forward.kernel_layers import KernelLayers
from cocoa_engine.execution.forward.linears import FastLinear, LinearBackend, fast_linear, is_plain
from cocoa_engine.execution.forward.source_attention import of_segments, passages_of_segments
from cocoa_engine.execution.forward.windows import Windows
from cocoa_engine.execution.native.layers import DecoderLayer, Layers
from cocoa_engine.execution.native.operators import can_multiply, is_readable, unpack
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.model.language_model import LanguageModel

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # cos and sin depend on the position alone
_IDLE_HOOKS = (
    "transformers.utils.output_capturing"  # hooks that remain after output_hidden_states=True and then do nothing
)

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, q [heads, T, head_dim], k, v [kv_heads, T, head_dim]) -> [T, heads * head_dim]``; stores k and v."""


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer.

    Attributes:
        attention_norm, mlp_norm: ``[d]``.
        q_norm, k_norm: ``[head_dim]`` (Qwen3), or ``None``.
    """

    attention_norm: Tensor
    qkv: FastLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: FastLinear
    mlp_norm: Tensor
    gate_up: FastLinear
    down: FastLinear


class Lean(Forward):
    """The lean pass.

    Args:
        model: a model for which :func:`lean_obstacle` returns ``None``.
        linear_backend: how linear layers multiply few rows.

    Raises:
        NotImplementedError: the model does not qualify. The message states the reason.
    """

    name = "lean"
    runs_modules = False

    def __init__(self, model: LanguageModel, linear_backend: LinearBackend) -> None:
        super().__init__(model)
        if obstacle := lean_obstacle(model):
            raise NotImplementedError(obstacle)
        config, decoder = model.config, model.decoder
        self.windows = Windows(config)
        self.native = linear_backend == "native"
        attention: Any = model.layers[0].self_attn
        self.head_dim = int(attention.head_dim)
        if hasattr(attention, "qkv_proj"):
            self.kv_heads, self.heads = config.num_key_value_heads, config.num_attention_heads
        else:  # a pruned model may have fewer than its config says
            self.kv_heads = attention.k_proj.out_features // self.head_dim
            self.heads = attention.q_proj.out_features // self.head_dim
        self.scale = float(attention.scaling)
        self.eps = float(config.rms_norm_eps)
        self.embedding: Tensor = model.model.get_input_embeddings().weight.detach()  # [V, d]
        self.norm: Tensor = decoder.norm.weight.detach()  # type: ignore[union-attr, operator]
        self.head = fast_linear([model.model.get_output_embeddings()], linear_backend)
        self.layers = [_layer(layer, linear_backend) for layer in model.layers]
        self.rotary = _RotaryTable(cast(nn.Module, decoder.rotary_emb), self.norm)
        self.kernels = self._kernels()

    def padding_rows(self, rows: int) -> int:
        return self.head.padding_rows(rows)

    def __call__(self, segments: Sequence[Segment], capture: CaptureSpec | None) -> PassOutput:
        device = self.embedding.device
        token_ids = torch.tensor([token_id for segment in segments for token_id in segment.token_ids], device=device)
        positions = torch.tensor([position for segment in segments for position in segment.positions], device=device)
        self.rotary.reserve(1 + max(position for segment in segments for position in segment.positions))
        cos, sin = self.rotary(positions)

        def attention(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            window, rows, start = self.windows[layer], [], 0
            for segment in segments:
                end = start + segment.width
                segment.store.write(layer, segment.start, keys[:, start:end], values[:, start:end])
                own_query = query[:, start:end]
                rows.append(attend(segment, layer, own_query, scale=self.scale, window=window, native=self.native))
                start = end
            return rows[0] if len(rows) == 1 else torch.cat(rows)

        states: Tensor | None
        leaves = None if self.kernels is None else self.kernels.leaves(segments)
        if self.kernels is not None and leaves is not None:
            x = self._embedded(token_ids)
            last, states, early, source, passages = self.kernels(x, cos, sin, leaves, capture)
        else:
            last, states, early = self.decode(token_ids, cos, sin, attention, capture)
            probes = [(segment.source, segment.width) for segment in segments]
            source, passages = of_segments(probes), passages_of_segments(probes)
        if capture is None:
            ends = torch.tensor([segment.width for segment in segments]).cumsum(0) - 1
            return PassOutput(self.head(last[ends]), None)
        if not early:
            return PassOutput(self.head(last), states, source=source, passages=passages)
        early_logits = self.head(torch.cat(early)).float().view(len(early), len(token_ids), -1)
        return PassOutput(self.head(last), states, early_logits, source, passages)

    def decode(
        self, token_ids: Tensor, cos: Tensor, sin: Tensor, attention: Attend, capture: CaptureSpec | None
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Run all layers over T tokens.

        Args:
            token_ids: ``[T]``.
            cos, sin: ``[T, head_dim]``; ``sin`` carries the sign of rotate_half.

        Returns:
            The last layer's states after the norm, ``[T, d]``; the requested states, ``[N + 1, T, d]`` float32; and the
            states of each early layer, ``[T, d]``.
        """
        count = token_ids.shape[0]
        x = self._embedded(token_ids)  # [T, d]
        split = [self.heads, self.kv_heads, self.kv_heads]
        states: list[Tensor] = []
        early: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            if capture is not None and capture.first <= number <= capture.last:
                states.append(x)
            if capture is not None and number in capture.early:
                early.append(x)
            h = F.rms_norm(x, x.shape[-1:], layer.attention_norm, self.eps)
            qkv = layer.qkv(h).view(count, -1, self.head_dim).transpose(0, 1)  # heads first
            query, keys, values = torch.split(qkv, split)
            if layer.q_norm is not None:
                query = F.rms_norm(query, query.shape[-1:], layer.q_norm, self.eps)
                keys = F.rms_norm(keys, keys.shape[-1:], layer.k_norm, self.eps)
                turned = torch.cat((query, keys))
            else:
                turned = qkv[: self.heads + self.kv_heads]
            rolled = turned.roll(self.head_dim // 2, -1)  # contiguous, and reused for the contiguous result
            turned = torch.addcmul(turned * cos, rolled, sin, out=rolled)
            mixed = attention(number, turned[: self.heads], turned[self.heads :], values)
            x = x + layer.out(mixed)
            h = F.rms_norm(x, x.shape[-1:], layer.mlp_norm, self.eps)
            gate, up = layer.gate_up(h).chunk(2, dim=-1)
            mixed = torch.mul(F.silu(gate), up, out=x.new_empty(gate.shape))
            x = x + layer.down(mixed)
        last = F.rms_norm(x, x.shape[-1:], self.norm, self.eps)
        # a mean square that overflows makes every state 0, and all tokens equally probable
        last = last.masked_fill(x.float().square().sum(-1, keepdim=True).isinf(), torch.nan)
        if capture is None:
            return last, None, early
        final = x if capture.final == "pre_norm" else last
        if capture.last == len(self.layers):
            states.append(final)
        return last, torch.stack([*states, final]).float(), early

    def _embedded(self, token_ids: Tensor) -> Tensor:
        if self.native and isinstance(self.embedding, BlockTensor) and can_multiply([self.embedding]):
            return unpack(self.embedding, token_ids)
        return F.embedding(token_ids, self.embedding)

    def _kernels(self) -> KernelLayers | None:
        """All layers in one kernel call, if the native kernels can run their linear layers and read their norms."""
        if not is_readable(self.norm):
            return None
        layers = []
        for number, layer in enumerate(self.layers):
            norms = (layer.attention_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
            qkv, out, gate_up, down = (each.native for each in (layer.qkv, layer.out, layer.gate_up, layer.down))
            if not (qkv and out and gate_up and down) or not all(norm is None or is_readable(norm) for norm in norms):
                return None
            layers.append(
                DecoderLayer(
                    attention_norm=layer.attention_norm,
                    q_norm=layer.q_norm,
                    k_norm=layer.k_norm,
                    mlp_norm=layer.mlp_norm,
                    qkv=qkv,
                    out=out,
                    gate_up=gate_up,
                    down=down,
                    windowed=self.windows[number] is not None,
                )
            )
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        if {(layer.qkv.total, layer.gate_up.total) for layer in layers} != {(qkv, layers[0].gate_up.total)}:
            return None  # the layers of a pruned model may differ in width
        native = Layers(
            layers,
            self.norm,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            eps=self.eps,
            scale=self.scale,
        )
        return KernelLayers(native, self.windows)


def lean_obstacle(model: LanguageModel) -> str | None:
    """Why a model does not qualify for the lean pass, such as another family or hooks. ``None`` if it qualifies."""
    kind = type(model.model).__name__
    if kind not in FAMILY or not type(model.model).__module__.startswith("transformers."):
        return f"{kind} is not of the Llama family"
    config = model.config
    rope = config.rope_parameters.get("rope_type", "default")
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act!r}"
    if rope not in _STATIC_ROPE:
        return f"rotary embeddings of type {rope!r} depend on the length"
    if 2 * cast(Any, model.decoder).rotary_emb.inv_freq.shape[0] != cast(Any, model.layers[0]).self_attn.head_dim:
        return "rotary embeddings of a part of each head"
    for module in model.model.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(getattr(hook, "__module__", None) != _IDLE_HOOKS for hook in hooks) or "forward" in module.__dict__:
            return "its modules have hooks"
        if not type(module).__module__.startswith(("transformers.models.", "transformers.activations", "torch.nn.")):
            return f"it has an unknown module, {type(module).__name__}"
        if isinstance(module, nn.Linear) and not is_plain(module):
            return "its linear layers are adapted or quantised"
    weights = list(model.model.parameters())
    if len({(weight.device, weight.dtype) for weight in weights}) != 1 or weights[0].is_meta:
        return "its weights are on several devices or have several dtypes"
    return None


def _layer(layer: Any, linear_backend: LinearBackend) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    q_norm, k_norm = (None if norm is None else norm.weight.detach() for norm in norms)
    joined = hasattr(attention, "qkv_proj")  # Phi-3
    return Layer(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=fast_linear(
            [attention.qkv_proj] if joined else [attention.q_proj, attention.k_proj, attention.v_proj], linear_backend
        ),
        q_norm=q_norm,
        k_norm=k_norm,
        out=fast_linear([attention.o_proj], linear_backend),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=fast_linear([mlp.gate_up_proj] if joined else [mlp.gate_proj, mlp.up_proj], linear_backend),
        down=fast_linear([mlp.down_proj], linear_backend),
    )


class _RotaryTable:
    """cos and sin by position, computed by the model's own rotary module and extended on demand."""

    def __init__(self, module: nn.Module, like: Tensor) -> None:
        self.module = module
        self.like = like
        self.cos = self.sin = like.new_empty(0, 0)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each ``[T, head_dim]``; sin carries the sign of rotate_half."""
        return self.cos[positions], self.sin[positions]

    def reserve(self, length: int) -> None:
        """Extend the tables to at least ``length`` positions."""
        if length <= self.cos.shape[0]:
            return
        positions = torch.arange(max(length, 2 * self.cos.shape[0], 1024), device=self.like.device)
        cos, sin = self.module(self.like, positions[None])
        sign = torch.ones_like(sin[0, 0])
        sign[: sign.shape[-1] // 2] = -1
        self.cos, self.sin = cos[0], sin[0] * sign
