"""A LangChain chain that asks a large model where the answer of a small one is too risky, and abstains if its is, too.

    python examples/cascade.py [SMALL LARGE]

Each model is a file, a folder or a name of the Hub; by default both are the embedded model.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from langchain_core.prompts import ChatPromptTemplate

from cocoa_integrations.langchain import ChatCocoa, HallucinationRiskError, get_risk_callback, risk_gate

TEXTS = [path.read_text() for path in sorted((Path(__file__).parent / "corpus").glob("*.md"))]
SYSTEM = "Answer in one short sentence, from the context only. If it does not say, reply: The context does not say."
QUESTIONS = ("Who built the lighthouse?", "Why does the lighthouse have 300 steps?", "Why did Lindqvist build it?")


def main(small: str | None = None, large: str | None = None, *, threshold: float | None = None) -> None:
    """Ask about the text that shares most words with a question, then print the risk of each answer, and the last."""
    prompt = ChatPromptTemplate([("system", SYSTEM), ("human", "Context:\n{context}\n\nQuestion: {question}")])
    first = prompt | ChatCocoa(model=small, max_tokens=32) | risk_gate(threshold, metric="answer_risk")
    second = prompt | ChatCocoa(model=large, max_tokens=32) | risk_gate(on_risk="abstain")
    chain = first.with_fallbacks([second], exceptions_to_handle=(HallucinationRiskError,))
    for question in QUESTIONS:
        words = set(re.findall(r"\w{4,}", question.lower()))
        context = max(TEXTS, key=lambda text: len(words & set(re.findall(r"\w{4,}", text.lower()))))
        with get_risk_callback() as risk:
            answer = chain.invoke({"context": context, "question": question})
        print(question, *(f"{report.answer_risk:.2f}" for report in risk.reports), answer.text, sep=" | ")


if __name__ == "__main__":
    main(*sys.argv[1:3])
