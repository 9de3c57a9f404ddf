"""The memory of one answer, measured in several new processes per method.

The size of keys and values is exact, as allocated. The peak of the whole process includes the model and torch, and
varies by a few percent between processes.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from benchmarks.measure import Bench, child
from benchmarks.peak import peak_bytes
from benchmarks.prompts import long_prompt
from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.execution.forward.base import KeyValues
from cocoa_engine.lab.timing import ratio

METHODS = ("greedy", "cocoa-sig")
KINDS = ("key_value_bytes", "peak_bytes")


def peaks(bench: Bench, length: int) -> dict[str, Any]:
    """Peak bytes of greedy and CoCoA-SIG with a prompt of ``length`` tokens, and their ratios."""
    settings = bench.settings
    task = bench.progress.add_task(f"memory, prompt of {length} tokens", total=len(METHODS) * settings.rounds)
    every: dict[str, dict[str, list[int]]] = {method: {kind: [] for kind in KINDS} for method in METHODS}
    for _ in range(settings.rounds):
        for method in METHODS:
            common = {"model": settings.model, "threads": settings.threads, "tokens": settings.tokens}
            argument = json.dumps({**common, "method": method, "length": length})
            for kind, size in child("-m", "benchmarks.memory", argument).items():
                every[method][kind].append(size)
            bench.progress.advance(task)
    greedy, cocoa_sig = (every[method] for method in METHODS)
    return {
        "length": length,
        "methods": every,
        "cocoa_sig_to_greedy": {kind: ratio(cocoa_sig[kind], greedy[kind])._asdict() for kind in KINDS},
    }


def _answer(model: str | None, threads: int, tokens: int, method: str, length: int) -> dict[str, int]:
    """The bytes of keys and values of one answer in this process, and the peak of the process."""
    import torch

    torch.set_num_threads(threads)
    engine = CocoaEngine.from_pretrained(model, runtime=Runtime(prefix_cache_mb=0))
    stores = 0
    for _ in engine.stream(long_prompt(engine, length), method=method, max_new_tokens=tokens):
        stores = max(stores, sum(held.nbytes for held in gc.get_objects() if type(held) is KeyValues))
    return dict(zip(KINDS, (stores, peak_bytes()), strict=True))


if __name__ == "__main__":
    print(json.dumps(_answer(**json.loads(sys.argv[1]))))
