"""Citations by measurement: each node left out of the prompt in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from pydantic import TypeAdapter

from cocoa_engine import CocoaEngine, ConfigError, passage_attention
from cocoa_engine.methods import retrieval_heads
from cocoa_engine.report import RiskReport
from cocoa_integrations._shared.citations import Citation
from cocoa_integrations.llama_index import CocoaLLM, CocoaRiskEvent, RiskCitationQueryEngine, RiskQueryEngine
from tests.helpers.alike import near
from tests.helpers.llama_index_helpers import Finds, Listener, answered
from tests.helpers.reports import stand_in, without_markers
from tests.helpers.rivals import heads_file, heads_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

QUESTION = "Who?"
TEXTS = ("The tower is red.", "Bread is sold at nine.", "It rains.")
TEMPLATE = PromptTemplate("{context_str}\n{query_str}\n")


@pytest.fixture(scope="module")
def quick() -> CocoaEngine:
    return CocoaEngine(tiny_model("llama", seed=6, max_position_embeddings=8192), tiny_tokenizer(), model_name="quick")


@pytest.fixture
def quick_llm(quick: CocoaEngine) -> CocoaLLM:
    return CocoaLLM(engine=quick, max_new_tokens=12)


def over(llm: CocoaLLM, **options: Any) -> RetrieverQueryEngine:
    return RetrieverQueryEngine.from_args(Finds(*TEXTS), llm=llm, text_qa_template=TEMPLATE, **options)


@pytest.mark.slow
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("how", ["query", "aquery"])
async def test_citations(how: str, processed: bool, quick_llm: CocoaLLM) -> None:
    options = {"repetition_penalty": 1.1} if processed else {}
    llm = CocoaLLM(engine=quick_llm.engine, max_new_tokens=12, generate_kwargs=options)
    plain = RiskQueryEngine(over(llm)).query(QUESTION)
    _, response = await answered(RiskCitationQueryEngine(over(llm), min_lift=0.0), how, QUESTION)
    report, citations = response.metadata["cocoa_risk"], response.metadata["cocoa_citations"]
    TypeAdapter(RiskReport).validate_python(report)
    TypeAdapter(list[Citation]).validate_python(citations)
    assert citations
    assert str(response) != str(plain)
    assert without_markers(str(response)) == str(plain)
    assert stand_in(str(response), report["spans"])
    assert stand_in(str(response), citations)
    assert [span["text"] for span in report["spans"]] == [
        span["text"] for span in plain.metadata["cocoa_risk"]["spans"]
    ]  # type: ignore[index]
    assert report["max_risk"] == near(plain.metadata["cocoa_risk"]["max_risk"])  # type: ignore[index]
    for citation in citations:
        assert citation["id"] == response.source_nodes[citation["source"] - 1].node_id

    # the lifts are those of plain scores of the answer after the prompts
    engine, own = llm.engine, response.metadata["cocoa_reports"][0]
    assert stand_in(str(plain), own["spans"])  # what the model wrote keeps its own offsets
    prompts = [
        "\n\n".join(kept) + f"\n{QUESTION}\n"
        for kept in (TEXTS, *[["" if a == b else a for a in TEXTS] for b in TEXTS])
    ]
    ids = engine.generate(prompts[0], max_new_tokens=12, **options).token_ids
    full, *bare = [engine.score(prompt, ids).spans[0].log_prob for prompt in prompts]
    for node in range(3):
        total = sum(span["source_lifts"][node] for span in report["spans"])
        assert total == pytest.approx(full - bare[node], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["query", "aquery"])
async def test_citations_by_attention(how: str, quick: CocoaEngine, tmp_path: Path) -> None:
    heads = heads_file(tmp_path, quick.num_layers, quick.model.config.num_attention_heads, heads_of(quick.model))
    llm = CocoaLLM(engine=quick, max_new_tokens=12, decore_heads=heads)
    _, response = await answered(RiskCitationQueryEngine(over(llm), by="attention", min_attention=0.0), how, QUESTION)
    report, citations = response.metadata["cocoa_risk"], response.metadata["cocoa_citations"]
    TypeAdapter(RiskReport).validate_python(report)
    TypeAdapter(list[Citation]).validate_python(citations)
    assert citations
    assert stand_in(str(response), citations)
    prompt = "\n\n".join(TEXTS) + f"\n{QUESTION}\n"
    own = quick.generate(prompt, max_new_tokens=12, source=TEXTS, decore_heads=heads)
    assert "".join(span["text"] for span in report["spans"]) == own.text
    for entry, span in zip(report["spans"], own.spans, strict=True):
        assert entry["source_attentions"] == near(span.passage_attention)
        assert entry["source_attention"] == near(span.source_attention)
    assert passage_attention(quick, own, prompt, TEXTS) == [near(span.passage_attention) for span in own.spans]


LONG = (" ".join(["The tower is red, and it is old."] * 12), *TEXTS[1:])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("how", ["query", "aquery"])
async def test_by_default_they_are_by_attention_and_nothing_is_fed_again(
    how: str, streaming: bool, quick: CocoaEngine, heard: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated query takes the prompt from the prefix cache, and runs no other pass than those of its answer."""
    llm = CocoaLLM(engine=CocoaEngine(quick.model, quick.tokenizer), max_new_tokens=12)
    inner = RetrieverQueryEngine.from_args(Finds(*LONG), llm=llm, text_qa_template=TEMPLATE, streaming=streaming)
    engine = RiskCitationQueryEngine(inner, min_attention=0.0, min_lift=0.0)

    async def cited() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        _, response = await answered(engine, how, QUESTION)
        return response.metadata["cocoa_citations"], response.metadata["cocoa_risk"]["spans"]

    first, spans = await cited()
    monkeypatch.setattr(llm.engine.session.model, "forward", None)  # the pass over prompt and answer
    again, same = await cited()
    assert first
    assert all("attention" in one for one in first)
    assert [one["text"] for one in again] == [one["text"] for one in first]
    for span, other in zip(spans, same, strict=True):
        assert span["source_attentions"] == near(other["source_attentions"])
    usages = [event.generation.usage for event in heard.of(CocoaRiskEvent)]
    assert len(usages) == 2
    assert usages[1].cached_tokens == usages[1].prompt_tokens - 1


@pytest.mark.parametrize("case", ["not seen", "split", "a lowest lift"])
def test_where_attention_finds_no_source_they_are_by_lift(
    case: str, quick_llm: CocoaLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"min_lift": -100.0, "min_attention": 0.0}
    inner = over(quick_llm)
    if case == "not seen":
        monkeypatch.setattr(retrieval_heads, "spread_heads_of", lambda model: None)  # as of a model without attention
    elif case == "split":
        changed = PromptTemplate("{context_str}\n{query_str}\n", function_mappings={"context_str": _with_line_breaks})
        inner = RetrieverQueryEngine.from_args(Finds(*LONG), llm=quick_llm, text_qa_template=changed)
    else:
        del options["min_attention"]
    response = RiskCitationQueryEngine(inner, **options).query(QUESTION)
    citations = response.metadata["cocoa_citations"]  # type: ignore[index]
    assert citations
    assert all("lift" in one for one in citations)
    assert all("source_lifts" in span for span in response.metadata["cocoa_risk"]["spans"])  # type: ignore[index]
    assert ("citations are by lift, because" in caplog.text) == (case != "a lowest lift")


def _with_line_breaks(context_str: str, **_: Any) -> str:
    return context_str.replace("old. The", "old.\nThe")


def test_nodes_of_another_engine_are_attended_to_in_a_pass_of_the_answer_alone(
    quick: CocoaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of a CitationQueryEngine are made of those that were retrieved."""
    llm = CocoaLLM(engine=CocoaEngine(quick.model, quick.tokenizer), max_new_tokens=12)
    opened: list[Any] = []
    cache = llm.engine.session.backend
    open_tree = cache.open
    monkeypatch.setattr(cache, "open", lambda *args: opened.extend(trees := open_tree(*args)) or trees)
    response = RiskCitationQueryEngine(CitationQueryEngine(Finds(*LONG), llm=llm), min_attention=0.0).query(QUESTION)
    spans = response.metadata["cocoa_risk"]["spans"]  # type: ignore[index]
    assert all(None not in span["source_attentions"] for span in spans)
    answered, fed_again = opened
    assert fed_again.cached_tokens == fed_again.prompt_tokens - 1 == answered.prompt_tokens - 1


def test_attention_that_cannot_be_measured(quick_llm: CocoaLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval_heads, "spread_heads_of", lambda model: None)  # as of a model without attention
    with pytest.raises(ConfigError, match="need a model with attention over the whole prompt"):
        RiskCitationQueryEngine(over(quick_llm), by="attention").query(QUESTION)
    with pytest.raises(ConfigError, match="by: unknown value"):
        RiskCitationQueryEngine(over(quick_llm), by="x")  # type: ignore[arg-type]


def test_of_accumulated_answers(quick_llm: CocoaLLM) -> None:
    """An answer cites only nodes of its own prompt."""
    engine = RiskCitationQueryEngine(over(quick_llm, response_mode=ResponseMode.ACCUMULATE), min_lift=0.0)
    response = engine.query(QUESTION)
    report = response.metadata["cocoa_risk"]  # type: ignore[index]
    assert stand_in(str(response), report["spans"])
    assert len(report["parts"]) == 3
    for number, part in enumerate(report["parts"]):
        assert str(response)[: part["start"]].endswith(f"Response {number + 1}: ")
        inside = [span for span in report["spans"] if part["start"] <= span["start"] and span["end"] <= part["end"]]
        assert inside
        for span in inside:
            assert [lift is not None for lift in span["source_lifts"]] == [node == number for node in range(3)]
            assert span["source"] in (None, number + 1)


def test_streams_and_texts_without_markers(quick_llm: CocoaLLM) -> None:
    plain = str(RiskQueryEngine(over(quick_llm)).query(QUESTION))
    stream = RiskCitationQueryEngine(over(quick_llm, streaming=True), min_lift=0.0).query(QUESTION)
    assert isinstance(stream, StreamingResponse)
    assert "".join(stream.response_gen) == plain
    unmarked = RiskCitationQueryEngine(over(quick_llm), min_lift=0.0, markers=False).query(QUESTION)
    assert str(unmarked) == plain
    assert unmarked.metadata["cocoa_citations"] == stream.metadata["cocoa_citations"] != []  # type: ignore[index]
    assert stand_in(plain, unmarked.metadata["cocoa_citations"])  # type: ignore[index]
