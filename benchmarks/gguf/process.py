"""Memory and time to the first token of a new process that answers with a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measure import Bench, child
from benchmarks.probe import probe
from benchmarks.prompts import QUESTIONS, encode_question
from cocoa_engine.lab.timing import Spread

MEMORY = """
import re
from pathlib import Path
def resident():
    return 1024 * int(re.search(r"VmRSS:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""
EMPTY = (
    MEMORY
    + """
import json, torch
torch.zeros(1)
after_torch = resident()
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
print(json.dumps({"torch": after_torch, "transformers": resident()}))
"""
)
ANSWER = (
    MEMORY
    + """
import json, sys, time
model, threads, prompt = json.loads(sys.argv[1])
start = time.perf_counter()
import torch
torch.set_num_threads(threads)
from cocoa_engine import CocoaEngine, Runtime
engine = CocoaEngine.from_pretrained(model, device_map=None, runtime=Runtime(prefix_cache_mb=0))
loaded, memory = time.perf_counter(), resident()
with engine.stream(prompt, max_new_tokens=64) as stream:
    next(stream)
    first = time.perf_counter()
    for _ in stream:
        pass
times = {"load": loaded - start, "first_token": first - start}
print(json.dumps({**times, "after_load": memory, "after_answer": resident()}))
"""
)


def measure(bench: Bench, file: Path) -> dict[str, Any]:
    """For each of some new processes after a first one: seconds since its start, and resident bytes.

    ``VmRSS`` counts the pages of the mapped file that were read.
    """
    settings = bench.settings
    argument = json.dumps([str(file), settings.threads, encode_question(bench.loaded, QUESTIONS[0])])
    task = bench.progress.add_task("new processes", total=2 * settings.rounds)
    found: dict[str, list[float]] = {}
    child("-c", ANSWER, argument)  # what the first start keeps is there from now on
    before = probe()
    for _ in range(settings.rounds):
        for program in (EMPTY, ANSWER):
            for name, value in child("-c", program, argument).items():
                found.setdefault(name, []).append(value)
            bench.progress.advance(task)
    return {
        "file_bytes": file.stat().st_size,
        "machine_state": [before, probe()],
        "processes": {name: {"values": values, **Spread.of(values)._asdict()} for name, values in found.items()},
    }
