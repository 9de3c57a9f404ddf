"""The constructor's options and transformers' generate keywords: honoured or refused, never ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_index.core.llms import ChatMessage
from transformers import MaxLengthCriteria, RepetitionPenaltyLogitsProcessor

from cocoa_engine import ChatTemplateError, CocoaConfig, CocoaEngine, ConfigError, ModelLoadError, Runtime
from cocoa_integrations._shared.settings import config_of
from cocoa_integrations.llama_index import CocoaLLM
from tests.helpers.llama_index_helpers import PROMPT, Counter
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer


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


def test_settings_fold_into_one_config(engine: CocoaEngine) -> None:
    mine = CocoaEngine(engine.model, engine.tokenizer, config=CocoaConfig(alpha=1.0, gamma=0.5))
    assert config_of(CocoaLLM(engine=mine)) == mine.config
    assert config_of(CocoaLLM(engine=mine, alpha=2.0)) == CocoaConfig(alpha=2.0, gamma=0.5)
    both = CocoaLLM(engine=mine, config=CocoaConfig(seed=1), alpha=2.0)
    assert config_of(both) == CocoaConfig(seed=1, alpha=2.0)
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
        ({"model_name": "gpt2"}, "engine= is given, so model_name would"),
        ({"model": tiny_model("llama"), "tokenizer": object()}, "engine= is given, so model, tokenizer would"),
        ({"model_kwargs": {"dtype": "float16"}}, "engine= is given, so model_kwargs would"),
        ({"device_map": "cuda"}, "engine= is given, so device_map would"),
        ({"dtype": "float16", "allow_pickle": True}, "engine= is given, so dtype, allow_pickle would"),
        ({"config": 3}, "config takes a CocoaConfig, not int"),
        ({"generate_kwargs": "x"}, "generate_kwargs takes a dict of options, not str"),
        ({"model_kwargs": "x"}, "model_kwargs"),
        ({"stopping_ids": 5}, "stopping_ids"),
        ({"query_wrapper_prompt": 3}, "query_wrapper_prompt"),
        ({"temperature": 0.5, "generate_kwargs": {"temperature": 0.0}}, "in generate_kwargs: temperature"),
        ({"max_tokens": 5, "generate_kwargs": {"max_new_tokens": 6}}, "in generate_kwargs: max_new_tokens"),
        ({"no_repeat_ngram_size": 3, "do_sample": True}, "give do_sample, no_repeat_ngram_size in generate_kwargs"),
    ],
)
def test_bad_options_raise_one_clear_error(options: dict[str, Any], message: str, engine: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match=message):
        CocoaLLM(engine=engine, **options)


def test_a_context_window_above_that_of_the_model(engine: CocoaEngine, caplog: pytest.LogCaptureFixture) -> None:
    limit = engine.context_window
    assert limit is not None
    assert CocoaLLM(engine=engine).metadata.context_window == limit
    assert not caplog.records
    llm = CocoaLLM(engine=engine, context_window=limit + 1)
    assert llm.context_window == llm.metadata.context_window == limit
    assert f"is more than the model's {limit} tokens" in caplog.text


def test_a_model_needs_a_tokenizer(engine: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        CocoaLLM(model=engine.model)
    with pytest.raises(ConfigError, match="model= is given, so model_kwargs would"):
        CocoaLLM(model=engine.model, tokenizer=engine.tokenizer, model_kwargs={"dtype": "float16"})
    with pytest.raises(ConfigError, match="tokenizer= is given, so tokenizer_kwargs would"):
        CocoaLLM(model=engine.model, tokenizer=engine.tokenizer, tokenizer_kwargs={"use_fast": False})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model with its tokenizer."""
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_model_and_its_dtype_by_name(folder: Path) -> None:
    llm = CocoaLLM(model_name=str(folder), dtype=torch.bfloat16, device_map=None)
    assert llm.engine.model.dtype is torch.bfloat16
    again = CocoaLLM.from_json(llm.to_json())
    assert (again.engine.model.dtype, again.model_name) == (torch.bfloat16, str(folder))


def test_secrets_show_nowhere(folder: Path) -> None:
    secret = {"token": "hf_secret"}
    llm = CocoaLLM(
        model_name=str(folder), model_kwargs={**secret, "attn_implementation": "eager"}, tokenizer_kwargs=secret
    )
    payload = getattr(llm, "to_payload", dict)()  # older versions have none
    for shown in (repr(llm), str(llm), llm.to_json(), str(llm.to_dict()), llm.model_dump_json(), str(payload)):
        assert "hf_secret" not in shown
    assert llm.model_kwargs["token"] == "hf_secret"
    assert llm.to_dict()["model_kwargs"] == {"attn_implementation": "eager"}


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


def test_greedy_keywords(llm: CocoaLLM, engine: CocoaEngine, caplog: pytest.LogCaptureFixture) -> None:
    quiet = CocoaLLM(engine=engine, generate_kwargs={"do_sample": False, "temperature": None, "top_p": None})
    assert config_of(quiet) == engine.config
    assert not caplog.records
    assert CocoaLLM(engine=engine, generate_kwargs={"do_sample": False, "temperature": 0.7}).temperature == 0
    assert "no effect" in caplog.text
    assert CocoaLLM(engine=engine, temperature=0.7).complete(PROMPT, do_sample=False, max_new_tokens=8).text == (
        llm.complete(PROMPT).text
    )


def test_sampling_keywords(engine: CocoaEngine) -> None:
    assert CocoaLLM(engine=engine, generate_kwargs={"do_sample": True}).temperature == 1.0
    assert CocoaLLM(engine=engine, generate_kwargs={"do_sample": True, "temperature": 0.6}).temperature == 0.6
    assert CocoaLLM(engine=engine, temperature=0.6, generate_kwargs={"do_sample": True}).temperature == 0.6
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


@pytest.mark.parametrize(
    "keyword",
    [{"bad_words_ids": [[10**9]]}, {"suppress_tokens": [None]}, {"eos_token_id": [None]}],
    ids=lambda keyword: next(iter(keyword)),
)
def test_keywords_with_values_that_are_found_wrong_late(keyword: dict[str, Any], engine: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match=next(iter(keyword))):
        CocoaLLM(engine=engine, max_new_tokens=2, generate_kwargs=keyword).complete(PROMPT)


def test_a_keyword_of_a_call_replaces_the_constructor_s(engine: CocoaEngine) -> None:
    standing, own = Counter(), Counter()
    llm = CocoaLLM(engine=engine, max_new_tokens=2, generate_kwargs={"logits_processor": [standing]})
    llm.complete(PROMPT, logits_processor=[own])
    assert own.calls > 0
    assert standing.calls == 0
    llm.complete(PROMPT)
    assert standing.calls > 0


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ({"top_p": 0.9}, "gamma"),
        ({"top_k": 50}, "gamma"),
        ({"num_beams": 4}, "max_candidates"),
        ({"max_length": 100}, "max_new_tokens"),
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


def test_pickle_weights_are_read_only_if_allowed(folder: Path) -> None:
    torch.save(tiny_model("llama").state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="allow_pickle=True"):
        CocoaLLM(model_name=str(folder))
    assert CocoaLLM(model_name=str(folder), allow_pickle=True, device_map=None).engine.model is not None


def test_stopping_criteria_of_transformers(llm: CocoaLLM, engine: CocoaEngine) -> None:
    limit = MaxLengthCriteria(len(engine.encode(PROMPT)) + 3)
    assert llm.complete(PROMPT, stopping_criteria=[limit]).raw["usage"]["completion_tokens"] == 3  # type: ignore[index]
