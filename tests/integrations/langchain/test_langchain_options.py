"""Options: of a constructor and of a call, known and unknown, and how they reach the engine and LangChain's traces."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from langchain_core.load import dumpd
from transformers import StoppingCriteriaList, SuppressTokensLogitsProcessor

from cocoa_engine import CocoaConfig, CocoaEngine, RiskCalibrator, Runtime
from cocoa_engine.errors import ConfigError, ModelLoadError
from cocoa_engine.model.embedded import MODEL_NAME
from cocoa_integrations._shared.settings import config_of
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, UnsupportedFeatureError, get_spans
from tests.helpers.model_folders import save_calibrator
from tests.helpers.reports import to_dicts

MODELS = [ChatCocoa, CocoaLLM]
each_model = pytest.mark.parametrize("kind", MODELS)


@pytest.fixture
def loads(quick_engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What from_pretrained is asked for, in place of loading."""
    asked: list[dict[str, Any]] = []

    def load(**options: Any) -> CocoaEngine:
        asked.append(options)
        return quick_engine

    monkeypatch.setattr(CocoaEngine, "from_pretrained", load)
    return asked


@each_model
def test_settings_not_given_are_those_of_the_config_or_the_engine(kind: Any, quick_engine: CocoaEngine) -> None:
    assert config_of(kind()) == CocoaConfig()
    config = CocoaConfig(alpha=1.0, stop="x", max_new_tokens=5)
    assert config_of(kind(config=config)) == config
    assert config_of(kind(config=config, alpha=3.0)) == config.replace(alpha=3.0)
    engine = CocoaEngine(quick_engine.model, quick_engine.tokenizer, config=config)
    assert config_of(kind(engine=engine)) == config
    assert config_of(kind(engine=engine, config=CocoaConfig(gamma=0.5))) == CocoaConfig(gamma=0.5)
    assert config_of(kind(engine=engine, stop=[], seed=7)) == config.replace(stop=(), seed=7)


@each_model
def test_names_that_users_know(kind: Any) -> None:
    model = kind(model="org/name", max_tokens=7, temperature=0.5, stop="x", max_retries=1, timeout=5)
    assert (model.model_name, model.max_new_tokens, model.temperature, model.stop) == ("org/name", 7, 0.5, ("x",))
    assert (model.model, model.max_tokens, model.config.temperature) == ("org/name", 7, 0.5)
    assert kind(model_name="org/name").model_name == "org/name"
    assert kind(model=Path("folder")).model_name == "folder"
    assert kind(max_tokens=None, temperature=None, stop=None, timeout=None) == kind()  # "not given" in LangChain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alhpa": 1.0}, r"unknown option 'alhpa' \(did you mean 'alpha'\?\)"),
        ({"pipeline": 1, "model_id": "a"}, r"pipeline=1 \(give engine=.*model_id='a' \(give model\)"),
        ({"max_token": 1}, r"did you mean 'max_tokens'\?"),
        ({"device": "cuda", "length_penalty": 2}, r"'device'.*'length_penalty'.*known are"),
        ({"logits_processor": 3}, r"logits_processor.*callable"),
        ({"alpha": -1}, r"alpha: .*greater than or equal to 0 \(got -1\)"),
        ({"max_tokens": 3, "max_new_tokens": 4}, r"max_new_tokens is given twice"),
        ({"engine": object()}, r"engine takes a CocoaEngine, not object"),
        ({"config": {"alpha": 1}}, r"config takes a CocoaConfig"),
    ],
)
@each_model
def test_bad_options_of_a_constructor(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alhpa": 1.0}, r"a call of \w+: unknown option 'alhpa' \(did you mean 'alpha'\?\)"),
        ({"functions": [{"name": "f"}], "function_call": "auto"}, r"\(give tools and tool_choice\)"),
        ({"alpha": -1}, r"alpha: .*greater than or equal to 0"),
        ({"device_map": "auto"}, r"unknown option 'device_map'"),
        ({"model": "other"}, "cannot change the model from 'quick' to 'other'; make another"),
        ({"timeout": -1}, r"timeout: .*greater than 0"),
        ({"logprobs": "many"}, r"logprobs"),
        ({"middle_layers": (1, 99)}, r"beyond the model's 6 layers"),
    ],
)
@each_model
async def test_bad_options_of_a_call(
    kind: Any, quick_engine: CocoaEngine, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind(engine=quick_engine)
    monkeypatch.setattr(quick_engine.model, "forward", lambda *args, **kwargs: pytest.fail("work was done"))
    with pytest.raises(ConfigError, match=message):
        model.invoke("Hi", **options)
    with pytest.raises(ConfigError, match=message):
        await model.ainvoke("Hi", **options)
    with pytest.raises(ConfigError, match=message):
        next(model.stream("Hi", **options))
    with pytest.raises(ConfigError, match=message):
        model.batch(["Hi"], **options)


def test_tools_are_refused_by_a_text_model(quick_llm: CocoaLLM) -> None:
    for options in ({"tools": [{}]}, {"response_format": {"type": "json_object"}}, {"tool_choice": "any"}):
        with pytest.raises(UnsupportedFeatureError, match=next(iter(options))):
            quick_llm.invoke("Hi", **options)
    with pytest.raises(UnsupportedFeatureError, match="response_format"):
        quick_llm.bind_tools([], response_format={"type": "json_object"})
    with pytest.raises(UnsupportedFeatureError, match="constrain"):
        quick_llm.with_structured_output({"title": "Answer", "type": "object"})


@each_model
def test_no_tools_are_no_tools(kind: Any, quick_engine: CocoaEngine) -> None:
    model = kind(engine=quick_engine, max_tokens=1)
    nothing = {"tools": [], "tool_choice": None, "strict": None, "parallel_tool_calls": False}
    assert model.invoke("Hi", model="quick", **nothing)
    assert model.bind(**nothing).invoke("Hi")
    assert model.bind_tools(**nothing) is model


@each_model
def test_callables_of_transformers_act(kind: Any, quick_engine: CocoaEngine) -> None:
    model = kind(engine=quick_engine, max_tokens=6)
    plain = model.generate_prompt([model._convert_input("Hi")]).generations[0][0]
    first = to_dicts(get_spans(plain))[0]["text"][0]

    def text(model: Any, **options: Any) -> str:
        return model.generate_prompt([model._convert_input("Hi")], **options).generations[0][0].text

    [banned] = quick_engine.encode(first, add_special_tokens=False)
    ban = SuppressTokensLogitsProcessor([banned])
    assert text(model, logits_processor=[ban])[0] != first
    assert text(kind(engine=quick_engine, max_tokens=6, logits_processor=ban)) == text(model, logits_processor=[ban])
    criteria = StoppingCriteriaList([lambda ids, scores, **_: True])
    assert text(model, stopping_criteria=criteria) == plain.text[:1]
    stopping = kind(engine=quick_engine, max_tokens=6, stopping_criteria=criteria)
    assert text(stopping) == plain.text[:1]
    assert text(stopping, stopping_criteria=[]) == plain.text
    for dump in (repr(stopping), str(dumpd(stopping)), str(stopping.model_dump())):
        assert "stopping_criteria" not in dump


@each_model
def test_none_is_not_given(kind: Any, quick_engine: CocoaEngine) -> None:
    model = kind(engine=quick_engine, max_tokens=1, max_retries=None, logprobs=None, logits_processor=None)
    assert (model.max_retries, model.logprobs, model.logits_processor) == (2, None, ())
    asked = model._for_call(None, {"logprobs": None, "stopping_criteria": None, "timeout": None})[0]
    assert (asked.logprobs, asked.stopping_criteria, asked.timeout) == (None, (), None)


@each_model
def test_the_model_is_loaded_when_first_needed_and_shared(kind: Any, loads: list[dict[str, Any]]) -> None:
    first, same, other = kind(model="a"), kind(model="a", alpha=1.0), kind(model="b")
    _ = first._identifying_params, first._get_ls_params(), repr(first), dumpd(first)
    assert loads == []
    first.invoke("Hi", max_tokens=1)
    same.invoke("Hi", max_tokens=1)
    first.model_copy(update={"alpha": 1.0}).invoke("Hi", max_tokens=1)
    assert [options["model_name"] for options in loads] == ["a"]
    assert not loads[0]["allow_pickle"]
    assert not loads[0]["trust_remote_code"]
    other.load()
    assert [options["model_name"] for options in loads] == ["a", "b"]


@pytest.mark.slow
@each_model
def test_loading_options_reach_the_engine(kind: Any, loads: list[dict[str, Any]], tmp_path: Path) -> None:
    calibrator = save_calibrator(tmp_path / "risk.json", "quick")
    model = kind(
        model="a",
        tokenizer_name="b",
        dtype="bfloat16",
        device_map="cuda:0",
        trust_remote_code=True,
        allow_pickle=True,
        model_kwargs={"revision": "main"},
        tokenizer_kwargs={"use_fast": True},
        runtime={"forward": "modules", "draft_tokens": 0},
        calibrator=calibrator,
        api_key="hf_secret",
    )
    assert model.load().calibrator == RiskCalibrator.load(calibrator)
    assert loads == [
        {
            "model_name": "a",
            "tokenizer_name": "b",
            "dtype": "bfloat16",
            "device_map": "cuda:0",
            "trust_remote_code": True,
            "allow_pickle": True,
            "model_kwargs": {"revision": "main", "token": "hf_secret"},
            "tokenizer_kwargs": {"use_fast": True},
            "runtime": Runtime(forward="modules", draft_tokens=0),
        }
    ]


@each_model
def test_tokens_of_the_hub_are_shown_nowhere(kind: Any) -> None:
    for secret in ({"api_key": "hf_secret"}, {"model_kwargs": {"token": "hf_secret"}}):
        model = kind(model="a", **secret)
        assert "hf_secret" not in f"{model!r} {model} {model._identifying_params} {dumpd(model)}"


@each_model
def test_an_engine_is_loaded_already(kind: Any, quick_engine: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match="engine= is given, so model, device_map would have no effect"):
        kind(engine=quick_engine, model="a", device_map="cuda:0")
    assert kind(engine=quick_engine, dtype="auto", api_key="x").load() is quick_engine  # as they are by default; unused


def test_a_failed_load_is_tried_again_by_the_next_call(
    quick_engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ChatCocoa(model="later")

    def fails(**options: Any) -> Any:
        raise ModelLoadError("no such model")

    monkeypatch.setattr(CocoaEngine, "from_pretrained", fails)
    with pytest.raises(ModelLoadError):
        chat.invoke("Hi")
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda **options: quick_engine)
    assert chat.load() is quick_engine


@each_model
def test_tracing_is_told_model_and_settings(kind: Any, quick_engine: CocoaEngine) -> None:
    model = kind(engine=quick_engine, max_tokens=5, temperature=0.3, stop=["x"])
    names = ("model_type", "stop", "model_name", "temperature", "max_tokens")
    kind_name = "chat" if kind is ChatCocoa else "llm"
    own, called = model._get_ls_params(), model._get_ls_params(["y"], model="other", temperature=0.1, max_tokens=3)
    assert [own[f"ls_{name}"] for name in names] == [kind_name, ["x"], "quick", 0.3, 5]
    assert [called[f"ls_{name}"] for name in names] == [kind_name, ["y"], "other", 0.1, 3]
    assert kind()._get_ls_params()["ls_model_name"] == MODEL_NAME


@each_model
def test_models_are_not_serialised_with_their_weights(kind: Any, quick_engine: CocoaEngine) -> None:
    model = kind(engine=quick_engine)
    assert not kind.is_lc_serializable()
    assert dumpd(model)["type"] == "not_implemented"
    assert "engine" not in model.model_dump()


def test_a_model_nobody_holds_any_more_is_let_go(loads: list[dict[str, Any]]) -> None:
    ChatCocoa(model="gone").load()
    gc.collect()
    ChatCocoa(model="gone").load()
    assert len(loads) == 2
