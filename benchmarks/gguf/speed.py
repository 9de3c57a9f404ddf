"""Time per token on the blocks of a file: the engine, the same model in float32, and llama.cpp, in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gguf.rival import llama_cpp
from benchmarks.measure import (
    BLOCKS,
    COCOA_SIG,
    FLOAT32,
    GREEDY,
    LLAMA_CPP,
    NO_DRAFTS,
    Bench,
    Competitor,
    EngineCompetitor,
    one_by_one,
)
from benchmarks.probe import probe
from benchmarks.prompts import questions
from benchmarks.settings import Settings
from cocoa_engine import CocoaEngine, Runtime


def measure(bench: Bench, file: Path, python: Path) -> dict[str, Any]:
    """Compare on the questions of the single-stream benchmark.

    Args:
        bench: with the same model in float32.
        file: the model's GGUF file.
        python: the interpreter of an environment with llama-cpp-python.
    """
    settings = bench.settings
    on_blocks = CocoaEngine.from_pretrained(str(file), device_map=None, runtime=Runtime(prefix_cache_mb=0))
    decoders = engines(on_blocks, settings)
    for method, name in (("greedy", GREEDY), ("cocoa-sig", COCOA_SIG)):
        decoders[f"{name}, {FLOAT32}"] = EngineCompetitor(bench.engine(), method=method, max_new_tokens=settings.tokens)
    cases = one_by_one(questions(bench.loaded, settings.prompts))
    with llama_cpp(python, file, settings.threads, settings.tokens) as rival:
        before = probe()
        competitors: dict[str, Competitor] = {LLAMA_CPP: rival, **decoders}
        comparison = bench.compare("GGUF file", competitors, [cases] * settings.rounds)
        return {
            "file_bytes": file.stat().st_size,
            "llama_cpp": rival.about,
            "equal_answers": _equal(decoders),
            "machine_state": [before, probe()],
            "comparison": comparison,
        }


def engines(engine: CocoaEngine, settings: Settings) -> dict[str, EngineCompetitor]:
    """Greedy decoding and CoCoA-SIG on blocks, with and without drafts."""
    without = CocoaEngine(
        engine.model,
        engine.tokenizer,
        runtime=Runtime(prefix_cache_mb=0, draft_tokens=0),
        model_name=engine.model_name,
    )
    return {
        f"{name}, {BLOCKS}{drafts}": EngineCompetitor(each, method=method, max_new_tokens=settings.tokens)
        for drafts, each in (("", engine), (f", {NO_DRAFTS}", without))
        for method, name in (("greedy", GREEDY), ("cocoa-sig", COCOA_SIG))
    }


def _equal(decoders: dict[str, EngineCompetitor]) -> dict[str, list[int]]:
    """For each method: the number of answers on blocks that are equal to those in float32, and of all."""
    found = {}
    for name in (GREEDY, COCOA_SIG):
        pairs = zip(decoders[f"{name}, {BLOCKS}"].answers(), decoders[f"{name}, {FLOAT32}"].answers(), strict=True)
        same = [one.token_ids == other.token_ids for one, other in pairs]
        found[name] = [sum(same), len(same)]
    return found
