"""A forked child: an error for an engine of the parent, in every way to call it, and an engine of its own works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")]

PROGRAM = """
import asyncio, gc, json, os, signal, sys, weakref
import torch
from cocoa_integrations.langchain import CocoaLLM as LangChainLLM
from cocoa_integrations.llama_index import CocoaLLM as LlamaIndexLLM
from cocoa_integrations._shared.workers import in_worker
from tests.helpers.engines import engine_of
from tests.helpers.processors import Held
from tests.helpers.tiny_models import tiny_model

for inside in ("", "held"):
    if not (child := os.fork()):  # a process in which nothing has been computed
        break
    assert os.waitpid(child, 0)[1] == 0
else:
    sys.exit()
torch.set_num_threads(2)

engine, ids = engine_of(tiny_model("llama")), [5, 6, 7]
wide = torch.ones(400_000)
wide.exp().sum()  # torch's own threads run
expected = engine.generate(ids, max_new_tokens=5).token_ids
asyncio.run(in_worker(engine, engine.info))
stream = engine.stream(ids, max_new_tokens=40)
next(stream)
langchain, llama_index = LangChainLLM(engine=engine, max_tokens=3), LlamaIndexLLM(engine=engine, max_tokens=3)
held = Held(engine) if inside else None

reading, writing = os.pipe()
child = os.fork()
if not child:
    signal.alarm(300)
    def said(call):
        try:
            return str(call())
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    outcomes = {
        "generate": said(lambda: engine.generate(ids)),
        "stream": said(lambda: engine.stream(ids)),
        "open stream": said(lambda: next(stream)),
        "generate_batch": said(lambda: engine.generate_batch([ids])),
        "score": said(lambda: engine.score(ids, ids)),
        "info": said(engine.info),
        "encode": said(lambda: engine.encode("a")),
        "other calibrator": said(lambda: engine.without_calibrator().generate(ids)),
        "langchain": said(lambda: langchain.invoke("a")),
        "langchain async": said(lambda: asyncio.run(langchain.ainvoke("a"))),
        "llama_index": said(lambda: llama_index.complete("a")),
        "llama_index async": said(lambda: asyncio.run(llama_index.acomplete("a"))),
    }
    known = weakref.ref(engine)
    stream.close()
    del engine, stream, langchain, llama_index, held
    gc.collect()
    own = engine_of(tiny_model("llama"))
    works = [float(wide.exp().sum() > 0), own.generate(ids, max_new_tokens=5).token_ids,
             asyncio.run(in_worker(own, own.generate, ids, max_new_tokens=5)).token_ids]
    os.write(writing, json.dumps([outcomes, works, torch.get_num_threads()]).encode())
    os._exit(0)
os.close(writing)
answer = os.fdopen(reading).read()
status = os.waitpid(child, 0)[1]
rest = [held.let_go().usage.completion_tokens] if held else []
rest += [engine.generate(ids, max_new_tokens=5).token_ids, len(list(stream)) > 0]
print(json.dumps([inside, status, expected, json.loads(answer or "null"), rest]), flush=True)
"""


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}  # they need not spin
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=560)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("inside", ["", "held"])
def test_a_fork_after_use(done: subprocess.CompletedProcess[str], inside: str) -> None:
    assert done.returncode == 0, done.stderr
    found = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
    status, expected, said, rest = found[inside]
    assert status == 0, "the child hangs"
    outcomes: dict[str, str] = said[0]
    for door, outcome in outcomes.items():
        assert outcome.startswith("ForkedProcessError: this engine was loaded before the process forked"), (
            door,
            outcome,
        )
        assert "spawn" in outcome
    assert "Exception ignored" not in done.stderr
    own: list[Any] = said[1]
    assert own == [1.0, expected, expected]
    assert said[2] == 2, "its own engine computes with several threads"
    assert rest[-2:] == [expected, True]
