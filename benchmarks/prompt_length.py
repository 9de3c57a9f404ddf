"""How the cost of a token grows with the prompt. The prompt itself is not timed.

Ours is timed from the first span on, ``generate`` from the first token on; both have their prompt's keys and values
from an earlier pass, so that a prompt of thousands of tokens is read once and not in every round. Drafts are off: lucky
guesses would hide what a step costs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from benchmarks.command import main
from benchmarks.measure import BASE, COCOA_SIG, GREEDY, Bench, Ours, Prompts, Way, alone
from benchmarks.memory import peaks
from benchmarks.prompts import long_context_questions
from cocoa_engine import Span
from cocoa_engine.studies.hf_generate import generate
from cocoa_engine.studies.timing import Turn, ratio


def measure(bench: Bench) -> dict[str, Any]:
    """A race for each length; the memory at the last one."""
    settings = bench.settings
    by_length: dict[str, Any] = {}
    for length in settings.lengths:
        longest = length == settings.lengths[-1]
        # the shorter ones only show how the cost grows: half the questions, half the tokens, two rounds
        count = settings.passages if longest else max(1, settings.passages // 2)
        cases = alone(long_context_questions(bench.loaded, length, count))
        tokens = settings.tokens if longest else max(16, settings.tokens // 2)
        rounds = settings.rounds if longest else min(2, settings.rounds)
        engine = bench.engine(draft_tokens=0, prefix_cache_mb=4096)
        ours = {
            GREEDY: AfterFirstSpan(engine, method="greedy", max_new_tokens=tokens),
            COCOA_SIG: AfterFirstSpan(engine, method="cocoa-sig", max_new_tokens=tokens),
        }
        ways: dict[str, Way] = {BASE: _after_first_token(bench, cases, tokens), **ours}
        race = bench.race(f"prompt of {length} tokens", ways, [cases] * rounds)
        pair = (COCOA_SIG, GREEDY)
        per_token = [race["ways"][name]["seconds"] for name in pair]
        per_kept = [ours[name].steps_per_token() for name in pair]
        per_step = [[one / each for one in seconds] for seconds, each in zip(per_token, per_kept, strict=True)]
        race["cocoa_sig_to_our_greedy"] = {
            "per_token": ratio(*per_token)._asdict(),
            "per_step": ratio(*per_step)._asdict(),
            "steps_per_token": dict(zip(pair, per_kept, strict=True)),
        }
        by_length[str(length)] = race
    return {"lengths": by_length, "memory": peaks(bench, settings.lengths[-1])}


class AfterFirstSpan(Ours):
    """Ours without drafts, timed from when the first span is had; an answer of one span is timed as a whole."""

    def steps_per_token(self) -> float:
        """Forward passes in the time that is measured, divided by the tokens that were kept there."""
        timed = [span for answer in self.answers() for span in answer.spans[1:] or answer.spans]
        return sum(map(steps, timed)) / sum(len(span.token_ids) for span in timed)

    def __call__(self, prompts: Prompts) -> Turn:
        (prompt,) = prompts
        asked = time.perf_counter()
        with self.engine.stream(prompt, config=self.config) as stream:
            first = next(stream)
            start = time.perf_counter()
            for _ in stream:
                pass
            end = time.perf_counter()
        assert stream.generation is not None
        tokens = self._keep(prompts, [stream.generation])
        if len(stream.generation.spans) == 1:
            return Turn(end - asked, tokens)
        return Turn(end - start, tokens - len(first.token_ids))


def steps(span: Span) -> int:
    """Forward passes that a span took, without drafts: rivals grow in step, up to the longest of them."""
    return max((len(candidate.token_ids) for candidate in span.candidates), default=len(span.token_ids))


def _after_first_token(bench: Bench, cases: Sequence[Prompts], tokens: int) -> Way:
    model, tokenizer = bench.loaded.model, bench.loaded.tokenizer
    read = {}
    with torch.no_grad():
        for (prompt,) in cases:
            ids = torch.tensor([prompt[:-1]], device=model.device)
            read[tuple(prompt)] = model(ids, use_cache=True, logits_to_keep=1).past_key_values

    def way(prompts: Prompts) -> Turn:
        clock = _FromFirstToken()
        known = copy.deepcopy(read[tuple(prompts[0])])
        (answer,) = generate(model, tokenizer, prompts, tokens, past_key_values=known, streamer=clock)
        return Turn(time.perf_counter() - clock.started, len(answer) - 1)

    return way


class _FromFirstToken(BaseStreamer):  # type: ignore[misc]
    """Notes when the first new token is there; ``generate`` puts the prompt first, then token by token."""

    def __init__(self) -> None:
        self.puts = 0
        self.started = 0.0

    def put(self, value: Any) -> None:
        self.puts += 1
        if self.puts == 2:
            self.started = time.perf_counter()

    def end(self) -> None:
        pass


if __name__ == "__main__":
    main("prompt_length")
