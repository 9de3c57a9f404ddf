"""Retrieval-augmented generation that retries risky answers with more passages and a larger alpha.

    python examples/llamaindex_retry.py ["a question about the documents" ...]

It also needs the package ``llama-index-retrievers-bm25``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llama_index.core import Document
from llama_index.core.node_parser import SentenceSplitter
from llama_index.retrievers.bm25 import BM25Retriever

from cocoa_integrations.llama_index import CocoaLLM, RiskRetryQueryEngine

CORPUS = Path(__file__).parent / "corpus"
QUESTIONS = (
    "Who built the lighthouse, and in which year?",
    "How long does the trip to the lighthouse of Halden Island take?",
)
THRESHOLD = 0.55
"""It suits these two questions. Choose yours on many of your own, with ``cocoa threshold``."""


def main(*questions: str) -> None:
    """Ask questions, then print every attempt and its answer, and mark the returned one."""
    documents = [Document(text=path.read_text(), metadata={"file": path.name}) for path in sorted(CORPUS.glob("*.md"))]
    nodes = SentenceSplitter(chunk_size=256, chunk_overlap=0).get_nodes_from_documents(documents)
    retriever = BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=1)
    llm = CocoaLLM(max_new_tokens=32)
    engine = RiskRetryQueryEngine(retriever, llm, measure="answer_risk", threshold=THRESHOLD)

    for question in questions or QUESTIONS:
        response = engine.query(question)
        assert response.metadata is not None
        print(f"question: {question}")
        for number, tried in enumerate(response.metadata["cocoa_tries"], 1):
            kept = "   <- kept" if tried["chosen"] else ""
            print(f"try {number}: {tried['top_k']} passages, alpha {tried['alpha']:g}, risk {tried['risk']:.3f}{kept}")
            print(f"  {tried['answer']}")
        print("sources of the answer: " + ", ".join(source.node.metadata["file"] for source in response.source_nodes))


if __name__ == "__main__":
    main(*sys.argv[1:])
