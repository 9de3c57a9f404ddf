"""Time per kept token on a GPU, for the shape of Llama-3-8B with random weights and scripted risk points.

Random weights generate meaningless text, but they are read from memory as fast as trained ones, and the memory traffic
determines the cost of a step. The risk points are scripted: each pass computes its most probable tokens as usual, and
their probabilities are then replaced, so that risk points occur at a given rate with 2 to 4 candidates each. The
decoders take turns in every round.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --tiny --device cpu      # tries the program; the times mean nothing
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Runtime
from cocoa_engine.decoding import token_feed
from cocoa_engine.decoding.next_tokens import NextTokens, next_tokens
from cocoa_engine.equations import middle_layers
from cocoa_engine.execution.backends import TokenTree, choose
from cocoa_engine.lab.timing import Spread, describe, one_line
from cocoa_engine.model.language_model import CaptureSpec, LanguageModel

LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
TINY = {
    **LLAMA_3_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}

RATES = (0.15, 0.3, 0.5)
"""Risk points per token; a trained model of 135M parameters has 0.3 at gamma = 0.3."""
CANDIDATES = (2, 3, 2, 3, 4)
"""Number of competing tokens at successive risk points: 2.8 on average."""
WIDTHS = (1, 3, 4, 8)
"""Numbers of leaves of the steps that are timed without the decode loop."""

TARGET_MS = 5.0
TARGET_RATIO = 1.05
BANDWIDTH = 4.8
"""Memory bandwidth of an H200, in TB/s."""

HUGGING_FACE, GREEDY = "HF generate, greedy", "CoCoA engine, greedy"
RESULT = Path(__file__).parent / "results" / "gpu.json"


class Script:
    """Replaces :func:`next_tokens`: does the same work, then returns scripted probabilities.

    In each pass either all rows are risk points or none is. The branches of a risk point therefore end together, and
    the rate of risk points per kept token is that of the script.

    Args:
        rate: risk points per token.
        tokens: number of generated tokens.
    """

    def __init__(self, rate: float, tokens: int) -> None:
        self.rate = rate
        self.tokens = tokens
        self.begin()

    def begin(self) -> None:
        """Restart the script for another generation."""
        self.random = Random(0)
        count = round(self.rate * self.tokens)
        competing = [CANDIDATES[number % len(CANDIDATES)] for number in range(count)]
        self.plan = [*competing, *[1] * (self.tokens - count)]  # number of competing tokens at each step
        self.random.shuffle(self.plan)

    def __call__(self, logits: Tensor, count: int, *, native: bool = False) -> list[NextTokens | None]:
        rows = next_tokens(logits, count, native=native)
        competing = self.plan.pop() if self.plan else 1
        return [None if row is None else self._scripted(row, competing) for row in rows]

    def _scripted(self, row: NextTokens, competing: int) -> NextTokens:
        best = -self.random.uniform(0.9, 1.8)  # varies the scores of the branches, so the first does not always win
        rest = len(row.token_ids) - competing
        log_probs = (*(best - 0.2 * rank for rank in range(competing)), *[best - 6.0] * rest)
        return replace(row, log_probs=log_probs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write ``gpu.json``.

    Args:
        arguments: the command line. Default: that of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, to try the measurement")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=256, help="generated tokens (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="length of the prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: %(default)s)")
    parser.add_argument(
        "--bandwidth", type=float, default=BANDWIDTH, help="memory bandwidth in TB/s (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help=f"JSON file (default: results/{RESULT.name}; with --tiny: none)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU; use --tiny --device cpu to try the measurement without one")
    if device.type == "cpu" and not options.tiny:
        parser.error("the 8B shape needs a GPU; on a CPU use --tiny")

    model = random_model(TINY if options.tiny else LLAMA_3_8B, device)
    # no drafts and no prefix cache: every token is decoded, and no decoder reuses the work of another
    runtime = Runtime(draft_tokens=0, prefix_cache_mb=0)
    engine = CocoaEngine(model, word_tokenizer(model.config.vocab_size), runtime=runtime, model_name="random weights")
    prompt = [Random(1).randrange(model.config.vocab_size) for _ in range(options.prompt_tokens)]
    timed = time_decoders(engine, prompt, options.tokens, options.rounds, device)
    read = bytes_read(model)
    record = {
        "machine": describe(),
        "model": {"shape": "tiny" if options.tiny else "Llama-3-8B", "dtype": str(model.dtype), "device": str(device)},
        "forward": engine.info().forward,
        "settings": {name: getattr(options, name) for name in ("tokens", "prompt_tokens", "rounds", "bandwidth")},
        "bytes_read_per_step": read,
        "bandwidth_bound_ms": read / options.bandwidth / 1e9,
        **timed,
        "step_ms": time_steps(model, runtime, prompt, device),
        "targets": targets(timed["decoders"], applies=device.type == "cuda" and not options.tiny),
    }
    show(record)
    out = options.out or (None if options.tiny else RESULT)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def random_model(shape: dict[str, Any], device: torch.device) -> PreTrainedModel:
    """A Llama with random weights, created on the device. It has no end token."""
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        )
    return model.eval()


def word_tokenizer(count: int) -> PreTrainedTokenizerFast:
    """A tokenizer of ``count`` tokens, each of which is one word."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(count)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def bytes_read(model: PreTrainedModel) -> int:
    """Bytes of the weights that a step reads: all except the embeddings, of which it reads one row per token."""
    total: int = sum(weight.nbytes for weight in model.parameters())
    embeddings: Tensor = model.get_input_embeddings().weight
    return total - embeddings.nbytes


def time_decoders(
    engine: CocoaEngine, prompt: list[int], tokens: int, rounds: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Times of complete generations, prompts included, in milliseconds per kept token, and decoding statistics."""
    config = CocoaConfig(max_new_tokens=tokens)
    statistics_of: dict[str, dict[str, float]] = {}

    def hugging_face() -> int:
        ids = torch.tensor([prompt], device=device)
        with torch.no_grad():
            out = engine.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0
            )
        return int(out.shape[1]) - len(prompt)

    def cocoa(name: str, method: str, rate: float) -> Callable[[], int]:
        script = Script(rate, tokens)

        def run() -> int:
            script.begin()
            with patch.object(token_feed, "next_tokens", script):
                generation = engine.generate(prompt, config=config, method=method)
            statistics_of[name] = _decoding_statistics(generation)
            return generation.usage.completion_tokens

        return run

    decoders = {HUGGING_FACE: hugging_face, GREEDY: cocoa(GREEDY, "greedy", 0.0)}
    for rate in RATES:
        name = f"cocoa-sig, {rate}"
        decoders[name] = cocoa(name, "cocoa-sig", rate)
    for decoder in decoders.values():  # warm up, and capture the graphs
        decoder()
    per_token: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in track(range(rounds), description="rounds", console=Console(stderr=True)):
        for name, decoder in decoders.items():
            _wait(device)
            start = time.perf_counter()
            kept = decoder()
            _wait(device)
            per_token[name].append(1000 * (time.perf_counter() - start) / kept)
    found: dict[str, Any] = {}
    for name, values in per_token.items():
        ratios = [value / greedy for value, greedy in zip(values, per_token[GREEDY], strict=True)]
        found[name] = {"ms_per_token": _spread(values), "ratio_to_greedy": _spread(ratios), "rounds_ms": values}
        if name in statistics_of:
            found[name]["decoding"] = statistics_of[name]
    return {"decoders": found}


def time_steps(model: PreTrainedModel, runtime: Runtime, prompt: list[int], device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step without the decode loop, by its number of leaves."""
    backend = choose(LanguageModel(model), runtime).backend
    capture = CaptureSpec(*middle_layers(model.config.num_hidden_layers), "post_norm")
    steps = 50
    found: dict[str, Any] = {}
    for width in WIDTHS:
        tree: TokenTree = backend.open([prompt], steps + 16, capture)[0]
        values = []
        try:
            backend.prefill(tree)
            for step in range(steps):
                paths = [(step + number,) for number in range(width)]
                _wait(device)
                start = time.perf_counter()
                backend.step([(tree, paths)])
                _wait(device)
                values.append(1000 * (time.perf_counter() - start))
                tree.commit(paths[-1])
        finally:
            tree.close()
        found[str(width)] = _spread(values[steps // 5 :])  # without the first steps, which capture the graphs
    return found


def targets(decoders: dict[str, Any], *, applies: bool) -> list[dict[str, Any]]:
    """Each target, and whether it is met: ``None`` unless ``applies``."""
    found = []
    for name, decoder in decoders.items():
        if name in (HUGGING_FACE, GREEDY):
            continue
        for quantity, limit in (("ms_per_token", TARGET_MS), ("ratio_to_greedy", TARGET_RATIO)):
            value = decoder[quantity]["median"]
            met = value <= limit if applies else None
            found.append({"decoder": name, "quantity": quantity, "limit": limit, "value": value, "met": met})
    return found


def show(record: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console()
    table = Table("decoder, risk points per token", "ms per kept token", f"ratio to {GREEDY}")
    for heading in ("candidates per risk point", "tokens per span", "tokens fed per token"):
        table.add_column(heading)
    for name, decoder in record["decoders"].items():
        decoding = decoder.get("decoding", {})
        keys = ("candidates_per_risk_point", "span_tokens", "fed_per_token")
        values = [f"{decoding[key]:.2f}" if decoding.get(key) is not None else "" for key in keys]
        table.add_row(name, _text(decoder["ms_per_token"]), _text(decoder["ratio_to_greedy"]), *values)
    console.print(table)
    steps = ", ".join(f"{width}: {_text(value)}" for width, value in record["step_ms"].items())
    console.print(f"time of a step by its number of leaves, ms: {steps}")
    bound, size = record["bandwidth_bound_ms"], record["bytes_read_per_step"] / 1e9
    console.print(f"bandwidth bound: {bound:.2f} ms ({size:.2f} GB at {record['settings']['bandwidth']} TB/s)")
    console.print(f"forward pass: {record['forward']}; {one_line(record['machine'])}")
    descriptions = {True: "met", False: "NOT met", None: "does not apply"}
    for target in record["targets"]:
        value = f"{target['value']:.2f} (at most {target['limit']})"
        console.print(f"{descriptions[target['met']]}: {target['decoder']}, {target['quantity']} {value}")


def _decoding_statistics(generation: Generation) -> dict[str, float]:
    """Rates of risk points, passes and fed tokens, and averages over the risk points."""
    usage, kept = generation.usage, generation.usage.completion_tokens
    risky = [span for span in generation.spans if span.candidates]
    found = {
        "risk_points_per_token": usage.risk_points / kept,
        "forward_passes_per_token": usage.forward_passes / kept,
        "fed_per_token": usage.fed_tokens / kept,
    }
    if risky:
        found["candidates_per_risk_point"] = statistics.mean(len(span.candidates) for span in risky)
        found["span_tokens"] = statistics.mean(len(span.token_ids) for span in risky)
        found["first_candidate_kept"] = statistics.mean(span.chosen == 0 for span in risky)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return Spread.of(values)._asdict()


def _text(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} [{spread['lowest']:.2f} - {spread['highest']:.2f}]"


if __name__ == "__main__":
    main()
