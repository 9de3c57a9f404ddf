"""A LangChain agent that does not run a tool on arguments that it may have made up.

    python examples/langchain_tools.py

It needs the extras `tools` and `agents`, and uses the embedded default model, which is too small to decide on a call by
itself: its first answer is made to be one. A larger model needs no ForceFirstCall.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import HumanMessage

from cocoa_integrations.langchain import ChatCocoa, ToolRiskMiddleware, argument_risks

QUESTION = "Pay Ada Lovelace 20 euros for the book."


def pay(name: str, euros: int) -> str:
    """Pay somebody."""
    return f"paid {euros} euros to {name}"


class ForceFirstCall(AgentMiddleware[Any, Any]):
    """The first answer is a call, further ones are text."""

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Choose for the model."""
        first = isinstance(request.messages[-1], HumanMessage)
        return handler(request.override(tool_choice="any" if first else "none"))


def main() -> None:
    """Ask twice: with any risk accepted, and with none of those that were measured."""
    chat = ChatCocoa(max_tokens=48)
    limit = float("inf")
    for _ in range(2):
        agent = create_agent(chat, [pay], middleware=[ToolRiskMiddleware(max_risk=limit), ForceFirstCall()])
        _, call, result, answer = agent.invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
        risks = {name: figures["risk"] for name, figures in argument_risks(call)[call.tool_calls[0]["id"]].items()}
        print(f"max_risk={limit:.3f}")
        for name, value in call.tool_calls[0]["args"].items():
            print(f"  {name}={value!r}  risk {risks[name]:.3f}")
        print(f"  tool: {result.content}\n  answer: {answer.text}\n")
        limit = min(risks.values()) - 0.001  # raw MLDS: a calibrator would make it a probability, and the limit too


if __name__ == "__main__":
    main()
