"""What the GGUF files of each family, one that was compared with transformers' model, call settings and tensors."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cocoa_engine.model.gguf_metadata import Metadata
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.gguf_tokenizer import token_ids

HEAD = "output.weight"
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The tensors of a Llama layer: the names in GGUF -> those in transformers."""
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
LONG_TABLES = (LONG_FACTORS, SHORT_FACTORS)
TABLES = (ROPE_FACTORS, *LONG_TABLES)  # tensors that are no weights of a module

_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
"""The tensors that hold a matrix of each expert, ``[experts, out, in]``."""
_ROUTER = "ffn_gate_inp"
_NORMS_AROUND = {**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}  # before and after, in Gemma
_Q_BIAS = "blk.0.attn_q.bias"
_LOCAL_ROPE_BASE = 10000.0  # of Gemma 3's windowed layers, unless the file says otherwise


@dataclass(frozen=True)
class Family:
    """How the files of one architecture are read."""

    model_type: str  # transformers' name of the architecture
    layer: Mapping[str, str]  # the tensors of a layer -> transformers' modules, which may have the rows of several
    fields: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}  # of the config, beside those of all families
    keys: Mapping[str, str] = field(default_factory=dict)  # fields that are taken over if the file has their setting
    norm_offset: float = 0.0  # what the file adds to the weights of the norms
    pairs: bool = False  # rows of query and key projections are in llama.cpp's rotary layout (adjacent pairs)
    biases: bool = False  # layers may have biases
    parameters: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = field(default_factory=dict)
    """Tensors of a layer that transformers has in another form: its parameter, and the form."""


def family_of(file: GgufFile) -> Family | None:
    """The family of a file, or ``None`` if it is not known."""
    metadata = Metadata(file)
    if metadata.architecture == "llama" and metadata.get("attention.sliding_window"):
        return _MISTRAL
    if metadata.architecture == "mistral3" and metadata.scaling[0] != "yarn":  # a Mistral 3 before Ministral 3
        return FAMILIES["llama"]
    return FAMILIES.get(metadata.architecture)


def path_of(family: Family, tensor: str) -> str | None:
    """transformers' name of a tensor."""
    if tensor in MODEL_TENSORS:
        return MODEL_TENSORS[tensor]
    block, _, rest = tensor.partition(".")
    layer, _, name = rest.partition(".")
    if block != "blk":
        return None
    if name in family.parameters:
        return f"model.layers.{layer}.{family.parameters[name][0]}"
    part, _, kind = name.rpartition(".")
    if part not in family.layer or kind not in (("weight", "bias") if family.biases else ("weight",)):
        return None
    return f"model.layers.{layer}.{family.layer[part]}.{kind}"


def tensors_by_path(family: Family, names: Iterable[str]) -> dict[str | None, list[str]]:
    """The tensors of each parameter by transformers' names, in the order of its rows."""
    order = {part: number for number, part in enumerate(family.layer)}
    paths: dict[str | None, list[str]] = {}
    for name in sorted(names, key=lambda name: order.get(name.split(".")[-2], 0)):
        paths.setdefault(path_of(family, name), []).append(name)
    return paths


def config_options(family: Family, file: GgufFile) -> dict[str, Any]:
    metadata = Metadata(file)
    heads = metadata["attention.head_count"]
    common = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata["embedding_length"],
        "intermediate_size": metadata["feed_forward_length"],
        "num_hidden_layers": metadata["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": max(metadata.of_layers("attention.head_count_kv", heads)),
        "max_position_embeddings": metadata["context_length"],
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(metadata),
        "tie_word_embeddings": HEAD not in file.tensors,
        "dtype": "float32",
        **token_ids(file),
    }
    stated = {name: metadata.number(key) for name, key in family.keys.items() if key in metadata}
    return common | stated | family.fields(metadata)


def _rope(metadata: Metadata) -> dict[str, Any]:
    kind, factor = metadata.scaling
    scaling = {"rope_type": kind, "factor": factor} if kind == "linear" else {"rope_type": "default"}
    return {**scaling, "rope_theta": metadata.get("rope.freq_base", 10000.0)}


def _head_dim(metadata: Metadata) -> dict[str, Any]:
    width = metadata.get("rope.dimension_count", metadata["embedding_length"] // metadata["attention.head_count"])
    return {"head_dim": metadata.get("attention.key_length", width)}


def _gemma(metadata: Metadata, *, largest: int) -> dict[str, Any]:
    """Scores are divided by the root of a head's size, in the largest model (by its layers) of the width for each."""
    share = metadata["embedding_length"] // metadata["attention.head_count"]
    size = metadata["attention.key_length"]
    return {"head_dim": size, "query_pre_attn_scalar": share if metadata["block_count"] == largest else size}


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    windowed = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", _LOCAL_ROPE_BASE)}
    base = metadata.get("rope.freq_base", 1_000_000.0)
    rope = {"full_attention": {**_rope(metadata), "rope_theta": base}, "sliding_attention": windowed}
    return {**_gemma(metadata, largest=62), "rope_parameters": rope}


def _phi3(metadata: Metadata) -> dict[str, Any]:
    size = metadata["embedding_length"] // metadata["attention.head_count"]
    rope = {**_rope(metadata), "partial_rotary_factor": metadata.get("rope.dimension_count", size) / size}
    file, trained = metadata.file, metadata.get("rope.scaling.original_context_length")
    options = {} if trained is None else {"original_max_position_embeddings": trained}
    if LONG_FACTORS in file.tensors:
        rope |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": trained,
            "long_factor": file.floats(LONG_FACTORS).flatten().tolist(),
            "short_factor": file.floats(SHORT_FACTORS).flatten().tolist(),
        }
        if "rope.scaling.attn_factor" in metadata:
            rope["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return {**options, "rope_parameters": rope, "sliding_window": metadata.get("attention.sliding_window") or None}


def _glm4(metadata: Metadata) -> dict[str, Any]:
    size = metadata.get("attention.key_length", metadata["embedding_length"] // metadata["attention.head_count"])
    turned = metadata.get("rope.dimension_count", size) / size
    rope = {**_rope(metadata), "partial_rotary_factor": turned}
    return {"head_dim": size, "rope_parameters": rope, "attention_bias": _Q_BIAS in metadata.file.tensors}


def _seed(metadata: Metadata) -> dict[str, Any]:
    return {**_head_dim(metadata), "attention_bias": _Q_BIAS in metadata.file.tensors}


def _mistral3(metadata: Metadata) -> dict[str, Any]:
    """Its scores grow with the position beyond the length of its training, by ``attention.temperature_scale``."""
    scaled = metadata.get("rope.scaling.yarn_log_multiplier", 0.0)
    yarn = {
        "rope_type": "yarn",
        "factor": metadata.scaling[1],
        "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", 1.0),
        "mscale": scaled or 1.0,
        "mscale_all_dim": scaled,
        "llama_4_scaling_beta": metadata.get("attention.temperature_scale", 0.0),
        "original_max_position_embeddings": metadata.get(
            "rope.scaling.original_context_length", metadata["context_length"]
        ),
    }
    return {**_head_dim(metadata), "rope_parameters": {**_rope(metadata), **yarn}}


def _granite(metadata: Metadata) -> dict[str, Any]:
    size = metadata["embedding_length"] // metadata["attention.head_count"]
    scale = metadata.number("attention.scale") if metadata.get("attention.scale") else size**-0.5
    return {"attention_multiplier": scale}


def _granite_moe(metadata: Metadata) -> dict[str, Any]:
    return {
        **_granite(metadata),
        "num_local_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "shared_intermediate_size": metadata.get("expert_shared_feed_forward_length", 0),
    }


def _granite_hybrid(metadata: Metadata) -> dict[str, Any]:
    """A layer without keys is a Mamba layer. Without experts, the shared ones are the dense layers."""
    inner, count = metadata["ssm.inner_size"], metadata["ssm.time_step_rank"]
    layers, dense = metadata.of_layers("attention.head_count_kv"), metadata["feed_forward_length"]
    return {
        **_granite(metadata),
        "layer_types": ["full_attention" if heads else "linear_attention" for heads in layers],
        "num_local_experts": metadata.get("expert_count", 0),
        "num_experts_per_tok": metadata.get("expert_used_count", 0),
        "shared_intermediate_size": metadata.get("expert_shared_feed_forward_length", dense),
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned", True) else None,
        "mamba_n_heads": count,
        "mamba_d_head": inner // count,
        "mamba_expand": inner // metadata["embedding_length"],
        "mamba_d_state": metadata["ssm.state_size"],
        "mamba_d_conv": metadata["ssm.conv_kernel"],
        "mamba_n_groups": metadata["ssm.group_count"],
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    """The ends of its scaling are not rounded to whole dimensions."""
    yarn = {
        "rope_type": "yarn",
        "factor": metadata.scaling[1],
        "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", 1.0),
        "truncate": False,
        "original_max_position_embeddings": metadata["rope.scaling.original_context_length"],
    }
    return {
        **_head_dim(metadata),
        "rope_parameters": {**_rope(metadata), **yarn},
        "intermediate_size": metadata["expert_feed_forward_length"],
        "num_local_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
    }


def _llama(metadata: Metadata) -> dict[str, Any]:
    biased = {"attention_bias": _Q_BIAS, "mlp_bias": "blk.0.ffn_up.bias"}
    return {**_head_dim(metadata), **{name: tensor in metadata.file.tensors for name, tensor in biased.items()}}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    used = metadata["expert_used_count"]
    routers = [f"blk.{layer}.{_ROUTER}.weight" for layer in range(metadata["block_count"])]
    return {
        **_head_dim(metadata),
        "num_experts": metadata["expert_count"],
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.get("expert_feed_forward_length") or metadata["feed_forward_length"] // used,
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),  # llama.cpp takes it to be so
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, name in enumerate(routers) if name not in metadata.file.tensors],
    }


_FUSED = {key: path for key, path in LAYER_TENSORS.items() if key not in ("attn_q", "attn_k", "attn_v", "ffn_gate")}
_GLM = {
    **{key: path for key, path in LAYER_TENSORS.items() if key != "ffn_gate"},
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_SEED = {"post_attention_norm" if key == "ffn_norm" else key: path for key, path in LAYER_TENSORS.items()}
_WITHOUT_NORMS = {key: path for key, path in LAYER_TENSORS.items() if not key.endswith("_norm")}
_NO_MLP = {key: path for key, path in LAYER_TENSORS.items() if path.partition(".")[0] != "mlp"}
_GRANITE_MOE = {
    **_NO_MLP,
    _ROUTER: "block_sparse_moe.router",
    **{key: path.replace("mlp", "block_sparse_moe") for key, path in EXPERTS.items()},
    **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp", "ffn_gate", "ffn_up"), "shared_mlp.input_linear"),
    **dict.fromkeys(("ffn_down_shexp", "ffn_down"), "shared_mlp.output_linear"),
}
_GRANITE_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_MAMBA = {
    "ssm_a": ("mamba.A_log", lambda a: (-a).log().flatten()),
    "ssm_d": ("mamba.D", Tensor.flatten),
    "ssm_dt.bias": ("mamba.dt_bias", Tensor.flatten),
    "ssm_norm.weight": ("mamba.norm.weight", Tensor.flatten),
    "ssm_conv1d.weight": ("mamba.conv1d.weight", lambda kernels: kernels[:, None]),
    "ssm_conv1d.bias": ("mamba.conv1d.bias", Tensor.flatten),
}
_MISTRAL = Family("mistral", LAYER_TENSORS, _head_dim, {"sliding_window": "attention.sliding_window"}, pairs=True)

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", LAYER_TENSORS, _llama, pairs=True, biases=True),  # Mistral's files too
    "qwen2": Family("qwen2", LAYER_TENSORS, biases=True),
    "qwen3": Family("qwen3", {**LAYER_TENSORS, **_HEAD_NORMS}, _head_dim),
    "qwen3moe": Family("qwen3_moe", {**LAYER_TENSORS, **_HEAD_NORMS, **EXPERTS, _ROUTER: "mlp.gate"}, _qwen3_moe),
    "phi3": Family("phi3", {**_FUSED, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, _phi3),
    "gemma2": Family(
        "gemma2",
        {**LAYER_TENSORS, **_NORMS_AROUND},
        lambda metadata: _gemma(metadata, largest=46),
        {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            "sliding_window": "attention.sliding_window",
        },
        norm_offset=1.0,
    ),
    "gemma3": Family(
        "gemma3_text",
        {**LAYER_TENSORS, **_HEAD_NORMS, **_NORMS_AROUND},
        _gemma3,
        {"final_logit_softcapping": "final_logit_softcapping", "sliding_window": "attention.sliding_window"},
        norm_offset=1.0,
    ),
    "granite": Family("granite", LAYER_TENSORS, _granite, _GRANITE_KEYS, pairs=True),
    "granitemoe": Family("granitemoeshared", _GRANITE_MOE, _granite_moe, _GRANITE_KEYS, pairs=True),
    "granitehybrid": Family(
        "granitemoehybrid",
        {**_GRANITE_MOE, "ssm_in": "mamba.in_proj", "ssm_out": "mamba.out_proj"},
        _granite_hybrid,
        _GRANITE_KEYS,
        pairs=True,
        parameters=_MAMBA,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        {**_NO_MLP, **EXPERTS, _ROUTER: "mlp.router", "post_attention_norm": "post_attention_layernorm"},
        _gpt_oss,
        {"sliding_window": "attention.sliding_window"},
        biases=True,
        parameters={"attn_sinks.weight": ("self_attn.sinks", Tensor.flatten)},
    ),
    "smollm3": Family("smollm3", LAYER_TENSORS, _head_dim, pairs=True),  # every fourth layer has no positions
    "mistral3": Family("ministral3", LAYER_TENSORS, _mistral3, pairs=True),
    "glm4": Family("glm4", _GLM, _glm4, biases=True),
    "seed_oss": Family("seed_oss", _SEED, _seed, biases=True),
    "ernie4_5": Family("ernie4_5", LAYER_TENSORS, _head_dim),
    "hunyuan-dense": Family(
        "hunyuan_v1_dense",
        {**LAYER_TENSORS, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        _head_dim,
    ),
    "olmo2": Family("olmo2", {**_WITHOUT_NORMS, **_HEAD_NORMS, **_NORMS_AFTER}),
}

UNPACKED = (
    *("bloom", "falcon", "gpt2", "lfm2", "mamba", "minimax-m2", "nemotron"),
    *("qwen2moe", "qwen35", "qwen35moe", "stablelm", "starcoder2"),
)
"""The architectures whose files transformers unpacks; these were compared, too."""
