"""The cost of a token by the length of the prompt. The prefill is not timed.

The engine is timed from its first span, ``generate`` from its first token. Both reuse the keys and values of the prompt
from an earlier pass, so that a prompt of thousands of tokens is not encoded in every round. Drafts are off: accepted
drafts would hide the cost of a step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from benchmarks.command import main
from benchmarks.measure import BASE, COCOA_SIG, GREEDY, Bench, Competitor, EngineCompetitor, Prompts, one_by_one
from benchmarks.memory import peaks
from benchmarks.prompts import long_context_questions
from cocoa_engine import Span
from cocoa_engine.lab.timing import Turn, generate, ratio


def measure(bench: Bench) -> dict[str, Any]:
    """A comparison for each prompt length, and the memory at the last length."""
    settings = bench.settings
    by_length: dict[str, Any] = {}
    for length in settings.lengths:
        longest = length == settings.lengths[-1]
        # the shorter ones only show how the cost grows: half the questions, half the tokens, two rounds
        count = settings.passages if longest else max(1, settings.passages // 2)
        cases = one_by_one(long_context_questions(bench.loaded, length, count))
        tokens = settings.tokens if longest else max(16, settings.tokens // 2)
        rounds = settings.rounds if longest else min(2, settings.rounds)
        engine = bench.engine(draft_tokens=0, prefix_cache_mb=4096)
        engines = {
            GREEDY: AfterFirstSpan(engine, method="greedy", max_new_tokens=tokens),
            COCOA_SIG: AfterFirstSpan(engine, method="cocoa-sig", max_new_tokens=tokens),
        }
        decoders: dict[str, Competitor] = {BASE: _after_first_token(bench, cases, tokens), **engines}
        comparison = bench.compare(f"prompt of {length} tokens", decoders, [cases] * rounds)
        pair = (COCOA_SIG, GREEDY)
        per_token = [comparison["competitors"][name]["seconds"] for name in pair]
        per_kept = [engines[name].steps_per_token() for name in pair]
        per_step = [[one / each for one in seconds] for seconds, each in zip(per_token, per_kept, strict=True)]
        comparison["cocoa_sig_to_greedy"] = {
            "per_token": ratio(*per_token)._asdict(),
            "per_step": ratio(*per_step)._asdict(),
            "steps_per_token": dict(zip(pair, per_kept, strict=True)),
        }
        by_length[str(length)] = comparison
    return {"lengths": by_length, "memory": peaks(bench, settings.lengths[-1])}


class AfterFirstSpan(EngineCompetitor):
    """The engine without drafts, timed from its first span. An answer of a single span is timed as a whole."""

    def steps_per_token(self) -> float:
        """Forward passes in the measured time, divided by the tokens that were kept in that time."""
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
    """Number of forward passes of a span without drafts. Each pass adds a token to every unfinished candidate."""
    return max((len(candidate.token_ids) for candidate in span.candidates), default=len(span.token_ids))


def _after_first_token(bench: Bench, cases: Sequence[Prompts], tokens: int) -> Competitor:
    model, tokenizer = bench.loaded.model, bench.loaded.tokenizer
    caches = {}
    with torch.no_grad():
        for (prompt,) in cases:
            ids = torch.tensor([prompt[:-1]], device=model.device)
            caches[tuple(prompt)] = model(ids, use_cache=True, logits_to_keep=1).past_key_values

    def competitor(prompts: Prompts) -> Turn:
        clock = _FromFirstToken()
        known = copy.deepcopy(caches[tuple(prompts[0])])
        (answer,) = generate(model, tokenizer, prompts, tokens, past_key_values=known, streamer=clock)
        return Turn(time.perf_counter() - clock.started, len(answer) - 1)

    return competitor


class _FromFirstToken(BaseStreamer):  # type: ignore[misc]
    """Stores the time of the first new token. ``generate`` calls ``put`` with the prompt, then with each new token."""

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
