"""Random models of several families in GGUF files, with the names of the ``gguf`` package and llama.cpp's layouts."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFValueType, GGUFWriter
from tokenizers import pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cocoa_engine.execution.forward.trial import sample_blocks
from tests.helpers.tiny_models import pieces_tokenizer

SPECIAL = {"<unk>": 3, "<s>": 3, "</s>": 3, "<|turn|>": 3, "<added>": 4}  # and their types
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "12"]
"""The vocabulary of the families with byte-level tokens. The others have that of ``pieces_tokenizer``."""
BYTE_LEVEL = ("llama", "qwen2", "qwen3")

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
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""What a file says of the settings of a model that are given and not None."""

_WINDOW = 5
_ROPE = {"rope_type": "default", "rope_theta": 20_000.0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 20_000.0,
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "original_max_position_embeddings": 8,
    "attention_factor": 1.25,
}
_PHI3 = {"rope.dimension_count": 16, "rope.scaling.original_context_length": 4096}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_QWEN3_MOE = {"head_dim": 16, "norm_topk_prob": True, **_EXPERTS}
_GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": _WINDOW}
_LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}  # its files do not say it

_YARN = {"factor": 16.0, "original_max_position_embeddings": 8, "beta_fast": 32.0, "beta_slow": 1.0}
_MINISTRAL = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 8,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 1.0,
    "attention.temperature_scale": 0.1,
}

_GRANITE_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
_MAMBA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_expand": 2,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
}
_MAMBA_KEYS: dict[str, Any] = {
    "attention.head_count_kv": [0, 2, 0],
    "ssm.conv_kernel": 3,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.inner_size": 128,
    "ssm.time_step_rank": 4,
    "rope.scaling.finetuned": False,
}
_UNUSED_MAMBA = {**_MAMBA_KEYS, "attention.head_count_kv": [2, 2, 2], "rope.scaling.finetuned": True}
_UNUSED_MAMBA |= {"expert_shared_feed_forward_length": 96, "expert_count": 0, "attention.scale": 0.25}

FAMILIES: dict[str, tuple[MODEL_ARCH, dict[str, Any], dict[str, Any]]] = {
    "llama": (MODEL_ARCH.LLAMA, {"head_dim": 16}, {}),
    "llama-mistral3": (MODEL_ARCH.MISTRAL3, {"head_dim": 32}, {}),  # Mistral 3, without the scalings of Ministral 3
    "qwen2": (MODEL_ARCH.QWEN2, {}, {}),
    "qwen3": (MODEL_ARCH.QWEN3, {"head_dim": 16}, {}),
    "mistral": (MODEL_ARCH.LLAMA, {"head_dim": 16, "sliding_window": None}, {}),
    "mistral-window": (MODEL_ARCH.LLAMA, {"head_dim": 16, "sliding_window": _WINDOW}, {"attention.key_length": None}),
    "phi3": (MODEL_ARCH.PHI3, {"sliding_window": _WINDOW}, _PHI3),
    "phi3-part": (
        MODEL_ARCH.PHI3,
        {"sliding_window": None, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
        {**_PHI3, "rope.dimension_count": 8},
    ),
    "phi3-long": (
        MODEL_ARCH.PHI3,
        {"sliding_window": None, "rope_parameters": _LONG, "original_max_position_embeddings": 8},
        {**_PHI3, "rope.scaling.original_context_length": 8, "rope.scaling.attn_factor": 1.25},
    ),
    "gemma2": (
        MODEL_ARCH.GEMMA2,
        {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "rope_parameters": _LOCAL},
        {"rope.freq_base": None},
    ),
    "gemma3": (
        MODEL_ARCH.GEMMA3,
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20_000.0},
                "sliding_attention": _LOCAL,
            },
        },
        {},
    ),
    "granite": (MODEL_ARCH.GRANITE, {**_GRANITE, "logits_scaling": 8.0}, {}),
    "granite-plain": (MODEL_ARCH.GRANITE, {"attention_multiplier": 0.25}, {"attention.scale": None}),
    "olmo2": (MODEL_ARCH.OLMO2, {}, {}),
    "smollm3": (MODEL_ARCH.SMOLLM3, {"num_hidden_layers": 5}, {}),
    "ministral3": (
        MODEL_ARCH.MISTRAL3,
        {"head_dim": 32, "rope_parameters": {**_ROPE, **_YARN, **_MINISTRAL}},
        _YARN_KEYS,
    ),
    "glm4": (
        MODEL_ARCH.GLM4,
        {"head_dim": 32, "attention_bias": True, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 16},
    ),
    "seed_oss": (MODEL_ARCH.SEED_OSS, {"head_dim": 32, "attention_bias": True}, {}),
    "ernie4_5": (MODEL_ARCH.ERNIE4_5, {"head_dim": 16}, {}),
    "hunyuan_v1_dense": (MODEL_ARCH.HUNYUAN_DENSE, {"head_dim": 32}, {}),
    "qwen3moe": (MODEL_ARCH.QWEN3MOE, _QWEN3_MOE, {}),
    "qwen3moe-mixed": (
        MODEL_ARCH.QWEN3MOE,
        {**_QWEN3_MOE, "norm_topk_prob": False, "mlp_only_layers": [1]},
        {"expert_weights_norm": False},
    ),
}
FAMILIES |= {
    "llama-biases": (MODEL_ARCH.LLAMA, {"head_dim": 16, "attention_bias": True, "mlp_bias": True}, {}),
    "granite-4": (MODEL_ARCH.GRANITE, {"attention_multiplier": 0.25}, _UNUSED_MAMBA),  # its dense models
    "granitemoe": (MODEL_ARCH.GRANITE_MOE, {**_GRANITE, **_GRANITE_EXPERTS, "shared_intermediate_size": 0}, {}),
    "granitemoe-shared": (MODEL_ARCH.GRANITE_MOE, {**_GRANITE, **_GRANITE_EXPERTS}, {}),
    "granitehybrid": (MODEL_ARCH.GRANITE_HYBRID, {**_GRANITE, **_GRANITE_EXPERTS, **_MAMBA}, _MAMBA_KEYS),
    "granitehybrid-dense": (
        MODEL_ARCH.GRANITE_HYBRID,
        {
            **_GRANITE,
            **_MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
        },
        {**_MAMBA_KEYS, "rope.scaling.finetuned": True},
    ),
    "gpt_oss": (
        MODEL_ARCH.GPT_OSS,
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": _WINDOW,
            "rope_parameters": {**_ROPE, **_YARN, "rope_type": "yarn", "truncate": False},
        },
        {**dict(list(_YARN_KEYS.items())[:3]), "expert_feed_forward_length": 96},
    ),
}
"""By name: gguf's architecture, the settings beside the common ones, and keys that these do not tell."""

_LAYER_NORM = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
_PARTLY = {"rope_parameters": {**_LOCAL, "partial_rotary_factor": 0.5}}
_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "full_attention_interval": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
_DELTA_KEYS = {
    "full_attention_interval": 3,
    "ssm.conv_kernel": 3,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [4, 2, 2, 0],
}
_SHARED = {"shared_expert_intermediate_size": 32}

UNPACKED: dict[str, tuple[MODEL_ARCH, dict[str, Any], dict[str, Any]]] = {
    "lfm2": (
        MODEL_ARCH.LFM2,
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5},
        {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3},
    ),
    "bloom": (
        MODEL_ARCH.BLOOM,
        {"intermediate_size": None, "num_key_value_heads": 4},
        {**_LAYER_NORM, "rope.freq_base": None, "feed_forward_length": 256},
    ),
    "falcon": (
        MODEL_ARCH.FALCON,
        {"intermediate_size": None, "num_key_value_heads": 1, "rope_parameters": _LOCAL},
        {**_LAYER_NORM, "rope.freq_base": None, "feed_forward_length": 256, "tensor_data_layout": "jploski"},
    ),
    "gpt2": (
        MODEL_ARCH.GPT2,
        {"intermediate_size": None, "num_key_value_heads": None, "max_position_embeddings": 1024},
        {**_LAYER_NORM, "rope.freq_base": None, "feed_forward_length": 256},
    ),
    "mamba": (
        MODEL_ARCH.MAMBA,
        {"intermediate_size": 128, "state_size": 8, "conv_kernel": 3, "time_step_rank": 4, "num_key_value_heads": None},
        {
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "rope.freq_base": None,
            "ssm.dt_b_c_rms": False,
            "ssm.conv_kernel": 3,
            "ssm.inner_size": 128,
            "ssm.state_size": 8,
            "ssm.time_step_rank": 4,
        },
    ),
    "nemotron": (MODEL_ARCH.NEMOTRON, {"head_dim": 16, **_PARTLY}, {**_LAYER_NORM, "rope.dimension_count": 8}),
    "stablelm": (
        MODEL_ARCH.STABLELM,
        {"use_qkv_bias": True, "rope_parameters": {**_LOCAL, "partial_rotary_factor": 0.25}},
        {**_LAYER_NORM, "rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "starcoder2": (MODEL_ARCH.STARCODER2, {"rope_parameters": _LOCAL, "sliding_window": None}, _LAYER_NORM),
    "minimax_m2": (
        MODEL_ARCH.MINIMAXM2,
        {"head_dim": 32, **_PARTLY, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"rope.dimension_count": 16, "expert_gating_func": 2, "expert_feed_forward_length": 96},
    ),
    "qwen2moe": (
        MODEL_ARCH.QWEN2MOE,
        {**_EXPERTS, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        {},
    ),
    "qwen35": (MODEL_ARCH.QWEN35, _DELTA, _DELTA_KEYS),
    "qwen35moe": (MODEL_ARCH.QWEN35MOE, {**_DELTA, **_EXPERTS, **_SHARED, "intermediate_size": None}, _DELTA_KEYS),
}
"""Those that transformers unpacks."""

_MODEL_TYPES = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe", "granitehybrid": "granitemoehybrid"}
_MODEL_TYPES |= {"granitemoe": "granitemoeshared", "qwen2moe": "qwen2_moe"}
_MODEL_TYPES |= {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
# whose heads are in llama.cpp's rotary layout
_PAIRED = (MODEL_ARCH.LLAMA, MODEL_ARCH.MISTRAL3, MODEL_ARCH.SMOLLM3)
_PAIRED += (MODEL_ARCH.GRANITE, MODEL_ARCH.GRANITE_MOE, MODEL_ARCH.GRANITE_HYBRID)
# weights of norms stored with 1 added
_OFFSET = (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3, MODEL_ARCH.NEMOTRON, MODEL_ARCH.QWEN35, MODEL_ARCH.QWEN35MOE)


_tensor_names = cache(gguf.get_tensor_name_map)


@torch.no_grad()
def write_family(
    path: Path,
    family: str,
    kind: str,
    *,
    tied: bool = True,
    experts: Sequence[str] = (),
    norms: str = "F32",
    tensors: Mapping[str, torch.Tensor] = MappingProxyType({}),
    tensors_in_part: int = 0,
    pre: str = "qwen2",
    special: Mapping[str, int] = SPECIAL,
    ids: Mapping[str, int] = MappingProxyType({"bos": 1, "eos": 2, "eot": 3}),
    template: str | None = None,
    metadata: Mapping[str, Any] = MappingProxyType({}),
    **overrides: Any,
) -> PreTrainedModel:
    """Write a model as llama.cpp's converter does, and return it with the numbers that the file holds.

    Args:
        path: the file.
        family: one of :data:`FAMILIES` or :data:`UNPACKED`.
        kind: gguf's type of the matrices.
        tied: the output layer has the embeddings' weights. It always has in Gemma 2.
        experts: gguf's types of the experts' gate, input and output, if they have others.
        norms: gguf's type of the vectors. A file with others than F32 is unpacked by transformers.
        special: the first five byte-level tokens, with their types. ``pre`` is their rule.
        ids: those that keys of the file name.
        metadata: keys that replace those of the file, or are added; ``None`` takes one out.
        overrides: further fields of the model's config.
    """
    architecture, settings, own = (FAMILIES | UNPACKED)[family]
    tokenizer = _byte_level(pre, special, ids) if family in BYTE_LEVEL else _sentencepiece()
    options = {**_SIZES, "rope_parameters": dict(_ROPE), **settings, **overrides}
    options |= {"vocab_size": len(tokenizer["tokens"]), "tie_word_embeddings": tied or family == "gemma2"}
    model_type = family.partition("-")[0]
    config = AutoConfig.for_model(_MODEL_TYPES.get(model_type, model_type), **options)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    prefix = gguf.MODEL_ARCH_NAMES[architecture]
    writer = GGUFWriter(path, prefix, split_max_tensors=tensors_in_part)
    rope = getattr(config, "rope_parameters", None) or _ROPE
    rope = rope.get("full_attention", rope)
    keys = {key: options[name] for name, key in _KEYS.items() if name in options} | {
        "rope.freq_base": rope["rope_theta"]
    }
    if architecture == MODEL_ARCH.PHI3:
        keys["attention.sliding_window"] = config.sliding_window or 0
    if rope["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    every = {f"{prefix}.{key}": value for key, value in (keys | own).items()}
    every |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    for key, value in {**every, "tokenizer.chat_template": template, **metadata}.items():
        if value is not None:
            is_count = type(value) is int and value >= 0
            writer.add_key_value(key, value, GGUFValueType.UINT32 if is_count else GGUFValueType.get_type(value))
    for length in ("long", "short") if rope["rope_type"] == "longrope" else ():
        writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    names = _tensor_names(architecture, config.num_hidden_layers)
    dense = _tensor_names(MODEL_ARCH.QWEN3, config.num_hidden_layers)  # layers without experts among others
    inner = getattr(config, "moe_intermediate_size", 0)
    stored = _STORED.get(architecture, {})
    weights = dict(model.named_parameters())
    for path_of, parameter in {**model.state_dict(), **weights}.items():
        if path_of not in weights and (parameter.dim() != 1 or "lm_head" in path_of):
            continue  # a tied head
        module, _, attribute = path_of.rpartition(".")
        is_norm = attribute == "weight" and parameter.dim() == 1
        is_offset = is_norm and architecture in _OFFSET and not module.endswith("linear_attn.norm")
        if parameter.dim() == 1 or attribute.endswith("bias"):
            nn.init.uniform_(parameter, -0.5, 0.5)
            parameter += is_norm and not is_offset
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        heads_of = heads.get(module.rpartition(".")[2]) if architecture in _PAIRED else None
        if (parts_of := stored.get(path_of.split(".", 3)[-1])) is not None:
            layer = path_of.split(".")[2]
            # rows in the file are columns here
            is_turned = architecture in (MODEL_ARCH.GPT2, MODEL_ARCH.GPT_OSS) and parameter.dim() > 1
            of = experts[0] if experts and "experts." in path_of else kind
            parameter.copy_(_rounded(parameter.mT, of).mT if is_turned else _rounded(parameter, of))
            for part, weight in parts_of(parameter, config).items():
                _add_tensor(writer, f"blk.{layer}.{part}", weight.numpy(), of, None, norms)
            continue
        if path_of.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts = {"gate_proj": parameter[:, :inner], "up_proj": parameter[:, inner:]}
            for part, weight in parts.items() if attribute == "gate_up_proj" else [(attribute, parameter)]:
                name = f"{names.get_name(f'{module}.{part}')}.weight"
                of = dict(zip(("gate_proj", "up_proj", "down_proj"), experts, strict=False)).get(part, kind)
                weight.copy_(torch.from_numpy(_add_tensor(writer, name, weight.numpy(), of, None, norms)))
            continue
        inner_module = module.removeprefix("transformer.")  # of Bloom
        name = f"{names.get_name(module) or dense.get_name(module) or names.get_name(inner_module)}.{attribute}"
        weight = parameter.numpy() + is_offset
        exact = _add_tensor(writer, name, weight, kind, heads_of, norms)
        if parameter.dim() == 2:
            parameter.copy_(torch.from_numpy(exact))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model  # type: ignore[no-any-return]


def _gate_and_up(weight: torch.Tensor, ending: str, dim: int = 0) -> dict[str, torch.Tensor]:
    gate, up = weight.chunk(2, dim)
    return {f"ffn_gate{ending}.weight": gate, f"ffn_up{ending}.weight": up}


def _queries_first(weight: torch.Tensor, config: Any) -> torch.Tensor:
    return weight.view(config.n_head, 3, -1, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)


def _turned(rows: torch.Tensor, config: Any, *, after_keys: bool = False) -> torch.Tensor:
    """Heads of values are stored with the number in the group of a key first."""
    counts = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    keys, values = rows.tensor_split([2 * counts[0] * config.linear_key_head_dim * after_keys])
    return torch.cat((keys, values.reshape(*counts, -1, *rows.shape[1:]).transpose(0, 1).reshape(values.shape)))


def _shared(config: Any) -> str:
    return "_shexp" if config.num_local_experts else ""


_Stored = dict[str, Callable[[torch.Tensor, Any], dict[str, torch.Tensor]]]
_GRANITE_LAYERS: _Stored = {
    "shared_mlp.input_linear.weight": lambda weight, config: _gate_and_up(weight, _shared(config)),
    "shared_mlp.output_linear.weight": lambda weight, config: {f"ffn_down{_shared(config)}.weight": weight},
    "block_sparse_moe.router.weight": lambda weight, _: {"ffn_gate_inp.weight": weight},
    "block_sparse_moe.experts.gate_up_proj": lambda weight, _: _gate_and_up(weight, "_exps", dim=1),
    "block_sparse_moe.experts.down_proj": lambda weight, _: {"ffn_down_exps.weight": weight},
    "mamba.A_log": lambda weight, _: {"ssm_a": -weight.exp()[:, None]},
    "mamba.D": lambda weight, _: {"ssm_d": weight[:, None]},
    "mamba.dt_bias": lambda weight, _: {"ssm_dt.bias": weight},
    "mamba.norm.weight": lambda weight, config: {"ssm_norm.weight": weight.view(config.mamba_n_groups, -1)},
    "mamba.conv1d.weight": lambda weight, _: {"ssm_conv1d.weight": weight.squeeze(1)},
}
_MIXTURE: _Stored = {
    "mlp.experts.gate_up_proj": lambda weight, _: _gate_and_up(weight, "_exps", dim=1),
    "mlp.experts.down_proj": lambda weight, _: {"ffn_down_exps.weight": weight},
    "mlp.shared_expert_gate.weight": lambda weight, _: {"ffn_gate_inp_shexp.weight": weight[0]},
    "mlp.e_score_correction_bias": lambda weight, _: {"exp_probs_b.bias": weight},
}
_DELTA_LAYERS: _Stored = _MIXTURE | {
    "linear_attn.A_log": lambda weight, config: {"ssm_a": -_turned(weight, config).exp()},
    "linear_attn.dt_bias": lambda weight, config: {"ssm_dt.bias": _turned(weight, config)},
    "linear_attn.conv1d.weight": lambda weight, config: {
        "ssm_conv1d.weight": _turned(weight, config, after_keys=True).squeeze(1)
    },
    "linear_attn.in_proj_qkv.weight": lambda weight, config: {
        "attn_qkv.weight": _turned(weight, config, after_keys=True)
    },
    "linear_attn.in_proj_z.weight": lambda weight, config: {"attn_gate.weight": _turned(weight, config)},
    "linear_attn.in_proj_a.weight": lambda weight, config: {"ssm_alpha.weight": _turned(weight, config)},
    "linear_attn.in_proj_b.weight": lambda weight, config: {"ssm_beta.weight": _turned(weight, config)},
    "linear_attn.out_proj.weight": lambda weight, config: {"ssm_out.weight": _turned(weight.mT, config).mT},
}
_STORED: dict[MODEL_ARCH, _Stored] = {
    **dict.fromkeys((MODEL_ARCH.GRANITE_MOE, MODEL_ARCH.GRANITE_HYBRID), _GRANITE_LAYERS),
    MODEL_ARCH.GPT_OSS: {
        "self_attn.sinks": lambda weight, _: {"attn_sinks.weight": weight},
        "mlp.experts.gate_up_proj": lambda weight, _: {
            f"ffn_{part}_exps.weight": weight[..., n::2].mT for n, part in enumerate(("gate", "up"))
        },
        "mlp.experts.gate_up_proj_bias": lambda weight, _: {
            f"ffn_{part}_exps.bias": weight[..., n::2] for n, part in enumerate(("gate", "up"))
        },
        "mlp.experts.down_proj": lambda weight, _: {"ffn_down_exps.weight": weight.mT},
        "mlp.experts.down_proj_bias": lambda weight, _: {"ffn_down_exps.bias": weight},
    },
    MODEL_ARCH.BLOOM: {
        "self_attention.query_key_value.weight": lambda *given: {"attn_qkv.weight": _queries_first(*given)},
        "self_attention.query_key_value.bias": lambda *given: {"attn_qkv.bias": _queries_first(*given)},
    },
    MODEL_ARCH.GPT2: {
        "attn.c_attn.weight": lambda weight, _: {"attn_qkv.weight": weight.mT},
        "attn.c_proj.weight": lambda weight, _: {"attn_output.weight": weight.mT},
        "mlp.c_fc.weight": lambda weight, _: {"ffn_up.weight": weight.mT},
        "mlp.c_proj.weight": lambda weight, _: {"ffn_down.weight": weight.mT},
    },
    MODEL_ARCH.MAMBA: {
        "mixer.A_log": lambda weight, _: {"ssm_a": -weight.exp()},
        "mixer.D": lambda weight, _: {"ssm_d": weight},
        "mixer.conv1d.weight": lambda weight, _: {"ssm_conv1d.weight": weight.squeeze(1)},
    },
    **dict.fromkeys((MODEL_ARCH.QWEN2MOE, MODEL_ARCH.MINIMAXM2), _MIXTURE),
    **dict.fromkeys((MODEL_ARCH.QWEN35, MODEL_ARCH.QWEN35MOE), _DELTA_LAYERS),
}
"""How the parameters of a layer are stored that have other names or another form in a file."""


def _rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Numbers that blocks of a type hold."""
    if kind == "F32" or weight.dim() < 2 or weight.shape[-1] % 32:
        return weight
    of = GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.contiguous().numpy(), of), of))


def write_tiny_gguf(path: Path) -> None:
    """A Llama whose tokens are letters, with a chat template."""
    ids = {"bos": 1, "eos": 2, "padding": 2, "unknown": 0}
    sizes = {"llama.vocab_size": len(TOKENS)}
    write_family(path, "llama", "Q4_1", pre="smollm", ids=ids, template="{{ messages }}", metadata=sizes)


def _byte_level(pre: str, special: Mapping[str, int], ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*special, *TOKENS[5:]],
        "token_type": [*special.values()] + [1] * (len(TOKENS) - 5),
        "merges": ["h e", "1 2"],
        **{f"{name}_token_id": token_id for name, token_id in ids.items()},
    }


def _sentencepiece() -> dict[str, Any]:
    tokenizer = pieces_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [-float(number) for number in range(len(tokens))],
        "token_type": [3, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "bos_token_id": 1,
        "eos_token_id": 0,
        "padding_token_id": 2,
    }


def _add_tensor(
    writer: GGUFWriter, name: str, weight: np.ndarray, kind: str, heads: int | None, norms: str
) -> np.ndarray:
    """Add a tensor, and return its numbers as the file holds them."""
    if heads is not None:
        weight = weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    if weight.ndim == 1:
        writer.add_tensor(name, weight.astype({"F32": "f4", "F16": "f2"}[norms]))
    elif kind == "F32" or weight.shape[-1] % 32 or name.endswith(_FLOATS):
        writer.add_tensor(name, weight.squeeze(1) if name.endswith("shortconv.conv.weight") else weight)
    else:
        of = GGMLQuantizationType[kind]
        packed = _packed(weight, kind)
        writer.add_tensor(name, packed, raw_dtype=of)
        weight = gguf.quants.dequantize(packed, of)
    if heads is not None:
        weight = weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    return np.ascontiguousarray(weight)


_FLOATS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "_exps.bias", "ssm_norm.weight", "ssm_a", "ssm_d")


def _packed(weight: np.ndarray, kind: str) -> np.ndarray:
    """Numbers in blocks; random blocks where the package cannot make them."""
    try:
        return gguf.quants.quantize(weight, GGMLQuantizationType[kind])
    except NotImplementedError:
        rows, columns = weight.size // weight.shape[-1], weight.shape[-1]
        blocks = sample_blocks(kind, rows, columns, torch.Generator().manual_seed(0))
        return blocks.blocks.view(*weight.shape[:-1], -1).numpy()
