"""A random Llama in a GGUF file, as llama.cpp's converter would write it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM


def write_tiny_gguf(path: Path) -> LlamaForCausalLM:
    """Write the file, and return the model: rotary rows are interleaved, some weights quantised."""
    heads, key_heads, width, inner, layers = 4, 2, 64, 96, 3
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "lo"]
    tokens = ["<unk>", "<s>", "</s>", *alphabet]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokens),
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}

    def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
        return weight.reshape(heads, 2, -1, width).swapaxes(1, 2).reshape(-1, width)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * len(alphabet))
    writer.add_token_merges(["h e", "l o"])  # of one, transformers makes no list
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(layers):
        ours = f"model.layers.{layer}."
        for theirs, name in [
            ("attn_norm", "input_layernorm"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_norm", "post_attention_layernorm"),
        ]:
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weights[f"{ours}{name}.weight"])
        for theirs, name, count in [("attn_q", "q_proj", heads), ("attn_k", "k_proj", key_heads)]:
            weight = interleaved(weights[f"{ours}self_attn.{name}.weight"], count)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight)
        for name in ("gate", "up", "down"):
            packed = gguf.quantize(weights[f"{ours}mlp.{name}_proj.weight"], gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"blk.{layer}.ffn_{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
