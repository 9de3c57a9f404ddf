"""The requests of the load: questions of different kinds and lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.prompts import PASSAGES, QUESTIONS

SHORT = Path(__file__).parent.parent / "short_questions.jsonl"
PROMPTS = 64


def prompts() -> list[str]:
    """Questions about passages, longer questions and short ones, mixed."""
    long = [f"{passage}\n\n{question}" for passage, question in PASSAGES]
    short = [json.loads(line)["question"] for line in SHORT.read_text(encoding="utf-8").splitlines()]
    chosen = [*long, *QUESTIONS, *short[: PROMPTS - len(long) - len(QUESTIONS)]]
    return [chosen[number * 27 % PROMPTS] for number in range(PROMPTS)]  # 27 and 64 have no common divisor


def bodies(tokens: int, **fields: Any) -> list[dict[str, Any]]:
    """The requests.

    Args:
        tokens: ``max_tokens``.
        **fields: further fields of each request.
    """
    return [
        {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "model": "m", **fields}
        for prompt in prompts()
    ]
