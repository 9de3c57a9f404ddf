"""Makes a model and its tokenizer from a GGUF file, whose weights stay in their blocks.

It covers what it was compared with: the architectures and tokenizers named below. transformers reads all other files.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from cocoa_engine.errors import ModelLoadError
from cocoa_engine.model.blocks import BLOCK_KINDS, BlockTensor
from cocoa_engine.model.embedded import CONTROL_TOKEN, LAYER_TENSORS, MODEL_TENSORS
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.language_model import require_layer_count

logger = logging.getLogger(__name__)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TENSORS = {**LAYER_TENSORS, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"

USER_TOKEN = 4  # GGUF's token type for tokens that were added and are not special
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PIECES = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {  # the published rules, by GGUF's name
    "smollm": None,  # every digit is a piece of its own, then GPT-2's rule applies
    "qwen2": _CONTRACTIONS + _PIECES % "",
    "llama-bpe": _CONTRACTIONS + _PIECES % "{1,3}",
}


def obstacle(file: GgufFile) -> str | None:
    """Why a file is left to transformers, or ``None``."""
    found = file.metadata
    architecture = found.get("general.architecture")
    if architecture not in ARCHITECTURES:
        return f"architecture {architecture!r}"
    if found.get("tokenizer.ggml.model") != "gpt2" or found.get("tokenizer.ggml.pre") not in PRE_TOKENIZERS:
        return f"tokenizer {found.get('tokenizer.ggml.model')!r}, {found.get('tokenizer.ggml.pre')!r}"
    if found.get(f"{architecture}.expert_count", 0):
        return "a mixture of experts"
    if _scaling(file) not in (None, "linear"):
        return f"rotary embeddings scaled by {_scaling(file)!r}"
    for name, entry in file.tensors.items():
        if name == ROPE_FACTORS and entry.kind == "F32":
            continue
        if _name(name) is None or (architecture == "llama" and name.endswith(".bias")):
            return f"the tensor {name}"
        if entry.kind != "F32" and (entry.kind not in BLOCK_KINDS or len(entry.shape) != 2):
            return f"{name} of type {entry.kind}"
    return None


def require_few_layers(file: GgufFile) -> None:
    """Check the number of layers in the metadata, before a config of that size is built.

    Raises:
        UnsupportedModelError: it is not a whole number, or more than any model has.
    """
    field = f"{file.metadata.get('general.architecture')}.block_count"
    if (layers := file.metadata.get(field)) is not None:
        require_layer_count(layers, f"{file.path}: {field}", "GGUF file")


def has_scaled_positions(file: GgufFile) -> bool:
    """Whether the rotary embeddings are scaled. transformers does not read this from most files."""
    return _scaling(file) is not None or ROPE_FACTORS in file.tensors


def _scaling(file: GgufFile) -> str | None:
    kind = file.metadata.get(f"{file.metadata.get('general.architecture')}.rope.scaling.type", "none")
    return None if kind == "none" else str(kind)


def context_window(file: GgufFile) -> int | None:
    """The context window that the metadata states, for any architecture."""
    return file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")


def load(file: GgufFile) -> PreTrainedModel:
    """The model, in evaluation mode on the CPU. Matrices are :class:`BlockTensor`, or float32 in the mapped file.

    Args:
        file: one without an :func:`obstacle`.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the metadata says.
    """
    config = _config(file)
    layers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if layers != {str(number) for number in range(len(layers))} or len(layers) != config.num_hidden_layers:
        raise ModelLoadError(f"{file.path} has tensors of {len(layers)} layers, not of {config.num_hidden_layers}")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    left = {name for name, _ in model.named_parameters()}
    for name, entry in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        path = _name(name)
        if path is None or path not in left:
            raise ModelLoadError(f"{file.path} has a tensor {name} that its metadata does not speak of")
        owner, _, attribute = path.rpartition(".")
        module = model.get_submodule(owner)
        expected = getattr(module, attribute).shape
        weight = _weight(file, name, config)
        if tuple(weight.shape) != tuple(expected):
            raise ModelLoadError(f"{file.path}: {name} has the shape {list(entry.shape)}, not {list(expected)}")
        setattr(module, attribute, nn.Parameter(weight, requires_grad=False))
        left.remove(path)
    if left:
        raise ModelLoadError(f"{file.path} has no tensor for {sorted(left)[0]}, and {len(left) - 1} more")
    model.tie_weights()
    decoder = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config)  # its buffers were not computed on the meta device
    if ROPE_FACTORS in file.tensors:  # Llama 3.1's scaling, by frequency
        factors = file.floats(ROPE_FACTORS).flatten()
        if factors.shape != decoder.rotary_emb.inv_freq.shape:
            raise ModelLoadError(f"{file.path}: {ROPE_FACTORS} has {len(factors)} factors")
        decoder.rotary_emb.inv_freq /= factors
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=_ends(file), pad_token_id=config.pad_token_id
    )
    return model.eval()


def load_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer of the file, a byte-level BPE."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    found = file.metadata
    tokens: list[str] = found["tokenizer.ggml.tokens"]
    kinds: list[int] = found["tokenizer.ggml.token_type"]
    pre: str = found["tokenizer.ggml.pre"]
    merges = [tuple(merge.split(" ", 1)) for merge in found["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    rule = PRE_TOKENIZERS[pre]
    first = (
        pre_tokenizers.Digits(individual_digits=True) if rule is None else pre_tokenizers.Split(Regex(rule), "isolated")
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    pairs = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind == CONTROL_TOKEN]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == USER_TOKEN])
    special = {
        f"{role}_token": tokens[number]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (number := found.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    if found.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
                ),
            ]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        name_or_path=str(file.path),
        chat_template=found.get("tokenizer.chat_template"),
        model_max_length=found[f"{found['general.architecture']}.context_length"],
        clean_up_tokenization_spaces=False,
        **special,
    )


def _name(tensor: str) -> str | None:
    """transformers' name of a tensor."""
    if tensor in MODEL_TENSORS:
        return MODEL_TENSORS[tensor]
    if tensor == _HEAD:
        return "lm_head.weight"
    parts = tensor.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _TENSORS or parts[3] not in ("weight", "bias"):
        return None
    return f"model.layers.{parts[1]}.{_TENSORS[parts[2]]}.{parts[3]}"


def _weight(file: GgufFile, name: str, config: PreTrainedConfig) -> Tensor:
    entry = file.tensors[name]
    weight: Tensor = file.floats(name) if entry.kind == "F32" else file.blocks(name)
    part = name.split(".")[-2]
    if config.model_type == "llama" and part in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
        weight = _unpermuted(weight, heads)
    return weight if entry.kind == "F32" else BlockTensor(weight, entry.kind)


def _unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a query or key projection from llama.cpp's rotary layout to transformers'; a copy."""
    count, size = rows.shape
    return rows.view(heads, count // heads // 2, 2, size).transpose(1, 2).reshape(count, size)


def _config(file: GgufFile) -> PreTrainedConfig:
    found = file.metadata
    architecture = found["general.architecture"]

    def value(key: str, default: Any = None) -> Any:
        return found.get(f"{architecture}.{key}", default)

    try:
        heads, width = value("attention.head_count"), value("embedding_length")
        options = {
            "vocab_size": file.tensors["token_embd.weight"].shape[0],
            "hidden_size": width,
            "intermediate_size": value("feed_forward_length"),
            "num_hidden_layers": value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": value("attention.head_count_kv", heads),
            "max_position_embeddings": found[f"{architecture}.context_length"],
            # stored as float32: 9.999999747378752e-06 means 1e-05
            "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon'):.7g}"),
            "rope_parameters": {"rope_theta": value("rope.freq_base", 10000.0), **_scaled(file)},
            "tie_word_embeddings": _HEAD not in file.tensors,
            "bos_token_id": found.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": found.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": found.get("tokenizer.ggml.padding_token_id"),
            "dtype": "float32",
        }
        if architecture != "qwen2":
            options["head_dim"] = value("attention.key_length", value("rope.dimension_count", width // heads))
        config = AutoConfig.for_model(architecture, **options)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelLoadError(f"the metadata of {file.path} is incomplete or wrong ({error})") from error
    config._name_or_path = str(file.path)
    return config


def _scaled(file: GgufFile) -> dict[str, Any]:
    if _scaling(file) is None:
        return {"rope_type": "default"}
    return {
        "rope_type": "linear",
        "factor": file.metadata[f"{file.metadata['general.architecture']}.rope.scaling.factor"],
    }


def _ends(file: GgufFile) -> list[int] | int | None:
    """The tokens that end an answer: the end of the text, and the end of a turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = list(dict.fromkeys(file.metadata[key] for key in keys if key in file.metadata))
    return found[0] if len(found) == 1 else found or None
