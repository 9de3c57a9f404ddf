"""Scoring a hundred answers to one question: one call for all of them, compared with one call for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.command import main
from benchmarks.measure import Bench, interleave
from benchmarks.prompts import SCORED_ANSWERS, SCORED_QUESTION, encode_question
from cocoa_engine import CocoaEngine
from cocoa_engine.lab.timing import ratio, timed

TOGETHER, ALONE = "one call", "a call for each"
SHARE = 5  # each round scores only every fifth answer alone, to save time


def measure(bench: Bench) -> dict[str, Any]:
    """Seconds per answer, without a prefix cache between calls."""
    settings = bench.settings
    engine = bench.engine()
    prompt = encode_question(engine, SCORED_QUESTION)
    answers = list(SCORED_ANSWERS[: settings.answers])

    def together(_: int) -> int:
        engine.score(prompt, answers)
        return len(answers)

    def alone(number: int) -> int:
        some = answers[number % SHARE :: SHARE]
        for answer in some:
            engine.score(prompt, answer)
        return len(some)

    with _reads(engine, prompt) as reads:
        engine.score(prompt, answers)
    engine.score(prompt, answers[:2])  # untimed: the first call also checks how the model can be run
    rounds = settings.rounds
    task = bench.progress.add_task("scoring", total=2 * rounds)
    competitors = {TOGETHER: timed(together), ALONE: timed(alone)}
    seconds = interleave(competitors, [[number] for number in range(rounds)], lambda: bench.progress.advance(task))
    return {
        "answers": len(answers),
        "prompt_tokens": len(prompt),
        "prompt_reads": len(reads),
        "seconds": seconds,
        "times_faster": ratio(seconds[ALONE], seconds[TOGETHER])._asdict(),
    }


@contextmanager
def _reads(engine: CocoaEngine, prompt: list[int]) -> Iterator[list[None]]:
    """Yield a list that gets an entry whenever the prompt enters the model.

    The hook makes the engine run the model through its own modules.
    """
    seen: list[None] = []

    def look(_module: Any, inputs: Any) -> None:
        for row in inputs[0].tolist():
            if row[: len(prompt)] == prompt:
                seen.append(None)

    hook = engine.model.get_input_embeddings().register_forward_pre_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


if __name__ == "__main__":
    main("scoring")
