"""The models of a server give what the same models in this process give, in both adapters."""

import copy
import itertools
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.runnables.utils import add
from llama_index.core.llms import ChatMessage, ChatResponse, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool

from cocoa_engine import CocoaConfig, CocoaEngine, Span, errors
from cocoa_integrations.chat_service.local import GrowingAnswer
from cocoa_integrations.langchain import (
    ChatCocoa,
    CocoaLLM,
    argument_risks,
    field_risks,
    get_risk,
    get_risk_callback,
    get_spans,
    with_citations,
    with_risk_retry,
)
from cocoa_integrations.llama_index import CocoaLLM as LlamaIndexLLM
from cocoa_integrations.llama_index import RiskCitationQueryEngine, collect_risk
from cocoa_integrations.llama_index.answers import Answers
from cocoa_integrations.llama_index.retrieved import add_nodes
from cocoa_integrations.server import create_app
from tests.helpers.alike import close, to_dicts, token_counts, without_reuse
from tests.helpers.in_threads import wait_until
from tests.helpers.inside import sequences_running
from tests.helpers.live_server import Recording, listening, serving
from tests.helpers.llama_index_helpers import Finds
from tests.helpers.reasoning_models import OPENS, READS_REASONING, speaker
from tests.helpers.rivals import heads_file
from tests.helpers.tiny_models import PATHS, QUESTION, Order, engine_for_schemas

each_kind = pytest.mark.parametrize("kind", [ChatCocoa, LlamaIndexLLM])


@pytest.fixture(scope="module")
def engine() -> CocoaEngine:
    return engine_for_schemas()


@pytest.fixture(scope="module")
def server(engine: CocoaEngine) -> Recording:
    return Recording(create_app(engine))


@pytest.fixture(scope="module")
def url(server: Recording) -> Iterator[str]:
    with listening(server) as url:
        yield url


@pytest.fixture
def sent(server: Recording) -> list[Any]:
    """The requests of the test."""
    server.bodies.clear()
    server.headers.clear()
    return server.bodies


def here_and_there(engine: CocoaEngine, url: str, kind: Any = ChatCocoa, **options: Any) -> tuple[Any, Any]:
    """The same model in this process and behind its server."""
    options = {"max_tokens": 12, "risk_metadata": "full", **options}
    return kind(engine=engine, **options), kind(base_url=url, timeout=60, **options)


def ask(model: Any, text: str, **options: Any) -> Any:
    return model.chat([ChatMessage(text)], **options) if hasattr(model, "chat") else model.invoke(text, **options)


def joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    return cast(AIMessageChunk, add(chunks))


def assert_same(here: Any, there: Any) -> None:
    """Every key of the reports but the ids of calls, and whatever else the answers have in common."""
    own, remote = (without_ids(get_risk(each).to_dict()) for each in (here, there))
    assert list(own) == list(remote)
    for key in own:
        assert close(own[key], remote[key]), key
    assert close(here.additional_kwargs.get("cocoa_spans"), there.additional_kwargs.get("cocoa_spans"))
    if isinstance(here, ChatResponse):
        assert close(*(without_ids(answer.raw["cocoa_risk"]) for answer in (here, there)))
    assert common(here) == common(there)


def without_ids(report: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": "new for each call"} for call in report.get("tool_calls", ())]
    return {**report, **({"tool_calls": calls} if calls else {})}


def common(answer: Any) -> list[Any]:
    """All of an answer but its risk and the ids of its calls."""
    if isinstance(answer, ChatResponse):
        metadata: Any = answer.raw
        blocks = [block.model_dump(exclude={"tool_call_id"}) for block in answer.message.blocks]
        usage = [metadata["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")]
        parts = [answer.message.role, answer.message.content, answer.delta, blocks, usage, {*answer.additional_kwargs}]
    else:
        metadata = answer.response_metadata
        wrong = [(call["args"], call["error"]) for call in answer.invalid_tool_calls]
        calls = [call["args"] for call in answer.tool_calls]
        parts = [answer.content, calls, wrong, token_counts(answer.usage_metadata), metadata["model_provider"]]
    return [*parts, metadata["model_name"], metadata["finish_reason"]]


# What comes back.


async def answers(model: Any, **options: Any) -> list[list[Any]]:
    """Whole answers and streams, sync and async."""
    if isinstance(model, ChatCocoa):
        streams = [[*model.stream(QUESTION, **options)], [part async for part in model.astream(QUESTION, **options)]]
        return [[model.invoke(QUESTION, **options)], [await model.ainvoke(QUESTION, **options)], *streams]
    asked = [ChatMessage(QUESTION)]
    astream = await model.astream_chat(asked, **options)
    streams = [[*model.stream_chat(asked, **options)], [part async for part in astream]]
    return [[model.chat(asked, **options)], [await model.achat(asked, **options)], *streams]


def pieces(chunks: list[Any]) -> list[Any]:
    """The text and the spans of each chunk."""
    if isinstance(chunks[0], AIMessage):
        return [(chunk.text, to_dicts(get_spans(chunk))) for chunk in chunks]
    spans = [chunk.additional_kwargs.get("cocoa_spans") for chunk in chunks[:-1]]
    return [spans, [(chunk.delta, chunk.message.content) for chunk in chunks]]


@each_kind
@pytest.mark.parametrize(
    "settings",
    [{}, {"method": "greedy"}, {"alpha": 8.0, "gamma": 0.05}, {"stop": ["6"]}, {"max_risk": 0.3, "max_tokens": 40}],
)
async def test_the_report_is_that_of_the_model_in_this_process(
    kind: Any, engine: CocoaEngine, url: str, settings: dict[str, Any]
) -> None:
    here, there = here_and_there(engine, url, kind, **settings)
    for own, remote in zip(await answers(here), await answers(there), strict=True):
        if len(own) > 1:
            assert close(pieces(own), pieces(remote))
        if kind is ChatCocoa and len(own) > 1:
            assert remote[-1].chunk_position == "last"
            own, remote = [joined(own)], [joined(remote)]
        assert_same(own[-1], remote[-1])


@each_kind
async def test_answers_end_at_the_risk_of_the_model_or_of_a_call(kind: Any, engine: CocoaEngine, url: str) -> None:
    expected = engine.chat([{"role": "user", "content": QUESTION}], max_risk=0.3, max_new_tokens=40)
    limited = here_and_there(engine, url, kind, max_tokens=40, max_risk=0.3)
    models = here_and_there(engine, url, kind, max_tokens=40)
    of_models = [await answers(model) for model in limited]
    of_calls = [await answers(model, max_risk=0.3) for model in models]
    if kind is ChatCocoa:  # an engine of its own, since what a batch leaves for later prompts is rounded otherwise
        alone = kind(engine=CocoaEngine(engine.model, engine.tokenizer), max_tokens=40)
        of_calls.append([[answer] for answer in alone.batch([QUESTION] * 2, max_risk=0.3)])
    for found in itertools.chain(*of_models, *of_calls):
        answer = joined(found) if kind is ChatCocoa else found[-1]
        text = answer.text if kind is ChatCocoa else answer.message.content
        assert (text, common(answer)[-1], expected.finish_reason) == (expected.text, "risk", "risk")
        assert get_risk(answer).spans[-1].reaches_max_risk
    assert {common(ask(model, QUESTION))[-1] for model in models} == {"length"}


@pytest.mark.parametrize("detail", ["full", "compact", "none"])
def test_returned_answers_have_the_detail_and_callbacks_everything(engine: CocoaEngine, url: str, detail: Any) -> None:
    here, there = here_and_there(engine, url)
    with get_risk_callback() as risk:
        answers = [chat.invoke(QUESTION, risk_metadata=detail) for chat in (here, there)]
        streams = [joined(list(chat.stream(QUESTION, risk_metadata=detail))) for chat in (here, there)]
    for own, remote in (answers, streams):
        for place, key in (("response_metadata", "cocoa_risk"), ("additional_kwargs", "cocoa_spans")):
            assert close(getattr(own, place).get(key), getattr(remote, place).get(key))
    full = here.invoke(QUESTION)
    assert all(close({**get_risk(full).to_dict(), "run_id": one.run_id}, one.to_dict()) for one in risk.reports)
    assert len(risk.reports) == 4


def look_up(place: str) -> str:
    """Look a place up."""
    return place


def look_down(place: str) -> str:
    """Look down on a place."""
    return place


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output_has_the_risk_of_each_field(engine: CocoaEngine, url: str, method: Any) -> None:
    here, there = here_and_there(engine, url, max_tokens=250)
    [own, remote] = [
        chat.with_structured_output(Order, method=method, include_raw=True).invoke("An order.")
        for chat in (here, there)
    ]
    assert isinstance(remote["parsed"], Order)
    assert remote["parsed"] == own["parsed"]
    assert_same(own["raw"], remote["raw"])
    assert [path for path in field_risks(remote["raw"]) if path.startswith("$.")] == list(field_risks(own["raw"]))
    assert set(PATHS) <= {*field_risks(remote["raw"])}
    model = there.with_structured_output(Order, method=method)
    assert list(model.stream("An order."))[-1] == own["parsed"]
    assert await model.ainvoke("An order.") == own["parsed"]


@pytest.mark.parametrize("choice", ["any", {"type": "function", "function": {"name": "look_up"}}])
def test_a_required_call_has_the_risk_of_each_argument(engine: CocoaEngine, url: str, choice: Any) -> None:
    here, there = here_and_there(engine, url, max_tokens=60)
    [own, remote] = [
        chat.bind_tools([look_up], tool_choice=choice).invoke("Where?", stop=["\x00"]) for chat in (here, there)
    ]
    assert_same(own, remote)
    calls = [*remote.tool_calls, *remote.invalid_tool_calls]
    assert [call["name"] for call in calls] == ["look_up"]
    assert [*argument_risks(remote)] == [call["id"] for call in calls]


CALL = '<tool_call>\n{"name": "look_up", "arguments": '


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ChatCocoa, LlamaIndexLLM])
@pytest.mark.parametrize(
    ("says", "limit", "names"),
    [
        (CALL + '{"place": "the red', 60, ["look_up"]),
        (CALL, 60, ["look_up"]),
        ('There: <tool_call>{"place": "red"}</tool_call>', 60, [None]),
        (f'<tool_call>{{"place": "red"}}</tool_call>{CALL}{{"place": "loaf"}}}}</tool_call>', 200, [None, "look_up"]),
        (f'{CALL}{{"place": "loaf"}}}}</tool_call>{CALL}{{"place": "the', 200, ["look_up", "look_up"]),
        (CALL.replace("look_up", "look_down") + '{"place": "it"}}</tool_call>', 60, ["look_down"]),
    ],
)
def test_calls_that_are_invalid_are_those_of_this_process(kind: Any, says: str, limit: int, names: list[str]) -> None:
    """Calls that are cut off, without a name, or not allowed: in the answer, its stream and its report."""
    engine = speaker(says)
    options: dict[str, Any] = {
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look_up"}]}
    }
    with serving(engine) as url:
        here, there = here_and_there(engine, url, kind, max_tokens=limit)
        if kind is ChatCocoa:
            own, remote = (chat.bind_tools([look_up, look_down], **options) for chat in (here, there))
            assert_same(own.invoke("Where?"), remote.invoke("Where?"))
            answer = joined(list(remote.stream("Where?")))
            assert_same(joined(list(own.stream("Where?"))), answer)
            assert len([*answer.tool_calls, *answer.invalid_tool_calls]) == len(names)
        else:
            tools = [FunctionTool.from_defaults(each) for each in (look_up, look_down)]
            given = {"tools": tools, "user_msg": "Where?", **options}
            answer = there.chat_with_tools(**given)
            assert_same(here.chat_with_tools(**given), answer)
            assert_same(*([*chat.stream_chat_with_tools(**given)][-1] for chat in (here, there)))
        reports = get_risk(answer).tool_calls
    assert [report.name for report in reports] == names
    assert reports[-1].error is not None or names[0] is None


async def test_the_reasoning_is_where_it_is_in_this_process() -> None:
    engine = speaker("the red loaf</think>\n\nyes and no", template=OPENS)
    with serving(engine) as url:
        here, there = here_and_there(engine, url, max_tokens=60)
        own, remote = here.invoke("Is it?"), there.invoke("Is it?")
        streamed = joined(list(there.stream("Is it?")))
        assert_same(joined(list(here.stream("Is it?"))), streamed)
        assert_same(own, await there.ainvoke("Is it?"))
    assert_same(own, remote)
    assert remote.text == streamed.text == "yes and no"
    assert [block["type"] for block in cast(Any, remote.content)] == ["reasoning", "text"]
    assert remote.usage_metadata is not None
    assert remote.usage_metadata["output_token_details"]["reasoning"] > 0


def test_a_conversation_is_the_same_prompt() -> None:
    """Reasoning and tool calls of earlier answers reach the chat template, the risk of earlier answers does not."""
    engine = speaker("yes", template=READS_REASONING)
    messages = [
        HumanMessage("Where?"),
        AIMessage(
            [{"type": "reasoning", "reasoning": "red loaf"}, {"type": "text", "text": "there"}],
            tool_calls=[{"name": "look_up", "args": {"place": "it"}, "id": "1"}],
            response_metadata={"cocoa_risk": {"spans": []}},
        ),
        ToolMessage("nine", tool_call_id="1"),
    ]
    seen: list[str] = []
    generate = engine.generate
    engine.generate = lambda prompt, **options: (seen.append(engine.decode(prompt)), generate(prompt, **options))[1]  # type: ignore[method-assign]
    with serving(engine) as url:
        for chat in here_and_there(engine, url):
            chat.invoke(messages)
    assert seen[0] == seen[1]
    assert "<think>red loaf</think>there" in seen[0]


# What is sent.


def test_only_what_is_given_is_sent(url: str, sent: list[Any], server: Recording, monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    ChatCocoa(base_url=url, timeout=60, max_tokens=1).invoke("Hi")
    [body] = sent
    assert body == {
        "model": "cocoa",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": False,
        "cocoa": {"max_new_tokens": 1, "report": "message"},
    }
    assert server.headers[0]["authorization"] == "Bearer none"
    ChatCocoa(base_url=url, max_tokens=1, api_key="k", default_headers={"x-team": "a"}).invoke("Hi")
    assert (server.headers[1]["authorization"], server.headers[1]["x-team"]) == ("Bearer k", "a")


def test_settings_are_sent_by_name_and_those_of_a_call_take_precedence(url: str, sent: list[Any]) -> None:
    chat = ChatCocoa(
        base_url=url, model="x", max_new_tokens=3, alpha=1.0, temperature=0.5, seed=3, middle_layers=[1, 2], api_key="k"
    )
    chat.invoke("Hi", alpha=2.0, max_tokens=2, method="cocoa", candidates=True, stop=["z"], enable_thinking=None)
    [body] = sent
    assert body["model"] == "x"
    assert body["cocoa"] == {
        "alpha": 2.0, "method": "cocoa", "middle_layers": [1, 2], "max_new_tokens": 2, "temperature": 0.5, "seed": 3,
        "stop": ["z"], "candidates": True, "report": "message",
    }  # fmt: skip
    answer = chat.invoke("Hi", candidates=True, max_tokens=12, risk_metadata="full", method="cocoa-sig")
    assert any(len(span["rivals"]) == span["candidates"] > 1 for span in to_dicts(get_spans(answer)))
    logged = chat.invoke("Hi", top_logprobs=2, model="another")
    assert sent[-1]["model"] == "another"
    assert [len(one["top_logprobs"]) for one in logged.response_metadata["logprobs"]["content"]] == [2, 2, 2]


@each_kind
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alhpa": 1.0}, r"unknown option 'alhpa' \(did you mean 'alpha'\?\)"),
        ({"decore_heads": "heads.json"}, "decore_heads names a file of the server's machine"),
        ({"risk_metadata": "fulll"}, "risk_metadata.*'full'"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "the same option|given twice"),
    ],
)
def test_options_are_checked_before_anything_is_sent(
    kind: Any, url: str, sent: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        kind(base_url=url, **options)
    if "max_tokens" not in options:
        with pytest.raises(errors.ConfigError, match=message):
            ask(kind(base_url=url), "Hi", **options)
    with pytest.raises(errors.PromptError, match="empty"):
        ask(kind(base_url=url), "")
    assert sent == []


def test_models_with_other_settings_do_not_share_cached_answers(url: str, sent: list[Any]) -> None:
    cache = InMemoryCache()
    for alpha in (1.0, 2.0, 1.0):
        assert ChatCocoa(base_url=url, max_tokens=2, alpha=alpha, cache=cache).invoke("Hi").text
    assert len(sent) == 2


# Errors.


def test_a_busy_server_is_asked_again_after_its_time(
    url: str, sent: list[Any], server: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.refusals = [(429, {"retry-after-ms": "30"}), (429, {"retry-after-ms": "30"})]
    assert ChatCocoa(base_url=url, max_tokens=2).invoke("Hi").usage_metadata
    assert len(sent) == 3
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    server.refusals = [(429, {"retry-after": "7"})]
    assert ChatCocoa(base_url=url, max_tokens=2).invoke("Hi").usage_metadata
    assert 7.0 in waited
    monkeypatch.undo()
    server.refusals = [(429, {})]
    with pytest.raises(openai.RateLimitError, match="try later"):
        ChatCocoa(base_url=url, max_retries=0).invoke("Hi")


async def test_errors_of_the_server_are_those_of_openai_with_its_message(engine: CocoaEngine, url: str) -> None:
    chat = ChatCocoa(base_url=url, timeout=60)
    with pytest.raises(openai.BadRequestError, match=r"above the server's limit") as caught:
        chat.invoke("Hi", max_candidates=1000)
    assert caught.value.param == "cocoa.max_candidates"
    with pytest.raises(openai.BadRequestError, match="context window"):
        await chat.ainvoke("word " * 5000)
    with pytest.raises(openai.BadRequestError, match="source"):
        list(chat.stream("Hi", source=["not in the prompt"]))
    with serving(engine, api_keys=("secret",)) as guarded:
        with pytest.raises(openai.AuthenticationError):
            ChatCocoa(base_url=guarded).invoke("Hi")
        assert ChatCocoa(base_url=guarded, api_key="secret", max_tokens=2).invoke("Hi").usage_metadata
    gone = ChatCocoa(base_url=url.replace("/v1", "/v2"), max_retries=0)
    with pytest.raises(openai.NotFoundError):
        gone.invoke("Hi")


def test_an_answer_that_is_left_ends_at_the_server(engine: CocoaEngine, url: str) -> None:
    stream = ChatCocoa(base_url=url, max_tokens=1000).stream(QUESTION)
    assert get_spans(next(stream))
    stream.close()
    wait_until(lambda: sequences_running(engine) == 0)


def test_an_error_in_mid_stream_is_raised_with_its_message(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_span = GrowingAnswer.add

    def failing(self: GrowingAnswer, span: Span) -> Any:
        if span.start > 0:
            raise errors.GenerationTimeoutError("too slow")
        return add_span(self, span)

    monkeypatch.setattr(GrowingAnswer, "add", failing)
    stream = ChatCocoa(base_url=url, max_tokens=100).stream(QUESTION)
    assert to_dicts(get_spans(next(stream)))
    with pytest.raises(openai.APIError, match="too slow"):
        list(stream)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(
        errors.MissingExtraError, match=r"a model behind a server needs openai: pip install .*\[remote\]"
    ):
        ChatCocoa(base_url="http://not.asked.before/v1")


CONFIGURED = (ChatCocoa, lambda chat: chat.configurable_fields(alpha=ConfigurableField("alpha")))
COPIES = [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]


@pytest.mark.parametrize(("kind", "form"), [*itertools.product([ChatCocoa, LlamaIndexLLM], COPIES), CONFIGURED])
def test_other_forms_ask_the_same_server(kind: Any, form: Any, url: str, sent: list[Any]) -> None:
    ask(form(kind(base_url=url, timeout=60, max_tokens=2, api_key="k")), "Hi")
    assert sent[0]["cocoa"] == {"max_new_tokens": 2, "report": "message"}


async def test_a_text_model_continues_a_prompt_at_the_server(engine: CocoaEngine, url: str) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    here, there = CocoaLLM(engine=engine, **options), CocoaLLM(base_url=url, timeout=60, **options)
    prompts = ["The capital of France is", "It is"]
    own, remote = here.generate(prompts), there.generate(prompts)
    for [a], [b] in zip(own.generations, remote.generations, strict=True):
        infos = [without_reuse(each.generation_info or {}) for each in (a, b)]
        tokens = [[token["token"] for token in info.pop("logprobs")["content"]] for info in infos]
        assert a.text == b.text
        assert close(*infos)
        assert tokens[0] == tokens[1]
    assert own.llm_output == remote.llm_output
    assert [answer[0].text for answer in (await there.agenerate(prompts)).generations] == [
        answer[0].text for answer in own.generations
    ]
    assert list(there.stream("It is")) == list(here.stream("It is"))
    assert [text async for text in there.astream("It is")] == list(here.stream("It is"))
    assert close(*(model.with_risk().invoke("It is") for model in (here, there)))


# With the rest.


@pytest.fixture
def seeing(engine: CocoaEngine, tmp_path: Path) -> Iterator[tuple[ChatCocoa, ChatCocoa]]:
    """A model whose retrieval heads are known."""
    config = engine.config.replace(decore_heads=heads_file(tmp_path, engine.model))
    aware = CocoaEngine(engine.model, engine.tokenizer, model_name="quick", config=config)
    with serving(aware) as url:
        yield here_and_there(aware, url)


async def test_passages_are_attended_to_at_the_server(seeing: tuple[ChatCocoa, ChatCocoa]) -> None:
    prompt = ChatPromptTemplate.from_template("{context}\n{question}")
    documents = [Document(text) for text in ("the red one", "a loaf is nine", "it rains")]
    values = {"context": documents, "question": "Who is it?"}
    own, remote = (with_citations(prompt, chat, min_attention=0.0) for chat in seeing)
    cited = remote.invoke(values)
    assert cited.text == own.invoke(values).text == (await remote.ainvoke(values)).text
    assert cited.response_metadata["cocoa_citations"]
    assert close(get_risk(own.invoke(values)).to_dict(), get_risk(cited).to_dict())
    retried = with_risk_retry(RunnableLambda(lambda _: documents), prompt, seeing[1], threshold=0.0, top_k_growth=1)
    for message in (retried.invoke("Who is it?"), await retried.ainvoke("Who is it?")):
        assert all(len(span["passage_attention"]) == 3 for span in to_dicts(get_spans(message)))


async def test_sources_that_the_prompt_at_the_server_does_not_have_are_not_cited(
    engine: CocoaEngine, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}\n{% endfor %}"
    prompt = ChatPromptTemplate.from_template("{context}\n{question}")
    values = {"context": [Document("the red one")], "question": "Who is it?"}
    with serving(CocoaEngine(engine.model, tokenizer)) as url:
        chat = ChatCocoa(base_url=url, max_tokens=4, timeout=60)
        hidden = with_citations(prompt, chat, format_documents=lambda documents: f"{len(documents)} documents")
        for chain in (with_citations(prompt, chat), hidden):
            for message in (chain.invoke(values), await chain.ainvoke(values)):
                assert message.response_metadata["cocoa_citations"] == []
    assert caplog.text.count("some sources are not cited, because the prompt does not have") == 4


def test_nodes_that_the_messages_do_not_have_are_not_cited(url: str, caplog: pytest.LogCaptureFixture) -> None:
    shouted = {"context_str": lambda context_str, **_: context_str.upper()}
    template = PromptTemplate("{context_str}\n{query_str}", function_mappings=shouted)
    llm = LlamaIndexLLM(base_url=url, max_tokens=12)
    inner = RetrieverQueryEngine.from_args(Finds("the red one"), llm=llm, text_qa_template=template)
    response = RiskCitationQueryEngine(inner).query("Hi")
    assert caplog.text.count("some sources are not cited") == 1
    assert response.metadata is not None
    assert response.metadata["cocoa_risk"]["spans"]
    assert response.metadata["cocoa_citations"] == []


def test_what_needs_the_model_in_this_process(url: str) -> None:
    there = ChatCocoa(base_url=url)
    with pytest.raises(errors.UnsupportedFeatureError, match="needs the engine"):
        there.get_num_tokens("Hi")
    counted = ChatCocoa(base_url=url, custom_get_token_ids=lambda text: [1] * len(text))
    assert counted.get_num_tokens_from_messages([HumanMessage("Hi"), AIMessage("Ho!")]) == 5


def nodes_of(*texts: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(id_=text, text=f" {text}\n")) for text in texts]


async def test_retrieved_nodes_in_the_messages_are_sent_as_sources(url: str, sent: list[Any]) -> None:
    llm = LlamaIndexLLM(base_url=url, timeout=60, max_tokens=3)
    question = [ChatMessage("the red loaf", role=MessageRole.SYSTEM), ChatMessage("yes and no")]
    with collect_risk() as reports, Answers():
        llm.chat(question)
        add_nodes(nodes_of("yes", "loaf yes", "it", "red loaf"))
        llm.chat(question)
        _ = [*llm.stream_chat(question)]
        await llm.achat(question)
        _ = [one async for one in await llm.astream_chat(question)]
        llm.complete("yes")
        add_nodes(nodes_of(*(f"{number:03}" for number in range(300))))
        llm.chat([ChatMessage("yes " + " ".join(f"{number:03}" for number in range(300)))])
    named = ["yes", "red loaf"]  # not one that begins in a message and ends in the next
    assert [body["cocoa"].get("source") for body in sent[:-1]] == [None, *[named] * 4, ["yes"]]
    assert sent[-1]["cocoa"]["source"] == ["yes", *(f"{number:03}" for number in range(255))]  # what a server takes
    counts = [{len(span.passage_attention or ()) for span in report.spans} for report in reports]
    assert counts == [{0}, *[{2}] * 4, {1}, {256}]
    with (answers := Answers()):  # of two nodes with one id the first counts
        add_nodes([*nodes_of("yes", "no"), NodeWithScore(node=TextNode(id_="yes", text="it"))])
    assert [node.text for node in answers.nodes or ()] == [" yes\n", " no\n"]


def test_the_context_window_is_that_of_the_server(engine: CocoaEngine, url: str, sent: list[Any]) -> None:
    llm = LlamaIndexLLM(base_url=url, config=CocoaConfig(alpha=1.0).replace(gamma=0.5))
    assert {name for name in CocoaConfig.model_fields if getattr(llm, name) is not None} == {"alpha", "gamma"}
    about = llm.metadata
    assert (about.context_window, about.num_output) == (engine.context_window, 256)
    assert about.is_chat_model
    assert about.is_function_calling_model
    assert LlamaIndexLLM(base_url=url, context_window=100).metadata.context_window == 100
    assert len(sent) == 1  # asked once
