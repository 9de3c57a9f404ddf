"""LangChain's answer caches never mix settings, and cached answers carry their risk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, get_risk, get_risk_callback
from tests.tiny_models import tiny_model

MODELS = [ChatCocoa, CocoaLLM]
OTHER: dict[str, Any] = {
    "method": "cocoa",
    "metric": "con_mlds",
    "alpha": 0.9,
    "gamma": 0.5,
    "max_candidates": 2,
    "max_span_tokens": 2,
    "span_boundary": "left",
    "span_log_prob": "mean",
    "middle_layers": (1, 3),
    "final_layer": "pre_norm",
    "max_new_tokens": 3,
    "temperature": 0.7,
    "seed": 1,
    "stop": ["x"],
}


@pytest.fixture(autouse=True)
def cache() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


def answer(model: Any, **options: Any) -> Any:
    """The generation of a call: what a cache keeps."""
    inputs = [model._convert_input("Once upon a time")]
    return model.generate_prompt(inputs, **options).generations[0][0]


@pytest.mark.parametrize("kind", MODELS)
def test_a_cached_answer_carries_its_risk(kind: Any, quick_engine: CocoaEngine, spy: Any) -> None:
    model = kind(engine=quick_engine, max_tokens=4)
    first, second = answer(model), answer(model)
    assert len(spy.calls) == 1
    assert second.text == first.text
    assert get_risk(second) == get_risk(first)


def test_every_setting_is_tried() -> None:
    assert set(OTHER) == set(CocoaConfig.model_fields)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("setting", OTHER)
def test_no_setting_replays_an_answer_of_another(kind: Any, setting: str, quick_engine: CocoaEngine, spy: Any) -> None:
    model = kind(engine=quick_engine, max_new_tokens=4)
    other = {setting: OTHER[setting]}
    answer(model)
    answer(model, **other)
    assert len(spy.calls) == 2
    plain, changed = answer(model), answer(model, **other)
    assert plain is not changed
    assert answer(kind(engine=quick_engine, **{"max_new_tokens": 4, **other})) is changed  # however it was given
    assert len(spy.calls) == 2


@pytest.mark.parametrize("kind", MODELS)
async def test_async_calls_share_the_cache_and_its_care(kind: Any, quick_engine: CocoaEngine, spy: Any) -> None:
    model = kind(engine=quick_engine, max_new_tokens=4)
    await model.ainvoke("Once")
    await model.ainvoke("Once", alpha=0.9)
    await model.bind(alpha=0.9).ainvoke("Once")
    model.invoke("Once")
    assert len(spy.calls) == 2


@pytest.mark.parametrize("kind", MODELS)
def test_models_in_memory_are_told_apart(kind: Any, quick_engine: CocoaEngine) -> None:
    other = CocoaEngine(tiny_model("llama", seed=9), quick_engine.tokenizer, model_name="quick")
    texts = [answer(kind(engine=engine, max_tokens=8)).text for engine in (quick_engine, other)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_without_cache_and_streams_do_not_use_it(kind: Any, quick_engine: CocoaEngine, spy: Any) -> None:
    model = kind(engine=quick_engine, max_new_tokens=4, cache=False)
    answer(model)
    answer(model)
    cached = kind(engine=quick_engine, max_new_tokens=4)
    answer(cached)
    list(cached.stream("Once upon a time"))
    assert len(spy.calls) == 4


def test_callbacks_see_a_cached_answer_of_the_chat_model_only(quick_engine: CocoaEngine) -> None:
    chat, llm = ChatCocoa(engine=quick_engine, max_tokens=4), CocoaLLM(engine=quick_engine, max_tokens=4)
    for model, expected in ((chat, 2), (llm, 1)):  # LangChain fires none for text models
        with get_risk_callback() as risk:
            answer(model)
            answer(model)
        assert len(risk.reports) == expected
