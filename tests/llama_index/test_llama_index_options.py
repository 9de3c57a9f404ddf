"""The constructor's options and transformers' generate keywords: honoured or refused, never ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index_helpers import PROMPT, Counter
from transformers import MaxLengthCriteria, RepetitionPenaltyLogitsProcessor

from cocoa_engine import ChatTemplateError, CocoaConfig, CocoaEngine, ConfigError, ModelLoadError
from cocoa_integrations.llama_index import CocoaLLM


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
    assert llm.complete(PROMPT).raw["usage"]["completion_tokens"] <= 4  # type: ignore[index]


def test_settings_fold_into_one_config(engine: CocoaEngine) -> None:
    mine = CocoaEngine(engine.model, engine.tokenizer, config=CocoaConfig(alpha=1.0, gamma=0.5))
    assert CocoaLLM(engine=mine).config == mine.config
    assert CocoaLLM(engine=mine, alpha=2.0).config == CocoaConfig(alpha=2.0, gamma=0.5)
    assert CocoaLLM(engine=mine, config=CocoaConfig(seed=1), alpha=2.0).config == CocoaConfig(seed=1, alpha=2.0)
    assert CocoaLLM(engine=mine, generate_kwargs={"max_new_tokens": 5}).metadata.num_output == 5
    assert CocoaLLM(engine=mine, max_tokens=5).metadata.num_output == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 0.5}, r"unknown option 'temprature' \(did you mean 'temperature'"),
        ({"contextwindow": 512}, r"unknown option 'contextwindow' \(did you mean 'context_window'"),
        ({"generate_kwargs": {"temprature": 0.5}}, r"unknown option 'temprature' \(did you mean 'temperature'"),
        ({"gamma": 0.0}, "gamma"),
        ({"method": "cocoa-sig-2"}, "did you mean 'cocoa-sig'"),
        ({"context_window": -1}, "context_window"),
        ({"query_wrapper_prompt": "Answer!"}, "query_str"),
        ({"max_new_tokens": 5, "generate_kwargs": {"max_new_tokens": 6}}, "generate_kwargs: max_new_tokens"),
        ({"model_name": "gpt2"}, "engine= already settles model_name"),
        ({"model": object(), "tokenizer": object()}, "engine= already settles model, tokenizer"),
        ({"model_kwargs": {"dtype": "float16"}}, "engine= already settles model_kwargs"),
        ({"device_map": "cuda"}, "engine= already settles device_map"),
    ],
)
def test_bad_options_raise_one_clear_error(options: dict[str, Any], message: str, engine: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match=message):
        CocoaLLM(engine=engine, **options)


def test_bad_settings_raise_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="alpha"):
        CocoaLLM(model_name="/there/is/no/such/model", alpha=-1.0)
    with pytest.raises(ModelLoadError, match="/there/is/no/such/model"):
        CocoaLLM(model_name="/there/is/no/such/model")


def test_a_model_needs_a_tokenizer(engine: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        CocoaLLM(model=engine.model)
    with pytest.raises(ConfigError, match="model= already settles model_kwargs"):
        CocoaLLM(model=engine.model, tokenizer=engine.tokenizer, model_kwargs={"dtype": "float16"})
    with pytest.raises(ConfigError, match="tokenizer= already settles tokenizer_kwargs"):
        CocoaLLM(model=engine.model, tokenizer=engine.tokenizer, tokenizer_kwargs={"use_fast": False})


def test_a_window_beyond_the_model_s_is_cut_with_a_warning(
    engine: CocoaEngine, caplog: pytest.LogCaptureFixture
) -> None:
    assert CocoaLLM(engine=engine).metadata.context_window == engine.context_window
    assert not caplog.records
    assert CocoaLLM(engine=engine, context_window=100_000).metadata.context_window == engine.context_window
    assert "100000" in caplog.text


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
    data = json.loads(llm.to_json())
    assert data["class_name"] == "CocoaLLM"
    again = CocoaLLM.from_dict(data, engine=engine)
    assert (again.config, again.stopping_ids, again.metadata) == (llm.config, [5], llm.metadata)


def test_stopping_ids_end_the_answer(llm: CocoaLLM, engine: CocoaEngine) -> None:
    token_ids = engine.generate(PROMPT, max_new_tokens=8).token_ids
    expected = engine.decode(token_ids[: token_ids.index(token_ids[3]) + 1])
    for options in ({"stopping_ids": [token_ids[3]]}, {"generate_kwargs": {"eos_token_id": token_ids[3]}}):
        response = CocoaLLM(engine=engine, max_new_tokens=8, **options).complete(PROMPT)
        assert response.text == expected
        assert response.raw["finish_reason"] == "stop"
    assert llm.complete(PROMPT, eos_token_id=[token_ids[3]]).text == expected


def test_greedy_keywords(llm: CocoaLLM, engine: CocoaEngine, caplog: pytest.LogCaptureFixture) -> None:
    quiet = CocoaLLM(engine=engine, generate_kwargs={"do_sample": False, "temperature": None, "top_p": None})
    assert quiet.config == CocoaConfig()
    assert not caplog.records
    assert CocoaLLM(engine=engine, generate_kwargs={"do_sample": False, "temperature": 0.7}).config.temperature == 0
    assert "no effect" in caplog.text
    assert CocoaLLM(engine=engine, temperature=0.7).complete(PROMPT, do_sample=False, max_new_tokens=8).text == (
        llm.complete(PROMPT).text
    )


def test_sampling_keywords(engine: CocoaEngine) -> None:
    assert CocoaLLM(engine=engine, generate_kwargs={"do_sample": True}).config.temperature == 1.0
    assert CocoaLLM(engine=engine, generate_kwargs={"do_sample": True, "temperature": 0.6}).config.temperature == 0.6
    assert CocoaLLM(engine=engine, temperature=0.6, generate_kwargs={"do_sample": True}).config.temperature == 0.6
    with pytest.raises(ConfigError, match="contradict"):
        CocoaLLM(engine=engine, generate_kwargs={"do_sample": True, "temperature": 0.0})


@pytest.mark.parametrize(
    "keyword",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": "first"},
        {"bad_words_ids": "first"},
        {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.5)]},
    ],
    ids=lambda keyword: next(iter(keyword)),
)
def test_keywords_that_become_logits_processors(keyword: dict[str, Any], llm: CocoaLLM, engine: CocoaEngine) -> None:
    plain = engine.generate(PROMPT, max_new_tokens=8)
    ((name, value),) = keyword.items()
    if value == "first":
        value = [plain.token_ids[0]] if name == "suppress_tokens" else [[plain.token_ids[0]]]
    by_call = llm.complete(PROMPT, **{name: value})
    by_constructor = CocoaLLM(engine=engine, max_new_tokens=8, generate_kwargs={name: value}).complete(PROMPT)
    assert by_call.text == by_constructor.text != plain.text


def test_repetition_penalty_replaces_the_model_s_own(
    llm: CocoaLLM, engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    strong, none = llm.complete(PROMPT, repetition_penalty=1.5).text, llm.complete(PROMPT).text
    monkeypatch.setattr(engine.model.generation_config, "repetition_penalty", 1.2)
    penalised = CocoaLLM(engine=engine, max_new_tokens=8)
    assert penalised.complete(PROMPT).text != none
    assert penalised.complete(PROMPT, repetition_penalty=1.0).text == none
    assert penalised.complete(PROMPT, repetition_penalty=1.5).text == strong


def test_a_keyword_of_a_call_replaces_the_constructor_s(engine: CocoaEngine) -> None:
    standing, own = Counter(), Counter()
    llm = CocoaLLM(engine=engine, max_new_tokens=2, generate_kwargs={"logits_processor": [standing]})
    llm.complete(PROMPT, logits_processor=[own])
    assert own.calls > 0
    assert standing.calls == 0
    llm.complete(PROMPT)
    assert standing.calls > 0


def test_stopping_criteria_of_transformers(llm: CocoaLLM, engine: CocoaEngine) -> None:
    limit = MaxLengthCriteria(len(engine.encode(PROMPT)) + 3)
    assert llm.complete(PROMPT, stopping_criteria=[limit]).raw["usage"]["completion_tokens"] == 3  # type: ignore[index]


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ({"top_p": 0.9}, "gamma"),
        ({"top_k": 50}, "gamma"),
        ({"num_beams": 4}, "max_candidates"),
        ({"max_length": 100}, "max_new_tokens"),
        ({"penalty_alpha": 0.6}, "cannot be honoured"),
        ({"tools": []}, "function calling"),
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


def test_keywords_that_ask_for_what_happens_anyway(llm: CocoaLLM) -> None:
    harmless = {"num_beams": 1, "top_p": 1.0, "top_k": 0, "use_cache": True, "pad_token_id": 2, "penalty_alpha": None}
    assert llm.complete(PROMPT, **harmless).text == llm.complete(PROMPT).text
