"""Models of all adapters after construction: names, options set later, copies, pickles, weights, profiles.

The adapters use public names of the engine and of each other only.
Async calls and streams work in threads of the engine's own: as many as fill its batch and queue, and one more.
"""

import ast
import asyncio
import copy
import gc
import itertools
import json
import pickle
import re
import threading
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField

import cocoa_integrations
from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, Runtime
from cocoa_engine.errors import PromptError, UnsupportedFeatureError
from cocoa_engine.model.load_options import CONTEXT_WINDOW
from cocoa_integrations._shared import engines
from cocoa_integrations._shared.engines import AsyncStream, in_worker
from cocoa_integrations.langchain import ChatCocoa, get_risk
from cocoa_integrations.langchain import CocoaLLM as LangChainLLM
from cocoa_integrations.llama_index import CocoaLLM
from tests.helpers.made_up_risk import save_calibrator
from tests.helpers.tiny_models import engine_for_schemas, save_model, tiny_model, tiny_tokenizer

PROMPT = "Once upon a time"
KINDS = [ChatCocoa, LangChainLLM, CocoaLLM]
each_kind = pytest.mark.parametrize("kind", KINDS)
of_langchain = pytest.mark.parametrize("kind", KINDS[:2])


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save_model(tmp_path / "model")


@pytest.fixture
def other_folder(tmp_path: Path) -> str:
    return save_model(tmp_path / "other", seed=9, chat=False, max_position_embeddings=256)


@pytest.fixture
def calibrator(folder: str, tmp_path: Path) -> str:
    return save_calibrator(tmp_path / "risk.json", folder)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that receives the name of each model whose weights are loaded from now on."""
    names: list[str] = []
    load = CocoaEngine.from_pretrained.__func__  # type: ignore[attr-defined]

    def counted(kind: Any, model_name: str | None = None, **options: Any) -> CocoaEngine:
        names.append(str(model_name))
        engine: CocoaEngine = load(kind, model_name, **options)
        return engine

    monkeypatch.setattr(CocoaEngine, "from_pretrained", classmethod(counted))
    return names


def answer_of(model: Any) -> Any:
    if isinstance(model, CocoaLLM):
        return model.complete(PROMPT)
    return model.generate_prompt([model._convert_input(PROMPT)]).generations[0][0]


def options_of(model: Any) -> Any:
    return model.to_dict() if isinstance(model, CocoaLLM) else model  # LlamaIndex's callback managers differ


def report_of(model: Any) -> dict[str, Any]:
    return get_risk(answer_of(model)).to_dict()


@pytest.mark.slow
@each_kind
def test_a_calibrator_set_later_applies_from_the_next_call(
    kind: Any, folder: str, calibrator: str, loads: list[str]
) -> None:
    model = kind(model=folder, max_tokens=4)
    before = report_of(model)
    model.calibrator = calibrator
    after = report_of(model)
    assert (before["calibrated"], after["calibrated"]) == (False, True)
    assert after == report_of(kind(model=folder, max_tokens=4, calibrator=calibrator))
    model.calibrator = None
    assert report_of(model) == before
    assert loads == [folder]


@each_kind
def test_every_loading_option_set_later_reaches_the_engine(kind: Any, folder: str, other_folder: str) -> None:
    model = kind(model_name=folder)
    model.runtime = {"max_batch_size": 3}
    assert model.runtime == Runtime(max_batch_size=3) == model.load().runtime
    model.dtype = "bfloat16"
    assert str(model.load().model.dtype) == "torch.bfloat16"
    model.model_kwargs = {"attn_implementation": "eager"}
    assert model.load().model.config._attn_implementation == "eager"
    model.tokenizer_name = other_folder
    assert model.load().tokenizer.name_or_path == other_folder
    model.tokenizer_kwargs = {"bos_token": "<pad>"}
    assert model.load().tokenizer.bos_token == "<pad>"
    model.max_tokens = 3
    assert model.max_new_tokens == model.max_tokens == 3


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("runtime", {"max_batch_size": 0}, "max_batch_size"),
        ("calibrator", 3, "calibrator"),
        ("model_name", object(), "model_name"),
        ("model_kwargs", "fast", "model_kwargs"),
        ("trust_remote_code", "perhaps", "trust_remote_code"),
        ("engine", object(), "engine takes a CocoaEngine"),
        ("config", {"alpha": 1.0}, "config takes a CocoaConfig"),
    ],
)
@each_kind
def test_nonsense_is_refused_when_it_is_set(kind: Any, name: str, value: Any, message: str, folder: str) -> None:
    model = kind(model=folder)
    with pytest.raises(ConfigError, match=message):
        setattr(model, name, value)
    assert options_of(model) == options_of(kind(model=folder))


@each_kind
def test_loaded_objects_exclude_loading_options_at_once_and_later(kind: Any, tiny: CocoaEngine) -> None:
    model = kind(engine=tiny)
    others = {"calibrator": "embedded", "dtype": "float16", "runtime": Runtime(), "model": "a", "model_name": "a"}
    for name, value in others.items():  # a name as it was given
        for given in (lambda: setattr(model, name, value), lambda: kind(engine=tiny, **{name: value})):  # noqa: B023
            with pytest.raises(ConfigError, match=f"^engine= is given, so {name} would have no effect"):
                given()
    model.dtype = "auto"  # as it is by default
    if kind is CocoaLLM:
        model.model_name = tiny.model_name  # as it is
        around = CocoaLLM(model=tiny_model("llama"), tokenizer=tiny_tokenizer(), max_new_tokens=2)
        with pytest.raises(ConfigError, match="model= is given, so dtype would have no effect"):
            around.dtype = "float16"
        with pytest.raises(ConfigError, match="tokenizer= is given, so tokenizer_kwargs would have no effect"):
            around.tokenizer_kwargs = {"use_fast": False}
        return
    named = kind(model="a")
    with pytest.raises(ConfigError, match="so model_name would have no effect"):
        named.engine = tiny
    unnamed = kind()
    unnamed.engine = tiny
    assert unnamed.load() is tiny


@each_kind
def test_copies_share_the_engine_and_go_their_own_way(
    kind: Any, folder: str, other_folder: str, loads: list[str], tiny: CocoaEngine
) -> None:
    limiter = {"rate_limiter": InMemoryRateLimiter(requests_per_second=1000)} if kind is ChatCocoa else {}
    for model in (kind(model=folder, max_tokens=2, **limiter), kind(engine=tiny)):
        engine = model.load()
        for same in (copy.copy(model), copy.deepcopy(model), model.model_copy(deep=True), copy.deepcopy([model])[0]):
            assert same.load() is engine
            assert getattr(same, "rate_limiter", None) is limiter.get("rate_limiter") or engine is tiny
            assert options_of(same) == options_of(model)
        for other in [copy.copy(model), copy.deepcopy(model), model.model_copy(deep=True)]:
            other.alpha = 9.0
            assert model.alpha != 9.0
            if engine is not tiny:
                other.model_name = other_folder
                assert (other.load().model_name, model.load().model_name) == (other_folder, folder)
    assert loads == [folder, other_folder]


@each_kind
def test_a_pickle_loads_its_model_by_name(kind: Any, folder: str, calibrator: str) -> None:
    own = {"system_prompt": "Hi.", "is_chat_model": False} if kind is CocoaLLM else {}
    model = kind(model=folder, calibrator=calibrator, alpha=1.5, max_tokens=4, timeout=60, **own)
    before = answer_of(model)
    data = pickle.dumps(model)
    assert len(data) < 20_000
    again = pickle.loads(data)
    assert options_of(again) == options_of(model)
    for each in (again, copy.deepcopy(pickle.loads(data)), model):
        after = answer_of(each)
        assert (after.text, get_risk(after).to_dict()) == (before.text, get_risk(before).to_dict())
    assert again.load() is model.load()  # in one process
    if kind is CocoaLLM:
        assert again.metadata == model.metadata
        assert asyncio.run(pickle.loads(data).acomplete(PROMPT)).text == before.text


@each_kind
def test_what_cannot_be_pickled_says_so(kind: Any, tiny: CocoaEngine) -> None:
    objects = {"model": tiny.model, "tokenizer": tiny.tokenizer} if kind is CocoaLLM else {"engine": tiny}
    message = f"a {kind.__name__} with a loaded engine, model or tokenizer cannot be pickled.*give model="
    with pytest.raises(UnsupportedFeatureError, match=message):
        pickle.dumps(kind(**objects))


# --- LlamaIndex loads the model when the LLM is made, and takes a loaded one


def test_what_follows_from_the_model_changes_with_it(folder: str, other_folder: str) -> None:
    llm = CocoaLLM(model_name=folder)
    asked = CocoaLLM(model_name=folder, context_window=400, is_chat_model=True)
    assert (llm.metadata.context_window, llm.metadata.is_chat_model) == (512, True)
    for each in (llm, asked):
        each.model_name = other_folder  # no chat template
    assert (llm.metadata.context_window, llm.metadata.is_chat_model) == (256, False)
    assert llm.metadata.is_function_calling_model is False
    assert (asked.metadata.context_window, asked.metadata.is_chat_model) == (256, True)  # cut, as at construction
    llm.context_window = 100
    llm.model_name = folder
    assert (llm.metadata.context_window, llm.metadata.is_chat_model) == (100, True)
    assert llm.metadata.model_name == folder


def test_a_given_model_takes_a_calibrator_and_a_label_later(tmp_path: Path) -> None:
    model = tiny_model("llama")
    llm = CocoaLLM(model=model, tokenizer=tiny_tokenizer(), model_name="mine", max_new_tokens=3)
    llm.calibrator = save_calibrator(tmp_path / "risk.json", "mine")
    assert report_of(llm)["calibrated"] is True
    llm.calibrator = None
    llm.model_name = "yours"
    assert llm.complete(PROMPT).raw["model_name"] == "yours"  # type: ignore[index]
    assert llm.engine.model is model


def test_llms_of_one_model_share_it(folder: str, calibrator: str, loads: list[str]) -> None:
    first, same = CocoaLLM(model_name=folder), CocoaLLM(model_name=folder, alpha=1.0)
    calibrated, batched = CocoaLLM(model_name=folder, calibrator=calibrator), CocoaLLM(model_name=folder, runtime={})
    assert loads == [folder]
    assert first.engine is same.engine
    assert calibrated.engine.session is first.engine.session
    assert batched.engine.model is first.engine.model
    own = CocoaLLM(model_name=folder, tokenizer=tiny_tokenizer())
    assert own.engine.model is first.engine.model
    assert loads == [folder]


# --- LangChain: the profile, prompts, synonyms


def test_the_window_is_read_without_the_weights(tmp_path: Path, loads: list[str], engine: CocoaEngine) -> None:
    config = {"model_type": "llama", "max_position_embeddings": 1234}
    (tmp_path / "config.json").write_text(json.dumps(config))  # of which no weights exist
    chat = ChatCocoa(model=tmp_path)
    assert chat.profile is not None
    assert chat.profile["max_input_tokens"] == 1234
    middleware = SummarizationMiddleware(model=chat, trigger=("fraction", 0.8), keep=("fraction", 0.3))
    assert middleware.model is chat
    embedded = ChatCocoa()
    assert embedded.profile is not None
    assert embedded.profile["max_input_tokens"] == CONTEXT_WINDOW == engine.context_window
    SummarizationMiddleware(model=embedded, trigger=("fraction", 0.8))
    assert loads == []


def test_the_profile_follows_the_model(folder: str, other_folder: str) -> None:
    chat: Any = ChatCocoa(model=folder)
    assert chat.profile["max_input_tokens"] == 512
    chat.model_name = other_folder
    assert chat.profile["max_input_tokens"] == 256
    chat.load()
    assert chat.profile["max_input_tokens"] == 256
    configurable = chat.configurable_fields(model=ConfigurableField(id="model"))
    rebuilt, _ = configurable.prepare({"configurable": {"model": folder}})
    assert rebuilt.profile["max_input_tokens"] == 512
    chat.profile = {"max_input_tokens": 99}
    assert chat.profile == {"max_input_tokens": 99} == copy.copy(chat).profile
    assert ChatCocoa(profile={"max_input_tokens": 7}).profile == {"max_input_tokens": 7}


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such/model-on-the-hub", "file"])
def test_a_window_that_cannot_be_read_is_absent(name: str, tmp_path: Path) -> None:
    if name == "file":
        (tmp_path / "config.json").write_text("no JSON")
        name = str(tmp_path)
    profile = ChatCocoa(model=name).profile
    assert profile is not None
    assert "max_input_tokens" not in profile
    assert profile["tool_calling"] is True


@of_langchain
def test_a_lone_surrogate_is_refused_before_a_model_is_loaded(kind: Any) -> None:
    model, text = kind(model="/no/such"), "a\ud800b"
    where = r"content of message 0 \(user\)" if kind is ChatCocoa else "prompt"
    for ask in (
        lambda: model.invoke(text),
        lambda: list(model.stream(text)),
        lambda: model.batch([text]),
        lambda: asyncio.run(model.ainvoke(text)),
    ):
        with pytest.raises(PromptError, match=rf"{where} has a lone surrogate \(U\+D800\) at character 1"):
            ask()


@of_langchain
def test_no_prompts_have_no_answers(kind: Any) -> None:
    for model in (kind(engine=engine_for_schemas()), kind(base_url="http://127.0.0.1:9/v1")):
        assert model.generate([]).generations == [] == asyncio.run(model.agenerate([])).generations


@of_langchain
def test_max_tokens_can_be_set_and_configured(kind: Any) -> None:
    model = kind(engine=engine_for_schemas())
    model.max_tokens = 3
    assert (model.max_new_tokens, model.max_tokens) == (3, 3)
    model.config = CocoaConfig(max_new_tokens=5, alpha=1.0)
    assert (model.max_tokens, model.alpha) == (5, 1.0)
    configurable = model.configurable_fields(max_tokens=ConfigurableField(id="length"))
    assert configurable.config_specs[0].annotation is int
    assert configurable.config_specs[0].default == 5
    chosen = {"configurable": {"length": 2}}
    assert configurable.invoke("Once", chosen) == model.bind(max_tokens=2).invoke("Once") or kind is ChatCocoa
    if kind is ChatCocoa:
        assert configurable.invoke("Once", chosen).usage_metadata["output_tokens"] == 2
    with pytest.raises(ConfigError, match="max_new_tokens is given under two names"):
        model.configurable_fields(max_tokens=ConfigurableField(id="a"), max_new_tokens=ConfigurableField(id="b"))
    with pytest.raises(ValueError, match="max_tokenz"):
        model.configurable_fields(max_tokenz=ConfigurableField(id="a"))


def test_the_cache_key_knows_a_change_made_before_a_model_that_shares_the_weights(folder: str, calibrator: str) -> None:
    plain, calibrated = ChatCocoa(model=folder), ChatCocoa(model=folder, calibrator=calibrator)
    unchanged = calibrated._identifying_params
    plain.load().model.generation_config.repetition_penalty = 1.7
    calibrated.load()
    assert calibrated._identifying_params != unchanged


def test_the_configuration_is_not_read_by_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "read_context_window", lambda *args, **options: pytest.fail("was read"))
    chat = ChatCocoa(model="org/name")
    assert copy.deepcopy(chat) == chat
    assert "org/name" in repr(chat)
    assert chat.model_dump()["model_name"] == "org/name"
    assert "org/name" in chat.model_dump_json()


ADAPTERS = [*KINDS, *(partial(kind, base_url="http://127.0.0.1:9/v1") for kind in KINDS)]
NAMES = ("model", "model_name")


@pytest.mark.parametrize("kind", ADAPTERS)
def test_both_names(kind: Any, folder: str) -> None:
    for names, form in itertools.product((("model",), ("model_name",), NAMES), (str, Path)):
        adapter = kind(**{name: form(folder) for name in names})
        assert (adapter.model, adapter.model_name) == (folder, folder)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_what_is_no_name_is_refused(kind: Any, folder: str) -> None:
    for name, value in itertools.product(NAMES, (3, b"model", ["model"], object(), "")):
        words = f"^{name} is empty" if value == "" else f"{name} takes a Hub id, a folder or a GGUF file"
        with pytest.raises(ConfigError, match=words):
            kind(**{name: value})
    for name in NAMES:
        with pytest.raises(ConfigError, match="model and model_name are the same option, given as model="):
            kind(**{**dict.fromkeys(NAMES, folder), name: Path("elsewhere")})


@each_kind
def test_what_is_no_address_is_refused_and_an_address_excludes_an_engine(kind: Any) -> None:
    for address in ("", " ", "localhost:8000", "http://", "ftp://host/v1"):
        with pytest.raises(ConfigError, match=r"^base_url takes the address of a server, such as http://"):
            kind(base_url=address)
    with pytest.raises(ConfigError, match="base_url= is given, so dtype would have no effect"):
        kind(base_url="http://a/v1", dtype="bfloat16")
    with pytest.raises(UnsupportedFeatureError, match="needs the engine"):
        kind(base_url="http://a/v1").load()


@each_kind
@pytest.mark.parametrize("name", NAMES)
def test_names_are_set_copied_and_written(
    kind: Any, name: str, folder: str, other_folder: str, loads: list[str]
) -> None:
    adapter = kind(**{name: folder}, max_tokens=4)
    assert report_of(adapter)["model_name"] == folder
    copied = adapter.model_copy(update={name: other_folder})
    assert (copied.model, copied.model_name, adapter.model) == (other_folder, other_folder, folder)
    assert copied.load().model_name == other_folder
    setattr(adapter, name, Path(other_folder))
    assert (adapter.model, adapter.model_name) == (other_folder, other_folder)
    if kind is not ChatCocoa:  # which needs a template
        assert answer_of(adapter).text == answer_of(kind(model=other_folder, max_tokens=4)).text
        assert report_of(adapter)["model_name"] == other_folder
    assert loads == [folder, other_folder]
    again = pickle.loads(pickle.dumps(adapter))  # our own
    assert (again.model, again.model_name) == (other_folder, other_folder)
    if kind is CocoaLLM:
        written = adapter.to_dict()
        assert CocoaLLM.from_dict(written).metadata.model_name == other_folder
        del written["model_name"]
        assert CocoaLLM.from_dict({**written, name: folder}).metadata.model_name == folder


def test_a_loaded_model_is_no_name(folder: str) -> None:
    """LlamaIndex's HuggingFaceLLM takes it as ``model``, and the name beside it is a label."""
    loaded = CocoaEngine.from_pretrained(folder)
    llm = CocoaLLM(model=loaded.model, tokenizer=loaded.tokenizer, model_name="label")
    assert (llm.model, llm.metadata.model_name) == ("label", "label")
    with pytest.raises(ConfigError, match="pass engine=CocoaEngine"):
        ChatCocoa(model=loaded.model)


def test_no_private_name_is_imported() -> None:
    """Ruff tells of private attributes of others, and the contracts of imports tell of modules."""
    for path in Path(cocoa_integrations.__file__).parent.rglob("*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        names = {name.name for node in imports for name in node.names if re.match("_[^_]", name.name)}
        assert names <= {"_shared"}, path


class Runs:
    """What has threads; no model is needed for them."""

    runtime = Runtime(max_batch_size=30, max_queue=10)


async def test_as_many_at_the_same_time_as_the_engine_takes_and_one_more() -> None:
    runs, all_there = Runs(), threading.Barrier(41)
    arrived = await asyncio.gather(*(in_worker(runs, all_there.wait, 60) for _ in range(41)))
    assert sorted(arrived) == list(range(41))


async def test_the_loops_own_threads_stay_free() -> None:
    runs, go_on = Runs(), threading.Event()
    waiting = [asyncio.ensure_future(in_worker(runs, go_on.wait, 60)) for _ in range(40)]
    assert await asyncio.to_thread(lambda: "free") == "free"
    go_on.set()
    assert all(await asyncio.gather(*waiting))


async def test_the_context_goes_along() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    variable.set("outer")

    def inside(*, value: str) -> str:
        before = variable.get()
        variable.set(value)
        return before

    assert await in_worker(Runs(), inside, value="inner") == "outer"
    assert variable.get() == "outer"


@pytest.mark.slow
async def test_the_threads_go_with_the_engine() -> None:
    runs = Runs()
    thread = await in_worker(runs, threading.current_thread)
    assert thread.is_alive()
    del runs
    gc.collect()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()


async def test_the_items_come_in_order_from_worker_threads_and_leaving_the_stream_closes_it() -> None:
    closed: list[bool] = []
    threads: list[str] = []

    def steps() -> Iterator[int]:
        try:
            for number in range(3):
                threads.append(threading.current_thread().name)
                yield number
        finally:
            closed.append(True)

    async with AsyncStream(Runs(), steps()) as stream:
        assert [item async for item in stream] == [0, 1, 2]
    assert closed == [True]
    assert all(name.startswith("cocoa") for name in threads)
    async with AsyncStream(Runs(), steps()) as stream:
        assert await anext(stream) == 0
        assert closed == [True]
    assert closed == [True, True]


async def test_cancellation_during_a_step_is_not_hidden() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        entered.set()
        go_on.wait(60)
        yield 0

    async def read() -> None:
        async with AsyncStream(Runs(), slow()) as stream:
            await anext(stream)

    task = asyncio.ensure_future(read())
    await asyncio.to_thread(entered.wait, 60)
    task.cancel()  # a worker thread is inside the generator, which cannot be closed from outside
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()


async def test_nothing_of_a_call_waits_for_the_garbage_collector() -> None:
    runs, given = Runs(), Runs()
    there = weakref.ref(given)
    gc.disable()
    try:
        await in_worker(runs, lambda runs: None, given)
        del given
        for _ in range(200):  # the thread may still be on its way out of the call
            if there() is not None:
                await asyncio.sleep(0.01)
        assert there() is None
    finally:
        gc.enable()
