"""Chains of retries, gates and citations, and whatever LangChain puts around a model, in any order."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from itertools import permutations
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import (
    ConfigurableField,
    Runnable,
    RunnableLambda,
    RunnablePassthrough,
    RunnableWithFallbacks,
)
from langchain_core.tools import tool
from pydantic import BaseModel, TypeAdapter

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine import engine as engine_module
from cocoa_engine.errors import HallucinationRiskError
from cocoa_integrations._shared.citations import Citation
from cocoa_integrations.langchain import (
    ChatCocoa,
    CocoaLLM,
    get_risk,
    get_spans,
    risk_gate,
    with_citations,
    with_risk_retry,
)
from cocoa_integrations.langchain.composed import called_model
from tests.helpers.alike import near, stand_in, to_dicts, without_markers
from tests.helpers.reasoning_models import HYBRID, PLAIN, reasoning_engine, saying
from tests.helpers.rivals import heads_file
from tests.helpers.tiny_models import engine_for_schemas

DOCUMENTS = [Document("the red one", id="a", metadata={"file": "x"}), Document("a loaf is nine"), Document("it rains")]
PROMPT = ChatPromptTemplate.from_template("{context}\n{question}")
VALUES = {"context": DOCUMENTS, "question": "Who is it?"}


@tool
def look_up(word: bool) -> str:
    """Look a word up."""
    return str(word)


def test_without_markers_and_options_of_a_call(quick_chat: ChatCocoa) -> None:
    chain = with_citations(PROMPT, quick_chat, min_attention=0.0, markers=False)
    message = chain.invoke(VALUES, max_tokens=4)
    filled = PROMPT.invoke({**VALUES, "context": "\n\n".join(one.page_content for one in DOCUMENTS)})
    assert message.text == quick_chat.invoke(filled, max_tokens=4).text
    assert message.response_metadata["cocoa_citations"]
    nothing = with_citations(PROMPT, quick_chat).invoke({**VALUES, "context": []})
    assert nothing.response_metadata["cocoa_citations"] == []
    assert isinstance((chain | StrOutputParser()).invoke(VALUES), str)
    with pytest.raises(ConfigError, match="did you mean 'alpha'"):
        chain.invoke(VALUES, alfa=1.0)


@pytest.mark.parametrize("detail", ["full", "compact"])
def test_the_reasoning_is_not_cited(detail: str) -> None:
    engine = reasoning_engine(PLAIN)
    chat = ChatCocoa(engine=engine, risk_metadata=detail, **saying(engine, "<think>red\nloaf</think>\n\nThe red one."))
    plain = chat.invoke(PROMPT.invoke({**VALUES, "context": "x"}))
    message = with_citations(PROMPT, chat, min_attention=0.0).invoke(VALUES)
    citations, spans = message.response_metadata["cocoa_citations"], to_dicts(get_spans(message))
    TypeAdapter(list[Citation]).validate_python(citations)
    assert plain.text == "The red one."
    assert "".join(one["text"] for one in citations) == plain.text
    assert re.fullmatch(r"The red one (\[\d\])+\.", message.text)
    assert stand_in(message.text, citations)
    for citation in citations:
        assert all(spans[number]["source"] == citation["source"] for number in citation["spans"])
    assert [span["text"] for span in spans] == [span["text"] for span in to_dicts(get_spans(plain))]
    generated = "<think>red\nloaf</think>\n\n" + message.text
    assert stand_in(generated, spans)
    reasoning = [span for span in spans if span["part"] == "reasoning"]
    assert reasoning
    assert all(span["source"] is None and len(span["source_attentions"]) == 3 for span in reasoning)


@pytest.fixture
def seeing_chat(quick_engine: CocoaEngine, tmp_path: Path) -> ChatCocoa:
    """A model whose retrieval heads are known."""
    heads = heads_file(tmp_path, quick_engine.model)
    return ChatCocoa(engine=quick_engine, max_tokens=12, risk_metadata="full", decore_heads=heads)


@pytest.mark.parametrize("detail", ["full", "compact"])
async def test_retries_and_streams_name_their_passages(detail: Any, seeing_chat: ChatCocoa) -> None:
    chat = seeing_chat.model_copy(update={"risk_metadata": detail})
    chain = with_risk_retry(RunnableLambda(lambda _: DOCUMENTS), PROMPT, chat, threshold=0.0, top_k_growth=1)
    for message in (chain.invoke("Who is it?"), await chain.ainvoke("Who is it?")):
        for span in to_dicts(get_spans(message)):
            assert len(span["passage_attention"]) == 3
            assert span["source_attention"] > 0
    other = with_risk_retry(
        RunnableLambda(lambda _: DOCUMENTS), PROMPT, chat, threshold=0.0, top_k_growth=1, format_documents=len
    )
    assert all("passage_attention" not in span for span in to_dicts(get_spans(other.invoke("Who is it?"))))
    text = chat.prompt_text("the red one; it rains")
    start = text.index("it rains")
    chunks = list(chat.stream("the red one; it rains", source=[(start, start + 8)]))
    spans = [span for chunk in chunks for span in chunk.additional_kwargs.get("cocoa_spans", [])]
    if detail == "full":
        assert spans
        assert all(len(span["passage_attention"]) == 1 for span in spans)
    with pytest.raises(ConfigError, match="is not in the prompt"):
        chat.invoke("it rains", source=["it snows"])


def test_the_documents_take_the_place_of_other_sources(quick_chat: ChatCocoa) -> None:
    chat = quick_chat.model_copy(update={"source": ["Who"]})
    for format_documents, count in ((len, 0), (lambda documents: DOCUMENTS[0].page_content, 1)):
        chain = with_citations(PROMPT, chat, min_attention=0.0, format_documents=format_documents)
        for span in to_dicts(get_spans(chain.invoke(VALUES))):
            assert len(span["source_attentions"]) == 3
            assert sum(value is not None for value in span["source_attentions"]) == count


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [look_up]},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"continue_final_message": True},
    ],
)
def test_documents_are_searched_for_in_the_prompt_that_is_answered(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = reasoning_engine(HYBRID)
    chat = ChatCocoa(engine=engine, **saying(engine, "It is red."))
    answered, searched = list[str](), list[str]()
    encoded, rendered = engine_module.chat_ids, ChatCocoa.prompt_text
    begun = [("ai", "It")] if "continue_final_message" in options else []

    def kept(*args: Any) -> tuple[str, list[int]]:
        text, token_ids = encoded(*args)
        answered.append(text)
        return text, token_ids

    monkeypatch.setattr(engine_module, "chat_ids", kept)
    monkeypatch.setattr(ChatCocoa, "prompt_text", lambda *args: searched.append(text := rendered(*args)) or text)
    prompt = ChatPromptTemplate.from_messages([("user", "{context} {question}"), *begun])
    with_citations(prompt, chat).invoke(VALUES, **options)
    assert searched == answered
    assert len(answered) == 1


def test_answers_with_other_passages_are_not_taken_from_a_cache(seeing_chat: ChatCocoa) -> None:
    cached = seeing_chat.model_copy(update={"cache": InMemoryCache()})
    assert "passage_attention" not in to_dicts(get_spans(cached.invoke("it rains")))[0]
    assert len(to_dicts(get_spans(cached.invoke("it rains", source=["rains"])))[0]["passage_attention"]) == 1


def test_bad_input(quick_chat: ChatCocoa) -> None:
    for documents in ("text", None, ["text"]):
        with pytest.raises(ConfigError, match="needs a list of documents under 'context'"):
            with_citations(PROMPT, quick_chat).invoke({**VALUES, "context": documents})
    with pytest.raises(ConfigError, match="takes a ChatCocoa"):
        with_citations(PROMPT, StrOutputParser())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes a ChatCocoa, not a FakeListChatModel"):
        with_citations(PROMPT, FakeListChatModel(responses=["a"]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no risk report"):
        with_citations(PROMPT, quick_chat).invoke({**VALUES, "answer": AIMessage("a")})


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
    "with_risk_retry": lambda chat: with_risk_retry(
        RunnableLambda(lambda question: DOCUMENTS), PROMPT, chat, threshold=0.0, max_tries=2, top_k_growth=1
    ),
}


@pytest.mark.parametrize("name", sorted(CHAINS))
async def test_the_chat_of_a_chain_may_be_composed_and_have_a_gate(name: str, quick_chat: ChatCocoa) -> None:
    composed = quick_chat.bind(max_tokens=4).with_config(tags=["a"])
    assert CHAINS[name](composed).invoke(VALUES).usage_metadata["output_tokens"] <= 4
    chain = CHAINS[name](quick_chat | risk_gate(0.0, on_risk="abstain", answer="I do not know."))
    assert chain.invoke(VALUES).text == (await chain.ainvoke(VALUES)).text == "I do not know."


@pytest.mark.parametrize("name", sorted(CHAINS))
@pytest.mark.parametrize("parsed", ["text", {"raw": AIMessage("x"), "parsed": None}, Answer(yes=True)], ids=type)
async def test_the_chat_of_a_chain_returns_messages(name: str, parsed: Any, quick_chat: ChatCocoa) -> None:
    chain = CHAINS[name](quick_chat | RunnableLambda(lambda message: parsed))
    words = rf"{name} needs a chat that returns messages, .* a {type(parsed).__name__}; put a parser after"
    with pytest.raises(ConfigError, match=words):
        chain.invoke(VALUES)
    with pytest.raises(ConfigError, match=words):
        await chain.ainvoke(VALUES)


MARKS = str.maketrans("", "", "<>")


def plain(text: str) -> str:
    return without_markers(text).translate(MARKS)


async def called(chain: Runnable[Any, Any], how: str) -> AIMessage:
    if how == "invoke":
        return await asyncio.to_thread(chain.invoke, VALUES["question"])
    if how == "ainvoke":
        return await chain.ainvoke(VALUES["question"])
    return [chunk async for chunk in chain.astream(VALUES["question"])][-1]


def steps_of(names: Sequence[str], chat: ChatCocoa, **of_citations: Any) -> Runnable[Any, Any]:
    """A chain of a retry and the named steps."""
    chain: Any = with_risk_retry(
        RunnableLambda(lambda _: DOCUMENTS),
        PROMPT,
        chat,
        threshold=0.0,
        max_tries=2,
        top_k_growth=1,
        return_documents=True,
    )
    has_documents = True
    for name in names:
        if name == "cite":
            chain |= with_citations(PROMPT, chat, **of_citations)
            has_documents = False
        else:
            gate = risk_gate(0.0, on_risk=name, mark="<{text}>")  # type: ignore[arg-type]
            chain |= RunnablePassthrough.assign(answer=itemgetter("answer") | gate) if has_documents else gate
    return chain if not has_documents else chain | itemgetter("answer")


@pytest.mark.parametrize("how", ["invoke", "astream"])
async def test_a_retried_answer_is_cited_and_marked_in_any_order(how: str, quick_chat: ChatCocoa) -> None:
    alone = await called(steps_of(["cite"], quick_chat, min_attention=0.0), how)
    assert alone.text != plain(alone.text)
    tries = alone.response_metadata["cocoa_tries"]
    assert [one["answer"] for one in tries if one["chosen"]] == [plain(alone.text)]
    shown = {
        (await called(steps_of(order, quick_chat, min_attention=0.0), how)).text
        for order in permutations(["cite", "mark"])
    }
    assert len(shown) == 1
    (text,) = shown
    assert "<" in text
    assert without_markers(text).translate(MARKS) == plain(alone.text)
    orders = [*permutations(["cite", "mark", "abstain"])]
    for order in orders if how == "invoke" else orders[:1]:
        message = await called(steps_of(order, quick_chat), how)
        assert message.text == "I don't know."
        assert get_risk(message).to_dict()["gate"]["action"] == "abstain"
        assert len(message.response_metadata["cocoa_tries"]) == 2


def test_an_answer_whose_passages_are_not_known_is_not_cited(
    quick_chat: ChatCocoa, caplog: pytest.LogCaptureFixture
) -> None:
    """The retry names its passages only where all are in the prompt."""

    def shouted(documents: Sequence[Document]) -> str:
        return "\n".join([documents[0].page_content.upper(), *(one.page_content for one in documents[1:])])

    retry = with_risk_retry(
        RunnableLambda(lambda _: DOCUMENTS),
        PROMPT,
        quick_chat,
        threshold=1.0,
        top_k_growth=1,
        format_documents=shouted,
        return_documents=True,
    )
    shown = [(retry | with_citations(PROMPT, quick_chat, format_documents=shouted)).invoke(VALUES["question"])]
    filled = PROMPT.invoke({**VALUES, "context": "\n\n".join(one.page_content for one in DOCUMENTS)})
    answer = quick_chat.invoke(filled, source=["the red one"])  # written with other passages
    shown.append(with_citations(PROMPT, quick_chat).invoke({**VALUES, "answer": answer}))
    shown.append(with_citations(PROMPT, quick_chat).invoke({**VALUES, "answer": quick_chat.invoke(filled)}))
    for message in shown:
        assert message.response_metadata["cocoa_citations"] == []
        assert all(span["source_attentions"] == [None] * 3 for span in get_risk(message).to_dict()["spans"])
    assert caplog.text.count("some sources are not cited, because the prompt does not have") == 3


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
@pytest.mark.parametrize("inside", ["raise", "abstain", "mark"])
async def test_a_gate_inside_of_a_retry(how: str, inside: Any, quick_chat: ChatCocoa) -> None:
    retriever = RunnableLambda(lambda _: DOCUMENTS)

    def chain(threshold: float, at: float = 0.0, **options: Any) -> Runnable[Any, Any]:
        gated: Any = quick_chat | risk_gate(at, on_risk=inside, mark="<{text}>")
        return with_risk_retry(retriever, PROMPT, gated, threshold=threshold, max_tries=2, top_k_growth=1, **options)

    passed = await called(chain(1.0, at=1.0), how)
    assert len(passed.response_metadata["cocoa_tries"]) == 1
    if inside == "mark":  # a marked answer is not withheld
        marked = await called(chain(1.0), how)
        assert len(marked.response_metadata["cocoa_tries"]) == 1
        assert plain(marked.text) == passed.text
        return
    refused = await called(chain(1.0, on_risk="abstain", answer="Ask a person."), how)
    tries = refused.response_metadata["cocoa_tries"]
    assert refused.text == "Ask a person."
    assert len(tries) == 2  # below the threshold of the retry, but not of the gate
    gate = get_risk(refused).to_dict()["gate"]
    assert (gate["action"], gate["threshold"]) == ("abstain", 0.0)
    assert get_risk(refused).max_risk == near(min(one["risk"] for one in tries))
    with pytest.raises(HallucinationRiskError, match="which reaches the threshold of 0") as error:
        await called(chain(1.0, on_risk="raise"), how)
    assert error.value.value == near(gate["value"])
    for on_risk in ("keep", "mark"):
        if inside == "abstain":
            assert (await called(chain(0.0, on_risk=on_risk), how)).text == "I don't know."
        else:
            with pytest.raises(HallucinationRiskError):
                await called(chain(0.0, on_risk=on_risk), how)


def test_a_retry_goes_on_after_a_gate_that_raised(quick_chat: ChatCocoa) -> None:
    seen: list[AIMessage] = []

    def first_is_stopped(message: AIMessage) -> AIMessage:
        seen.append(message)
        return risk_gate(0.0).invoke(message) if len(seen) == 1 else message

    gated: Any = quick_chat | RunnableLambda(first_is_stopped)
    chain = with_risk_retry(RunnableLambda(lambda _: DOCUMENTS), PROMPT, gated, threshold=1.0, top_k_growth=1)
    message = chain.invoke(VALUES["question"])
    tries = message.response_metadata["cocoa_tries"]
    assert [one["answer"] for one in tries] == [one.text for one in seen]
    assert [one["chosen"] for one in tries] == [False, True]
    assert [one["cocoa_risk"].get("gate", {}).get("action") for one in tries] == ["raise", None]


@pytest.mark.parametrize("action", ["mark", "abstain"])
async def test_a_gate_inside_of_citations(action: Any, quick_chat: ChatCocoa) -> None:
    gate = risk_gate(0.0, on_risk=action, mark="<{text}>")
    inside = with_citations(PROMPT, quick_chat | gate, min_attention=0.0)  # type: ignore[arg-type]
    outside = with_citations(PROMPT, quick_chat, min_attention=0.0) | gate
    assert inside.invoke(VALUES).text == (await outside.ainvoke(VALUES)).text == (await inside.ainvoke(VALUES)).text
    with pytest.raises(HallucinationRiskError):
        with_citations(PROMPT, quick_chat | risk_gate(0.0)).invoke(VALUES)  # type: ignore[arg-type]


def test_steps_in_the_place_of_the_model_are_refused(quick_chat: ChatCocoa) -> None:
    citing: Any = with_citations(PROMPT, quick_chat)
    retry: Any = with_risk_retry(RunnableLambda(lambda _: DOCUMENTS), PROMPT, quick_chat, top_k_growth=1)
    for wrong in (
        lambda: with_risk_retry(RunnableLambda(lambda _: DOCUMENTS), PROMPT, citing),
        lambda: with_citations(PROMPT, retry),
    ):
        with pytest.raises(ConfigError, match=r"return_documents=True\) \| with_citations\(prompt, chat\)"):
            wrong()
