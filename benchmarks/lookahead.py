"""Forward passes per token with ``span_boundary="own"``, with and without speculation past the best finished branch.

    python -m benchmarks.lookahead

The results are counts, which are the same on every machine.
"""

from __future__ import annotations

from unittest.mock import patch

from benchmarks.prompts import questions
from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.decoding import task
from cocoa_engine.decoding.request import FREE_LEAVES

PROMPTS, TOKENS = 8, 64


def passes_per_token(loaded: CocoaEngine, free_leaves: int) -> float:
    """Decoding passes per generated token over some questions. ``free_leaves=1`` turns the speculation off."""
    with patch.object(task, "FREE_LEAVES", free_leaves):
        engine = CocoaEngine(loaded.model, loaded.tokenizer, runtime=Runtime(draft_tokens=0, prefix_cache_mb=0))
        answers = [
            engine.generate(prompt, span_boundary="own", max_new_tokens=TOKENS) for prompt in questions(loaded, PROMPTS)
        ]
    usages = [answer.usage for answer in answers]
    return sum(usage.forward_passes - 1 for usage in usages) / sum(usage.completion_tokens for usage in usages)


def main() -> None:
    """Print the passes per token with and without lookahead."""
    loaded = CocoaEngine.from_pretrained(dtype="float32")
    print(f"with lookahead:    {passes_per_token(loaded, FREE_LEAVES):.2f} passes per token")
    print(f"without lookahead: {passes_per_token(loaded, 1):.2f} passes per token")


if __name__ == "__main__":
    main()
