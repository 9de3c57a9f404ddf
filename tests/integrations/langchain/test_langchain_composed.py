"""Whatever LangChain puts around a model, in any order: every option reaches the engine, and questions know of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnableWithFallbacks
from langchain_core.tools import tool
from pydantic import BaseModel

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_integrations.langchain import (
    ChatCocoa,
    CocoaLLM,
    risk_gate,
    with_citations,
    with_context_lift,
    with_risk_retry,
)
from cocoa_integrations.langchain.composed import called_model
from tests.helpers.structured import engine_for_schemas


@tool
def look_up(word: bool) -> str:
    """Look a word up."""
    return str(word)


class Answer(BaseModel):
    yes: bool


class ReachedError(Exception):
    """The engine was asked."""


class Door:
    """What the engine is asked to do. It does nothing."""

    def __init__(self, engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, Any] = {}
        for name in ("chat", "stream_chat", "generate_batch", "stream"):
            monkeypatch.setattr(engine, name, self.opened)

    def opened(self, prompt: Any, **options: Any) -> Any:
        text = str(prompt)
        config = options["config"]
        self.asked = {
            "max_tokens": config.max_new_tokens,
            "alpha": config.alpha,
            "tools": "look_up" in text,
            "schema": "fits this JSON schema" in text,
            "grammar": len(options["logits_processor"]),
        }
        raise ReachedError

    def told(self, runnable: Any, config: Any) -> dict[str, Any]:
        with pytest.raises(ReachedError):
            runnable.invoke("Hi", config)
        return self.asked


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    with monkeypatch.context() as patched:
        yield Door(engine_for_schemas(), patched)


def field(name: str) -> ConfigurableField:
    return ConfigurableField(id=name)


def alternative(model: Any, **options: Any) -> Any:
    other = ChatCocoa(engine=engine_for_schemas())
    return model.configurable_alternatives(field("which"), default_key="first", second=other)


CONFIG = {"configurable": {"length": 7, "weight": 0.5}}
STEPS: dict[str, Any] = {
    "bind length": lambda model: model.bind(max_tokens=7),
    "bind weight": lambda model: model.bind(alpha=0.5),
    "length field": lambda model: model.configurable_fields(max_tokens=field("length")),
    "weight field": lambda model: model.configurable_fields(alpha=field("weight")),
    "tools": lambda model: model.bind_tools([look_up]),
    "config": lambda model: model.with_config(tags=["a"], run_name="b"),
    "configured": lambda model: model.with_config(configurable={"unknown": 1}),
    "retry": lambda model: model.with_retry(stop_after_attempt=1),
    "fallbacks": lambda model: model.with_fallbacks([], exceptions_to_handle=(KeyError,)),
    "alternatives": alternative,
    "listeners": lambda model: model.with_listeners(on_start=lambda run: None),
    "async listeners": lambda model: model.with_alisteners(),
    "types": lambda model: model.with_types(output_type=str),
}
OPTIONS = {"length": {"bind length", "length field"}, "weight": {"bind weight", "weight field"}}
ENDS: dict[str, Any] = {
    "as it is": lambda model: model,
    "schema": lambda model: model.with_structured_output(Answer),
    "schema, raw": lambda model: model.with_structured_output(Answer, include_raw=True),
    "schema, mode": lambda model: model.with_structured_output(Answer, method="json_mode"),
    "schema, call": lambda model: model.with_structured_output(Answer, method="function_calling"),
}
AFTER: dict[str, Any] = {
    "bind length": STEPS["bind length"],
    "config": STEPS["config"],
    "retry": STEPS["retry"],
    "fallbacks": STEPS["fallbacks"],
}


@pytest.mark.slow
@settings(max_examples=100)
@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=5, unique=True),
    end=st.sampled_from(sorted(ENDS)),
    after=st.lists(st.sampled_from(sorted(AFTER)), max_size=2, unique=True),
)
def test_every_option_reaches_the_engine(steps: list[str], end: str, after: list[str]) -> None:
    engine = engine_for_schemas()
    with pytest.MonkeyPatch.context() as patched:
        door, runnable = Door(engine, patched), ChatCocoa(engine=engine)
        for name in steps:
            runnable = STEPS[name](runnable)
        asked = called_model(runnable, CONFIG)
        runnable = ENDS[end](runnable)
        for name in after:
            runnable = AFTER[name](runnable)
        told = door.told(runnable, CONFIG)
    used = {*steps, *after}
    assert told["max_tokens"] == (7 if used & OPTIONS["length"] else engine.config.max_new_tokens)
    assert told["alpha"] == (0.5 if used & OPTIONS["weight"] else engine.config.alpha)
    assert told["tools"] == ("tools" in steps and end != "schema, call")
    assert told["schema"] == (end in ("schema", "schema, raw"))
    assert told["grammar"] == (end != "as it is")
    # what is asked of the composed model
    assert asked.max_new_tokens == (7 if set(steps) & OPTIONS["length"] else engine.config.max_new_tokens)
    assert asked.alpha == (0.5 if set(steps) & OPTIONS["weight"] else engine.config.alpha)


@pytest.mark.parametrize(
    "steps", [["bind length"], ["bind length", "tools"], ["tools", "bind length", "retry", "config"]]
)
def test_questions_are_answered_for_what_will_be_sent(steps: list[str]) -> None:
    chat: Any = ChatCocoa(engine=engine_for_schemas())
    model = chat
    for name in steps:
        model = STEPS[name](model)
    assert model.max_tokens == 7
    assert model._get_ls_params()["ls_max_tokens"] == 7
    assert model.profile == chat.profile
    asked = [HumanMessage("Hi")]
    counted = chat.get_num_tokens_from_messages(asked, tools=[look_up] if "tools" in steps else None)
    assert model.get_num_tokens_from_messages(asked) == counted
    assert ("look_up" in model.prompt_text("Hi")) == ("tools" in steps)
    assert model._identifying_params["max_new_tokens"] == 7
    assert [*model.generate([asked], risk_metadata="full").generations[0][0].message.additional_kwargs["cocoa_spans"]]


def test_the_last_value_counts(door: Door) -> None:
    chat: Any = ChatCocoa(engine=engine_for_schemas())
    assert door.told(chat.bind(max_tokens=3).bind(max_new_tokens=7), {})["max_tokens"] == 7
    bound = chat.bind(max_tokens=3).configurable_fields(max_tokens=field("length"))
    assert door.told(bound, {})["max_tokens"] == 3
    assert door.told(bound, CONFIG)["max_tokens"] == 7
    assert door.told(bound.bind_tools([look_up]), CONFIG)["max_tokens"] == 7
    chosen = bound.with_config(configurable={"length": 9})
    assert chosen.max_tokens == 9
    assert door.told(chosen.with_structured_output(Answer), {})["max_tokens"] == 9


def test_alternatives_and_fallbacks_each_get_tools_and_options(door: Door) -> None:
    chat: Any = ChatCocoa(engine=engine_for_schemas())
    other = ChatCocoa(engine=engine_for_schemas(), alpha=0.5)
    either = chat.configurable_alternatives(
        field("which"), default_key="a", b=other, c=lambda: other.bind(max_tokens=3)
    )
    model = either.bind_tools([look_up]).bind(max_tokens=7)
    second = {"configurable": {"which": "b"}}
    assert door.told(model, second) == {"max_tokens": 7, "alpha": 0.5, "tools": True, "schema": False, "grammar": 0}
    assert door.told(model, {"configurable": {"which": "c"}})["tools"]
    assert called_model(model, second).alpha == 0.5  # type: ignore[arg-type]
    with_fallback = chat.with_fallbacks([other]).bind(max_tokens=7).with_structured_output(Answer)
    inner = with_fallback.bound
    assert isinstance(inner, RunnableWithFallbacks)
    assert door.told(inner.fallbacks[0].bind(max_tokens=7), {})["schema"]


def test_options_that_contradict_each_other_are_refused_when_they_are_bound() -> None:
    chat: Any = ChatCocoa(engine=engine_for_schemas())
    with pytest.raises(ConfigError, match="unknown tool"):
        chat.bind(tool_choice="find").bind_tools([look_up])
    with pytest.raises(ConfigError, match="max_new_tokens"):
        chat.bind(max_tokens=-1).bind_tools([look_up])


@pytest.mark.parametrize(
    "steps", [["bind length"], ["length field"], ["retry", "bind length"], ["bind length", "fallbacks", "config"]]
)
async def test_text_models_with_risk(steps: list[str], door: Door) -> None:
    model: Any = CocoaLLM(engine=engine_for_schemas(), risk_metadata="compact")
    for name in steps:
        model = STEPS[name](model)
    model = model.with_risk()
    assert door.told(model, CONFIG)["max_tokens"] == 7
    for call in (lambda: list(model.stream("Hi", CONFIG)), lambda: model.batch(["Hi"], CONFIG)):
        door.asked = {}
        with pytest.raises(ReachedError):
            call()
        assert door.asked["max_tokens"] == 7
    with pytest.raises(ReachedError):
        await model.ainvoke("Hi", CONFIG)


CHAINS: dict[str, Any] = {
    "with_citations": lambda chat: with_citations(PROMPT, chat),
    "with_context_lift": lambda chat: with_context_lift(PROMPT, chat),
    "with_risk_retry": lambda chat: with_risk_retry(
        RunnableLambda(lambda question: DOCUMENTS), PROMPT, chat, threshold=0.0, max_tries=2, top_k_growth=1
    ),
}
PROMPT = ChatPromptTemplate.from_template("{context}\n{question}")
DOCUMENTS = [Document("the red one")]
VALUES = {"context": DOCUMENTS, "question": "Who is it?"}


@pytest.mark.parametrize("name", sorted(CHAINS))
async def test_the_chat_of_a_chain_may_have_a_gate(name: str, quick_chat: ChatCocoa) -> None:
    marked = risk_gate(0.0, on_risk="abstain", answer="I do not know.")
    chain = CHAINS[name](quick_chat | marked)
    assert chain.invoke(VALUES).text == "I do not know."
    assert (await chain.ainvoke(VALUES)).text == "I do not know."


@pytest.mark.parametrize("name", sorted(CHAINS))
@pytest.mark.parametrize("parsed", ["text", {"raw": AIMessage("x"), "parsed": None}, Answer(yes=True)], ids=type)
async def test_the_chat_of_a_chain_returns_messages(name: str, parsed: Any, quick_chat: ChatCocoa) -> None:
    chain = CHAINS[name](quick_chat | RunnableLambda(lambda message: parsed))
    words = rf"{name} needs a chat that returns messages, .* a {type(parsed).__name__}; put a parser after"
    with pytest.raises(ConfigError, match=words):
        chain.invoke(VALUES)
    with pytest.raises(ConfigError, match=words):
        await chain.ainvoke(VALUES)


@pytest.mark.parametrize("name", sorted(CHAINS))
def test_the_chat_of_a_chain_may_be_composed(name: str, quick_chat: ChatCocoa) -> None:
    message = CHAINS[name](quick_chat.bind(max_tokens=4).with_config(tags=["a"])).invoke(VALUES)
    assert message.usage_metadata["output_tokens"] <= 4
