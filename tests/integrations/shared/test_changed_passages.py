"""Citations by attention with a tokenizer that changes the text of the passages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from llama_index.core.query_engine import RetrieverQueryEngine

from cocoa_engine import CocoaEngine
from cocoa_integrations.langchain import ChatCocoa, get_spans, with_citations, with_risk_retry
from cocoa_integrations.llama_index import CocoaLLM, RiskCitationQueryEngine
from tests.helpers.llama_index_helpers import Finds
from tests.helpers.reasoning_models import PLAIN
from tests.helpers.reports import to_dicts
from tests.helpers.rivals import heads_file, heads_of
from tests.helpers.tiny_models import LoweringTokenizer, tiny_model

TEXTS = ("The  Tower\nis RED.", "Bread is sold\n\nat Nine.", "It rains.")
DOCUMENTS = [Document(text) for text in TEXTS]
PROMPT = ChatPromptTemplate.from_template("{context}\n{question}")


@pytest.fixture(scope="module")
def engine() -> CocoaEngine:
    tokenizer = LoweringTokenizer()
    tokenizer.chat_template = PLAIN
    return CocoaEngine(tiny_model("llama", seed=6, max_position_embeddings=8192), tokenizer, model_name="slow")


@pytest.fixture
def heads(engine: CocoaEngine, tmp_path: Path) -> str:
    return heads_file(tmp_path, engine.num_layers, engine.model.config.num_attention_heads, heads_of(engine.model))


@pytest.mark.parametrize("by", [None, "attention"])
async def test_langchain(by: Any, engine: CocoaEngine, heads: str) -> None:
    chat = ChatCocoa(engine=engine, max_tokens=6, risk_metadata="full", decore_heads=heads)
    chain = with_citations(PROMPT, chat, by=by, min_attention=0.0)
    values = {"context": DOCUMENTS, "question": "Who?"}
    message = await chain.ainvoke(values)
    for span in to_dicts(get_spans(message)):
        assert len(span["source_attentions"]) == 3
        assert all(value > 0 for value in span["source_attentions"])
    retry = with_risk_retry(RunnableLambda(lambda _: DOCUMENTS), PROMPT, chat, threshold=0.0, top_k_growth=1)
    tried = await retry.ainvoke("Who?")
    assert all(len(span["passage_attention"]) == 3 for span in to_dicts(get_spans(tried)))


@pytest.mark.parametrize("by", [None, "attention"])
async def test_llama_index(by: Any, engine: CocoaEngine, heads: str) -> None:
    llm = CocoaLLM(engine=engine, max_new_tokens=6, decore_heads=heads)
    citing = RiskCitationQueryEngine(RetrieverQueryEngine.from_args(Finds(*TEXTS), llm=llm), by=by, min_attention=0.0)
    response: Any = await citing.aquery("Who?")
    for span in response.metadata["cocoa_risk"]["spans"]:
        assert len(span["source_attentions"]) == 3
        assert all(value > 0 for value in span["source_attentions"])
