"""Retrieval-augmented generation with the risk of every span, using BM25 retrieval over a few documents.

    python examples/llamaindex_rag.py ["a question about the documents"]

It also needs the package ``llama-index-retrievers-bm25``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llama_index.core import Document
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.retrievers.bm25 import BM25Retriever

from cocoa_engine.report import RiskReport
from cocoa_integrations.llama_index import CocoaLLM, collect_risk

CORPUS = Path(__file__).parent / "corpus"
QUESTION = "Who built the lighthouse, and in which year?"


def query_engine(llm: CocoaLLM) -> RetrieverQueryEngine:
    """A query engine that answers with ``llm`` from the two best passages of the corpus, found by BM25."""
    documents = [Document(text=path.read_text(), metadata={"file": path.name}) for path in sorted(CORPUS.glob("*.md"))]
    nodes = SentenceSplitter(chunk_size=256, chunk_overlap=0).get_nodes_from_documents(documents)
    retriever = BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=2)
    return RetrieverQueryEngine.from_args(retriever, llm=llm)


def show(report: RiskReport) -> None:
    """Print each span with a bar of its risk, from 0 to 1."""
    print(f"risk of each span (by {report.risk_source}):")
    for span in report.spans:
        bar = "#" * round(20 * (span.risk or 0.0))
        candidates = f"  ({span.candidates} candidates)" if span.candidates else ""
        print(f"  {span.risk:.3f} {bar:<20} {span.text!r}{candidates}")


def main(question: str = QUESTION) -> None:
    """Ask a question, then print the answer, its risk and its sources."""
    rag = query_engine(CocoaLLM(max_new_tokens=48))
    with collect_risk() as reports:
        response = rag.query(question)
    print(f"question: {question}\nanswer: {response}\n")
    for report in reports:
        show(report)
    print("\nsources:")
    for source in response.source_nodes:
        print(f"  {source.score:.2f} {source.node.metadata['file']}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
