"""Random models of three families in GGUF files, their matrices in blocks of one type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from cocoa_engine.model.gguf_families import FAMILIES

SPECIAL = {"<unk>": 3, "<s>": 3, "</s>": 3, "<|turn|>": 3, "<added>": 4}  # and their types
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "12"]


def write(
    path: Path,
    architecture: str,
    kind: str,
    *,
    tied: bool = True,
    pre: str = "qwen2",
    scaling: str | None = None,
    factors: torch.Tensor | None = None,
    tensors_in_part: int = 0,
    special: Mapping[str, int] = SPECIAL,
    ids: Mapping[str, int] = MappingProxyType({"bos": 1, "eos": 2, "eot": 3}),
    template: str | None = None,
    norms: str = "F32",
    metadata: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Write a random model as llama.cpp's converter does, and return it with the numbers that the file holds.

    Args:
        special: the first five tokens, with their types.
        ids: the ids that keys of the file name.
        template: the chat template.
        norms: gguf's type of the vectors. A file with others than F32 is unpacked by transformers.
        metadata: keys that replace those of the file, or are added; ``None`` takes one out.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    options = {**sizes, "num_key_value_heads": 2, "vocab_size": len(TOKENS), "tie_word_embeddings": tied}
    options |= {} if architecture == "qwen2" else {"head_dim": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, rms_norm_eps=1e-6, **options)).float()
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_in_part)
    writer.add_block_count(3)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    if architecture != "qwen2":
        writer.add_key_length(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*special, *TOKENS[5:]])
    writer.add_token_types([*special.values()] + [1] * (len(TOKENS) - 5))
    writer.add_token_merges(["h e", "1 2"])
    for name, token_id in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    if template is not None:
        writer.add_chat_template(template)
    names = {ours: theirs for theirs, ours in FAMILIES["qwen3"].layer.items()}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        weight = parameter.numpy()
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            own = names[".".join(parts[3:-1])]
            theirs = f"blk.{parts[2]}.{own}.{parts[-1]}"
        else:
            own = ""
            theirs = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(
                name, "output.weight"
            )
        if architecture == "llama" and own in ("attn_q", "attn_k"):
            weight = weight.reshape(4 if own == "attn_q" else 2, 2, -1, 64).swapaxes(1, 2).reshape(-1, 64)
        if weight.ndim == 2 and kind != "F32":
            packed = gguf.quants.quantize(np.ascontiguousarray(weight), GGMLQuantizationType[kind])
            writer.add_tensor(theirs, packed, raw_dtype=GGMLQuantizationType[kind])
            exact = gguf.quants.dequantize(packed, GGMLQuantizationType[kind])
            if architecture == "llama" and own in ("attn_q", "attn_k"):
                exact = exact.reshape(4 if own == "attn_q" else 2, -1, 2, 64).swapaxes(1, 2).reshape(-1, 64)
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(exact)))
        else:
            writer.add_tensor(theirs, np.ascontiguousarray(weight, dtype={"F32": "f4", "F16": "f2"}[norms]))
    if scaling is not None:
        writer.add_string(f"{architecture}.rope.scaling.type", scaling)
        writer.add_float32(f"{architecture}.rope.scaling.factor", 4.0)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    for key, value in (metadata or {}).items():
        _replace(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


@torch.no_grad()
def write_tiny_gguf(path: Path) -> None:
    """A Llama whose tokens are letters, with a chat template."""
    ids = {"bos": 1, "eos": 2, "padding": 2, "unknown": 0}
    sizes = {"llama.vocab_size": len(TOKENS)}
    write(path, "llama", "Q4_1", pre="smollm", ids=ids, template="{{ messages }}", metadata=sizes)


def _replace(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    for part in writer.kv_data:
        part.pop(key, None)
    if value is not None:
        kind = gguf.GGUFValueType.UINT32 if value in (2**32 - 1,) else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
