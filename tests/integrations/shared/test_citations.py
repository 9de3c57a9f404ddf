"""Citations by the attention to each source, by both adapters."""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from langchain_core.documents import Document
from langchain_core.load import dumps
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from pydantic import TypeAdapter

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine.methods import retrieval_heads
from cocoa_engine.report import RiskReport
from cocoa_integrations._shared.citations import Citation
from cocoa_integrations.langchain import ChatCocoa, get_risk, get_spans, with_citations, with_risk_retry
from cocoa_integrations.llama_index import CocoaLLM, RiskCitationQueryEngine
from tests.helpers.alike import near, stand_in, to_dicts, without_markers
from tests.helpers.inside import opened_trees
from tests.helpers.llama_index_helpers import Finds, answered
from tests.helpers.reasoning_models import PLAIN
from tests.helpers.rivals import heads_file
from tests.helpers.tiny_models import LoweringTokenizer, tiny_model, tiny_tokenizer

QUESTION = "Who?"
TEXTS = ("The tower is red.", "Bread is sold at nine.", "It rains.")
CHANGED_BY_THE_TOKENIZER = ("The  Tower\nis RED.", "Bread is sold\n\nat Nine.", "It rains.")
LONG = (" ".join(["The tower is red, and it is old."] * 12), *TEXTS[1:])
PROMPT = ChatPromptTemplate.from_template("{context}\n{question}")
OF_LANGCHAIN, OF_LLAMA_INDEX = ["invoke", "ainvoke", "batch"], ["query", "aquery"]


def engine_of(tokenizer: Any) -> CocoaEngine:
    tokenizer.chat_template = PLAIN
    return CocoaEngine(tiny_model("llama", seed=6, max_position_embeddings=8192), tokenizer, model_name="quick")


@pytest.fixture(scope="module")
def quick() -> CocoaEngine:
    return engine_of(tiny_tokenizer())


@pytest.fixture(scope="module")
def lowering() -> CocoaEngine:
    return engine_of(LoweringTokenizer())


def asked(texts: tuple[str, ...] = TEXTS) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "\n\n".join(texts) + f"\n{QUESTION}"}]


class Cited(NamedTuple):
    """An answer, its report, and its citations."""

    text: str
    report: dict[str, Any]
    citations: list[dict[str, Any]]


def changed(context: str) -> str:
    """As a prompt has it that breaks the lines of the first source, and has other words for the last one."""
    return context.replace("old. The", "old.\nThe").replace("It rains.", "IT RAINS.")


async def cited(
    engine: CocoaEngine,
    how: str,
    texts: tuple[str, ...] = TEXTS,
    model: dict[str, Any] | None = None,
    *,
    is_changed: bool = False,
    **options: Any,
) -> Cited:
    """Ask one of the adapters; ``is_changed`` has the prompt change its sources."""
    if how in OF_LLAMA_INDEX:
        llm = CocoaLLM(engine=engine, max_new_tokens=12, is_chat_model=True, **(model or {}))
        changes: Any = {"context_str": lambda context_str, **_: changed(context_str)} if is_changed else None
        template = PromptTemplate("{context_str}\n{query_str}", function_mappings=changes)
        inner = RetrieverQueryEngine.from_args(Finds(*texts), llm=llm, text_qa_template=template)
        _, response = await answered(RiskCitationQueryEngine(inner, **options), how, QUESTION)
        nodes = [node.node_id for node in response.source_nodes]
        shown = Cited(str(response), response.metadata["cocoa_risk"], response.metadata["cocoa_citations"])
        assert all(citation["id"] == nodes[citation["source"] - 1] for citation in shown.citations)
        return shown
    documents = [Document(text, id=str(number), metadata={"n": number}) for number, text in enumerate(texts)]
    if is_changed:
        options["format_documents"] = lambda given: changed("\n\n".join(one.page_content for one in given))
    chat = ChatCocoa(engine=engine, max_tokens=12, risk_metadata="full", **(model or {}))
    chain, values = with_citations(PROMPT, chat, **options), {"context": documents, "question": QUESTION}
    if how == "ainvoke":
        message: AIMessage = await chain.ainvoke(values)
    elif how == "batch":
        message = (await asyncio.to_thread(chain.batch, [values, values]))[1]
    else:
        message = await asyncio.to_thread(chain.invoke, values)
    citations = message.response_metadata["cocoa_citations"]
    for citation in citations:
        document = documents[citation["source"] - 1]
        assert (citation["id"], citation["metadata"]) == (document.id, document.metadata)
    report = get_risk(message).to_dict()
    assert report["spans"] == to_dicts(get_spans(message))
    assert dumps(message)
    return Cited(message.text, report, citations)


def check(shown: Cited, plain: str) -> None:
    """The report and the citations of an answer are those of its text."""
    TypeAdapter(RiskReport).validate_python(shown.report)
    TypeAdapter(list[Citation]).validate_python(shown.citations)
    assert shown.citations
    assert shown.text != plain
    assert without_markers(shown.text) == plain
    assert stand_in(shown.text, shown.report["spans"])
    assert stand_in(shown.text, shown.citations)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.1}])
@pytest.mark.parametrize("how", OF_LANGCHAIN + OF_LLAMA_INDEX)
async def test_citations(how: str, options: dict[str, Any], quick: CocoaEngine, tmp_path: Path) -> None:
    known = {"decore_heads": heads_file(tmp_path, quick.model)}
    model = {**known, "generate_kwargs": options} if how in OF_LLAMA_INDEX else {**known, **options}
    shown = await cited(quick, how, model=model, min_attention=0.0)
    plain = quick.chat(asked(), max_new_tokens=12, source=TEXTS, **known, **options)
    check(shown, plain.text)
    spans = shown.report["spans"]
    assert [span["text"] for span in spans] == [span.text for span in plain.spans]
    assert shown.report["max_risk"] == near(RiskReport.of(plain).max_risk)
    for span, own in zip(spans, plain.spans, strict=True):
        assert span["source_attentions"] == near(own.passage_attention)
        assert span["source_attention"] == near(own.source_attention)
        assert 0 < own.source_attention <= 1
        assert sum(own.passage_attention) <= own.source_attention + 1e-5
    for citation in shown.citations:
        values = [spans[number]["source_attentions"][citation["source"] - 1] for number in citation["spans"]]
        assert min(values) <= citation["attention"] <= max(values)
    none = await cited(quick, how, model=model, min_attention=1.0)
    assert (none.text, none.citations) == (plain.text, [])


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "query", "aquery"])
async def test_sources_that_the_prompt_changes_are_not_cited(
    how: str, quick: CocoaEngine, caplog: pytest.LogCaptureFixture
) -> None:
    shown = await cited(quick, how, LONG, is_changed=True, min_attention=0.0)
    assert {citation["source"] for citation in shown.citations} == {2}
    for span in shown.report["spans"]:
        assert [value is None for value in span["source_attentions"]] == [True, False, True]
    assert caplog.text.count("some sources are not cited, because the prompt does not have") == 1


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "query", "aquery"])
async def test_nothing_is_fed_again(how: str, quick: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated question takes the prompt from the prefix cache, and runs no other pass than those of its answer."""
    engine = CocoaEngine(quick.model, quick.tokenizer)
    opened = opened_trees(engine, monkeypatch)
    first = await cited(engine, how, LONG, min_attention=0.0)
    monkeypatch.setattr(engine.session.model, "forward", None)  # the pass over prompt and answer
    again = await cited(engine, how, LONG, min_attention=0.0)
    assert first.citations
    assert again.text == first.text
    for span, other in zip(again.report["spans"], first.report["spans"], strict=True):
        assert span["source_attentions"] == near(other["source_attentions"])
    assert [tree.cached_tokens == tree.prompt_tokens - 1 for tree in opened] == [False, True]


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "query", "aquery"])
async def test_attention_that_cannot_be_measured(
    how: str, quick: CocoaEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retrieval_heads, "spread_heads_of", lambda model: None)  # as of a model without attention
    shown = await cited(quick, how)
    assert (shown.text, shown.citations) == (quick.chat(asked(), max_new_tokens=12).text, [])
    assert all(span["source_attentions"] == [None] * 3 for span in shown.report["spans"])
    assert caplog.text.count("some sources are not cited") == 1
    for value in (float("nan"), "0.05", True, None):
        with pytest.raises(ConfigError, match="min_attention takes a finite number"):
            await cited(quick, how, min_attention=value)


@pytest.mark.parametrize("how", ["ainvoke", "aquery", "retry"])
async def test_the_tokenizer_may_change_the_sources(how: str, lowering: CocoaEngine, tmp_path: Path) -> None:
    model, texts = {"decore_heads": heads_file(tmp_path, lowering.model)}, CHANGED_BY_THE_TOKENIZER
    if how == "retry":
        chat = ChatCocoa(engine=lowering, max_tokens=6, risk_metadata="full", **model)  # type: ignore[arg-type]
        found = RunnableLambda(lambda _: [Document(text) for text in texts])
        tried = await with_risk_retry(found, PROMPT, chat, threshold=0.0, top_k_growth=1).ainvoke(QUESTION)
        measured = [span["passage_attention"] for span in to_dicts(get_spans(tried))]
    else:
        shown = await cited(lowering, how, texts, model, min_attention=0.0)
        measured = [span["source_attentions"] for span in shown.report["spans"]]
    assert measured
    assert all(len(values) == 3 and all(value > 0 for value in values) for values in measured)
