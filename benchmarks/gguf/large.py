"""A file with the shape of a 7B model and random blocks: time per token beside the limit that memory sets."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from benchmarks.gguf.rival import llama_cpp
from benchmarks.gguf.speed import engines
from benchmarks.measure import LLAMA_CPP, Bench, Competitor
from benchmarks.peak import peak_bytes
from benchmarks.probe import probe
from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.model.gguf_reader import GgufFile

LAYERS, WIDTH, HEADS, INNER = 32, 4096, 32, 11008
PROMPT = 16  # tokens
KIND = gguf.GGMLQuantizationType.Q4_K


def measure(bench: Bench, tokenizer_of: Path, folder: Path, python: Path) -> dict[str, Any]:
    """Make the file, load it, and compare the engine with llama.cpp.

    Args:
        bench: for the settings.
        tokenizer_of: the GGUF file whose tokenizer it gets.
        folder: where the file of about 4 GB is written. It must fit into memory beside the caches.
        python: the interpreter of an environment with llama-cpp-python.
    """
    file = folder / "random-7b.gguf"
    write(file, GgufFile(tokenizer_of))
    start = time.perf_counter()
    engine = CocoaEngine.from_pretrained(str(file), device_map=None, runtime=Runtime(prefix_cache_mb=0))
    loaded = time.perf_counter() - start
    prompts = [
        [[number * PROMPT + token + 100 for token in range(PROMPT)]] for number in range(min(3, bench.settings.prompts))
    ]
    with llama_cpp(python, file, bench.settings.threads, bench.settings.tokens) as rival:
        competitors: dict[str, Competitor] = {LLAMA_CPP: rival, **engines(engine, bench.settings)}
        before, speed = probe(), read_gb_per_s()
        comparison = bench.compare("7B file", competitors, [prompts] * bench.settings.rounds)
    return {
        "file_bytes": file.stat().st_size,
        "load_seconds": loaded,
        "peak_bytes": peak_bytes(),
        "read_gb_per_s": [speed, read_gb_per_s()],
        "machine_state": [before, probe()],
        "comparison": comparison,
    }


def write(path: Path, source: GgufFile) -> None:
    """A Llama of 6.8 billion weights in random Q4_K blocks, never held in float32, with another file's tokenizer."""
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    vocabulary = len(source.metadata["tokenizer.ggml.tokens"])
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_S)
    _copy_tokenizer(writer, source)
    generator = np.random.default_rng(0)
    for name, rows, columns in _matrices(vocabulary):
        writer.add_tensor(name, _random(rows, columns, generator), raw_dtype=KIND)
    for number in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{number}.{norm}.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gb_per_s() -> float:
    """How fast torch's threads read 2 GiB, the best of three."""
    numbers = torch.ones(2**29)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - start)
    return numbers.nbytes / min(times) / 1e9


def _matrices(vocabulary: int) -> list[tuple[str, int, int]]:
    found = [("token_embd.weight", vocabulary, WIDTH), ("output.weight", vocabulary, WIDTH)]
    for number in range(LAYERS):
        parts = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH))
        parts |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
        found += [(f"blk.{number}.{name}.weight", *shape) for name, shape in parts.items()]
    return found


def _random(rows: int, columns: int, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Random Q4_K blocks ``[rows, bytes of a row]``, whose numbers have a mean near 0 and a deviation near 0.02."""
    numbers, size = gguf.GGML_QUANT_SIZES[KIND]
    blocks = np.frombuffer(generator.bytes(rows * columns // numbers * size), np.uint8).reshape(-1, size).copy()
    halves = blocks[:, :4].view(np.float16)
    halves[:, 0], halves[:, 1] = 1e-4, 7.5e-4  # the factor of the scales, and of the minima
    found: np.ndarray[Any, Any] = blocks.reshape(rows, -1)
    return found


def _copy_tokenizer(writer: gguf.GGUFWriter, source: GgufFile) -> None:
    found = source.metadata
    writer.add_tokenizer_model(found["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(found["tokenizer.ggml.pre"])
    writer.add_token_list(found["tokenizer.ggml.tokens"])
    writer.add_token_types(found["tokenizer.ggml.token_type"])
    writer.add_token_merges(found["tokenizer.ggml.merges"])
    writer.add_bos_token_id(found["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(found["tokenizer.ggml.eos_token_id"])
