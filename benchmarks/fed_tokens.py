"""Where the fed tokens of CoCoA-SIG go, by counts that are the same on every machine; see ``decoding.where_fed``."""

from __future__ import annotations

from typing import Any

from benchmarks.command import main
from benchmarks.decoding import where_fed
from benchmarks.measure import NO_DRAFTS, Bench, EngineCompetitor, one_by_one
from benchmarks.prompts import questions, untuned_questions

GROUPS = ("the benchmark's questions", "questions on which nothing was tuned")


def measure(bench: Bench) -> dict[str, Any]:
    """For each group of questions, with and without drafts: tokens fed per kept token, by kind."""
    settings = bench.settings
    groups = (questions(bench.loaded, settings.prompts), untuned_questions(bench.loaded, settings.untuned))
    found: dict[str, Any] = {}
    for group, prompts in zip(GROUPS, groups, strict=True):
        for drafts, runtime in (("drafts", {}), (NO_DRAFTS, {"draft_tokens": 0})):
            decoder = EngineCompetitor(bench.engine(**runtime), method="cocoa-sig", max_new_tokens=settings.tokens)
            task = bench.progress.add_task(f"fed tokens, {group}, {drafts}", total=len(prompts))
            for prompt in one_by_one(prompts):
                decoder(prompt)
                bench.progress.advance(task)
            found[f"{len(prompts)}: {group}, {drafts}"] = where_fed(decoder.answers())
    return {"fed": found}


if __name__ == "__main__":
    main("fed_tokens")
