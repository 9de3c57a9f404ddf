"""The async methods: same answers, never blocking the event loop, and no work after the caller has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
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


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_leaving_a_stream_stops_the_work(asynchronous: bool, llm: CocoaLLM) -> None:
    counter = Counter()
    if asynchronous:
        stream: Any = await llm.astream_complete(PROMPT, **ENDLESS, logits_processor=counter)
        await anext(stream)
        await stream.aclose()
        assert [chunk async for chunk in stream] == []
    else:
        stream = llm.stream_complete(PROMPT, **ENDLESS, logits_processor=counter)
        next(stream)
        stream.close()
    calls, later = await _calls_now_and_later(llm, counter)
    assert calls == later < 100
