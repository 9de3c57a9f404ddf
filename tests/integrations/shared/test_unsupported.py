"""Options of other models: both adapters refuse them in the same words, and accept the values that have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError
from cocoa_integrations._shared.unsupported import INSTEAD, WITHOUT_EFFECT
from cocoa_integrations.langchain import ChatCocoa
from cocoa_integrations.langchain import CocoaLLM as LangChainLLM
from cocoa_integrations.llama_index import CocoaLLM as LlamaIndexLLM
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

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


@pytest.fixture(scope="module")
def tiny() -> CocoaEngine:
    return CocoaEngine(tiny_model("llama"), tiny_tokenizer())


@pytest.mark.parametrize("name", VALUES)
def test_both_adapters_give_the_same_hint(name: str, tiny: CocoaEngine) -> None:
    option = {name: VALUES[name]}
    lists = []
    asks: list[Any] = [
        lambda: ChatCocoa(**option),
        lambda: ChatCocoa(engine=tiny).invoke("Hi", **option),
        lambda: LangChainLLM(engine=tiny).bind(**option).invoke("Hi"),
        lambda: LlamaIndexLLM(engine=tiny, **option),
        lambda: LlamaIndexLLM(engine=tiny, generate_kwargs=option),
        lambda: LlamaIndexLLM(engine=tiny).complete("Hi", **option),
    ]
    for ask in asks:
        with pytest.raises(ConfigError) as error:
            ask()
        lists.append(str(error.value).rpartition("leave out: ")[2])
    assert set(lists) == {f"{name}={VALUES[name]!r} ({INSTEAD[name]})."}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WITHOUT_EFFECT, "do_sample"])
def test_values_without_effect_are_accepted(name: str, tiny: CocoaEngine) -> None:
    for value in (None, *WITHOUT_EFFECT.get(name, ())):
        options: dict[str, Any] = {name: value}
        assert ChatCocoa(**options) == ChatCocoa()
        langchain = LangChainLLM(engine=tiny, max_tokens=1)
        assert langchain.invoke("Hi", **options) == langchain.invoke("Hi")
        assert LlamaIndexLLM(engine=tiny, generate_kwargs=options, max_new_tokens=1).complete("Hi").text is not None


def test_options_of_calls_go_into_generate_kwargs(tiny: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match="CocoaLLM: give do_sample, no_repeat_ngram_size in generate_kwargs"):
        LlamaIndexLLM(engine=tiny, do_sample=True, no_repeat_ngram_size=3)


SAMPLED: dict[str, Any] = {
    "method": "sample",
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "seed": 3,
    "max_new_tokens": 8,
}


def test_the_method_sample_takes_top_p_and_top_k(tiny: CocoaEngine) -> None:
    expected = tiny.generate("Hi", **SAMPLED).text
    assert expected != tiny.generate("Hi", **SAMPLED | {"top_k": 0, "top_p": 1.0, "temperature": 3.0}).text
    assert LangChainLLM(engine=tiny, **SAMPLED).invoke("Hi") == expected
    assert LangChainLLM(engine=tiny).invoke("Hi", **SAMPLED) == expected
    assert LangChainLLM(engine=tiny, method="sample").invoke("Hi", **SAMPLED | {"method": None}) == expected
    assert LangChainLLM(engine=tiny, config=CocoaConfig(method="sample"), **SAMPLED).invoke("Hi") == expected
    assert LlamaIndexLLM(engine=tiny, **SAMPLED).complete("Hi").text == expected
    assert LlamaIndexLLM(engine=tiny, generate_kwargs=SAMPLED).complete("Hi").text == expected
    assert LlamaIndexLLM(engine=tiny, method="sample").complete("Hi", **SAMPLED).text == expected
    assert ChatCocoa(method="sample", temperature=0.7, top_p=0.9).config.top_p == 0.9
    greedy = tiny.generate("Hi", method="greedy", max_new_tokens=8).text
    assert LangChainLLM(engine=tiny, **SAMPLED).invoke("Hi", method="greedy") == greedy


def test_top_p_is_refused_where_a_call_goes_back_to_spans(tiny: CocoaEngine) -> None:
    for ask in (
        LangChainLLM(engine=tiny, method="sample").invoke,
        LlamaIndexLLM(engine=tiny, method="sample").complete,
    ):
        with pytest.raises(ConfigError, match=r"top_p=0\.9 \(gamma .* only method='sample'"):
            ask("Hi", method="cocoa-sig", top_p=0.9)
