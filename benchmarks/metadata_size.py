"""Bytes of JSON of an answer: its text, and the message or response with each level of ``risk_metadata``.

    python -m benchmarks.metadata_size

The results are counts, which are the same on every machine up to the digits of floats. Needs the extras ``langchain``
and ``llama-index``.
"""

from __future__ import annotations

import argparse
import json

from cocoa_engine import CocoaEngine
from cocoa_engine.report import Detail

PROMPT = "Tell me about the history of the telephone, from its invention until today."
DETAILS: tuple[Detail, ...] = ("full", "compact", "none")


def sizes(engine: CocoaEngine, tokens: int = 200) -> dict[str, dict[str, int]]:
    """Bytes of JSON by object and level of detail; ``text`` is the text of the answer alone.

    Args:
        engine: the engine that answers.
        tokens: length of the answer.
    """
    from langchain_core.caches import InMemoryCache
    from llama_index.core.llms import ChatMessage

    from cocoa_integrations.langchain import ChatCocoa
    from cocoa_integrations.llama_index import CocoaLLM

    chat = ChatCocoa(engine=engine, max_tokens=tokens, cache=InMemoryCache())  # decodes once for all levels
    llm = CocoaLLM(engine=engine, max_new_tokens=tokens)
    found: dict[str, dict[str, int]] = {}
    for detail in DETAILS:
        message = chat.invoke(PROMPT, risk_metadata=detail)
        response = llm.chat([ChatMessage(content=PROMPT)], risk_metadata=detail)
        found[detail] = {
            "text": len(json.dumps(message.text, ensure_ascii=False).encode()) - 2,
            "LangChain: message": len(message.model_dump_json().encode()),
            "LlamaIndex: response": len(response.model_dump_json().encode()),
            "LlamaIndex: `raw`, which agents keep": len(json.dumps(response.raw).encode()),
        }
    return {name: {detail: found[detail][name] for detail in DETAILS} for name in found["full"]}


def main() -> None:
    """Print the sizes as a Markdown table."""
    parser = argparse.ArgumentParser(description="Bytes of JSON of an answer with its metadata.")
    parser.add_argument("--model", help="Hub name or folder; default: the embedded model")
    parser.add_argument("--tokens", type=int, default=200)
    given = parser.parse_args()
    engine = CocoaEngine.from_pretrained(given.model)
    print("| Bytes of JSON | " + " | ".join(f"`{detail}`" for detail in DETAILS) + " |")
    print("| --- |" + " ---: |" * len(DETAILS))
    for name, row in sizes(engine, given.tokens).items():
        print(f"| {name} | " + " | ".join(f"{row[detail]:,}" for detail in DETAILS) + " |")


if __name__ == "__main__":
    main()
