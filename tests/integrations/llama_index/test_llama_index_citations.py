"""Citations by measurement: each node left out of the prompt in turn."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode

from cocoa_engine import CocoaEngine
from cocoa_integrations.llama_index import CocoaLLM, CocoaRiskEvent, RiskCitationQueryEngine, RiskQueryEngine
from tests.helpers.alike import near
from tests.helpers.llama_index_helpers import Finds, Listener, answered
from tests.helpers.reports import stand_in
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
