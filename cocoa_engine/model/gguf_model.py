"""Makes a model from a GGUF file of a known family: its weights stay in their blocks, or are unpacked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from cocoa_engine.errors import ModelLoadError, short_repr
from cocoa_engine.model import experts
from cocoa_engine.model.blocks import BLOCK_KINDS, BlockTensor, joined, q5_0_of
from cocoa_engine.model.configs import context_window_of
from cocoa_engine.model.generation_config import eos_of_gguf
from cocoa_engine.model.gguf_families import (
    EXPERTS,
    FAMILIES,
    LONG_TABLES,
    ROPE_FACTORS,
    TABLES,
    UNPACKED,
    Family,
    config_options,
    family_of,
    path_of,
    tensors_by_path,
)
from cocoa_engine.model.gguf_metadata import Metadata, require_agreement
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.light_model import ARCHITECTURES, LightModel, import_model_classes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def require_read(file: GgufFile) -> None:
    """Check that files of an architecture were compared with transformers' model."""
    architecture, read = Metadata(file).architecture, (*FAMILIES, *UNPACKED)
    if architecture not in read:
        raise ModelLoadError(
            f"{file.path}: GGUF files of the general.architecture {short_repr(architecture)} are not read; use the "
            "model's checkpoint (safetensors) if docs/reference/architectures.md has it as equal, or a file of one of "
            f"the architectures {', '.join(sorted(read))}"
        )


def require_whole(file: GgufFile, model: PreTrainedModel) -> None:
    """Check that a model has as many numbers as its file: transformers leaves out tensors that it does not know."""
    state, layers = model.state_dict(), model.config.num_hidden_layers
    drafts = tuple(f"blk.{layers + number}." for number in range(Metadata(file).get("nextn_predict_layers", 0)))
    stored = sum(math.prod(entry.shape) for name, entry in file.tensors.items() if not name.startswith(drafts))
    weights = [weight for _, weight in model.named_parameters()]
    weights += [buffer for name, buffer in model.named_buffers() if name in state]
    if (numbers := sum(weight.numel() for weight in weights)) != stored:
        raise ModelLoadError(
            f"{file.path} has {stored} numbers, and transformers' model {numbers}: some tensors would be ignored "
            f"({obstacle(file)}); use the model's checkpoint (safetensors) instead"
        )


def obstacle(file: GgufFile) -> str | None:
    """Why the tensors of a file are left to transformers, or ``None``."""
    family = family_of(file)
    if family is None:
        return f"architecture {file.metadata.get('general.architecture')!r}"
    long = [name in file.tensors for name in LONG_TABLES]
    if any(long) and (family.model_type != "phi3" or not all(long)):
        return "rotary factors by length"
    if ROPE_FACTORS in file.tensors and family.model_type == "gemma3_text":
        return f"the tensor {ROPE_FACTORS}"
    unknown = next((name for name in file.tensors if name not in TABLES and path_of(family, name) is None), None)
    if unknown is not None:
        return f"the tensor {unknown}"
    for name, entry in file.tensors.items():
        dimensions = 3 if name.split(".")[-2] in EXPERTS else 2
        is_matrix = entry.kind in (*BLOCK_KINDS, "MXFP4") and len(entry.shape) == dimensions
        if entry.kind != "F32" and (name in TABLES or not is_matrix):
            return f"{name} of type {entry.kind}"
    return None


def context_window(file: GgufFile) -> int | None:
    """The context window that the metadata states, for any architecture."""
    family = family_of(file)
    if family is None:
        return Metadata(file).get("context_length")
    return context_window_of(PreTrainedConfig(**config_options(family, file)))


def load(file: GgufFile, weights: Mapping[str, nn.Parameter] | None = None) -> PreTrainedModel:
    """The model of a file without an :func:`obstacle`, in evaluation mode on the CPU.

    Matrices are :class:`BlockTensor`, or float32 in the mapped file. ``weights`` are the parameters, by transformers'
    names, if they have been read.
    """
    import_model_classes()
    family = cast("Family", family_of(file))
    config = AutoConfig.for_model(family.model_type, **config_options(family, file))
    require_agreement(file, config)
    config._name_or_path = str(file.path)
    model: Any = without_weights(config)
    experts.separate(model, in_gguf=True)
    _place(model, family, file, config, weights or {})
    model.tie_weights()
    for part in (*model.modules(), *model.parameters()):
        part._is_hf_initialized = True  # as ``from_pretrained`` does, so that ``init_weights`` leaves it as it is
    whole: PreTrainedModel = model.eval()
    return whole


def unpacked(file: GgufFile, options: Mapping[str, Any]) -> PreTrainedModel:
    """The model of :func:`load` as of a checkpoint. Options of ``from_pretrained`` override the config of the file."""
    packed: Any = load(file)
    options, dtype = dict(options), options["dtype"]
    weights: dict[str, Tensor] = {}
    for name, weight in packed.named_parameters():
        whole = weight.dequantized() if isinstance(weight, BlockTensor) else weight.detach()
        weights[name] = whole.to(dtype) if isinstance(dtype, torch.dtype) else whole
    config = options.pop("config", None)
    if config is None:
        config = packed.config
        for name in [name for name in options if name in vars(config) and name != "dtype"]:
            setattr(config, name, options.pop(name))
    model: Any = type(packed).from_pretrained(None, config=config, state_dict=experts.fused(weights), **options)
    model.name_or_path = model.config.name_or_path = str(file.path)
    model.generation_config = packed.generation_config
    if ROPE_FACTORS in file.tensors:
        model.model.rotary_emb.inv_freq.copy_(packed.model.rotary_emb.inv_freq)
    return cast("PreTrainedModel", model)


def can_be_light(file: GgufFile) -> bool:
    """Whether :func:`load_light` knows the architecture of a file that has no :func:`obstacle`."""
    return cast("Family", family_of(file)).model_type in ARCHITECTURES


def load_light(file: GgufFile, checked: str = "") -> LightModel:
    """The weights of :func:`load`, and what was found of their lean pass. The model is made when it is asked for."""
    family = cast("Family", family_of(file))
    options = config_options(family, file)
    head_dim = options["hidden_size"] // options["num_attention_heads"]
    config = PreTrainedConfig(**{"head_dim": head_dim, "hidden_act": "silu", **options})
    require_agreement(file, config)
    model = LightModel(config, family.model_type, checked)
    _place(model, family, file, config, {})
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.name_or_path = str(file.path)
    model.build = partial(load, file, dict(model.named_parameters()))
    return model.eval()


def _place(
    model: Any, family: Family, file: GgufFile, config: PreTrainedConfig, weights: Mapping[str, nn.Parameter]
) -> None:
    """Set the parameters of a model except a head that is tied to the embeddings, rotary factors and end tokens."""
    layers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if layers != {str(number) for number in range(len(layers))} or len(layers) != config.num_hidden_layers:
        raise ModelLoadError(f"{file.path} has tensors of {len(layers)} layers, not of {config.num_hidden_layers}")
    left = {name for name, _ in model.named_parameters()}
    if config.tie_word_embeddings:
        left.discard("lm_head.weight")
    for path, names in tensors_by_path(family, [name for name in file.tensors if name not in TABLES]).items():
        if path is None or path not in left:
            raise ModelLoadError(f"{file.path} has a tensor {names[0]} that its metadata does not speak of")
        owner, _, attribute = path.rpartition(".")
        module = model.get_submodule(owner)
        expected = getattr(module, attribute).shape
        weight = weights.get(path)
        if weight is None:
            weight = nn.Parameter(joined([_weight(family, file, name, config) for name in names]), requires_grad=False)
        if weight.shape != expected:
            raise ModelLoadError(f"{file.path}: {names[0]} has the shape {list(weight.shape)}, not {list(expected)}")
        setattr(module, attribute, weight)
        left.remove(path)
    if left:
        raise ModelLoadError(f"{file.path} has no tensor for {sorted(left)[0]}, and {len(left) - 1} more")
    if ROPE_FACTORS in file.tensors:  # Llama 3.1's scaling, by frequency
        factors, frequencies = file.floats(ROPE_FACTORS).flatten(), model.model.rotary_emb.inv_freq
        if factors.shape != frequencies.shape:
            raise ModelLoadError(f"{file.path}: {ROPE_FACTORS} has {len(factors)} factors")
        frequencies /= factors
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=eos_of_gguf(file.metadata), pad_token_id=config.pad_token_id
    )


def _weight(family: Family, file: GgufFile, name: str, config: PreTrainedConfig) -> Tensor:
    """A tensor as transformers' model has it."""
    (kind, shape, *_), part = file.tensors[name], name.split(".")[-2]
    weight: Tensor = file.floats(name) if kind == "F32" else file.blocks(name)
    if family.norm_offset and name.endswith("norm.weight"):
        weight = weight - family.norm_offset
    if family.pairs and part in ("attn_q", "attn_k"):  # from llama.cpp's rotary layout to transformers'
        heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
        weight = weight.view(heads, shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)
    for own, (_, changed) in family.parameters.items():
        weight = changed(weight) if name.endswith(f".{own}") else weight
    if kind == "MXFP4":
        weight, kind = q5_0_of(weight), "Q5_0"
    return weight if kind == "F32" else BlockTensor(weight, kind)


def without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """transformers' float32 model of a config, whose parameters have no memory.

    Its buffers (rotary frequencies, the embeddings' scale) are computed, but not those that a checkpoint holds.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module in model.modules():
        buffers = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
        own = {name: buffer for name, buffer in buffers.items() if buffer is not None and buffer.is_meta}
        computed = []
        for unset in (0, 1) if own else ():  # what is not computed differs
            for name, buffer in own.items():
                setattr(module, name, torch.full(buffer.shape, unset, dtype=buffer.dtype, device="cpu"))
            model._init_weights(module)
            computed.append([getattr(module, name) for name in own])
        for name, *values in zip(own, *computed, strict=True):
            if not torch.equal(*values):
                raise ModelLoadError(f"{type(module).__name__}.{name} is not known without a checkpoint")
    return model
