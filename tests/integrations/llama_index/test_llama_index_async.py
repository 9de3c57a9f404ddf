"""The async methods: same answers, never blocking the event loop, and no work after the caller has gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
import torch
from llama_index.core.llms import ChatMessage

from cocoa_engine import ConfigError, PromptError
from cocoa_integrations.llama_index import CocoaLLM, CocoaRiskEvent
from tests.helpers.llama_index_helpers import PROMPT, Counter, Listener

ENDLESS = {"max_new_tokens": 400, "method": "greedy", "suppress_tokens": [0, 2]}  # no end-of-text token
QUESTION = [ChatMessage("Name a colour.")]
METHODS: dict[str, tuple[str, Any]] = {
    "acomplete": ("complete", PROMPT),
    "astream_complete": ("stream_complete", PROMPT),
    "achat": ("chat", QUESTION),
    "astream_chat": ("stream_chat", QUESTION),
}


class Slow(Counter):
    """Takes longer than a turn of the event loop."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().__call__(ids, scores)


async def _everything(answer: Awaitable[Any]) -> Any:
    """The response, or the list of a stream's responses."""
    answer = await answer
    return [chunk async for chunk in answer] if isinstance(answer, AsyncIterator) else answer


@pytest.mark.parametrize("method", METHODS)
async def test_async_answers_equal_the_sync_ones(method: str, llm: CocoaLLM, heard: Listener) -> None:
    sync, prompt = METHODS[method]
    expected = getattr(llm, sync)(prompt)
    expected = list(expected) if "stream" in method else expected
    assert await _everything(getattr(llm, method)(prompt)) == expected
    assert len(heard.of(CocoaRiskEvent)) == 2


@pytest.mark.parametrize("method", METHODS)
async def test_the_event_loop_goes_on_turning(method: str, llm: CocoaLLM) -> None:
    counter, seen = Slow(), set()
    task = asyncio.ensure_future(_everything(getattr(llm, method)(METHODS[method][1], logits_processor=counter)))
    while not task.done():
        seen.add(counter.calls)
        await asyncio.sleep(0.005)
    await task
    assert len(seen) > 4  # the loop saw most of the eight tokens being made


@pytest.mark.parametrize("method", METHODS)
async def test_bad_input_raises_when_asked(method: str, llm: CocoaLLM) -> None:
    with pytest.raises(ConfigError, match="unknown option 'alhpa'"):
        await getattr(llm, method)(METHODS[method][1], alhpa=1.0)
    too_long = "word " * 9000
    with pytest.raises(PromptError, match="8192"):
        await getattr(llm, method)([ChatMessage(too_long)] if "chat" in method else too_long)


async def _calls_now_and_later(llm: CocoaLLM, counter: Counter) -> tuple[int, int]:
    """The counter after one further answer, and after another one."""
    await llm.acomplete(PROMPT)
    calls = counter.calls
    await llm.acomplete(PROMPT)
    return calls, counter.calls


@pytest.mark.parametrize("method", METHODS)
async def test_cancelling_stops_the_work_within_a_span(method: str, llm: CocoaLLM, heard: Listener) -> None:
    counter = Counter()
    call = getattr(llm, method)(METHODS[method][1], **ENDLESS, gamma=1.0, logits_processor=counter)  # one long span
    task = asyncio.ensure_future(_everything(call))
    while counter.calls < 3 and not task.done():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    calls, later = await _calls_now_and_later(llm, counter)
    assert calls == later < 100
    assert not [event for event in heard.of(CocoaRiskEvent) if event.generation.usage.completion_tokens > 8]


@pytest.mark.parametrize("leave", ["break", "close", "raise"])
async def test_leaving_a_stream_stops_the_work(leave: str, llm: CocoaLLM) -> None:
    counter = Counter()
    stream: Any = await llm.astream_complete(PROMPT, **ENDLESS, logits_processor=counter)

    async def read_one() -> None:
        async for _ in stream:
            if leave == "raise":
                raise RuntimeError("enough")
            break

    if leave == "raise":
        with pytest.raises(RuntimeError, match="enough"):
            await read_one()
    else:
        await read_one()
    if leave == "close":
        await stream.aclose()
        assert [chunk async for chunk in stream] == []
    calls, later = await _calls_now_and_later(llm, counter)
    assert calls == later < 100
