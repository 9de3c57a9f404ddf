"""A LangChain chain that replies "I don't know." if its answer, and a second, stricter attempt, are too risky.

    python examples/langchain_abstain.py

It uses the embedded model. For another one: ``ChatCocoa(model="Qwen/Qwen2.5-7B-Instruct", device_map="auto")``.
"""

from __future__ import annotations

from langchain_core.prompts import ChatPromptTemplate

from cocoa_integrations.langchain import ChatCocoa, HallucinationRiskError, get_risk, risk_gate

QUESTIONS = ("What is the capital of France?", "Who won the chess open of Lower Wimsby in 1987?")


def main() -> None:
    """Ask a question that the model can answer and one that it cannot."""
    prompt = ChatPromptTemplate.from_messages([("system", "Answer in one short sentence."), ("human", "{question}")])
    chat = ChatCocoa(max_tokens=24)
    first = prompt | chat | risk_gate()
    stricter = prompt | chat.bind(alpha=6.0, max_candidates=16) | risk_gate(on_risk="abstain")
    chain = first.with_fallbacks([stricter], exceptions_to_handle=(HallucinationRiskError,))
    for question in QUESTIONS:
        answer = chain.invoke({"question": question})
        report = get_risk(answer)
        print(f"{question}\n  {answer.text}   (highest risk {report.max_risk:.3f})")
        if report.gate is not None:
            print("  withheld: " + "".join(span.text or "" for span in report.spans))


if __name__ == "__main__":
    main()
