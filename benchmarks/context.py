"""Prompt-lookup drafts on questions about a passage, whose answers repeat words of the passage."""

from __future__ import annotations

from typing import Any

from benchmarks.command import main
from benchmarks.measure import (
    BASE,
    COCOA_SIG,
    GREEDY,
    NO_DRAFTS,
    Bench,
    Competitor,
    EngineCompetitor,
    hugging_face,
    one_by_one,
    rounds_of_parts,
)
from benchmarks.prompts import context_questions


def measure(bench: Bench) -> dict[str, Any]:
    """Times of the engine and of Hugging Face ``generate``, each with and without drafts."""
    tokens = bench.settings.tokens
    drafts = bench.engine().runtime.draft_tokens
    decoders: dict[str, Competitor] = {
        BASE: hugging_face(bench),
        "HF generate, prompt lookup": hugging_face(bench, prompt_lookup_num_tokens=drafts),
    }
    for name, method in ((GREEDY, "greedy"), (COCOA_SIG, "cocoa-sig")):
        for how, runtime in ((NO_DRAFTS, {"draft_tokens": 0}), ("drafts", {})):
            decoders[f"{name}, {how}"] = EngineCompetitor(bench.engine(**runtime), method=method, max_new_tokens=tokens)
    cases = one_by_one(context_questions(bench.loaded, bench.settings.passages))
    comparison = bench.compare("questions about a passage", decoders, rounds_of_parts(cases, 4))
    return {"draft_tokens": drafts, "comparison": comparison}


if __name__ == "__main__":
    main("context")
