"""Time per token of CoCoA-SIG and of our greedy decode, as ratios to ``model.generate`` greedy on the same model.

The three are interleaved prompt by prompt in every round, so that a busy machine slows all of them alike; the ratio of
a round is taken over its whole text, and the median over rounds is quoted.

    python -m benchmarks.decode_speed --rounds 5 --out benchmarks/results/decode_speed.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import describe
from cocoa_engine import CocoaConfig, CocoaEngine

QUESTIONS = [
    "What is the capital of Australia, and when was it founded?",
    "Explain why the sky is blue.",
    "Write a Python function that reverses a list.",
    "Name five rivers in Europe.",
    "Summarise the story of Romeo and Juliet.",
    "Who discovered penicillin?",
    "Give me a recipe for pancakes.",
    "What are the rules of chess?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = CocoaEngine.from_pretrained(options.model)
    config = CocoaConfig(max_new_tokens=options.tokens)
    prompts = [engine.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    counts = {"risk_points": 0, "forward_passes": 0, "fed_tokens": 0, "completion_tokens": 0}

    def generate(ids: list[int]) -> int:
        with torch.no_grad():
            tensor = torch.tensor([ids])
            out = engine.model.generate(
                tensor, attention_mask=torch.ones_like(tensor), do_sample=False, max_new_tokens=options.tokens
            )
        return int(out.shape[1]) - len(ids)

    def greedy(ids: list[int]) -> int:
        return engine.generate(ids, config=config, method="greedy").usage.completion_tokens

    def cocoa_sig(ids: list[int]) -> int:
        usage = engine.generate(ids, config=config).usage
        for name in counts:
            counts[name] += getattr(usage, name)
        return usage.completion_tokens

    ways: dict[str, Callable[[list[int]], int]] = {
        "transformers generate, greedy": generate,
        "ours, greedy": greedy,
        "ours, cocoa-sig": cocoa_sig,
    }
    for way in ways.values():  # warm up
        way(prompts[0])
    counts = dict.fromkeys(counts, 0)
    per_token: dict[str, list[float]] = {name: [] for name in ways}
    for _ in track(range(options.rounds), description="rounds", console=Console(stderr=True)):
        seconds, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
        for prompt in prompts:
            for name, way in ways.items():
                start = time.perf_counter()
                tokens[name] += way(prompt)
                seconds[name] += time.perf_counter() - start
        for name in ways:
            per_token[name].append(seconds[name] / tokens[name])

    base = per_token["transformers generate, greedy"]
    ratios = {name: [value / b for value, b in zip(values, base, strict=True)] for name, values in per_token.items()}
    table = Table("way", "ms per token", "ratio (median)", "lowest", "highest")
    for name, values in per_token.items():
        figures = (statistics.median(ratios[name]), min(ratios[name]), max(ratios[name]))
        table.add_row(name, f"{1000 * statistics.median(values):.1f}", *(f"{figure:.2f}" for figure in figures))
    Console().print(table)
    kept = counts["completion_tokens"]
    rates = {name: value / kept for name, value in counts.items() if name != "completion_tokens"}
    Console().print("cocoa-sig, per kept token:", {name: round(value, 2) for name, value in rates.items()})
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "machine": describe(),
            "model": engine.model_name,
            "config": config.model_dump(mode="json"),
            "seconds_per_token": per_token,
            "ratio_to_generate": ratios,
            "per_kept_token": rates,
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
