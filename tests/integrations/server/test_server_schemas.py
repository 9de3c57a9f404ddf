"""Schemas that are slow to compile, too long for the model, or cannot be looked at, as a client sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cocoa_engine import confined
from cocoa_engine.confined import FORKS
from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers.served import CHAT, HELLO, post, speaker

pytestmark = pytest.mark.skipif(not FORKS, reason="limits need forked processes")


def asking(schema: dict[str, Any], **rest: Any) -> dict[str, Any]:
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"messages": HELLO, "max_tokens": 4, "response_format": response_format, **rest}


@pytest.mark.slow
async def test_slow_schemas_leave_places_for_others(
    listen: Callable[[FastAPI], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined, "CPU_SECONDS", 1000.0)  # they end for their memory
    engine = speaker(max_batch_size=2, max_queue=30)
    app = create_app(engine, ServerSettings())
    url, statuses = listen(app).url, []
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=200)) as client:
        quick = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        assert (await client.post(CHAT, json=asking(quick))).status_code == 200

        async def ask_slowly(at: int) -> None:
            slow = {"type": "integer", "multipleOf": 99999989 + 2 * at}
            statuses.append((await client.post(CHAT, json=asking(slow, n=2))).status_code)

        slow = []
        for at in range(24):  # with n=2 these ask for more answers than are decoded and queued
            slow.append(asyncio.ensure_future(ask_slowly(at)))
            await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            while len(statuses) < 16:  # the others have half of the places
                await asyncio.sleep(0.05)
        for body in (asking(quick), {"messages": HELLO, "max_tokens": 4}):
            assert (await client.post(CHAT, json=body)).status_code == 200
        assert not all(each.done() for each in slow)
        for each in slow:
            each.cancel()


async def test_what_does_not_fit_the_model_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(speaker(), ServerSettings())
    many = {"type": "object", "properties": {f"property_{at}": {"type": "integer"} for at in range(2000)}}
    monkeypatch.setattr(confined, "started", lambda *_, **__: pytest.fail("compiled"))
    response = await post(app, asking(many))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_process_that_cannot_start_is_the_fault_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    app, asked = create_app(speaker(), ServerSettings()), asking({"type": "boolean"})
    with monkeypatch.context() as patched:
        patched.setattr(confined, "_server", None)
        patched.setattr(confined, "_spares", [])
        patched.setattr("multiprocessing.spawn._python_exe", "/bin/true")
        response = await post(app, asked)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_worker"
    assert (await post(app, asked)).status_code == 200


async def test_the_tools_of_a_request_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the check of a request, the compilation and the comparison of the answer look at."""
    budgets = []
    started = confined.started

    def watched(*args: Any, budget: confined.Budget | None = None, **options: Any) -> Any:
        budgets.append(budget or confined.current_budget())
        return started(*args, budget=budget, **options)

    monkeypatch.setattr(confined, "started", watched)
    monkeypatch.setattr("cocoa_engine.decoding.grammar.started", watched)
    app = create_app(speaker(), ServerSettings())
    for _ in range(2):
        await post(app, asking({"type": "boolean"}, n=2, max_tokens=12))
    assert len(budgets) > 4
    assert len({id(each) for each in budgets}) == 2
