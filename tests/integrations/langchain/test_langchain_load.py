"""One ``ChatCocoa`` for many users at once: threads and tasks, streams left midway, mistakes, handlers that fail."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.runnables.utils import add

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.errors import ConfigError
from cocoa_integrations.langchain import ChatCocoa, get_risk, get_spans
from tests.helpers.alike import close, token_counts
from tests.helpers.hooks import hook_count
from tests.helpers.in_threads import together
from tests.helpers.inside import assert_idle, sequences_running
from tests.helpers.processors import Meets
from tests.helpers.reports import to_dicts
from tests.helpers.tiny_models import tiny_model

pytestmark = pytest.mark.slow

USERS = 64
"""Threads, and as many tasks at the same time."""

SETTINGS: list[dict[str, Any]] = [
    {},
    {"method": "greedy"},
    {"alpha": 0.5, "metric": "con_mlds"},
    {"span_boundary": "fixed", "max_span_tokens": 3},
    {"temperature": 1.5, "seed": 3, "gamma": 0.1},
]
KINDS = ("whole", "streamed", "left", "wrong")


class Fails(BaseCallbackHandler):
    """A user's handler with a fault: LangChain logs what it raises."""

    def on_llm_new_token(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a handler's own fault")

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a handler's own fault")


def chat_of(quick_engine: CocoaEngine, **runtime: Any) -> ChatCocoa:
    """The quick model with weights of its own, so that its hooks can be counted."""
    engine = CocoaEngine(tiny_model("llama", seed=6), quick_engine.tokenizer, runtime=Runtime(**runtime))
    return ChatCocoa(engine=engine, max_tokens=10)


def prompt(user: int) -> str:
    """Of a length of its own: batches are ragged, from a few tokens to some hundred."""
    return f"{user} " + f"secret of user {user}; " * (user % 7) + "Who?"


def options(user: int) -> dict[str, Any]:
    """Settings of the call, one of them unknown or out of range for those who do it wrong."""
    if KINDS[user % 4] == "wrong":
        return {"alfa": 1.0} if user % 8 == 3 else {"gamma": 2.0}
    return SETTINGS[user % len(SETTINGS)]


def config(user: int) -> Any:
    return {"callbacks": [Fails()]} if user % 3 == 0 else None


def ask(chat: ChatCocoa, user: int) -> Any:
    """What a user gets: a message, the chunks up to where he leaves, or an error."""
    asked, kind = (prompt(user), config(user)), KINDS[user % 4]
    try:
        if kind == "whole":
            return chat.invoke(*asked, **options(user))
        stream = chat.stream(*asked, **options(user))
        return [next(stream) for _ in range(2)] if kind == "left" else add(list(stream))
    except ConfigError as error:
        return error


async def ask_async(chat: ChatCocoa, user: int) -> Any:
    """See :func:`ask`."""
    asked, kind = (prompt(user), config(user)), KINDS[user % 4]
    try:
        if kind == "whole":
            return await chat.ainvoke(*asked, **options(user))
        async with aclosing(chat.astream(*asked, **options(user))) as stream:
            return [await anext(stream) for _ in range(2)] if kind == "left" else add([chunk async for chunk in stream])
    except ConfigError as error:
        return error


def plain(outcome: Any) -> Any:
    """An outcome as plain data, so that two can be compared."""
    if isinstance(outcome, AIMessage):
        return [
            outcome.text,
            get_risk(outcome).to_dict(),
            to_dicts(get_spans(outcome)),
            token_counts(outcome.usage_metadata),
        ]
    if isinstance(outcome, list):
        return [[chunk.text, to_dicts(get_spans(chunk))] for chunk in outcome]
    if isinstance(outcome, ConfigError):
        return [str(outcome)]
    raise outcome


def test_every_user_gets_what_each_gets_alone(quick_engine: CocoaEngine) -> None:
    alone, shared = chat_of(quick_engine, prefix_cache_mb=0), chat_of(quick_engine, prefix_cache_mb=1)
    expected = [plain(ask(alone, user)) for user in range(2 * USERS)]
    assert [len(one) for one in expected[:4]] == [4, 4, 2, 1]
    lengths = [one[-1]["input_tokens"] for one in expected if len(one) == 4]
    assert max(lengths) > 4 * min(lengths)
    engine = shared.load()
    hooks = hook_count(engine.model)

    def tasks() -> list[Any]:
        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(ask_async(shared, user) for user in range(USERS, 2 * USERS)))

        return asyncio.run(all_of_them())

    threads: list[Callable[[], Any]] = [lambda user=user: ask(shared, user) for user in range(USERS)]
    *outcomes, of_tasks = together([*threads, tasks])
    if isinstance(of_tasks, BaseException):
        raise of_tasks
    actual = [plain(outcome) for outcome in (*outcomes, *of_tasks)]

    assert [user for user in range(2 * USERS) if not close(actual[user], expected[user])] == []
    del outcomes, of_tasks
    gc.collect()
    assert_idle(engine)
    assert hook_count(engine.model) == hooks


WIDE = 36
"""More calls than an event loop, or LangChain, has threads by itself, whatever the number of cores."""


class AllThere:
    """Makes each of ``threads`` threads wait at its first call until all have called."""

    def __init__(self, threads: int) -> None:
        self.barrier, self.seen = threading.Barrier(threads), set[int]()

    def __call__(self, _: int) -> None:
        if threading.get_ident() not in self.seen and len(self.seen) < self.barrier.parties:
            self.seen.add(threading.get_ident())
            self.barrier.wait(60)


@pytest.mark.parametrize("how", ["batch", "abatch", "with configs"])
def test_a_batch_fills_the_engines_batch(how: str, quick_engine: CocoaEngine) -> None:
    chat = chat_of(quick_engine, max_batch_size=WIDE, max_queue=0)
    options: dict[str, Any] = {"stopping_criteria": [Meets(AllThere(WIDE))], "max_tokens": 3}
    prompts = [prompt(user) for user in range(2 * WIDE)]  # the second half waits for the first, and is not refused
    configs: Any = [{"tags": ["a"]} for _ in prompts] if how == "with configs" else None
    if how == "batch":
        answers = chat.batch(prompts, **options)
    else:
        answers = asyncio.run(chat.abatch(prompts, configs, **options))
    assert len(answers) == len(prompts)
    assert_idle(chat.load())


def test_max_concurrency_means_what_it_means_in_langchain(quick_engine: CocoaEngine) -> None:
    chat, most = chat_of(quick_engine, max_batch_size=8), []
    engine = chat.load()
    options: dict[str, Any] = {"stopping_criteria": [Meets(lambda _: most.append(sequences_running(engine)))]}
    prompts = [prompt(user) for user in range(9)]
    asyncio.run(chat.abatch(prompts, {"max_concurrency": 2}, **options))
    chat.batch(prompts, {"max_concurrency": 2}, **options)
    assert max(most) == 2
