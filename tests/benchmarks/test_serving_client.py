"""The client of the measurements under load: what it asks again, what it counts, and what it takes for an error."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from benchmarks.serving.client import PATH, ask_all
from benchmarks.serving.first_text import before_first_text
from benchmarks.serving.load import percentile
from benchmarks.serving.memory import is_flat
from cocoa_integrations.server import create_app
from tests.helpers.live_server import served
from tests.helpers.served import HELLO, speaker

BODY = {"messages": HELLO, "max_tokens": 6, "stream_options": {"include_usage": True}}


async def test_answers_of_the_server() -> None:
    engine = speaker(ends=False)
    expected = engine.chat(HELLO, max_new_tokens=6)
    with served(create_app(engine)) as url:
        answers = await ask_all(url, [BODY, BODY, {**BODY, "max_tokens": -1}], at_once=2)
    good = [one for one in answers if one.number < 2]
    assert [(one.text, one.tokens, one.failure) for one in good] == [(expected.text, 6, None)] * 2
    assert all(one.to_first > 0 and len(one.between) == len(one.pieces) - 1 for one in good)
    [bad] = [one for one in answers if one.number == 2]
    assert bad.status == 400
    assert "max_tokens" in str(bad.failure)


async def test_a_refused_call_is_repeated_and_a_cut_stream_is_an_error() -> None:
    app, calls = FastAPI(), []

    @app.post(PATH)
    async def chat() -> Response:
        calls.append(None)
        if len(calls) == 1:
            return Response(status_code=429, headers={"retry-after": "0"})
        return StreamingResponse(iter([b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n']))

    with served(app) as url:
        [answer] = await ask_all(url, [BODY], at_once=1)
    assert (answer.refusals, answer.text, answer.failure) == (1, "half", "the stream has no end")
    [refused] = await ask_all(url, [BODY], at_once=1)
    assert "ClientConnector" in str(refused.failure)


def test_passes_before_the_first_text() -> None:
    """The span is the one that a stream begins with, and the pass over its last token was needed."""
    engine = speaker("Yes, it is.")
    with engine.stream_chat(HELLO, config=engine.config.replace(max_new_tokens=24)) as stream:
        span = next(stream)
    counted = before_first_text(engine, {"messages": HELLO, "max_tokens": 24}, engine.config.method)
    assert span.text
    assert counted["tokens"] == len(span.token_ids)
    assert 1 <= counted["passes"] <= counted["tokens"]
    assert engine.session.scheduler.observers == []


def test_percentiles_and_memory_that_is_flat_when_it_has_not_changed_for_some_steps() -> None:
    assert [percentile(range(1, 101), share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 51, 100, 100]

    def points(*values: float) -> list[dict[str, float]]:
        return [{"unique_mib": value} for value in values]

    assert not is_flat(points(100, 100, 100, 100))
    assert is_flat(points(50, 100, 101, 100, 102, 100))
    assert not is_flat(points(100, 100, 103, 100, 100))
