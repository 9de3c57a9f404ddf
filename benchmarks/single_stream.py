"""One answer at a time: CoCoA-SIG and the engine's greedy decoding against Hugging Face ``generate``.

The decoders that have targets run several rounds over all prompts. Further decoders, some of them slow, run once over
all prompts, divided into rounds, against the same base.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from benchmarks.command import main
from benchmarks.measure import (
    BASE,
    BLOCKS,
    COCOA_SIG,
    GREEDY,
    LEAN,
    MODULES,
    NO_DRAFTS,
    Bench,
    Competitor,
    EngineCompetitor,
    hugging_face,
    one_by_one,
    rounds_of_parts,
)
from benchmarks.prompts import questions
from cocoa_engine import METHODS, CocoaEngine, Generation, Runtime


def measure(bench: Bench) -> dict[str, Any]:
    """Two comparisons with the same base, and the statistics of the decoding."""
    tokens = bench.settings.tokens
    cases = one_by_one(questions(bench.loaded, bench.settings.prompts))

    def cocoa(method: str, **runtime: Any) -> EngineCompetitor:
        return EngineCompetitor(bench.engine(**runtime), method=method, max_new_tokens=tokens)

    modules, lean = {"forward": "modules"}, {"forward": "auto"}
    decoders: dict[str, Competitor] = {BASE: hugging_face(bench)}
    for name, runtime in ((MODULES, modules), (LEAN, lean)):
        decoders[f"{GREEDY}, {name}"] = cocoa("greedy", **runtime)
        decoders[f"{COCOA_SIG}, {name}"] = cocoa("cocoa-sig", **runtime)
        decoders[f"{GREEDY}, {name}, {NO_DRAFTS}"] = greedy = cocoa("greedy", draft_tokens=0, **runtime)
        decoders[f"{COCOA_SIG}, {name}, {NO_DRAFTS}"] = cocoa_sig = cocoa("cocoa-sig", draft_tokens=0, **runtime)
    # now greedy and cocoa_sig are those of the last iteration: lean and without drafts
    if bench.settings.model is None:
        on_blocks = CocoaEngine.from_pretrained(runtime=Runtime(prefix_cache_mb=0))
        for name, method in ((GREEDY, "greedy"), (COCOA_SIG, "cocoa-sig")):
            decoders[f"{name}, {BLOCKS}"] = EngineCompetitor(on_blocks, method=method, max_new_tokens=tokens)
    comparison = bench.compare("single stream", decoders, [cases] * bench.settings.rounds)

    competing = [len(span.candidates) for answer in cocoa_sig.answers() for span in answer.spans if span.candidates]
    beams = max(2, round(statistics.mean(competing))) if competing else 2
    further_decoders: dict[str, Competitor] = {BASE: hugging_face(bench)}
    for count in sorted({beams, 5}):
        further_decoders[f"HF generate, {count} beams"] = hugging_face(bench, num_beams=count)
    for name, linears, runtime in ((LEAN, "packed", lean), (MODULES, "stock", modules)):
        further_decoders[f"{GREEDY}, {name}, {linears} linears"] = cocoa("greedy", linears=linears, **runtime)
        further_decoders[f"{COCOA_SIG}, {name}, {linears} linears"] = cocoa("cocoa-sig", linears=linears, **runtime)
    for method in METHODS:
        if method not in ("greedy", "cocoa-sig", "sample"):
            further_decoders[f"{method}, {LEAN}"] = cocoa(method, **lean)
    further = bench.compare("single stream, further decoders", further_decoders, rounds_of_parts(cases, 4))

    return {
        "comparison": comparison,
        "further": further,
        "decoding": decoding_statistics(cocoa_sig.answers(), greedy.answers()),
    }


def decoding_statistics(answers: Sequence[Generation], greedy: Sequence[Generation]) -> dict[str, Any]:
    """Statistics of a branching method.

    Args:
        answers: its answers.
        greedy: the answers of greedy decoding to the same prompts, in the same order.
    """
    kept = sum(answer.usage.completion_tokens for answer in answers)
    chosen = [span for answer in answers for span in answer.spans if span.candidates]
    lengths = [len(span.token_ids) for span in chosen]
    pairs = zip(answers, greedy, strict=True)
    return {
        "prompts": len(answers),
        "tokens": kept,
        "risk_points_per_token": len(chosen) / kept,
        "candidates_per_risk_point": statistics.mean(len(span.candidates) for span in chosen) if chosen else None,
        "first_candidate_kept": statistics.mean(span.chosen == 0 for span in chosen) if chosen else None,
        "span_tokens_mean": statistics.mean(lengths) if lengths else None,
        "tokens_apart_from_greedy": sum(_tokens_apart(one.token_ids, other.token_ids) for one, other in pairs) / kept,
    }


def _tokens_apart(tokens: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens without a counterpart in the other text, after the two texts are aligned."""
    matcher = SequenceMatcher(None, tokens, other, autojunk=False)
    return len(tokens) - sum(block.size for block in matcher.get_matching_blocks())


if __name__ == "__main__":
    main("single_stream")
