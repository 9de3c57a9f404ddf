"""A model after its construction: options set later, copies, pickles, shared weights, its profile."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime
from cocoa_engine.errors import ConfigError, PromptError, UnsupportedFeatureError
from cocoa_engine.model.embedded import CONTEXT_WINDOW
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, get_risk
from tests.helpers.model_folders import counted_loads, save_calibrator, save_model

MODELS = [ChatCocoa, CocoaLLM]
each_model = pytest.mark.parametrize("kind", MODELS)
LONE = "a\ud800b"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save_model(tmp_path / "model")


@pytest.fixture
def other_folder(tmp_path: Path) -> str:
    return save_model(tmp_path / "other", seed=9, max_position_embeddings=256)


@pytest.fixture
def calibrator(folder: str, tmp_path: Path) -> str:
    return save_calibrator(tmp_path / "risk.json", folder)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return counted_loads(monkeypatch)


def generation(model: Any, prompt: str = "Once upon a time", **options: Any) -> Any:
    return model.generate_prompt([model._convert_input(prompt)], **options).generations[0][0]


@pytest.mark.slow
@each_model
def test_a_calibrator_set_later_applies_from_the_next_call(
    kind: Any, folder: str, calibrator: str, loads: list[str]
) -> None:
    model = kind(model=folder, max_tokens=4)
    before = get_risk(generation(model)).to_dict()
    model.calibrator = calibrator
    after = get_risk(generation(model)).to_dict()
    assert (before["calibrated"], after["calibrated"]) == (False, True)
    assert after == get_risk(generation(kind(model=folder, max_tokens=4, calibrator=calibrator))).to_dict()
    model.calibrator = None
    assert get_risk(generation(model)).to_dict() == before
    assert loads == [folder]


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
@each_model
def test_nonsense_is_refused_when_it_is_set(kind: Any, name: str, value: Any, message: str) -> None:
    model = kind()
    with pytest.raises(ConfigError, match=message):
        setattr(model, name, value)
    assert model == kind()


@each_model
def test_an_engine_excludes_loading_options_later_too(kind: Any, quick_engine: CocoaEngine) -> None:
    model = kind(engine=quick_engine)
    for name, value in (("calibrator", "embedded"), ("model", "a"), ("dtype", "float16"), ("runtime", Runtime())):
        with pytest.raises(ConfigError, match=r"engine= is given, so .* would have no effect"):
            setattr(model, name, value)
    model.dtype = "auto"  # as it is by default
    named = kind(model="a")
    with pytest.raises(ConfigError, match="so model_name would have no effect"):
        named.engine = quick_engine
    unnamed = kind()
    unnamed.engine = quick_engine
    assert unnamed.load() is quick_engine


# --- copies and pickles


@each_model
def test_copies_share_the_engine(kind: Any, folder: str, loads: list[str], quick_engine: CocoaEngine) -> None:
    limiter = {"rate_limiter": InMemoryRateLimiter(requests_per_second=1000)} if kind is ChatCocoa else {}
    for model in (kind(model=folder, **limiter), kind(engine=quick_engine)):
        engine = model.load()
        for same in (copy.copy(model), copy.deepcopy(model), model.model_copy(deep=True), copy.deepcopy([model])[0]):
            assert same.load() is engine
            assert getattr(same, "rate_limiter", None) is limiter.get("rate_limiter") or model.engine is not None
            assert same == model
        other = copy.deepcopy(model)
        other.alpha = 9.0
        assert model.alpha != 9.0
    assert loads == [folder]


@each_model
def test_a_pickle_loads_its_model_by_name(kind: Any, folder: str, calibrator: str) -> None:
    model = kind(model=folder, calibrator=calibrator, alpha=1.5, max_tokens=4, timeout=60)
    before = generation(model)
    data = pickle.dumps(model)
    assert len(data) < 20_000
    again = pickle.loads(data)
    assert again == model
    after = generation(again)
    assert (after.text, get_risk(after).to_dict()) == (before.text, get_risk(before).to_dict())
    assert again.load() is model.load()  # in one process


@each_model
def test_what_cannot_be_pickled_says_so(kind: Any, folder: str, quick_engine: CocoaEngine) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"a {kind.__name__} with a loaded engine.*give model="):
        pickle.dumps(kind(engine=quick_engine))
    with pytest.raises(UnsupportedFeatureError, match="because its logits_processor cannot be"):
        pickle.dumps(kind(model=folder, logits_processor=lambda ids, scores: scores))


# --- the profile


def chat_with(window: int | None, tmp_path: Path) -> ChatCocoa:
    """A chat model of which only a configuration exists."""
    (tmp_path / "bare").mkdir(exist_ok=True)
    stated = {} if window is None else {"max_position_embeddings": window}
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "llama", **stated}))
    return ChatCocoa(model=tmp_path / "bare")


def test_the_window_is_read_without_the_weights(tmp_path: Path, loads: list[str], engine: CocoaEngine) -> None:
    chat = chat_with(1234, tmp_path)
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
    chat = ChatCocoa(model=folder)
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


# --- prompts


@each_model
@pytest.mark.parametrize("how", ["invoke", "stream", "batch", "ainvoke"])
def test_a_lone_surrogate_is_refused_before_a_model_is_loaded(kind: Any, how: str) -> None:
    model = kind(model="/no/such")
    calls = {
        "invoke": lambda: model.invoke(LONE),
        "stream": lambda: list(model.stream(LONE)),
        "batch": lambda: model.batch([LONE]),
        "ainvoke": lambda: asyncio.run(model.ainvoke(LONE)),
    }
    where = r"content of message 0 \(user\)" if kind is ChatCocoa else "prompt"
    with pytest.raises(PromptError, match=rf"{where} has a lone surrogate \(U\+D800\) at character 1"):
        calls[how]()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_bad_prompt_of_a_batch_fails_alone(asynchronous: bool, quick_llm: CocoaLLM, live: Any) -> None:
    prompts: list[Any] = ["One, two,", LONE, "", "Once upon"]
    options: dict[str, Any] = {"config": {"callbacks": [live]}, "return_exceptions": True, "max_tokens": 3}
    answers = asyncio.run(quick_llm.abatch(prompts, **options)) if asynchronous else quick_llm.batch(prompts, **options)
    expected = quick_llm.batch([prompts[0], prompts[3]], max_tokens=3)
    assert [answers[0], answers[3]] == expected
    assert all(isinstance(answer, PromptError) for answer in answers[1:3])
    assert live.ends == 2
    with pytest.raises(PromptError):
        quick_llm.batch(prompts)
    assert quick_llm.batch([], return_exceptions=True) == []
    errors = quick_llm.batch(["Hi", "Ho"], return_exceptions=True, gamma=7)
    assert all(isinstance(error, ConfigError) for error in errors)


# --- synonyms


@each_model
def test_max_tokens_can_be_set_and_configured(kind: Any, quick_engine: CocoaEngine) -> None:
    model = kind(engine=quick_engine)
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
    from cocoa_integrations._shared import loading

    monkeypatch.setattr(loading, "read_context_window", lambda *args, **options: pytest.fail("was read"))
    chat = ChatCocoa(model="org/name")
    assert copy.deepcopy(chat) == chat
    assert "org/name" in repr(chat)
    assert chat.model_dump()["model_name"] == "org/name"
    assert "org/name" in chat.model_dump_json()
