"""Small configurations of every causal language model that the installed transformers has.

The default configuration of an architecture is shrunk field by field: fields of one name mean the same in almost all
architectures. The few that need more are in :data:`SPECIAL`.
"""

from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.helpers.tiny_models import BOS, EOS, NUM_LAYERS, PAD

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WITH_IMAGES = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())
"""Architectures for images and texts without a causal class, which run on texts alone."""

_SIZES = """
300 vocab_size decoder_vocab_size vocab_size_per_layer_input
512 max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions max_source_positions
512 original_max_position_embeddings model_max_length
64 intermediate_size ffn_dim d_ff dff d_inner n_inner dim_ff mlp_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim
64 moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size intermediate_size_mlp
64 dense_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size shared_experts_intermediate_size
64 feed_forward_size pronunciation_vocab_size shape_vocab_size adapter_input_size
32 hidden_size n_embd d_model dim embed_dim emb_dim embedding_dim embedding_size input_embedding_size
32 word_embed_proj_dim output_embedding_size attention_hidden_size backbone_hidden_size lru_width out_hidden_size
32 hidden_size_global output_channels adapter_out_dim input_size audio_vocab_size router_hidden_size mamba_d_ssm
32 q_lora_rank kv_lora_rank o_lora_rank vision_output_dim projector_output_dim projector_input_dim base_channels
32 ple_embed_dim moe_latent_size
8 head_dim swa_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim qk_nope_head_dim v_head_dim dim_head
8 index_head_dim d_head kv_channels global_head_dim attention_head_size d_kv hidden_size_per_layer_input
16 index_topk index_n_heads
8 pronunciation_embed_dim shape_embed_dim conf_conv_kernel_size mamba_chunk_size chunk_size
8 sliding_window sliding_window_size local_attention attention_window_size attention_chunk_size index_block_size
8 window_size local_attention_window_len block_size
6 num_hidden_layers n_layer n_layers num_layers decoder_layers num_blocks num_decoder_layers
4 num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads
4 num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads conf_num_attention_heads
4 linear_num_value_heads linear_num_heads mamba_num_heads time_step_rank mamba_dt_rank
4 num_experts n_routed_experts num_local_experts moe_num_experts state_size ssm_state_size mamba_d_state
2 num_key_value_heads num_kv_heads kv_n_heads linear_num_key_heads swa_num_key_value_heads encoder_layers
2 num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts num_encoder_layers depth
2 conf_num_hidden_layers laurel_rank zero_expert_num num_global_layers num_lstm_layers
12 qk_head_dim
4 qk_rope_head_dim rotary_dim rotary_dims
"""
"""The size of each field; windows and chunks are shorter than the prompts. With few index heads, which are rectified,
many of their scores would be equal (0), and the choice of the largest would depend on the length of the text."""

_FIELDS: dict[str, Any] = {
    name: int(size) for size, *names in map(str.split, _SIZES.strip().splitlines()) for name in names
}
_FIELDS |= {"eos_token_id": EOS, "bos_token_id": BOS, "pad_token_id": PAD, "tie_word_embeddings": False}
_FIELDS |= {"initializer_range": 0.15, "init_std": 0.15, "is_decoder": True}
_FIELDS |= {"forced_eos_token_id": None, "forced_bos_token_id": None}  # the reference does not know them
_FIELDS |= {"logit_scale": 1.0}  # Cohere's would make all tokens compete
_FIELDS |= {"n_group": 1, "topk_group": 1, "num_expert_group": 1, "first_k_dense_replace": 1}

_LATENT = {"num_key_value_heads": 4, "head_dim": 4}  # latent attention: as many as query heads, rotary dimensions
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
_INDEXED = {"head_dim": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
_INDEXED |= {"indexer_compress_ratio": 4}
_DOTS3 = {
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank"), 32),
    **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("head_dim", "swa_head_dim"), 12),
    "num_key_value_heads": 4,
}
_DECODER_ALONE = {"encoder_layers": NUM_LAYERS}  # the cache is made for as many layers
_ALTERNATING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
_ZAMBA = {
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * (NUM_LAYERS // 3),
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    "num_key_value_heads": 4,
}

_OTHER_PARTS = dict.fromkeys(
    ("vision_config", "audio_config", "patcher_config"), MappingProxyType({"num_hidden_layers": 2, "encoder_layers": 2})
)
"""Parts that do not decode have another number of layers than the decoder, as in real models."""

SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "bailing_hybrid", "deepseek_v3", "deepseek_v32"), _LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "minicpm3", "youtu"), _LATENT),
    **dict.fromkeys(["bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian"], _DECODER_ALONE),
    **dict.fromkeys(["mbart", "mvp", "pegasus", "plbart", "whisper"], _DECODER_ALONE),
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 4]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"] * (NUM_LAYERS // 2)},
    **{key: {"head_dim": 8} for key in ["helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"]},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "longcat_flash": {**_LATENT, "head_dim": 4, "qk_nope_head_dim": 8, "qk_head_dim": 12, "v_head_dim": 8},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": _DOTS3,
    "dots3_note": {
        **{f"text_config.{name}": value for name, value in _DOTS3.items()},
        "vision_config.num_hidden_layers": 42,
        "vision_config.adapter_in_dim": 32,
        "audio_config.adapter_input_size": 32,
    },
    "gemma3n_text": {
        "layer_types": _ALTERNATING,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * NUM_LAYERS,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_LAYERS // 2]], "window_size": 20},
    "inkling_text": {"logits_mup_width_multiplier": 1.0},  # for large models: here all logits would be alike
    "inkling_mm_model": {"text_config.logits_mup_width_multiplier": 1.0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2)},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention"] * (NUM_LAYERS // 3),
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
    },
    "prophetnet": {"num_encoder_layers": NUM_LAYERS},
    "qwen4_exp": {f"text_config.{name}": value for name, value in _INDEXED.items()},
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh"] * (NUM_LAYERS // 2),
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "rwkv": {"rescale_every": 0},  # halves states after they were read
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    **dict.fromkeys(("zamba", "zamba2"), _ZAMBA),
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]} for kind in _ALTERNATING
        },
    },
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
SPECIAL |= {
    key: {"text_config.rope_parameters": _SECTIONS}
    for key in ("glm4v", "glm4v_moe", "glm46v", "glmga", "qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "glm_ocr")
}
"""Further fields by model type; a name with dots is a field of a part, as in ``text_config.num_heads``."""


def small_config(model_type: str) -> PreTrainedConfig:
    """The shrunk configuration of an architecture."""
    return _shrunk(AutoConfig.for_model(model_type), SPECIAL.get(model_type, {}))


def small_model(model_type: str, seed: int = 1) -> PreTrainedModel:
    """A model of an architecture with random weights, float32, in evaluation mode."""
    torch.manual_seed(seed)
    auto: Any = AutoModelForImageTextToText if model_type in WITH_IMAGES else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(small_config(model_type), dtype=torch.float32).eval()
    output = model.get_output_embeddings()
    if output is not None:
        with torch.no_grad():
            output.weight.normal_(std=1.2)  # about every third step is a risk point at gamma = 0.3
    return model


def _shrunk(default: PreTrainedConfig, special: dict[str, Any]) -> PreTrainedConfig:
    fields: dict[str, Any] = {}
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            below = {key.partition(".")[2]: more for key, more in special.items() if key.startswith(f"{name}.")}
            fields[name] = _shrunk(value, {**_OTHER_PARTS.get(name, {}), **below}).to_dict()
        elif name in _FIELDS and value is not None:
            fields[name] = _FIELDS[name]
    return type(default)(**{**fields, **{key: value for key, value in special.items() if "." not in key}})
