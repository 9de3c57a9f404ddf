"""A LangChain callback handler that prints each span with its risk as soon as it is decided.

    python examples/langchain_callback.py

It uses the embedded model. For another one: ``ChatCocoa(model="Qwen/Qwen2.5-7B-Instruct", device_map="auto")``.
"""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import BaseCallbackHandler

from cocoa_integrations.langchain import ChatCocoa, get_risk_callback, get_spans

QUESTIONS = ["Which planet is the largest?", "Who painted the Mona Lisa?"]


class SpanPrinter(BaseCallbackHandler):
    """Prints each span when it is decided."""

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
        """Print the span of the chunk. The last chunk has no span; it carries the report of the answer."""
        for span in get_spans(chunk):
            print(f"  {span.risk:.3f}  {span.candidates or 1} candidate(s)  {span.text!r}", flush=True)


def main() -> None:
    """Ask two questions with the handler attached, then compare the risk of the answers."""
    # With streaming=True, invoke() also passes each span to the handlers, at any depth of chains and agents.
    chat = ChatCocoa(max_tokens=24, streaming=True)
    with get_risk_callback() as risk:
        for question in QUESTIONS:
            print(question)
            answer = chat.invoke(question, config={"callbacks": [SpanPrinter()]})
            print(f"  => {answer.text}\n")

    for question, report in zip(QUESTIONS, risk.reports, strict=True):
        print(f"{report.max_risk:.3f} at most, {report.mean_risk:.3f} on average: {question}")


if __name__ == "__main__":
    main()
