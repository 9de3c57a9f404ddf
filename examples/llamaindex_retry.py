"""Retrieval-augmented answers that are tried again, from more passages and more strictly, where they are too risky.

    python examples/llamaindex_retry.py

It needs ``llama-index-retrievers-bm25`` besides this package.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llama_index.core import Document
from llama_index.core.node_parser import SentenceSplitter
from llama_index.retrievers.bm25 import BM25Retriever

from cocoa_integrations.llama_index import CocoaLLM, RiskRetryQueryEngine

CORPUS = Path(__file__).parent / "corpus"
QUESTION = "How long is the ferry crossing and how high is the lighthouse?"
THRESHOLD = 0.93
"""A raw MLDS, whose level differs from model to model; with a calibrator it would be a probability."""


def main(question: str = QUESTION) -> None:
    """Ask, then print every try and the answer that was kept."""
    documents = [Document(text=path.read_text(), metadata={"file": path.name}) for path in sorted(CORPUS.glob("*.md"))]
    nodes = SentenceSplitter(chunk_size=256, chunk_overlap=0).get_nodes_from_documents(documents)
    retriever = BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=1)
    engine = RiskRetryQueryEngine(retriever, CocoaLLM(max_new_tokens=32), threshold=THRESHOLD, measure="mean_risk")

    response = engine.query(question)
    assert response.metadata is not None
    print(f"question: {question}")
    for number, tried in enumerate(response.metadata["cocoa_tries"], 1):
        kept = "   <- kept" if tried["chosen"] else ""
        print(f"try {number}: {tried['top_k']} passages, alpha {tried['alpha']:g}, mean risk {tried['risk']:.3f}{kept}")
        print(f"  {tried['answer']}")
    print("sources of the answer: " + ", ".join(source.node.metadata["file"] for source in response.source_nodes))


if __name__ == "__main__":
    main(*sys.argv[1:2])
