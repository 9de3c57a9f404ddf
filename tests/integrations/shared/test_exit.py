"""A process that ends while streams are open prints nothing about them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.processes import run

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, os, sys, threading
from cocoa_integrations.langchain import CocoaLLM as LangChainLLM
from cocoa_integrations.llama_index import CocoaLLM as LlamaIndexLLM
from cocoa_engine.model.model_classes import import_model_classes

import_model_classes()  # or torchao writes to stderr when the tests' models are made
from tests.helpers.engines import endless

for how in ("end", "interrupt"):
    if not (child := os.fork()):  # which ends as a process that was started anew
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{how}.{name}", os.O_CREAT | os.O_WRONLY), number)
        break
    os.waitpid(child, 0)
else:
    sys.exit()

engine = endless()
streams = [engine.stream([5, 6, 7], max_new_tokens=200)]
streams += [LangChainLLM(engine=engine, max_tokens=200).stream("hello")]
streams += [LlamaIndexLLM(engine=engine, max_tokens=200).stream_complete("hello")]
for stream in streams:
    next(stream)

def read():
    for _ in engine.stream([5, 6], max_new_tokens=400, gamma=1.0):
        reads.set()

reads = threading.Event()
threading.Thread(target=read, daemon=True).start()
reads.wait(100)

async def main():
    for stream in (
        LangChainLLM(engine=engine, max_tokens=200).astream("hello"),
        await LlamaIndexLLM(engine=engine, max_tokens=200).astream_complete("hello"),
    ):
        streams.append(stream)
        await stream.__anext__()
    if how == "interrupt":
        raise KeyboardInterrupt

asyncio.run(main())
print("end")
"""


def test_open_streams_do_not_print_at_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)
    done = run([sys.executable, "-W", "ignore", "-c", PROGRAM])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for how in ("end", "interrupt"):
        stdout, stderr = ((tmp_path / f"{how}.{name}").read_text() for name in ("stdout", "stderr"))
        assert "Exception ignored" not in stderr, stderr
        assert stderr.count("Traceback") == (how == "interrupt"), stderr
        assert stdout.split() == (["end"] if how == "end" else [])
