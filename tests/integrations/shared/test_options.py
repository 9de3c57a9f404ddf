"""Options of constructors and calls, ours and of other models: honoured or refused in both adapters, never ignored."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.load import dumpd
from llama_index.core.llms import ChatMessage
from transformers import (
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)

from cocoa_engine import ChatTemplateError, CocoaConfig, CocoaEngine, RiskCalibrator, Runtime
from cocoa_engine.errors import ConfigError, ModelLoadError
from cocoa_engine.model.load_options import MODEL_NAME
from cocoa_integrations._shared.options import REFUSALS, config_of
from cocoa_integrations.langchain import ChatCocoa, UnsupportedFeatureError
from cocoa_integrations.langchain import CocoaLLM as LangChainLLM
from cocoa_integrations.llama_index import CocoaLLM
from tests.helpers.llama_index_helpers import PROMPT
from tests.helpers.made_up_risk import save_calibrator
from tests.helpers.tiny_models import TEMPLATE, endless, engine_for_schemas, save_model, tiny_model, tiny_tokenizer

QUICK = engine_for_schemas()
OF_LANGCHAIN = [ChatCocoa, LangChainLLM]
each_model = pytest.mark.parametrize("kind", OF_LANGCHAIN)
ALL = [*OF_LANGCHAIN, CocoaLLM]
each_kind = pytest.mark.parametrize("kind", ALL)


@pytest.fixture(scope="module")
def engine() -> CocoaEngine:
    """Its answers do not end by themselves."""
    engine = endless()
    engine.tokenizer.chat_template = TEMPLATE
    return engine


@pytest.fixture
def llm(engine: CocoaEngine) -> CocoaLLM:
    return CocoaLLM(engine=engine, max_new_tokens=8)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What from_pretrained is asked for, in place of loading."""
    asked: list[dict[str, Any]] = []

    def load(**options: Any) -> CocoaEngine:
        asked.append(options)
        return QUICK

    monkeypatch.setattr(CocoaEngine, "from_pretrained", load)
    return asked


@each_kind
def test_settings_not_given_are_those_of_the_config_or_the_engine(kind: Any) -> None:
    config = CocoaConfig(alpha=1.0, stop="x", max_new_tokens=5)
    engine = CocoaEngine(QUICK.model, QUICK.tokenizer, config=config)
    assert config_of(kind(engine=engine)) == config
    assert config_of(kind(engine=engine, alpha=3.0)) == config.replace(alpha=3.0)
    assert config_of(kind(engine=engine, config=CocoaConfig(gamma=0.5))) == CocoaConfig(gamma=0.5)
    assert config_of(kind(engine=engine, config=CocoaConfig(seed=1), alpha=2.0)) == CocoaConfig(seed=1, alpha=2.0)
    assert config_of(kind(engine=engine, stop=[], seed=7)) == config.replace(stop=(), seed=7)
    if kind is CocoaLLM:
        for options in ({"max_tokens": 6}, {"generate_kwargs": {"max_new_tokens": 6}}):
            assert CocoaLLM(engine=engine, **options).metadata.num_output == 6
    else:
        assert config_of(kind()) == CocoaConfig()
        assert config_of(kind(config=config, alpha=3.0)) == config.replace(alpha=3.0)


@each_model
def test_names_that_users_know(kind: Any) -> None:
    model = kind(model="org/name", max_tokens=7, temperature=0.5, stop="x", max_retries=1, timeout=5)
    assert (model.model_name, model.max_new_tokens, model.temperature, model.stop) == ("org/name", 7, 0.5, ("x",))
    assert (model.model, model.max_tokens, model.config.temperature) == ("org/name", 7, 0.5)
    assert kind(max_tokens=None, temperature=None, stop=None, timeout=None) == kind()  # "not given" in LangChain


def test_takes_every_option_of_hugging_face_llm(engine: CocoaEngine) -> None:
    options: dict[str, Any] = {
        "model_name": "my-model",
        "tokenizer_name": "my-model",
        "model": engine.model,
        "tokenizer": engine.tokenizer,
        "context_window": 512,
        "max_new_tokens": 4,
        "system_prompt": "Be brief.",
        "query_wrapper_prompt": "{query_str}",
        "device_map": "auto",
        "stopping_ids": [2],
        "tokenizer_kwargs": {},
        "model_kwargs": {},
        "runtime": {"max_batch_size": 3},
        "generate_kwargs": {"temperature": 0.7, "do_sample": False},
        "is_chat_model": True,
        "messages_to_prompt": lambda messages: messages[-1].content,
        "completion_to_prompt": lambda prompt: prompt,
    }
    llm = CocoaLLM(**options)
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output) == (512, 4)
    assert (metadata.model_name, metadata.is_chat_model) == ("my-model", True)
    assert metadata.is_function_calling_model is False
    assert llm.runtime == Runtime(max_batch_size=3)
    assert llm.complete(PROMPT).raw["usage"]["completion_tokens"] <= 4  # type: ignore[index]


LOADED = {"engine": None, "model": tiny_model("llama")}
BAD: list[tuple[list[Any], dict[str, Any], str]] = [
    (ALL, {"alhpa": 1.0}, r"unknown option 'alhpa' \(did you mean 'alpha'\?\)"),
    (ALL, {"max_token": 1}, r"did you mean 'max_tokens'\?"),
    (ALL, {"alpha": -1}, r"alpha: .*greater than or equal to 0 \(got -1\)"),
    (ALL, {"method": "cocoa-sig-2"}, "did you mean 'cocoa-sig'"),
    (ALL, {"max_tokens": 3, "max_new_tokens": 4}, "max_new_tokens is given twice|the same option"),
    (ALL, {"engine": object()}, r"engine takes a CocoaEngine, not object"),
    (ALL, {"config": {"alpha": 1}}, r"config takes a CocoaConfig, not dict"),
    (ALL, {"model_name": "a", "device_map": "cuda:0"}, "engine= is given, so model_name, device_map would have no"),
    (ALL, {"dtype": "float16", "allow_pickle": True}, "engine= is given, so dtype, allow_pickle would"),
    (ALL, {"model_kwargs": {"dtype": "float16"}}, "engine= is given, so model_kwargs would"),
    (ALL, {"model_kwargs": "x"}, "model_kwargs"),
    (OF_LANGCHAIN, {"pipeline": 1, "model_id": "a"}, r"pipeline=1 \(give engine=.*model_id='a' \(give model\)"),
    (OF_LANGCHAIN, {"device": "cuda", "length_penalty": 2}, r"'device'.*'length_penalty'.*known are"),
    (OF_LANGCHAIN, {"logits_processor": 3}, r"logits_processor.*callable"),
    ([LangChainLLM], {"enable_thinking": False}, "unknown option 'enable_thinking'"),
    ([CocoaLLM], {"contextwindow": 512}, r"unknown option 'contextwindow' \(did you mean 'context_window'"),
    ([CocoaLLM], {"generate_kwargs": {"temprature": 0.5}}, r"'temprature' \(did you mean 'temperature'"),
    ([CocoaLLM], {"context_window": -1}, "context_window"),
    ([CocoaLLM], {"query_wrapper_prompt": "Answer!"}, "query_str"),
    ([CocoaLLM], {"query_wrapper_prompt": 3}, "query_wrapper_prompt"),
    ([CocoaLLM], {"model": tiny_model("llama"), "tokenizer": object()}, "engine= is given, so model, tokenizer would"),
    ([CocoaLLM], {"generate_kwargs": "x"}, "generate_kwargs takes a dict of options, not str"),
    ([CocoaLLM], {"stopping_ids": 5}, "stopping_ids"),
    ([CocoaLLM], {"temperature": 0.5, "generate_kwargs": {"temperature": 0.0}}, "in generate_kwargs: temperature"),
    ([CocoaLLM], {"max_tokens": 5, "generate_kwargs": {"max_new_tokens": 6}}, "in generate_kwargs: max_new_tokens"),
    ([CocoaLLM], {"no_repeat_ngram_size": 3, "do_sample": True}, "give do_sample, no_repeat_ngram_size in generate_k"),
    ([CocoaLLM], LOADED, "tokenizer"),
    ([CocoaLLM], {**LOADED, "tokenizer": tiny_tokenizer(), "model_kwargs": {"a": 1}}, "model= is given, so model_kw"),
    ([CocoaLLM], {**LOADED, "tokenizer": tiny_tokenizer(), "tokenizer_kwargs": {"a": 1}}, "tokenizer= is given, so to"),
]


@pytest.mark.parametrize(("kind", "options", "message"), [(kind, *row) for kinds, *row in BAD for kind in kinds])
def test_bad_options_of_a_constructor(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**{"engine": QUICK, **options})


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
    kind: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind(engine=QUICK)
    monkeypatch.setattr(QUICK.model, "forward", lambda *args, **kwargs: pytest.fail("work was done"))
    for ask in (model.invoke, lambda text, **options: next(model.stream(text, **options))):
        with pytest.raises(ConfigError, match=message):
            ask("Hi", **options)
    with pytest.raises(ConfigError, match=message):
        await model.ainvoke("Hi", **options)
    with pytest.raises(ConfigError, match=message):
        model.batch(["Hi"], **options)


def test_tools_and_templates_are_refused_by_a_text_model() -> None:
    llm = LangChainLLM(engine=QUICK)
    for options in ({"tools": [{}]}, {"response_format": {"type": "json_object"}}, {"tool_choice": "any"}):
        with pytest.raises(UnsupportedFeatureError, match=next(iter(options))):
            llm.invoke("Hi", **options)
    with pytest.raises(UnsupportedFeatureError, match="response_format"):
        llm.bind_tools([], response_format={"type": "json_object"})
    with pytest.raises(UnsupportedFeatureError, match="constrain"):
        llm.with_structured_output({"title": "Answer", "type": "object"})
    for model in (llm, CocoaLLM(engine=QUICK)):  # of the text, which is in no template
        with pytest.raises(ConfigError, match="unknown option 'enable_thinking'"):
            completed(model, enable_thinking=False)


@each_model
def test_none_is_not_given_and_no_tools_are_no_tools(kind: Any) -> None:
    model = kind(engine=QUICK, max_tokens=1, max_retries=None, logprobs=None, logits_processor=None)
    assert (model.max_retries, model.logprobs, model.logits_processor) == (2, None, ())
    asked = model._for_call(None, {"logprobs": None, "stopping_criteria": None, "timeout": None})[0]
    assert (asked.logprobs, asked.stopping_criteria, asked.timeout) == (None, (), None)
    nothing = {"tools": [], "tool_choice": None, "strict": None, "parallel_tool_calls": False}
    assert model.invoke("Hi", model="quick", **nothing)
    assert model.bind(**nothing).invoke("Hi")
    assert model.bind_tools(**nothing) is model


@each_kind
def test_callables_of_transformers_act(kind: Any) -> None:
    model, text = kind(engine=QUICK, max_tokens=6), completed
    plain = text(model)
    [banned] = QUICK.encode(plain[0], add_special_tokens=False)
    ban, criteria = SuppressTokensLogitsProcessor([banned]), StoppingCriteriaList([lambda ids, scores, **_: True])
    assert text(model, logits_processor=[ban])[0] != plain[0]
    assert text(model, stopping_criteria=criteria) == plain[:1]
    if kind is CocoaLLM:
        limit = MaxLengthCriteria(len(QUICK.encode("Hi")) + 3)
        assert text(model, stopping_criteria=[limit]) == plain[:3]
    for name, value, changed in (
        ("logits_processor", ban, text(model, logits_processor=[ban])),
        ("stopping_criteria", criteria, plain[:1]),
    ):
        options = {"generate_kwargs": {name: value}} if kind is CocoaLLM else {name: value}
        changing = kind(engine=QUICK, max_tokens=6, **options)
        assert text(changing) == text(changing) == changed
        assert text(changing, **{name: []}) == plain  # instead of the constructor's
        of_langchain = (repr(changing), str(dumpd(changing)), str(changing.model_dump()))
        assert name not in (changing.to_json() if kind is CocoaLLM else "".join(of_langchain))


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
@each_kind
def test_loading_options_reach_the_engine(kind: Any, loads: list[dict[str, Any]], tmp_path: Path) -> None:
    calibrator = save_calibrator(tmp_path / "risk.json", "quick")
    options: dict[str, Any] = {
        "tokenizer_name": "b",
        "dtype": "bfloat16",
        "device_map": "cuda:0",
        "trust_remote_code": True,
        "allow_pickle": True,
        "tokenizer_kwargs": {"use_fast": True},
    }
    runtime, own = {"forward": "modules", "draft_tokens": 0}, {"model_kwargs": {"revision": "main"}}
    model = kind(model="a", runtime=runtime, calibrator=calibrator, api_key="hf_secret", **own, **options)
    assert model.load().calibrator == RiskCalibrator.load(calibrator)
    own = {"model_kwargs": {"revision": "main", "token": "hf_secret"}}
    assert loads == [{"model_name": "a", "runtime": Runtime(**runtime), **own, **options}]


def test_a_failed_load_is_tried_again_and_a_model_nobody_holds_is_let_go(
    loads: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**options: Any) -> Any:
        raise ModelLoadError("no such model")

    chat = ChatCocoa(model="later")
    with monkeypatch.context() as patched:
        patched.setattr(CocoaEngine, "from_pretrained", fails)
        with pytest.raises(ModelLoadError):
            chat.invoke("Hi")
    assert chat.load() is not None
    del chat
    gc.collect()
    ChatCocoa(model="later").load()
    assert len(loads) == 2


@each_model
def test_tracing_is_told_model_and_settings(kind: Any) -> None:
    model = kind(engine=QUICK, max_tokens=5, temperature=0.3, stop=["x"])
    names = ("model_type", "stop", "model_name", "temperature", "max_tokens")
    kind_name = "chat" if kind is ChatCocoa else "llm"
    own, called = model._get_ls_params(), model._get_ls_params(["y"], model="other", temperature=0.1, max_tokens=3)
    assert [own[f"ls_{name}"] for name in names] == [kind_name, ["x"], "quick", 0.3, 5]
    assert [called[f"ls_{name}"] for name in names] == [kind_name, ["y"], "other", 0.1, 3]
    assert kind()._get_ls_params()["ls_model_name"] == MODEL_NAME


@each_model
def test_an_engine_is_taken_as_it_is_and_not_serialised(kind: Any) -> None:
    model = kind(engine=QUICK, dtype="auto", api_key="x")  # as they are by default; unused
    assert model.load() is QUICK
    assert not kind.is_lc_serializable()
    assert dumpd(model)["type"] == "not_implemented"
    assert "engine" not in model.model_dump()


def test_a_context_window_above_that_of_the_model(engine: CocoaEngine, caplog: pytest.LogCaptureFixture) -> None:
    limit = engine.context_window
    assert limit is not None
    assert CocoaLLM(engine=engine).metadata.context_window == limit
    assert not caplog.records
    llm = CocoaLLM(engine=engine, context_window=limit + 1)
    assert llm.context_window == llm.metadata.context_window == limit
    assert f"is more than the model's {limit} tokens" in caplog.text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(save_model(tmp_path))


def test_a_model_and_its_dtype_by_name(folder: Path) -> None:
    llm = CocoaLLM(model_name=str(folder), dtype=torch.bfloat16, device_map=None)
    assert llm.engine.model.dtype is torch.bfloat16
    again = CocoaLLM.from_json(llm.to_json())
    assert (again.engine.model.dtype, again.model_name) == (torch.bfloat16, str(folder))


@each_kind
def test_secrets_show_nowhere(kind: Any, folder: Path) -> None:
    secret, own = {"token": "hf_secret"}, {"attn_implementation": "eager"}
    for options in ({"api_key": "hf_secret"}, {"model_kwargs": {**secret, **own}, "tokenizer_kwargs": secret}):
        model = kind(model=str(folder), **options)
        shown = [repr(model), str(model), model.model_dump_json(exclude={"callbacks"}), str(model.model_dump())]
        if kind is CocoaLLM:
            payload = getattr(model, "to_payload", dict)()  # older versions have none
            shown += [model.to_json(), str(model.to_dict()), str(payload)]
            assert "api_key" in options or model.to_dict()["model_kwargs"] == own
        else:
            shown += [str(model._identifying_params), str(dumpd(model))]
        assert "hf_secret" not in "".join(shown)
        assert "api_key" in options or model.model_kwargs["token"] == "hf_secret"


def test_is_chat_model_follows_the_tokenizer_unless_completions_are_wrapped(engine: CocoaEngine) -> None:
    assert CocoaLLM(engine=engine).metadata.is_chat_model
    assert not CocoaLLM(engine=engine, is_chat_model=False).metadata.is_chat_model
    assert not CocoaLLM(engine=engine, completion_to_prompt=str.strip).metadata.is_chat_model
    assert not CocoaLLM(engine=engine, query_wrapper_prompt="{query_str}!").metadata.is_chat_model


def test_a_tokenizer_without_chat_template(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    llm = CocoaLLM(engine=engine, max_new_tokens=4)
    assert not llm.metadata.is_chat_model
    with pytest.raises(ChatTemplateError):
        llm.chat([ChatMessage("Hello")])
    formatted = CocoaLLM(engine=engine, max_new_tokens=4, messages_to_prompt=lambda messages: PROMPT)
    assert formatted.metadata.is_chat_model
    assert formatted.chat([ChatMessage("Hello")]).message.content == llm.complete(PROMPT).text


def test_serialises_without_the_model(engine: CocoaEngine) -> None:
    llm = CocoaLLM(engine=engine, alpha=1.5, stopping_ids=[5], generate_kwargs={"max_new_tokens": 5})
    assert "logits_processor" not in CocoaLLM(engine=engine, generate_kwargs={"logits_processor": [max]}).to_json()
    data = json.loads(llm.to_json())
    assert data["class_name"] == "CocoaLLM"
    again = CocoaLLM.from_dict(data, engine=engine)
    assert (config_of(again), again.stopping_ids, again.metadata) == (config_of(llm), [5], llm.metadata)
    assert config_of(again) == engine.config.replace(alpha=1.5, max_new_tokens=5)


def test_keywords_of_greedy_decoding_and_sampling(
    llm: CocoaLLM, engine: CocoaEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def temperature(**options: Any) -> float | None:
        return CocoaLLM(engine=engine, **options).temperature

    quiet = CocoaLLM(engine=engine, generate_kwargs={"do_sample": False, "temperature": None, "top_p": None})
    assert config_of(quiet) == engine.config
    assert not caplog.records
    assert temperature(generate_kwargs={"do_sample": False, "temperature": 0.7}) == 0
    assert "no effect" in caplog.text
    greedy = CocoaLLM(engine=engine, temperature=0.7).complete(PROMPT, do_sample=False, max_new_tokens=8)
    assert greedy.text == llm.complete(PROMPT).text
    assert temperature(generate_kwargs={"do_sample": True}) == 1.0
    assert temperature(generate_kwargs={"do_sample": True, "temperature": 0.6}) == 0.6
    assert temperature(temperature=0.6, generate_kwargs={"do_sample": True}) == 0.6
    with pytest.raises(ConfigError, match="contradict"):
        temperature(generate_kwargs={"do_sample": True, "temperature": 0.0})


@pytest.mark.parametrize(
    ("name", "value_of"),
    [
        ("repetition_penalty", lambda token: 1.5),
        ("no_repeat_ngram_size", lambda token: 1),
        ("suppress_tokens", lambda token: [token]),
        ("bad_words_ids", lambda token: [[token]]),
        ("logits_processor", lambda token: [RepetitionPenaltyLogitsProcessor(1.5)]),
    ],
)
def test_keywords_that_become_logits_processors(name: str, value_of: Any, llm: CocoaLLM, engine: CocoaEngine) -> None:
    plain = engine.generate(PROMPT, max_new_tokens=8)
    keyword = {name: value_of(plain.token_ids[0])}
    by_constructor = CocoaLLM(engine=engine, max_new_tokens=8, generate_kwargs=keyword).complete(PROMPT)
    assert llm.complete(PROMPT, **keyword).text == by_constructor.text != plain.text


def test_keywords_with_values_that_are_found_wrong_late(engine: CocoaEngine) -> None:
    for name, value in (("bad_words_ids", [[10**9]]), ("suppress_tokens", [None]), ("eos_token_id", [None])):
        with pytest.raises(ConfigError, match=name):
            CocoaLLM(engine=engine, max_new_tokens=2, generate_kwargs={name: value}).complete(PROMPT)


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ({"penalty_alpha": 0.6}, "not supported"),
        ({"tools": []}, "chat_with_tools"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"no_repeat_ngram_size": "two"}, "no_repeat_ngram_size"),
    ],
)
def test_keywords_that_cannot_be_honoured_are_refused(
    keyword: dict[str, Any], message: str, llm: CocoaLLM, engine: CocoaEngine
) -> None:
    with pytest.raises(ConfigError, match=message):
        CocoaLLM(engine=engine, generate_kwargs=keyword)
    with pytest.raises(ConfigError, match=message):
        llm.complete(PROMPT, **keyword)


def test_a_tokenizer_by_name_beside_a_model(folder: Path, engine: CocoaEngine) -> None:
    llm = CocoaLLM(model=tiny_model("llama"), tokenizer_name=str(folder), max_new_tokens=2)
    assert llm.complete("ab").raw["usage"]["completion_tokens"] > 0  # type: ignore[index]
    with pytest.raises(ModelLoadError, match="/no/such"):
        CocoaLLM(model=engine.model, tokenizer_name="/no/such")


VALUES: dict[str, Any] = {
    "top_k": 50,
    "top_p": 0.9,
    "n": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "num_beams": 4,
    "logit_bias": {"5": 1},
    "max_length": 100,
    "stop_sequences": ["x"],
}


@pytest.mark.parametrize("name", VALUES)
def test_both_adapters_give_the_same_hint(name: str) -> None:
    option = {name: VALUES[name]}
    lists = []
    asks: list[Any] = [
        lambda: ChatCocoa(**option),
        lambda: ChatCocoa(engine=QUICK).invoke("Hi", **option),
        lambda: LangChainLLM(engine=QUICK).bind(**option).invoke("Hi"),
        lambda: CocoaLLM(engine=QUICK, **option),
        lambda: CocoaLLM(engine=QUICK, generate_kwargs=option),
        lambda: CocoaLLM(engine=QUICK).complete("Hi", **option),
    ]
    for ask in asks:
        with pytest.raises(ConfigError) as error:
            ask()
        lists.append(str(error.value).rpartition("leave out: ")[2])
    assert set(lists) == {f"{name}={VALUES[name]!r} ({REFUSALS[name][1]})."}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name, (neutral, _) in REFUSALS.items() if neutral), "do_sample"])
def test_values_without_effect_are_accepted(name: str) -> None:
    for value in (None, *REFUSALS[name][0]):
        options: dict[str, Any] = {name: value}
        assert ChatCocoa(**options) == ChatCocoa()
        langchain = LangChainLLM(engine=QUICK, max_tokens=1)
        assert langchain.invoke("Hi", **options) == langchain.invoke("Hi")
        assert CocoaLLM(engine=QUICK, generate_kwargs=options, max_new_tokens=1).complete("Hi").text is not None


SAMPLED: dict[str, Any] = {"method": "sample", "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 3}
SAMPLED["max_new_tokens"] = 8


def test_the_method_sample_takes_top_p_and_top_k() -> None:
    expected = QUICK.generate("Hi", **SAMPLED).text
    assert expected != QUICK.generate("Hi", **SAMPLED | {"top_k": 0, "top_p": 1.0, "temperature": 3.0}).text
    for kind in (LangChainLLM, CocoaLLM):
        for options, call in (
            (SAMPLED, {}),
            ({}, SAMPLED),
            ({"method": "sample"}, SAMPLED | {"method": None}),
            ({"config": CocoaConfig(method="sample"), **SAMPLED}, {}),
        ):
            assert completed(kind(engine=QUICK, **options), **call) == expected
    assert completed(CocoaLLM(engine=QUICK, generate_kwargs=SAMPLED)) == expected
    assert ChatCocoa(method="sample", temperature=0.7, top_p=0.9).config.top_p == 0.9
    greedy = QUICK.generate("Hi", method="greedy", max_new_tokens=8).text
    assert completed(LangChainLLM(engine=QUICK, **SAMPLED), method="greedy") == greedy
    for kind in (LangChainLLM, CocoaLLM):
        with pytest.raises(ConfigError, match=r"top_p=0\.9 \(gamma .* only method='sample'"):
            completed(kind(engine=QUICK, method="sample"), method="cocoa-sig", top_p=0.9)


def completed(model: Any, **options: Any) -> str:
    answer = model.complete("Hi", **options) if isinstance(model, CocoaLLM) else model.invoke("Hi", **options)
    return answer if isinstance(answer, str) else str(answer.text)
