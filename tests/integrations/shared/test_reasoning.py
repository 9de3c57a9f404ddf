"""Reasoning is told from the answer, however the text arrives, and is neither called, nor counted, nor shown as it."""

import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, message_to_dict, messages_from_dict
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables.utils import add as added
from llama_index.core.base.llms.types import TextBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.tools import FunctionTool
from packaging.version import Version
from pydantic import BaseModel

from cocoa_engine import CocoaEngine, ConfigError, HallucinationRiskError, PromptError
from cocoa_engine.report import RiskReport, SpanReport
from cocoa_integrations import langchain
from cocoa_integrations._shared.edits import EditedText
from cocoa_integrations._shared.limits import Limit
from cocoa_integrations._shared.options import ends_inside_reasoning
from cocoa_integrations._shared.reasoning import split_generation
from cocoa_integrations.chat_service.local import GrowingAnswer
from cocoa_integrations.langchain import ChatCocoa, field_risks, get_risk, get_risk_callback, get_spans, risk_gate
from cocoa_integrations.llama_index import CocoaLLM, RiskChatEngine, RiskQueryEngine, argument_risks, collect_risk
from cocoa_integrations.tool_calling import Plan, ToolRequest
from tests.helpers.alike import close, risk_report, to_dicts, without_run
from tests.helpers.made_up_answers import generation
from tests.helpers.made_up_risk import fitted
from tests.helpers.reasoning_models import HYBRID, OPENS, PLAIN, READS_REASONING, reasoning_engine, saying

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ADDS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
USER = {"role": "user", "content": "Hi"}
THINKING = {**USER, "content": "<think>"}


@pytest.fixture(scope="module")
def engines() -> dict[str, CocoaEngine]:
    return {tags: reasoning_engine(tags=tags) for tags in TAGS}


@pytest.fixture(scope="module")
def engine(engines: dict[str, CocoaEngine]) -> CocoaEngine:
    return engines["text"]


def cuts(text: str) -> Iterator[list[str]]:
    """The text in pieces of one, two, three and seven characters, and in two pieces at every place."""
    for size in (1, 2, 3, 7):
        yield [text[at : at + size] for at in range(0, len(text), size)]
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "answer", "calls"),
    [
        (False, "Hello </think> x", "", "Hello </think> x", 0),
        (False, "\n Hello", "", "\n Hello", 0),
        (False, "<thin ice", "", "<thin ice", 0),
        (False, "<thi", "", "<thi", 0),
        (False, "Use <think> and </think>.", "", "Use <think> and </think>.", 0),
        (False, "<think>\nWell.\n</think>\n\nHello!\n", "Well.", "Hello!\n", 0),
        (False, "\n<think>Well", "Well", "", 0),
        (False, "<think>\n\n</think>\n\nHello", "", "Hello", 0),
        (True, "Well, a < b.</think>\n\nHello", "Well, a < b.", "Hello", 0),
        (True, "\n<think>\nWell </thin</think>Hello</think>", "Well </thin", "Hello</think>", 0),
        (True, "Well </thi", "Well </thi", "", 0),
        (True, " \n", "", "", 0),
        (True, "</think>Hello", "", "Hello", 0),
        (True, f"I could {ADDS} but…</think>\n\nHello!", f"I could {ADDS} but…", "Hello!", 0),
        (True, f"I could {ADDS} and</think>\n{ADDS}", f"I could {ADDS} and", "", 1),
        (False, f"<think>{ADDS}", ADDS, "", 0),
        (False, f" {ADDS}", "", "", 1),
    ],
)
def test_the_parts_add_up_however_the_text_is_cut(
    engine: CocoaEngine, inside: bool, text: str, reasoning: str, answer: str, calls: int
) -> None:
    for pieces in cuts(text):
        whole = generation(*((piece, 0.5) for piece in pieces))
        plan = Plan(ToolRequest.of([ADD]), engine)
        plan.inside_reasoning = inside
        growing = GrowingAnswer(plan)
        seen = []
        for span in whole.spans:
            seen += growing.add(span)
        held, rest, reading = growing.finish()
        seen += [*held, rest]
        split = plan.split(whole)
        assert ("".join(piece.reasoning for piece in seen), split.reasoning) == (reasoning, reasoning)
        assert ("".join(piece.content for piece in seen), reading.content) == (answer, answer)
        assert [call.error for call in reading.calls] == [None] * calls
        assert [(piece.entry.span, piece.entry.part) for piece in seen[:-1]] == [
            (number, None if split.parts is None else split.parts[number]) for number in range(len(whole.spans))
        ]
        assert all(piece.calls == [] for piece in seen) == (calls == 0)
        if calls:
            assert whole.text[slice(*reading.calls[0].values["a"])] == "1"


def test_a_span_belongs_to_where_its_visible_text_is(engine: CocoaEngine) -> None:
    texts = ["Well.", " </thi", "nk>\n", "\n", "Hello", "!"]
    split = split_generation(generation(*((text, 0.5) for text in texts)), engine, inside=True)
    assert split.parts == ("reasoning", "reasoning", "reasoning", "answer", "answer", "answer")
    straddles = split_generation(generation(("Well.</think> Hi", 0.9), ("!", 0.1)), engine, inside=True)
    assert straddles.parts == ("answer", "answer")
    assert split_generation(generation(("Hi", 0.5)), engine).parts is None


def test_reports_and_limits_count_the_answer(engine: CocoaEngine) -> None:
    whole = generation(("Well, ", 0.9), ("ok.</think>", 0.7), ("\n\nHel", 0.2), ("lo", 0.4))
    report = split_generation(whole, engine, inside=True).report(whole)
    assert (report.max_risk, report.mean_risk) == (0.4, pytest.approx(0.3))
    assert report.reasoning is not None
    assert report.reasoning.to_dict() == {
        "max_risk": 0.9,
        "mean_risk": pytest.approx(0.8),
        "risk_points": 0,
        "spans": [0, 1],
        "answer_start": 19,
    }
    assert [span.part for span in report.spans] == ["reasoning", "reasoning", "answer", "answer"]
    assert [span.span for span, _ in Limit(0.3).risky(report.spans) if isinstance(span, SpanReport)] == [3]

    def marked(threshold: float, text: str, report: RiskReport) -> str:
        edited = EditedText.of(text, report)
        return edited.changed(Limit(threshold).mark_edits(edited.spans(report.spans), "[{text}]")).text

    assert marked(0.2, "Hello", report) == "[Hello]"
    straddles = generation(("Well.</think> Hi", 0.9), ("!", 0.1))
    straddling = split_generation(straddles, engine, inside=True).report(straddles)
    assert marked(0.5, "Hi!", straddling) == "[Hi]!"
    for wrong in ("i!", "Hello", "Well. Hi!"):
        with pytest.raises(ConfigError, match="differs from the text of its spans"):
            marked(0.5, wrong, straddling)
    plain = risk_report(whole, split_generation(whole, engine))
    assert plain == risk_report(whole)
    assert "reasoning" not in plain
    assert "part" not in plain["spans"][0]


@pytest.mark.slow
def test_the_risk_of_the_answer_as_a_whole_is_that_of_the_answer() -> None:
    calibrator = fitted(levels=("answer",), draws=2)
    engine = reasoning_engine(calibrator=calibrator)
    whole = generation(("Well.</think>", 0.9), ("Hello", 0.1), ("!", 0.4)).model_copy(update={"answer_risk": 0.5})
    split = split_generation(whole, engine, inside=True)
    alone = generation(("Hello", 0.1), ("!", 0.4))
    assert risk_report(whole, split)["answer_risk"] == calibrator.answer_risk(alone)
    assert risk_report(whole)["answer_risk"] == 0.5
    cut_off = generation(("Well", 0.9)).model_copy(update={"answer_risk": 0.5})
    assert risk_report(cut_off, split_generation(cut_off, engine, inside=True))["answer_risk"] is None


@pytest.mark.parametrize(
    ("template", "chat", "kwargs", "inside"),
    [
        (OPENS, [USER], {}, True),
        (PLAIN, [USER], {}, False),
        (PLAIN, [{**USER, "content": "What is <think>"}], {}, False),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", [THINKING], {}, False),
        ("{{ messages[0].content if add_generation_prompt else raise_exception('') }}", [THINKING], {}, False),
        (HYBRID, [USER], {}, False),
        (HYBRID, [USER], {"enable_thinking": False}, False),
        (OPENS, [USER, {"role": "assistant", "content": "a </think> b"}, USER], {}, True),
        (PLAIN, [USER, {"role": "assistant", "content": "<think>Well"}], {"continue_final_message": True}, True),
        (PLAIN, [USER, {"role": "assistant", "content": "<think>a</think>b"}], {"continue_final_message": True}, False),
        (OPENS, [USER, {"role": "assistant", "content": "Hello"}], {"continue_final_message": True}, False),
    ],
)
def test_the_rendered_prompt_says_whether_the_answer_begins_inside(
    template: str, chat: list[dict[str, str]], kwargs: dict[str, bool], inside: bool
) -> None:
    if "continue_final_message" in kwargs:
        kwargs = {**kwargs, "add_generation_prompt": False}
    assert ends_inside_reasoning(reasoning_engine(template), chat, kwargs) is inside


THOUGHT = 'I could <tool_call>{"name":"get_weather","arguments":{}}</tool_call> but…'
TEXT = f"{THOUGHT}</think>\n\nHello!"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
PARTS = [("reasoning", THOUGHT), ("text", "Hello!")]
TAGS = ["text", "added", "special"]
KINDS = [ChatCocoa, CocoaLLM]
each_kind = pytest.mark.parametrize("kind", KINDS)


def get_weather() -> str:
    """Get the weather."""
    return "Sunny."


TOOL = FunctionTool.from_defaults(get_weather)
TOOLS = [TOOL.metadata.to_openai_tool()]


def model_of(kind: Any, engine: CocoaEngine, text: str = TEXT, **options: Any) -> Any:
    """A model that says a text."""
    options = {**saying(engine, text), "risk_metadata": "full", **options}
    if kind is CocoaLLM:
        options["generate_kwargs"] = {"logits_processor": options.pop("logits_processor")}
    return kind(engine=engine, **options)


def messages(kind: Any, *turns: Any) -> list[Any]:
    """A conversation of user and assistant; a turn is a text, or the reasoning and the text of an answer."""
    conversation: list[Any] = []
    for number, turn in enumerate(turns):
        thought, text = turn if isinstance(turn, tuple) else (None, turn)
        if kind is ChatCocoa:
            blocks: list[Any] = [{"type": "reasoning", "reasoning": thought}] if thought else []
            content = [*blocks, {"type": "text", "text": text}] if thought else text
            conversation.append(AIMessage(content) if number % 2 else HumanMessage(content))
        else:
            thoughts = [ThinkingBlock(content=thought)] if thought else []
            role = "assistant" if number % 2 else "user"
            conversation.append(ChatMessage(role=role, blocks=[*thoughts, TextBlock(text=text)]))
    return conversation


def ask(model: Any, *turns: Any, **options: Any) -> Any:
    conversation = messages(type(model), *turns or ["Hi"])
    return model.invoke(conversation, **options) if hasattr(model, "invoke") else model.chat(conversation, **options)


def stream(model: Any, **options: Any) -> list[Any]:
    """The chunks, and the whole answer at the end."""
    if isinstance(model, ChatCocoa):
        chunks = list(model.stream("Hi", **options))
        return [*chunks, added(chunks)]
    return list(model.stream_chat([ChatMessage("Hi")], **options))


def parts(answer: Any) -> list[tuple[str, str]]:
    """The types and the texts of the blocks of an answer."""
    if isinstance(answer, AIMessage):
        return [(block["type"], block[block["type"]]) for block in answer.content]  # type: ignore[index]
    names = {ThinkingBlock: ("reasoning", "content"), TextBlock: ("text", "text")}
    return [(names[type(block)][0], getattr(block, names[type(block)][1])) for block in answer.message.blocks]


def text_of(answer: Any) -> str:
    return str(answer.text if isinstance(answer, AIMessage) else answer.message.content)


def prompt_tokens(answer: Any) -> int:
    if isinstance(answer, AIMessage):
        return int(answer.usage_metadata["input_tokens"])  # type: ignore[index]
    return int(answer.raw["usage"]["prompt_tokens"])


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}])
def test_nothing_is_called_before_the_end_of_the_reasoning(
    kind: Any, engines: dict[str, CocoaEngine], tags: str, tools: dict[str, Any]
) -> None:
    model = model_of(kind, engines[tags])
    answer = ask(model, **tools)
    *chunks, last = stream(model, **tools)
    for each in (answer, last):
        assert parts(each) == PARTS
        assert text_of(each) == "Hello!"
        assert close(get_risk(each).to_dict(), get_risk(answer).to_dict())
    if kind is ChatCocoa:
        assert answer.content_blocks == answer.content
        assert answer.tool_calls == answer.invalid_tool_calls == []
        assert all(chunk.tool_call_chunks == [] for chunk in chunks)
        assert close(to_dicts(get_spans(last)), to_dicts(get_spans(answer)))
        deltas = [chunk.text for chunk in chunks]
    else:
        for chunk in (*chunks, last):
            assert model.get_tool_calls_from_response(chunk, error_on_no_tool_call=False) == []
        assert "".join(chunk.additional_kwargs.get("thinking_delta", "") for chunk in chunks) == THOUGHT
        streamed = [span for chunk in chunks for span in chunk.additional_kwargs.get("cocoa_spans", ())]
        assert close(streamed, answer.additional_kwargs["cocoa_spans"])
        deltas = [str(chunk.delta) for chunk in chunks]
    assert "".join(deltas) == "Hello!"
    assert len([delta for delta in deltas if delta]) > 1


async def test_output_versions_events_and_async(engine: CocoaEngine) -> None:
    chat = model_of(ChatCocoa, engine)
    of_v1 = model_of(ChatCocoa, engine, output_version="v1")
    assert of_v1.invoke("Hi").content == chat.invoke("Hi").content
    streamed = stream(of_v1)
    assert parts(streamed[-1]) == PARTS
    assert "".join(chunk.text for chunk in streamed[:-1]) == streamed[-1].text == "Hello!"
    whole = added([chunk async for chunk in chat.astream("Hi")])
    assert parts(whole) == PARTS
    events = [event async for event in chat.astream_events("Hi", version="v2")]
    assert events[-1]["data"]["output"].text == "Hello!"
    assert "".join(chat.pipe(StrOutputParser()).stream("Hi")) == "Hello!"
    assert messages_from_dict([message_to_dict(whole)])[0].content == whole.content


@each_kind
def test_the_risk_is_that_of_the_answer(kind: Any, engine: CocoaEngine) -> None:
    with get_risk_callback() as seen, collect_risk() as collected:
        answer = ask(model_of(kind, engine))
    report = get_risk(answer).to_dict()
    assert without_run(seen.reports if kind is ChatCocoa else collected) == [report]
    by_part = {part: [span for span in report["spans"] if span["part"] == part] for part in ("reasoning", "answer")}
    highest = {part: max(span["risk"] for span in spans) for part, spans in by_part.items()}
    assert (report["max_risk"], report["reasoning"]["max_risk"]) == (highest["answer"], highest["reasoning"])
    assert report["reasoning"]["spans"] == [span["span"] for span in by_part["reasoning"]]
    assert "".join(span["text"] for span in by_part["answer"]).strip() == "Hello!"
    if kind is ChatCocoa:
        assert seen.max_risk == highest["answer"]
        assert langchain.max_risk(answer, "f_mlds") < max(span["f_mlds"] for span in by_part["reasoning"])
        usage = answer.usage_metadata
        assert 0 < usage["output_token_details"]["reasoning"] < usage["output_tokens"]
    else:
        assert answer.raw["cocoa_risk"] == report
        assert 0 < answer.message.blocks[0].num_tokens < answer.raw["usage"]["completion_tokens"]


def test_gates_count_and_mark_the_answer(engine: CocoaEngine) -> None:
    chat = model_of(ChatCocoa, engine)
    message = chat.invoke("Hi")
    highest = langchain.max_risk(message, "f_mlds")
    between = (highest + max(span["f_mlds"] for span in get_risk(message).to_dict()["spans"])) / 2
    assert highest < between
    assert risk_gate(between, metric="f_mlds").invoke(message) == message
    with pytest.raises(HallucinationRiskError):
        risk_gate(highest, metric="f_mlds").invoke(message)
    mark = risk_gate(0.0, on_risk="mark", mark="[{text}]")
    marked = mark.invoke(message)
    assert parts(marked)[0] == PARTS[0]
    assert marked.text.replace("[", "").replace("]", "") == "Hello!"
    assert marked.text.startswith("[")
    chunks = list((chat | mark).stream("Hi"))
    assert len(chunks) > 3
    assert added(chunks).text == marked.text
    assert parts(risk_gate(0.0, on_risk="abstain").invoke(message)) == [PARTS[0], ("text", "I don't know.")]


@each_kind
def test_reasoning_of_the_history_reaches_only_a_template_that_reads_it(kind: Any, engine: CocoaEngine) -> None:
    model = model_of(kind, engine)
    history, plain = ("Hi", ("Secret.", "Hello!"), "Again"), ("Hi", "Hello!", "Again")
    assert prompt_tokens(ask(model, *history)) == prompt_tokens(ask(model, *plain))
    refusal = "content of type 'reasoning' in HumanMessage" if kind is ChatCocoa else "a user message has a Thinking"
    with pytest.raises(PromptError, match=refusal):
        ask(model, ("Secret.", "Hi"))
    engine = reasoning_engine(READS_REASONING)
    reads = kind(engine=engine, max_tokens=4)
    more = prompt_tokens(ask(reads, *history)) - prompt_tokens(ask(reads, *plain))
    assert more == len(engine.encode("<think>Secret.</think>", add_special_tokens=False))
    if kind is ChatCocoa:
        answer = model.invoke("Hi")
        assert model.invoke([HumanMessage("Hi"), answer, HumanMessage("Again")]).text == "Hello!"


def test_every_form_of_reasoning_in_the_history(engine: CocoaEngine) -> None:
    blocks: list[Any] = [
        {"type": "reasoning", "reasoning": "Well."},
        {"type": "thinking", "thinking": "Well.", "signature": "x"},
        {"type": "redacted_thinking", "data": "Secret."},
        {"type": "non_standard", "value": {"a": "Secret."}},
    ]
    text: Any = {"type": "text", "text": "Hello!"}
    chat, (hi, said, again) = model_of(ChatCocoa, engine), messages(ChatCocoa, "Hi", "Hello!", "Again")
    history, plain = [hi, AIMessage([*blocks, text]), again], [hi, said, again]
    assert prompt_tokens(chat.invoke(history)) == prompt_tokens(chat.invoke(plain))
    assert chat.get_num_tokens_from_messages(history) == chat.get_num_tokens_from_messages(plain)
    reads = ChatCocoa(engine=reasoning_engine(READS_REASONING))
    in_kwargs = AIMessage("Hello!", additional_kwargs={"reasoning_content": "Well."})
    for answer in (*(AIMessage([block, text]) for block in blocks[:2]), in_kwargs):
        assert "<think>Well.</think>Hello!" in reads.prompt_text([hi, answer, again])


@each_kind
def test_thinking_is_switched_off_by_the_constructor_or_a_call(kind: Any, engine: CocoaEngine) -> None:
    hybrid = reasoning_engine(HYBRID)
    model = kind(engine=hybrid, max_tokens=4)
    tokens = prompt_tokens(ask(model))
    more = len(hybrid.encode("<think>\n\n</think>\n\n", add_special_tokens=False))
    off: dict[str, Any]
    for off in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        made = kind(engine=hybrid, max_tokens=4, **off)
        assert prompt_tokens(ask(model, **off)) == prompt_tokens(ask(made)) == tokens + more
        assert prompt_tokens(ask(made, enable_thinking=True)) == tokens
        if kind is ChatCocoa:
            assert prompt_tokens(model.bind(**off).invoke("Hi")) == tokens + more
            assert made._identifying_params != model._identifying_params
            assert made.get_num_tokens_from_messages([HumanMessage("Hi")]) == tokens + more
    both = {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True, "a": 1}}
    assert prompt_tokens(ask(model, **both)) == tokens + more
    with pytest.raises(ConfigError, match="not tools"):
        ask(model, chat_template_kwargs={"tools": []})
    with pytest.raises(ConfigError, match="has no variable enable_thinking"):
        ask(kind(engine=engine), enable_thinking=False)
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        kind(chat_template_kwargs=3)


def test_the_final_message_is_continued() -> None:
    engine = reasoning_engine(PLAIN)
    begun = messages(ChatCocoa, "Hi", "Hello, ")
    chat = ChatCocoa(engine=engine, max_tokens=8)
    made = ChatCocoa(engine=engine, max_tokens=8, continue_final_message=True)
    expected = engine.generate("<|user|>\nHi<|end|>\n<|assistant|>\nHello, ", max_new_tokens=8)
    for message in (
        chat.invoke(begun, continue_final_message=True),
        made.invoke(begun),
        added(list(made.stream(begun))),
        chat.bind(continue_final_message=True).invoke(begun),
    ):
        assert message.text == expected.text
        assert prompt_tokens(message) == expected.usage.prompt_tokens
    plain = engine.render_chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, "}])
    assert chat.invoke(begun).text == engine.generate(plain, max_new_tokens=8).text
    for wrong in (made, chat.bind(continue_final_message=True)):
        with pytest.raises(PromptError, match="the last message has the role 'user'"):
            wrong.invoke("Hi")
    assert made.get_num_tokens_from_messages(begun[:1]) == chat.get_num_tokens_from_messages(begun[:1])
    thinks = made.invoke([begun[0], AIMessage("<think>Well")], **saying(engine, ", ok.</think>Hello!"))
    assert parts(thinks) == [("reasoning", ", ok."), ("text", "Hello!")]


class Move(BaseModel):
    """Move."""

    up: bool


@pytest.mark.slow
@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_schema_holds_after_the_reasoning(engines: dict[str, CocoaEngine], tags: str, method: Any) -> None:
    options = {**saying(engines[tags], "Up {or} down?</think>\n", ends=False), "max_new_tokens": 200}
    chat = ChatCocoa(engine=engines[tags], **options)
    answer = chat.with_structured_output(Move, method=method, include_raw=True).invoke("Hi")
    assert isinstance(answer["parsed"], Move), answer
    assert parts(answer["raw"])[0] == ("reasoning", "Up {or} down?")
    if method == "json_schema":
        assert json.loads(answer["raw"].text).keys() == {"up"}
    [(path, field)] = field_risks(answer["raw"]).items()
    text = "".join(span["text"] for span in get_risk(answer["raw"]).to_dict()["spans"])
    assert (path, json.loads(text[field.start : field.end])) == ("$.up", answer["parsed"].up)


@pytest.mark.parametrize("limit", [12, 40])
def test_an_answer_cut_off_inside_has_no_text(engine: CocoaEngine, limit: int) -> None:
    chat = model_of(ChatCocoa, engine)
    message = chat.invoke("Hi", max_tokens=limit)
    for each in (message, added(list(chat.stream("Hi", max_tokens=limit)))):
        [(kind, thought)] = parts(each)
        assert (kind, each.text, get_risk(each).max_risk) == ("reasoning", "", 0.0)
        assert THOUGHT.startswith(thought)
        assert get_risk(each).to_dict()["reasoning"]["max_risk"] > 0.0
    assert message.usage_metadata["output_token_details"] == {"reasoning": limit}


def test_what_the_model_opens_itself_is_reasoning_too() -> None:
    chat = model_of(ChatCocoa, reasoning_engine(HYBRID), "<think>\nWell.</think>\n\nHello!")
    for answer in (chat.invoke("Hi"), added(list(chat.stream("Hi")))):
        assert parts(answer) == [("reasoning", "Well."), ("text", "Hello!")]
    empty = saying(chat.engine, "<think>\n\n</think>\n\nHello!")
    assert added(list(chat.stream("Hi", **empty))).content == chat.invoke("Hi", **empty).content == "Hello!"


def test_a_call_after_the_reasoning(engine: CocoaEngine) -> None:
    llm = model_of(CocoaLLM, engine, f"{THOUGHT}</think>\n\nI look.\n{CALL}")
    chunks = list(llm.stream_chat_with_tools([TOOL], user_msg="Hi"))
    for response in (llm.chat_with_tools([TOOL], user_msg="Hi"), chunks[-1]):
        [call] = llm.get_tool_calls_from_response(response)
        assert (call.tool_name, call.tool_kwargs) == ("get_weather", {})
        assert [type(block) for block in response.message.blocks] == [ThinkingBlock, TextBlock, ToolCallBlock]
        assert response.message.content == "I look.\n"
        assert [entry["id"] for entry in response.additional_kwargs["cocoa_risk"]["tool_calls"]] == [call.tool_id]
    assert "".join(str(chunk.delta) for chunk in chunks) == "I look.\n"


def test_a_prompt_that_was_formatted_by_hand(engine: CocoaEngine) -> None:
    llm = model_of(CocoaLLM, engine, messages_to_prompt=lambda messages: f"{messages[0].content}\n<think>\n")
    assert parts(ask(llm)) == PARTS
    for option in ({"continue_final_message": True}, {"enable_thinking": False}, {"chat_template_kwargs": {"a": 1}}):
        with pytest.raises(ConfigError, match="leave out messages_to_prompt"):
            ask(llm, **option)
    assert llm.complete("Hi").text == TEXT


@pytest.mark.skipif(
    Version(version("llama-index-core")) < Version("0.14.24"),
    reason="older chat engines cannot stream a message that has several blocks",
)
def test_chat_engines_keep_the_answer(engine: CocoaEngine) -> None:
    chat_engine = RiskChatEngine(SimpleChatEngine.from_defaults(llm=model_of(CocoaLLM, engine)))
    response = chat_engine.chat("Hi")
    assert response.response == "Hello!"  # type: ignore[union-attr]
    again = chat_engine.stream_chat("Again")  # with the reasoning in its history
    assert "".join(again.response_gen) == "Hello!"
    for metadata in (response.metadata, again.metadata):
        assert metadata["cocoa_risk"]["reasoning"]["max_risk"] > 0  # type: ignore[index]
    assert [message.content for message in chat_engine.chat_history] == ["Hi", "Hello!", "Again", "Hello!"]


def test_fields_after_the_reasoning(engine: CocoaEngine) -> None:
    options = {**saying(engine, "Up {or} down?</think>\n", ends=False), "max_new_tokens": 200}
    schema = {"type": "object", "properties": {"up": {"type": "boolean"}}, "required": ["up"]}
    options["response_format"] = {"type": "json_schema", "json_schema": {"name": "Move", "schema": schema}}
    llm = CocoaLLM(engine=engine)
    with collect_risk() as reports:
        response, last = ask(llm, **options), stream(llm, **options)[-1]
    for each, report in zip((response, last), reports, strict=True):
        [(path, field)] = field_risks(each).items()
        text = "".join(span["text"] for span in report.to_dict()["spans"])
        assert path == "$.up"
        assert json.loads(text[field.start : field.end]) == json.loads(text_of(each))["up"]
        assert close(report.fields, field_risks(each))

    class AsksForJson(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            return text_of(ask(llm, **options))

    shown = RiskQueryEngine(AsksForJson()).query("Hi")
    metadata = shown.metadata or {}
    assert metadata["cocoa_risk"]["model_name"] == "thinker"
    assert metadata["cocoa_risk"]["run_id"] == metadata["cocoa_reports"][0]["run_id"]
    assert close(field_risks(shown), field_risks(response))
    assert argument_risks(shown) == {}
