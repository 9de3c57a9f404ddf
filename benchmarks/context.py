"""Questions about a passage, whose answers repeat its words: what drafts looked up in the prompt save."""

from __future__ import annotations

from typing import Any

from benchmarks.command import main
from benchmarks.measure import BASE, COCOA_SIG, GREEDY, NO_DRAFTS, Bench, Ours, Way, alone, hugging_face, parts
from benchmarks.prompts import context_questions


def measure(bench: Bench) -> dict[str, Any]:
    """With and without drafts, ours and Hugging Face's."""
    tokens = bench.settings.tokens
    drafts = bench.engine().runtime.draft_tokens
    ways: dict[str, Way] = {
        BASE: hugging_face(bench),
        "HF generate, prompt lookup": hugging_face(bench, prompt_lookup_num_tokens=drafts),
    }
    for name, method in ((GREEDY, "greedy"), (COCOA_SIG, "cocoa-sig")):
        for how, runtime in ((NO_DRAFTS, {"draft_tokens": 0}), ("drafts", {})):
            ways[f"{name}, {how}"] = Ours(bench.engine(**runtime), method=method, max_new_tokens=tokens)
    cases = alone(context_questions(bench.loaded, bench.settings.passages))
    return {"draft_tokens": drafts, "rivals": bench.race("questions about a passage", ways, parts(cases, 4))}


if __name__ == "__main__":
    main("context")
