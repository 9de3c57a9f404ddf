"""One answer at a time: CoCoA-SIG and our greedy decode against ``generate``, on the same model and prompts.

The ways that bars are set for run several rounds over all prompts. The slower and the further rivals run once over all
prompts, in parts, against the same base.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.command import main
from benchmarks.decoding import looks_like
from benchmarks.measure import (
    BASE,
    COCOA_SIG,
    GREEDY,
    LEAN,
    MODULES,
    NO_DRAFTS,
    Bench,
    Ours,
    Way,
    alone,
    hugging_face,
    parts,
)
from benchmarks.prompts import questions
from cocoa_engine import METHODS


def measure(bench: Bench) -> dict[str, Any]:
    """Two races with the same base, and what the decoding looks like."""
    tokens = bench.settings.tokens
    cases = alone(questions(bench.loaded, bench.settings.prompts))

    def ours(method: str, **runtime: Any) -> Ours:
        return Ours(bench.engine(**runtime), method=method, max_new_tokens=tokens)

    modules, lean = {"forward": "modules"}, {"forward": "auto"}
    main_ways: dict[str, Way] = {BASE: hugging_face(bench)}
    for name, runtime in ((MODULES, modules), (LEAN, lean)):
        main_ways[f"{GREEDY}, {name}"] = ours("greedy", **runtime)
        main_ways[f"{COCOA_SIG}, {name}"] = ours("cocoa-sig", **runtime)
        main_ways[f"{GREEDY}, {name}, {NO_DRAFTS}"] = greedy = ours("greedy", draft_tokens=0, **runtime)
        main_ways[f"{COCOA_SIG}, {name}, {NO_DRAFTS}"] = cocoa_sig = ours("cocoa-sig", draft_tokens=0, **runtime)
    # from here on greedy and cocoa_sig are the last two, lean and without drafts
    rivals = bench.race("single stream", main_ways, [cases] * bench.settings.rounds)

    weighed = [len(span.candidates) for answer in cocoa_sig.answers() for span in answer.spans if span.candidates]
    beams = max(2, round(statistics.mean(weighed))) if weighed else 2
    further_ways: dict[str, Way] = {BASE: hugging_face(bench)}
    for count in sorted({beams, 5}):
        further_ways[f"HF generate, {count} beams"] = hugging_face(bench, num_beams=count)
    for name, linears, runtime in ((LEAN, "packed", lean), (MODULES, "stock", modules)):
        further_ways[f"{GREEDY}, {name}, {linears} linears"] = ours("greedy", linears=linears, **runtime)
        further_ways[f"{COCOA_SIG}, {name}, {linears} linears"] = ours("cocoa-sig", linears=linears, **runtime)
    for method in METHODS:
        if method not in ("greedy", "cocoa-sig"):
            further_ways[f"{method}, {LEAN}"] = ours(method, **lean)
    further = bench.race("single stream, further rivals", further_ways, parts(cases, 4))

    return {
        "rivals": rivals,
        "further": further,
        "decoding": looks_like(cocoa_sig.answers(), greedy.answers()),
    }


if __name__ == "__main__":
    main("single_stream")
