"""The client of the measurements under load: what it asks again, what it counts, and what it takes for an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from benchmarks.serving import load, memory
from benchmarks.serving.client import PATH, Streamed, ask_all
from benchmarks.serving.first_text import before_first_text
from benchmarks.serving.load import fifths, percentile
from benchmarks.serving.memory import is_flat
from benchmarks.serving.requests import PROMPTS, bodies, prompts
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


def test_an_error_chunk_is_an_error() -> None:
    answer = Streamed(0, 0.0, [(1.0, b'data: {"error": {"message": "no"}}')], status=200)
    assert "no" in str(answer.failure)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 51), (0.99, 100), (1.0, 100)])
def test_percentile(share: float, expected: int) -> None:
    assert percentile(range(1, 101), share) == expected


def test_requests_differ() -> None:
    assert len(set(prompts())) == len(bodies(5)) == PROMPTS


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


def test_fifths_of_a_run() -> None:
    assert fifths([float(value) for value in range(10)]) == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert fifths([1.0, 2.0]) == [1.0, 2.0]


def test_memory_is_flat_when_it_has_not_changed_for_some_steps() -> None:
    def points(*values: float) -> list[dict[str, float]]:
        return [{"unique_mib": value} for value in values]

    assert not is_flat(points(100, 100, 100, 100))
    assert is_flat(points(50, 100, 101, 100, 102, 100))
    assert not is_flat(points(100, 100, 103, 100, 100))


class FakeServer:
    """Uses 2 seconds for each round, and 3 with glibc's own arenas."""

    url = "http://nowhere"

    def __init__(self, arenas: str | None) -> None:
        self.arenas, self.spent = arenas, 0.0

    def usage(self) -> dict[str, float]:
        self.spent += 1.0 if self.arenas is None else 1.5
        return {"unique_mib": 100.0, "processor_seconds": self.spent}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Starts no servers. By the name of the log of each that would have been: its number of arenas."""
    logs: dict[str, str | None] = {}
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)

    @contextmanager
    def running(command: Any, port: int, threads: int, log: Path) -> Iterator[FakeServer]:
        assert log.name not in logs
        logs[log.name] = os.environ.get("MALLOC_ARENA_MAX")
        yield FakeServer(logs[log.name])

    async def ask_all(url: str, asked: Any, at_once: int) -> list[Streamed]:
        usage = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 4}}'
        return [Streamed(0, 0.0, [(1.0, usage)], status=200)]

    for module in (load, memory):
        monkeypatch.setattr(module, "running", running)
        monkeypatch.setattr(module, "ask_all", ask_all)
    monkeypatch.setattr(memory, "_used", lambda server: server.usage())
    return logs


def test_every_curve_of_the_memory_has_a_log_of_its_own(started: dict[str, str | None], tmp_path: Path) -> None:
    found = memory.measure(6, 16, 1, tmp_path)
    assert list(found["curves"]) == list(memory.CURVES)
    assert [one["answers"] for one in found["curves"]["256 MiB, one arena"]] == [100, 200, 300, 400, 500]  # it is flat
    assert list(started.values()) == ["0", "0", None]
    assert "MALLOC_ARENA_MAX" not in os.environ


def test_the_memory_under_load_is_measured_with_both_allocators(
    started: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_long", lambda server, *_: SimpleNamespace(record={"arenas": server.arenas}))
    found = load.memory(5.0, 3, 16, 1, 8, tmp_path)
    assert list(started.values()) == [None, "0"]
    assert [one["arenas"] for one in found["allocators"].values()] == [None, "0"]
    assert [len(rounds) for rounds in found["rounds"]["tokens_per_second"].values()] == [3, 3]
    assert found["processor_time"]["median"] == pytest.approx(1 / 1.5)
