"""The metadata of a GGUF file, and whether the model that was made of the file is the one that it means.

Each setting of the file's architecture must agree with the model's config, whichever loader made that. A setting that
no table has is refused by its name: without a scaling, a window or a cap a model gives wrong answers and no error.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cocoa_engine.errors import ModelLoadError, short_repr
from cocoa_engine.model.configs import require_layer_count
from cocoa_engine.model.gguf_reader import GgufFile


class Metadata(Mapping[str, Any]):
    """The settings of a file's architecture, without its name. One for each layer is the value that all have."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.architecture = file, str(file.metadata.get("general.architecture"))

    def __getitem__(self, name: str) -> Any:
        value = self.file.metadata[f"{self.architecture}.{name}"]
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ValueError(f"{self.architecture}.{name} differs between layers")
        return value[0]

    def __iter__(self) -> Iterator[str]:
        prefix = f"{self.architecture}."
        return (key.removeprefix(prefix) for key in self.file.metadata if key.startswith(prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def of_layers(self, name: str, default: Any = None) -> list[Any]:
        """The value for each layer."""
        value, count = self.file.metadata.get(f"{self.architecture}.{name}", default), self["block_count"]
        if isinstance(value, list) and len(value) != count:
            raise ValueError(f"{self.architecture}.{name} is not for {count} layers")
        return value if isinstance(value, list) else [value] * count

    def number(self, name: str) -> Any:
        """A number of the file. One stored as float32 is rounded: 9.999999747378752e-06 means 1e-05."""
        value = self[name]
        return float(f"{value:.7g}") if isinstance(value, float) else value

    @property
    def scaling(self) -> tuple[str, float]:
        """Type and factor of a rotary scaling, but by a tensor. A factor without a type is linear, and 0 is none."""
        kind = str(self.get("rope.scaling.type", "linear"))
        factor = self.get("rope.scaling.factor", self.get("rope.scale_linear")) or 1.0
        return _UNSCALED if kind == "none" or (kind, factor) == ("linear", 1.0) else (kind, factor)


_UNSCALED = ("none", 1.0)

Agrees = Callable[[Any, Any, Metadata], bool]  # whether the value of a setting is that of the model with a config


def _field(*names: str, absent: tuple[Any, ...] = ()) -> Agrees:
    """It is the first of some fields that the config has. Without them, it is one of some values without effect."""

    def agrees(value: Any, config: Any, _: Metadata) -> bool:
        stated = _first(config, *names)
        return any(_same(value, expected) for expected in (absent if stated is None else (stated,)))

    return agrees


def _computed(compute: Callable[[Any], Any]) -> Agrees:
    return lambda value, config, _: _same(value, compute(config))


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _same(value: Any, expected: Any) -> bool:
    """Numbers may be rounded to float32. A number for each layer is the same for all, unless several are expected."""
    if isinstance(value, list) and not isinstance(expected, list):
        return all(_same(item, expected) for item in value)
    if isinstance(value, float) and isinstance(expected, (int, float)):
        return math.isclose(value, expected, rel_tol=1e-6)
    return bool(value == expected)


def _rope(config: Any, layers: str = "full_attention") -> Mapping[str, Any]:
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    return rope.get(layers) or rope


def _head(config: Any, *names: str, layers: str = "full_attention") -> int:
    kinds = getattr(config, "layer_types", None) or ()
    by_layer = getattr(config, "per_layer_config", None)  # of Gemma 4: heads have other sizes in other layers
    of_layer = by_layer[kinds.index(layers)] if by_layer and layers in kinds else config
    size = _first(of_layer, *names, "head_dim")
    return int(config.hidden_size // (_first(config, "num_attention_heads") or 1) if size is None else size)


def _turned(config: Any, size: int, layers: str = "full_attention") -> int:
    """How many numbers of each head the rotary embeddings turn."""
    rope = _rope(config, layers)
    at_all = rope.get("rope_type") == "proportional"  # some of them by 0
    return size if at_all else int(size * rope.get("partial_rotary_factor", 1.0))


def _inner_size(config: Any) -> Any:
    heads, size = (
        _first(config, "linear_num_value_heads", "mamba_n_heads"),
        _first(config, "linear_value_head_dim", "mamba_d_head"),
    )
    return heads * size if heads and size else _first(config, "intermediate_size")


_KEYLESS = ("conv", "linear_attention")


def _has_these_heads(value: Any, config: Any, _: Metadata) -> bool:
    """A list says which layers have none."""
    heads = _first(config, "num_kv_heads", "num_key_value_heads", "num_attention_heads") or 0
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1  # of Falcon
    kinds = getattr(config, "layer_types", None) or ()
    is_listed = isinstance(value, list) and any(kind in _KEYLESS for kind in kinds)
    return _same(value, [0 if kind in _KEYLESS else heads for kind in kinds] if is_listed else heads)


def _of_parts(part: str, agrees: Agrees) -> Agrees:
    """A setting of tensors that a file may not have: it is then without effect."""
    return lambda value, config, metadata: (
        agrees(value, config, metadata) or not any(part in name for name in metadata.file.tensors)
    )


def _has_these_layers(_: Any, config: Any, metadata: Metadata) -> bool:
    """Further layers, which draft tokens, are left out."""
    return bool(metadata["block_count"] == config.num_hidden_layers + metadata.get("nextn_predict_layers", 0))


def _is_scaled_alike(_: Any, config: Any, metadata: Metadata) -> bool:
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    if kind == "longrope":  # by tensors, which a file may have without a type
        return metadata.scaling in (_UNSCALED, (kind, 1.0))
    return metadata.scaling == (_UNSCALED if kind == "default" else (kind, rope.get("factor")))


def _is_windowed_alike(value: Any, config: Any, _: Metadata) -> bool:
    """A list says which layers have a window; of a number n, every n-th has none."""
    layers = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()]
    expected = value if isinstance(value, list) else [(layer + 1) % (value or 1) != 0 for layer in range(len(layers))]
    return layers == expected or not any((*layers, *expected))


def _is_scored_alike(value: Any, config: Any, _: Metadata) -> bool:
    own = _first(config, "attention_multiplier")
    size = _first(config, "query_pre_attn_scalar") or _head(config)
    return _same(value, size**-0.5 if own is None else own) or (not value and own is None)


_OFF = (
    *("leading_dense_block_count", "router_logit_softcapping", "swin_norm", "attention.max_alibi_bias"),
    *("attention.clamp_kqv", "attention.temperature_length", "ssm.dt_b_c_rms"),
)
AGREEING: dict[str, Agrees] = {
    **dict.fromkeys(_OFF, _field(absent=(0,))),
    **dict.fromkeys(
        ("interleave_moe_layer_step", "moe_every_n_layers", "attention.output_scale"), _field(absent=(0, 1))
    ),
    "vocab_size": lambda value, config, metadata: (
        value == config.vocab_size == metadata.file.tensors["token_embd.weight"].shape[0]
    ),
    "context_length": lambda value, config, _: (_first(config, "max_position_embeddings") or value) == value,
    "embedding_length": _field("hidden_size"),
    "block_count": _has_these_layers,
    "nextn_predict_layers": _has_these_layers,
    "feed_forward_length": _of_parts(
        ".ffn_", _computed(lambda config: _first(config, "intermediate_size", "n_inner") or 4 * config.hidden_size)
    ),
    "expert_feed_forward_length": _field("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": _of_parts(
        "_shexp.", _field("shared_expert_intermediate_size", "shared_intermediate_size", absent=(0,))
    ),
    "expert_count": _field("num_experts", "num_local_experts", absent=(0,)),
    "expert_used_count": _field("num_experts_per_tok", absent=(0,)),
    "expert_shared_count": _field("n_shared_experts", absent=(0,)),
    "expert_group_count": _field("n_group", absent=(0, 1)),
    "expert_group_used_count": _field("topk_group", absent=(0, 1)),
    "expert_weights_scale": _field("routed_scaling_factor", absent=(0.0, 1.0)),
    "expert_weights_norm": _field("norm_topk_prob"),
    "expert_gating_func": lambda value, config, _: (
        value in ((2,) if _first(config, "scoring_func") == "sigmoid" else (0, 1))  # 0: not stated
    ),
    "full_attention_interval": lambda value, config, _: (
        [kind == "full_attention" for kind in getattr(config, "layer_types", None) or ()]
        == [(layer + 1) % value == 0 for layer in range(config.num_hidden_layers)]
    ),
    "use_parallel_residual": _field("use_parallel_residual", absent=(False,)),
    "tensor_data_layout": _field(absent=("Meta AI original pth", "jploski")),  # those that llama.cpp reads
    "pooling_type": _field(absent=(0, -1)),
    "logit_scale": _field("logits_scaling", absent=(0.0, 1.0)),
    "residual_scale": _field("residual_multiplier", absent=(0.0, 1.0)),
    "embedding_scale": _field("embedding_multiplier", absent=(0.0, 1.0)),
    "attn_logit_softcapping": _field("attn_logit_softcapping", absent=(0.0,)),
    "final_logit_softcapping": _field("final_logit_softcapping", absent=(0.0,)),
    "embedding_length_per_layer_input": _field("hidden_size_per_layer_input", absent=(0,)),
    "attention.head_count": _field("num_attention_heads", absent=(0,)),
    "attention.head_count_kv": _has_these_heads,
    "attention.key_length": _computed(_head),
    "attention.value_length": _computed(lambda config: _head(config, "v_head_dim")),
    "attention.key_length_swa": _computed(lambda config: _head(config, layers="sliding_attention")),
    "attention.value_length_swa": _computed(lambda config: _head(config, layers="sliding_attention")),
    "attention.layer_norm_epsilon": _field("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": _field("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "attention.causal": _field(absent=(True,)),
    "attention.sliding_window": _computed(lambda config: _first(config, "sliding_window") or 0),
    "attention.sliding_window_pattern": _is_windowed_alike,
    "attention.shared_kv_layers": _field("num_kv_shared_layers", absent=(0,)),
    "attention.scale": _is_scored_alike,
    "rope.dimension_count": _computed(lambda config: _turned(config, _head(config))),
    "rope.dimension_count_swa": _computed(
        lambda config: _turned(config, _head(config, layers="sliding_attention"), "sliding_attention")
    ),
    "rope.dimension_sections": lambda value, config, _: (
        isinstance(value, list)
        and [section for section in value if section] == (_rope(config).get("mrope_section") or [])
    ),
    "rope.freq_base": _computed(lambda config: _rope(config).get("rope_theta")),
    "rope.freq_base_swa": _computed(lambda config: _rope(config, "sliding_attention").get("rope_theta")),
    "rope.scaling.type": _is_scaled_alike,
    "rope.scaling.factor": _is_scaled_alike,
    "rope.scale_linear": _is_scaled_alike,  # the former name
    "rope.scaling.attn_factor": _computed(lambda config: _rope(config).get("attention_factor") or 1.0),
    "rope.scaling.original_context_length": lambda value, config, _: (
        _rope(config).get("original_max_position_embeddings", value) == value  # without effect on other scalings
    ),
    "rope.scaling.finetuned": lambda value, config, metadata: (
        bool(value) == (getattr(config, "position_embedding_type", None) == "rope")
        if metadata.architecture == "granitehybrid"
        else bool(value) or not metadata.architecture.startswith("granite")  # which turn nothing without it
    ),
    "rope.scaling.yarn_ext_factor": _field(absent=(0.0, -1.0)),
    "rope.scaling.yarn_attn_factor": _field(absent=(1.0,)),
    "rope.scaling.yarn_beta_fast": _computed(lambda config: _rope(config).get("beta_fast") or 32.0),
    "rope.scaling.yarn_beta_slow": _computed(lambda config: _rope(config).get("beta_slow") or 1.0),
    "rope.scaling.yarn_log_multiplier": _computed(lambda config: _rope(config).get("mscale_all_dim", 0)),
    "attention.temperature_scale": _computed(lambda config: _rope(config).get("llama_4_scaling_beta", 0)),
    "ssm.conv_kernel": _of_parts(".ssm_", _field("conv_kernel", "linear_conv_kernel_dim", "mamba_d_conv")),
    "ssm.state_size": _of_parts(".ssm_", _field("state_size", "linear_key_head_dim", "mamba_d_state")),
    "ssm.time_step_rank": _of_parts(".ssm_", _field("time_step_rank", "linear_num_value_heads", "mamba_n_heads")),
    "ssm.group_count": _of_parts(".ssm_", _field("linear_num_key_heads", "mamba_n_groups", absent=(0,))),
    "ssm.inner_size": _of_parts(".ssm_", _computed(_inner_size)),
    "shortconv.l_cache": _field("conv_L_cache"),
}
"""By its name without the architecture: when a setting agrees with a config. All others are refused."""

_NEEDED = ("context_length", "embedding_length", "block_count", "attention.head_count")

_LISTS = (
    ".sliding_window_pattern",
    ".dimension_sections",
    "lfm2.attention.head_count_kv",
    "hybrid.attention.head_count_kv",
)
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_WHOLE = ("_count", "_count_kv", "_length", "_size", "_window")
_FLAGS = ("_norm", "_residual", ".causal", ".finetuned", ".dt_b_c_rms", "_bos_token", "_eos_token", "_space_prefix")
_TEXTS = (
    *("general.architecture", "scaling.type", ".tensor_data_layout"),
    *("ggml.model", "ggml.pre", "tokenizer.chat_template"),
)
_TEMPLATES = "tokenizer.chat_template."

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {"general.type": ("model",), "general.quantization_version": (2,)}
"""The only values of keys that would mean another kind of file."""

OTHERS = ("adapter.", "clip.", "diffusion.", "xielu.")
"""How keys begin that no model has which is read. Keys of other parts, and of ``general``, describe the file."""


def require_known(file: GgufFile) -> None:
    """Check that the metadata has no key that would be ignored, values of the right types, and all that a model needs.

    A needed key that it lacks is a KeyError.
    """
    metadata = Metadata(file)
    prefix = f"{metadata.architecture}."
    keys = [key for key in file.metadata if key.startswith(OTHERS)]
    keys += [key for key, values in WITHOUT_EFFECT.items() if file.metadata.get(key, values[0]) not in values]
    _refuse(file, [*keys, *(prefix + name for name in metadata if name not in AGREEING)])
    require_types(file)
    for name in (*_NEEDED, next((name for name in _EPSILONS if name in metadata), _EPSILONS[0])):
        metadata[name]  # a KeyError names it
    layers = metadata["block_count"]
    require_layer_count(layers, f"{file.path}: {prefix}block_count", "GGUF file")
    for key, values in file.metadata.items():
        of_layers = key.startswith(prefix) and isinstance(values, list) and not key.endswith(_LISTS)
        if of_layers and values != values[:1] * layers:
            raise ModelLoadError(f"{file.path}: {key} = {short_repr(values)} is not one value for all {layers} layers")


def require_types(file: GgufFile) -> None:
    """Check that the values of a file have the types of their keys, as in llama.cpp. Those of a layer may be lists."""
    architecture = f"{Metadata(file).architecture}."
    for key, value in file.metadata.items():
        is_setting, what = key.startswith(architecture), "number"
        kinds: tuple[type, ...] = (int, float)
        if key.endswith(_TEXTS) or key.startswith(_TEMPLATES):
            kinds, what = (str,), "text"
        elif key.endswith(_FLAGS):
            kinds, what = (bool,), "truth value"
        elif key.endswith((*_WHOLE, "_token_id")):
            kinds, what = (int,), "whole number"
        elif key.endswith(_LISTS[0]):
            kinds = (int, float, bool)
        values = value if is_setting and isinstance(value, list) else [value]
        is_checked = is_setting or key.startswith(_TEMPLATES) or key.endswith((*_TEXTS, *_FLAGS, "_token_id"))
        if is_checked and any(type(item) not in kinds or (key.endswith(_WHOLE) and item < 0) for item in values):
            raise ModelLoadError(f"{file.path}: {key} = {short_repr(value)} is no {what}")


def require_agreement(file: GgufFile, config: Any) -> None:
    """Check that each setting of the file has the same value in the model with a config."""
    metadata = Metadata(file)
    values = {name: file.metadata[f"{metadata.architecture}.{name}"] for name in metadata}
    ignored = [name for name, value in values.items() if not AGREEING[name](value, config, metadata)]
    _refuse(file, [f"{metadata.architecture}.{name}" for name in ignored])


def _refuse(file: GgufFile, keys: list[str]) -> None:
    if keys:
        ignored = ", ".join(f"{key} = {short_repr(file.metadata[key])}" for key in keys[:4])
        raise ModelLoadError(f"{file.path}: {ignored} would be ignored; use the model's checkpoint instead")
