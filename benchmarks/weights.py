"""Answers of quantised weights beside those of the checkpoint: ``python -m benchmarks.weights [--model MODEL]``.

Perplexity of a fixed text, and how often the most probable next token is that of the original. No times are measured.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.serving.rival import unpacked_into
from cocoa_engine import CocoaEngine, Runtime

TEXT = Path(__file__).parent.parent / "LICENSE"
TOKENS = 1024


def next_tokens(model: str | None, weights: Any, text: str) -> tuple[torch.Tensor, float]:
    """The most probable token after each prefix, and the perplexity of the text."""
    engine = CocoaEngine.from_pretrained(model, runtime=Runtime(weights=weights))
    ids = engine.tokenizer(text, return_tensors="pt")["input_ids"][:, :TOKENS]
    with torch.inference_mode():
        logits = engine.model(ids).logits[0, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    return logits.argmax(-1), math.exp(float(loss))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the embedded model")
    model = parser.parse_args().model
    text = TEXT.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            unpacked_into(Path(folder))
            model = folder
        expected, perplexity = next_tokens(model, "stored", text)
        print("| weights | perplexity | same most probable token |\n| --- | --- | --- |")
        print(f"| stored | {perplexity:.3f} | |")
        for weights in ("q8_0", "q4_k"):
            found, perplexity = next_tokens(model, weights, text)
            print(f"| {weights} | {perplexity:.3f} | {float((found == expected).float().mean()):.3f} |")


if __name__ == "__main__":
    main()
