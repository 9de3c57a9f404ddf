"""A process that ends while streams are open prints nothing about them."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.processes import run

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, sys, threading
from cocoa_integrations.langchain import CocoaLLM as LangChainLLM
from cocoa_integrations.llama_index import CocoaLLM as LlamaIndexLLM
from tests.helpers.engines import endless

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
    if "interrupt" in sys.argv:
        raise KeyboardInterrupt

asyncio.run(main())
print("end")
"""


@pytest.mark.parametrize("how", ["end", "interrupt"])
def test_open_streams_do_not_print_at_exit(how: str) -> None:
    done = run([sys.executable, "-W", "ignore", "-c", PROGRAM, how])
    assert "Exception ignored" not in done.stderr, done.stderr
    assert done.stderr.count("Traceback") == (how == "interrupt")
    assert done.stdout.split() == (["end"] if how == "end" else [])
