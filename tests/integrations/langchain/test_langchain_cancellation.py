"""An async call that is cancelled stops the work, and none ever holds up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler

from cocoa_engine import CocoaEngine, Runtime
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, get_spans
from tests.helpers.in_threads import wait_until
from tests.helpers.inside import assert_idle, calls_waiting, sequences_running
from tests.helpers.processors import Held
from tests.helpers.reports import to_dicts
from tests.helpers.served import Gate, gated, happens

PROMPTS = ["Who invented the telephone?", "One, two, three,", "Once upon a time"]
BEFORE_GATE = 3


@pytest.fixture
def gate(quick_engine: CocoaEngine) -> Iterator[Gate]:
    """It lets some forward passes through, and holds each further one until it is opened."""
    with gated(quick_engine) as gate:
        gate.allow(BEFORE_GATE - 1)
        yield gate


async def reached(gate: Gate) -> None:
    await happens(lambda: gate.reached >= BEFORE_GATE)


async def cancel(task: Any) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def read(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


def is_idle(engine: CocoaEngine) -> bool:
    return sequences_running(engine) == 0 and calls_waiting(engine) == 0


# Greedy decoding at gamma 1 makes one span: nothing comes out of a stream between two forward passes.
LONG: dict[str, Any] = {"method": "greedy", "gamma": 1.0, "max_tokens": 40}
CALLS: dict[str, Callable[[ChatCocoa, CocoaLLM], Any]] = {
    "chat.ainvoke": lambda chat, llm: chat.ainvoke(PROMPTS[0], **LONG),
    "chat.astream": lambda chat, llm: read(chat.astream(PROMPTS[0], **LONG)),
    "chat.abatch": lambda chat, llm: chat.abatch(PROMPTS, **LONG),
    "llm.ainvoke": lambda chat, llm: llm.ainvoke(PROMPTS[0], **LONG),
    "llm.ainvoke streaming": lambda chat, llm: llm.ainvoke(PROMPTS[0], stream=True, **LONG),
    "llm.astream": lambda chat, llm: read(llm.astream(PROMPTS[0], **LONG)),
    "llm.abatch": lambda chat, llm: llm.abatch(PROMPTS, **LONG),
    "llm.abatch in parts": lambda chat, llm: CocoaLLM(engine=llm.load(), batch_size=1).abatch(PROMPTS, **LONG),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@each_call
async def test_cancelling_stops_the_work(call: Any, quick_chat: ChatCocoa, quick_llm: CocoaLLM, gate: Gate) -> None:
    task = asyncio.ensure_future(call(quick_chat, quick_llm))
    await reached(gate)
    await cancel(task)
    gate.open()
    await asyncio.to_thread(wait_until, lambda: is_idle(quick_chat.load()))
    assert gate.reached <= BEFORE_GATE + len(PROMPTS) - 1  # those under way in the threads of a batch


@pytest.mark.slow
@each_call
async def test_the_event_loop_runs_on(call: Any, quick_chat: ChatCocoa, quick_llm: CocoaLLM, gate: Gate) -> None:
    task = asyncio.ensure_future(call(quick_chat, quick_llm))
    await reached(gate)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
    gate.open()
    assert await task
    assert gate.reached > 2 * (BEFORE_GATE + len(PROMPTS))  # so that stopping early is visible above


@each_call
async def test_a_cancelled_call_that_waits_leaves_the_queue(call: Any, quick_engine: CocoaEngine) -> None:
    runtime = Runtime(max_batch_size=1, max_queue=3)
    engine = CocoaEngine(quick_engine.model, quick_engine.tokenizer, runtime=runtime)
    chat, llm, held = ChatCocoa(engine=engine), CocoaLLM(engine=engine), Held(engine)
    task = asyncio.ensure_future(call(chat, llm))
    await asyncio.to_thread(wait_until, lambda: calls_waiting(engine) > 0)
    await cancel(task)
    await asyncio.to_thread(wait_until, lambda: calls_waiting(engine) == 0)
    held.let_go()
    assert_idle(engine)


async def test_async_handlers_hear_of_spans_on_the_event_loop(quick_chat: ChatCocoa, quick_llm: CocoaLLM) -> None:
    class Handler(AsyncCallbackHandler):
        def __init__(self) -> None:
            self.loops: set[Any] = set()
            self.spans = 0

        async def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
            self.loops.add(asyncio.get_running_loop())
            self.spans += len(to_dicts(get_spans(chunk)))

    handler = Handler()
    config: Any = {"callbacks": [handler]}
    spans = [
        span for chunk in await read(quick_chat.astream(PROMPTS[0], config)) for span in to_dicts(get_spans(chunk))
    ]
    assert handler.spans == len(spans) > 1
    await read(quick_llm.astream(PROMPTS[0], config))
    await quick_llm.ainvoke(PROMPTS[0], config, stream=True)
    assert handler.spans > len(spans) + 2
    assert handler.loops == {asyncio.get_running_loop()}
