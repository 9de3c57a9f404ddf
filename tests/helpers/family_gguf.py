"""Random models of several families in GGUF files, with the names of the ``gguf`` package and llama.cpp's layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cocoa_engine.execution.forward.trial import sample_blocks
from tests.helpers.tiny_models import sentencepiece_like_tokenizer

_WINDOW = 5
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 20_000.0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 20_000.0,
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "original_max_position_embeddings": 8,
    "attention_factor": 1.25,
}

Settings = Callable[[GGUFWriter, Any], None]


def _head_dim(writer: GGUFWriter, config: Any) -> None:
    writer.add_key_length(config.head_dim)


def _window(writer: GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window or 0)


def _phi3(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_dimension_count(int(16 * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    _window(writer, config)
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], dtype=np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], dtype=np.float32))


def _gemma2(writer: GGUFWriter, config: Any) -> None:
    _head_dim(writer, config)
    _window(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _gemma3(writer: GGUFWriter, config: Any) -> None:
    _head_dim(writer, config)
    _window(writer, config)
    rope = config.rope_parameters["full_attention"]
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _granite(writer: GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _qwen3_moe(writer: GGUFWriter, config: Any) -> None:
    _head_dim(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if not config.norm_topk_prob:
        writer.add_expert_weights_norm(False)


def _glm4(writer: GGUFWriter, config: Any) -> None:
    _head_dim(writer, config)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))


def _lfm2(writer: GGUFWriter, config: Any) -> None:
    writer.kv_data[0].pop("lfm2.attention.head_count_kv")
    writer.add_head_count_kv([0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types])
    writer.add_shortconv_l_cache(config.conv_L_cache)


def _mistral3(writer: GGUFWriter, config: Any) -> None:
    _head_dim(writer, config)
    rope = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


_YARN = {
    **_ROPE,
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_QWEN3_MOE = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": _WINDOW}

FAMILIES: dict[str, tuple[MODEL_ARCH, dict[str, Any], Settings | None]] = {
    "mistral": (MODEL_ARCH.LLAMA, {"head_dim": 16, "sliding_window": None}, _head_dim),
    "mistral-window": (MODEL_ARCH.LLAMA, {"head_dim": 16, "sliding_window": _WINDOW}, _window),
    "phi3": (MODEL_ARCH.PHI3, {"sliding_window": _WINDOW}, _phi3),
    "phi3-part": (
        MODEL_ARCH.PHI3,
        {"sliding_window": None, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
        _phi3,
    ),
    "phi3-long": (
        MODEL_ARCH.PHI3,
        {"sliding_window": None, "rope_parameters": _LONG, "original_max_position_embeddings": 8},
        _phi3,
    ),
    "gemma2": (
        MODEL_ARCH.GEMMA2,
        {
            **_GEMMA,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},  # its files do not say it
        },
        _gemma2,
    ),
    "gemma3": (
        MODEL_ARCH.GEMMA3,
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        _gemma3,
    ),
    "granite": (MODEL_ARCH.GRANITE, _GRANITE, _granite),
    "granite-plain": (MODEL_ARCH.GRANITE, {"attention_multiplier": 0.25}, None),
    "olmo2": (MODEL_ARCH.OLMO2, {}, None),
    "smollm3": (MODEL_ARCH.SMOLLM3, {"num_hidden_layers": 5}, None),
    "ministral3": (MODEL_ARCH.MISTRAL3, {"head_dim": 32, "rope_parameters": _YARN}, _mistral3),
    "glm4": (
        MODEL_ARCH.GLM4,
        {"head_dim": 32, "attention_bias": True, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
        _glm4,
    ),
    "seed_oss": (MODEL_ARCH.SEED_OSS, {"head_dim": 32, "attention_bias": True}, _head_dim),
    "ernie4_5": (MODEL_ARCH.ERNIE4_5, {"head_dim": 16}, _head_dim),
    "hunyuan_v1_dense": (MODEL_ARCH.HUNYUAN_DENSE, {"head_dim": 32}, _head_dim),
    "qwen3moe": (MODEL_ARCH.QWEN3MOE, _QWEN3_MOE, _qwen3_moe),
    "qwen3moe-mixed": (
        MODEL_ARCH.QWEN3MOE,
        {**_QWEN3_MOE, "norm_topk_prob": False, "mlp_only_layers": [1]},
        _qwen3_moe,
    ),
}
"""By name: gguf's architecture, the settings beside the common ones, and what writes them."""

UNPACKED: dict[str, tuple[MODEL_ARCH, dict[str, Any], Settings | None]] = {
    "lfm2": (
        MODEL_ARCH.LFM2,
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5},
        _lfm2,
    )
}
"""Those that transformers unpacks."""

_MODEL_TYPES = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}
_PAIRS = (
    MODEL_ARCH.LLAMA,
    MODEL_ARCH.GRANITE,
    MODEL_ARCH.SMOLLM3,
    MODEL_ARCH.MISTRAL3,
)  # query and key rows in llama.cpp's rotary layout
_OFFSET = (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3)  # weights of norms stored with 1 added


def write_family(
    path: Path, name: str, kind: str, *, tied: bool = True, experts: Sequence[str] = (), **overrides: Any
) -> PreTrainedModel:
    """Write a model as llama.cpp's converter does, and return it with the numbers that the file holds.

    Args:
        path: the file.
        name: one of :data:`FAMILIES` or :data:`UNPACKED`.
        kind: gguf's type of the matrices.
        tied: the output layer has the embeddings' weights. It always has in Gemma 2.
        experts: gguf's types of the experts' gate, input and output, if they have others.
        overrides: further fields of the model's config.
    """
    architecture, settings, add = {**FAMILIES, **UNPACKED}[name]
    tokenizer = sentencepiece_like_tokenizer()
    options = {**_SIZES, "rope_parameters": dict(_ROPE), **settings, **overrides}
    options |= {"vocab_size": len(tokenizer), "tie_word_embeddings": tied or name == "gemma2"}
    model_type = name.partition("-")[0]
    config = AutoConfig.for_model(_MODEL_TYPES.get(model_type, model_type), **options)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture != MODEL_ARCH.GEMMA2:
        rope = config.rope_parameters
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if add is not None:
        add(writer, config)
    _write_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    dense = gguf.get_tensor_name_map(MODEL_ARCH.QWEN3, config.num_hidden_layers)  # layers without experts among others
    inner = getattr(config, "moe_intermediate_size", 0)
    for path_of, parameter in model.named_parameters():
        with torch.no_grad():
            if path_of.endswith("norm.weight"):
                nn.init.uniform_(parameter, -0.5, 0.5)
                parameter += architecture not in _OFFSET
            module, _, attribute = path_of.rpartition(".")
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            heads_of = heads.get(module.rpartition(".")[2]) if architecture in _PAIRS else None
            if path_of.endswith(("experts.gate_up_proj", "experts.down_proj")):
                parts = {"gate_proj": parameter[:, :inner], "up_proj": parameter[:, inner:]}
                for part, weight in parts.items() if attribute == "gate_up_proj" else [(attribute, parameter)]:
                    name = f"{names.get_name(f'{module}.{part}')}.weight"
                    of = dict(zip(("gate_proj", "up_proj", "down_proj"), experts, strict=False)).get(part, kind)
                    weight.copy_(torch.from_numpy(_add_tensor(writer, name, weight.numpy(), of, None)))
                continue
            exact = _add_tensor(
                writer,
                f"{names.get_name(module) or dense.get_name(module)}.{attribute}",
                parameter.numpy() + (path_of.endswith("norm.weight") and architecture in _OFFSET),
                kind,
                heads_of,
            )
            if parameter.dim() == 2:
                parameter.copy_(torch.from_numpy(exact))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model  # type: ignore[no-any-return]


def _add_tensor(writer: GGUFWriter, name: str, weight: np.ndarray, kind: str, heads: int | None) -> np.ndarray:
    """Add a tensor, and return its numbers as the file holds them."""
    if heads is not None:
        weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    if weight.ndim == 1 or kind == "F32" or name.endswith(("ffn_gate_inp.weight", "conv.weight")):
        writer.add_tensor(name, weight.squeeze(1) if name.endswith("conv.weight") else weight)
    else:
        of = GGMLQuantizationType[kind]
        packed = _packed(weight, kind)
        writer.add_tensor(name, packed, raw_dtype=of)
        weight = gguf.quants.dequantize(packed, of)
    if heads is not None:
        weight = weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    return np.ascontiguousarray(weight)


def _packed(weight: np.ndarray, kind: str) -> np.ndarray:
    """Numbers in blocks; random blocks where the package cannot make them."""
    of = GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(weight, of)
    except NotImplementedError:
        blocks = sample_blocks(
            kind, weight.size // weight.shape[-1], weight.shape[-1], torch.Generator().manual_seed(0)
        )
        return blocks.blocks.view(*weight.shape[:-1], -1).numpy()


def _write_tokenizer(writer: GGUFWriter, tokenizer: Any) -> None:
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_token_types([3, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(2)
