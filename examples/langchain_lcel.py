"""A LangChain chain that returns the text and the risk of an answer side by side.

    python examples/langchain_lcel.py

It uses the embedded model. For another one: ``ChatCocoa(model="Qwen/Qwen2.5-7B-Instruct", device_map="auto")``.
"""

from __future__ import annotations

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel

from cocoa_engine.report import RiskReport
from cocoa_integrations.langchain import ChatCocoa, get_risk

QUESTION = "What is the boiling point of water?"


def main() -> None:
    """Ask a question, stream the answer, then list its spans, riskiest first."""
    prompt = ChatPromptTemplate.from_messages([("system", "Answer in one sentence."), ("human", "{question}")])
    chat = ChatCocoa(max_tokens=32)
    # StrOutputParser alone would drop the risk. In a RunnableParallel, the text still streams.
    text_and_risk = RunnableParallel(text=StrOutputParser(), risk=RunnableLambda(get_risk))
    chain = prompt | chat | text_and_risk

    risk: RiskReport | None = None
    for part in chain.stream({"question": QUESTION}):
        print(part.get("text", ""), end="", flush=True)
        risk = part.get("risk", risk)

    assert risk is not None
    print(f"\n\n{risk.method}, {risk.risk_points} risk points, highest risk {risk.max_risk:.3f}")
    for span in sorted(risk.spans, key=lambda span: -(span.risk or 0.0)):
        print(f"{span.risk:.3f}  {span.kind:<10}  {span.text!r}")


if __name__ == "__main__":
    main()
