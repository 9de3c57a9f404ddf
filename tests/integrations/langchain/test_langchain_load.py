"""Many users at once: threads, tasks, streams left midway, mistakes, handlers that fail; calls that are cancelled."""

import asyncio
import contextlib
import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.runnables.utils import add
from llama_index.core.llms import ChatMessage

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.errors import ConfigError
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, get_risk, get_spans
from cocoa_integrations.llama_index import CocoaLLM as LlamaIndexLLM
from cocoa_integrations.llama_index import collect_risk
from tests.helpers.alike import close, to_dicts, token_counts
from tests.helpers.in_threads import Held, Meets, happens, together, wait_until
from tests.helpers.inside import Gate, assert_idle, calls_waiting, gated, hook_count, sequences_running
from tests.helpers.tiny_models import tiny_model

USERS = 32
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


def prompt_of(user: int) -> str:
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
    asked, kind = (prompt_of(user), config(user)), KINDS[user % 4]
    try:
        if kind == "whole":
            return chat.invoke(*asked, **options(user))
        stream = chat.stream(*asked, **options(user))
        return [next(stream) for _ in range(2)] if kind == "left" else add(list(stream))
    except ConfigError as error:
        return error


async def ask_async(chat: ChatCocoa, user: int) -> Any:
    """See :func:`ask`."""
    asked, kind = (prompt_of(user), config(user)), KINDS[user % 4]
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["batch", "abatch", "with configs"])
def test_a_batch_fills_the_engines_batch(how: str, quick_engine: CocoaEngine) -> None:
    chat = chat_of(quick_engine, max_batch_size=WIDE, max_queue=0)
    options: dict[str, Any] = {"stopping_criteria": [Meets(AllThere(WIDE))], "max_tokens": 3}
    prompts = [prompt_of(user) for user in range(2 * WIDE)]  # the second half waits for the first, and is not refused
    configs: Any = [{"tags": ["a"]} for _ in prompts] if how == "with configs" else None
    if how == "batch":
        answers = chat.batch(prompts, **options)
    else:
        answers = asyncio.run(chat.abatch(prompts, configs, **options))
    assert len(answers) == len(prompts)
    assert_idle(chat.load())


@pytest.mark.slow
def test_max_concurrency_means_what_it_means_in_langchain(quick_engine: CocoaEngine) -> None:
    chat, most = chat_of(quick_engine, max_batch_size=8), []
    engine = chat.load()
    options: dict[str, Any] = {"stopping_criteria": [Meets(lambda _: most.append(sequences_running(engine)))]}
    prompts = [prompt_of(user) for user in range(9)]
    asyncio.run(chat.abatch(prompts, {"max_concurrency": 2}, **options))
    chat.batch(prompts, {"max_concurrency": 2}, **options)
    assert max(most) == 2


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
    return [chunk async for chunk in (await stream if inspect.isawaitable(stream) else stream)]


def is_idle(engine: CocoaEngine) -> bool:
    return sequences_running(engine) == 0 and calls_waiting(engine) == 0


# Greedy decoding at gamma 1 makes one span: nothing comes out of a stream between two forward passes.
LONG: dict[str, Any] = {"method": "greedy", "gamma": 1.0, "max_new_tokens": 40}
CALLS: dict[str, Callable[[CocoaEngine], Any]] = {
    "chat.ainvoke": lambda engine: ChatCocoa(engine=engine).ainvoke(PROMPTS[0], **LONG),
    "chat.astream": lambda engine: read(ChatCocoa(engine=engine).astream(PROMPTS[0], **LONG)),
    "chat.abatch": lambda engine: ChatCocoa(engine=engine).abatch(PROMPTS, **LONG),
    "llm.ainvoke": lambda engine: CocoaLLM(engine=engine).ainvoke(PROMPTS[0], **LONG),
    "llm.ainvoke streaming": lambda engine: CocoaLLM(engine=engine).ainvoke(PROMPTS[0], stream=True, **LONG),
    "llm.astream": lambda engine: read(CocoaLLM(engine=engine).astream(PROMPTS[0], **LONG)),
    "llm.abatch": lambda engine: CocoaLLM(engine=engine).abatch(PROMPTS, **LONG),
    "llm.abatch in parts": lambda engine: CocoaLLM(engine=engine, batch_size=1).abatch(PROMPTS, **LONG),
    "index.acomplete": lambda engine: LlamaIndexLLM(engine=engine).acomplete(PROMPTS[0], **LONG),
    "index.achat": lambda engine: LlamaIndexLLM(engine=engine).achat([ChatMessage(PROMPTS[0])], **LONG),
    "index.astream_complete": lambda engine: read(LlamaIndexLLM(engine=engine).astream_complete(PROMPTS[0], **LONG)),
    "index.astream_chat": lambda engine: read(
        LlamaIndexLLM(engine=engine).astream_chat([ChatMessage(PROMPTS[0])], **LONG)
    ),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@each_call
async def test_cancelling_stops_the_work(call: Any, quick_engine: CocoaEngine, gate: Gate) -> None:
    with collect_risk() as reports:
        task = asyncio.ensure_future(call(quick_engine))
        await reached(gate)
        await cancel(task)
        gate.open()
        await asyncio.to_thread(wait_until, lambda: is_idle(quick_engine))
    assert gate.reached <= BEFORE_GATE + len(PROMPTS) - 1  # those under way in the threads of a batch
    assert reports == []


@pytest.mark.parametrize("make", [ChatCocoa, CocoaLLM, LlamaIndexLLM])
async def test_leaving_a_stream_stops_the_work(make: Any, quick_engine: CocoaEngine) -> None:
    model, asked = make(engine=quick_engine), {"max_new_tokens": 400, "stopping_criteria": [Meets(lambda _: None)]}
    name = "stream_complete" if make is LlamaIndexLLM else "stream"
    stream = getattr(model, name)(PROMPTS[0], **asked)
    next(stream)
    stream.close()
    await asyncio.to_thread(wait_until, lambda: is_idle(quick_engine))
    later = getattr(model, f"a{name}")(PROMPTS[0], **asked)
    later = await later if inspect.isawaitable(later) else later
    await anext(later)
    await later.aclose()
    assert await read(later) == []
    await asyncio.to_thread(wait_until, lambda: is_idle(quick_engine))
    assert asked["stopping_criteria"][0].tokens < 100


@pytest.mark.slow
@each_call
async def test_the_event_loop_runs_on(call: Any, quick_engine: CocoaEngine, gate: Gate) -> None:
    task = asyncio.ensure_future(call(quick_engine))
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
    held = Held(engine)
    task = asyncio.ensure_future(call(engine))
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
