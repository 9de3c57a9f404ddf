"""Time per kept token on a GPU, at the shape of Llama-3-8B with random weights and scripted risk points.

Random weights say nothing worth reading, but they are read from memory as fast as trained ones, and that is what a step
costs. Where candidates compete is scripted: each pass looks up its most probable tokens as ever, and is then told other
probabilities, so that risk points come at a given rate with 2 to 4 candidates each. The ways are interleaved in every
round.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --tiny --device cpu      # whether it runs, not how fast
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
from cocoa_engine.decoding import distributions
from cocoa_engine.decoding.next_tokens import NextTokens, next_tokens
from cocoa_engine.equations import middle_layers
from cocoa_engine.execution.backends import TokenTree, choose
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.studies.machine import describe, one_line
from cocoa_engine.studies.timing import Spread

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
"""How many tokens compete at one risk point after the other: 2.8 on average."""
WIDTHS = (1, 3, 4, 8)
"""Tips of the steps that are timed by themselves."""

TARGET_MS = 5.0
TARGET_RATIO = 1.05
BANDWIDTH = 4.8
"""Of an H200's memory, in TB/s."""

HUGGING_FACE, GREEDY = "transformers generate, greedy", "ours, greedy"
RESULT = Path(__file__).parent / "results" / "gpu.json"


class Script:
    """Stands in for :func:`next_tokens`: the same work, then scripted probabilities.

    Every row of a pass is a risk point or none is, so the branches of a risk point end together and the rate of risk
    points per kept token is the script's.

    Args:
        rate: risk points per token.
        tokens: that are generated.
    """

    def __init__(self, rate: float, tokens: int) -> None:
        self.rate = rate
        self.tokens = tokens
        self.begin()

    def begin(self) -> None:
        """Start over, for another generation."""
        self.random = Random(0)
        count = round(self.rate * self.tokens)
        competing = [CANDIDATES[place % len(CANDIDATES)] for place in range(count)]
        self.plan = [*competing, *[1] * (self.tokens - count)]  # how many compete for each token
        self.random.shuffle(self.plan)

    def __call__(self, logits: Tensor, count: int, *, native: bool = False) -> list[NextTokens | None]:
        rows = next_tokens(logits, count, native=native)
        competing = self.plan.pop() if self.plan else 1
        return [None if row is None else self._told(row, competing) for row in rows]

    def _told(self, row: NextTokens, competing: int) -> NextTokens:
        best = -self.random.uniform(0.9, 1.8)  # spreads the branches' scores: the first one does not always win
        rest = len(row.token_ids) - competing
        log_probs = (*(best - 0.2 * place for place in range(competing)), *[best - 6.0] * rest)
        return replace(row, log_probs=log_probs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model: tries the measurement out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=256, help="generated tokens (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="memory, TB/s (default: %(default)s)")
    parser.add_argument("--out", type=Path, help=f"default: {RESULT.name} beside the other results; tiny: nowhere")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --tiny --device cpu tries the measurement out without one")
    if device.type == "cpu" and not options.tiny:
        parser.error("the 8B shape is for a GPU; on a CPU take --tiny")

    model = random_model(TINY if options.tiny else LLAMA_3_8B, device)
    # no guesses ahead and no prompts remembered: every token is decoded, and no way profits from another
    runtime = Runtime(draft_tokens=0, prefix_cache_mb=0)
    engine = CocoaEngine(model, words(model.config.vocab_size), runtime=runtime, model_name="random weights")
    prompt = [Random(1).randrange(model.config.vocab_size) for _ in range(options.prompt_tokens)]
    timed = time_ways(engine, prompt, options.tokens, options.rounds, device)
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
        "targets": targets(timed["ways"], applies=device.type == "cuda" and not options.tiny),
    }
    show(record)
    out = options.out or (None if options.tiny else RESULT)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def random_model(shape: dict[str, Any], device: torch.device) -> PreTrainedModel:
    """A Llama with random weights, made on the device; it never ends a text."""
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        )
    return model.eval()


def words(count: int) -> PreTrainedTokenizerFast:
    """A tokenizer with a word for each token."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(count)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def bytes_read(model: PreTrainedModel) -> int:
    """The weights that a step reads: all but the embeddings, of which it reads a row for each token."""
    total: int = sum(weight.nbytes for weight in model.parameters())
    embeddings: Tensor = model.get_input_embeddings().weight
    return total - embeddings.nbytes


def time_ways(
    engine: CocoaEngine, prompt: list[int], tokens: int, rounds: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Whole generations, prompts included, in milliseconds per kept token; and what the scripts led to."""
    config = CocoaConfig(max_new_tokens=tokens)
    looks: dict[str, dict[str, float]] = {}

    def hugging_face() -> int:
        ids = torch.tensor([prompt], device=device)
        with torch.no_grad():
            out = engine.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0
            )
        return int(out.shape[1]) - len(prompt)

    def ours(name: str, method: str, rate: float) -> Callable[[], int]:
        script = Script(rate, tokens)

        def run() -> int:
            script.begin()
            with patch.object(distributions, "next_tokens", script):
                generation = engine.generate(prompt, config=config, method=method)
            looks[name] = _look(generation)
            return generation.usage.completion_tokens

        return run

    ways = {HUGGING_FACE: hugging_face, GREEDY: ours(GREEDY, "greedy", 0.0)}
    for rate in RATES:
        name = f"ours, cocoa-sig, {rate}"
        ways[name] = ours(name, "cocoa-sig", rate)
    for way in ways.values():  # warm up, and capture the graphs
        way()
    per_token: dict[str, list[float]] = {name: [] for name in ways}
    for _ in track(range(rounds), description="rounds", console=Console(stderr=True)):
        for name, way in ways.items():
            _wait(device)
            start = time.perf_counter()
            kept = way()
            _wait(device)
            per_token[name].append(1000 * (time.perf_counter() - start) / kept)
    found: dict[str, Any] = {}
    for name, values in per_token.items():
        ratios = [value / greedy for value, greedy in zip(values, per_token[GREEDY], strict=True)]
        found[name] = {"ms_per_token": _spread(values), "ratio_to_our_greedy": _spread(ratios), "rounds_ms": values}
        if name in looks:
            found[name]["decoding"] = looks[name]
    return {"ways": found}


def time_steps(model: PreTrainedModel, runtime: Runtime, prompt: list[int], device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step by itself, without the decode loop, for some numbers of tips."""
    backend = choose(LanguageModel(model), runtime).backend
    wanted = CaptureSpec(*middle_layers(model.config.num_hidden_layers), "post_norm")
    steps = 50
    found: dict[str, Any] = {}
    for width in WIDTHS:
        tree: TokenTree = backend.open([prompt], steps + 16, wanted)[0]
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
        found[str(width)] = _spread(values[steps // 5 :])  # the first ones capture
    return found


def targets(ways: dict[str, Any], *, applies: bool) -> list[dict[str, Any]]:
    """Each target, and whether it is met; none where the measurement was only tried out."""
    found = []
    for name, way in ways.items():
        if name in (HUGGING_FACE, GREEDY):
            continue
        for figure, limit in (("ms_per_token", TARGET_MS), ("ratio_to_our_greedy", TARGET_RATIO)):
            value = way[figure]["median"]
            met = value <= limit if applies else None
            found.append({"way": name, "figure": figure, "limit": limit, "value": value, "met": met})
    return found


def show(record: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console()
    table = Table("way, risk points per token", "ms per kept token", "ratio to our greedy", "candidates", "span", "fed")
    for name, way in record["ways"].items():
        look = way.get("decoding", {})
        keys = ("candidates_per_risk_point", "span_tokens", "fed_per_token")
        figures = [f"{look[key]:.2f}" if look.get(key) is not None else "" for key in keys]
        table.add_row(name, _text(way["ms_per_token"]), _text(way["ratio_to_our_greedy"]), *figures)
    console.print(table)
    steps = ", ".join(f"{width}: {_text(value)}" for width, value in record["step_ms"].items())
    console.print(f"one step by its number of tips, ms: {steps}")
    bound, size = record["bandwidth_bound_ms"], record["bytes_read_per_step"] / 1e9
    console.print(f"bandwidth bound: {bound:.2f} ms ({size:.2f} GB at {record['settings']['bandwidth']} TB/s)")
    console.print(f"forward pass: {record['forward']}; {one_line(record['machine'])}")
    words_for = {True: "met", False: "NOT met", None: "does not apply"}
    for target in record["targets"]:
        value = f"{target['value']:.2f} (at most {target['limit']})"
        console.print(f"{words_for[target['met']]}: {target['way']}, {target['figure']} {value}")


def _look(generation: Generation) -> dict[str, float]:
    """How a decode went."""
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
