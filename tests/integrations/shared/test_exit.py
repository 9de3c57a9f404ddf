"""A process that ends while streams are open or calls run ends as usual, and prints nothing about them."""

from __future__ import annotations

import os
import signal
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
from cocoa_engine.model.light_model import import_model_classes

import_model_classes()  # or torchao writes to stderr when the tests' models are made
from tests.helpers.engines import endless

for how in sys.argv[1:]:
    if not (child := os.fork()):  # which ends as a process that was started anew
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{how}.{name}", os.O_CREAT | os.O_WRONLY), number)
        break
    print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

engine = endless()
streams = [engine.stream([5, 6, 7], max_new_tokens=200)]
streams += [LangChainLLM(engine=engine, max_tokens=200).stream("hello")]
streams += [LlamaIndexLLM(engine=engine, max_tokens=200).stream_complete("hello")]
for stream in streams:
    next(stream)

def note(token_ids, scores):
    begun.set()
    return scores

def read():
    for _ in engine.stream([5, 6], max_new_tokens=400, gamma=1.0, logits_processor=[note]):
        pass

begun = threading.Event()
for _ in range(3 if how == "several" else 1):
    threading.Thread(target=read, daemon=True).start()
begun.wait(100)

async def main():
    for stream in (
        LangChainLLM(engine=engine, max_tokens=200).astream("hello"),
        await LlamaIndexLLM(engine=engine, max_tokens=200).astream_complete("hello"),
    ):
        streams.append(stream)
        await stream.__anext__()
    if how == "interrupt":
        raise KeyboardInterrupt

if how == "open loop":
    (loop := asyncio.new_event_loop()).run_until_complete(main())
else:
    asyncio.run(main())
print("end")
"""

CASES = ("end", "interrupt", "several", "open loop")


def test_open_streams_and_running_calls_do_not_disturb_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)
    done = run([sys.executable, "-W", "ignore", "-c", PROGRAM, *CASES])
    assert (done.returncode, done.stderr) == (0, "")
    statuses = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines())
    assert statuses.pop("interrupt") in ("1", f"-{signal.SIGINT:d}")  # which one depends on Python's version
    assert statuses == {how: "0" for how in CASES if how != "interrupt"}
    for how in CASES:
        stdout, stderr = ((tmp_path / f"{how}.{name}").read_text() for name in ("stdout", "stderr"))
        assert "Exception ignored" not in stderr, stderr
        if how == "interrupt":
            assert (stdout, stderr.count("Traceback"), stderr.splitlines()[-1]) == ("", 1, "KeyboardInterrupt")
            continue
        assert (stdout, stderr) == ("end\n", "")
