"""An agent that does not run a tool if the model may have hallucinated an argument.

    python examples/langgraph_agent.py

It needs ``pip install '.[agents,tools]'`` and uses the embedded model. For another one:
``ChatCocoa(model="Qwen/Qwen2.5-7B-Instruct", device_map="auto")``.
"""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentState, before_model
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.runtime import Runtime

from cocoa_integrations.langchain import ChatCocoa, ToolRiskMiddleware, argument_risks

REQUESTS = ("Book a table for 4 people at Luigi's at 19:30.", "Book me a table for dinner tonight.")


@tool
def book_table(restaurant: str, people: int, time: str) -> str:
    """Book a table at a restaurant."""
    return f"Booked: {restaurant}, {people} people, {time}."


@before_model(can_jump_to=["end"])
def end_after_tool(state: AgentState[Any], runtime: Runtime[Any]) -> dict[str, Any] | None:
    """End the agent after a tool result. The embedded model is too small to summarise it."""
    return {"jump_to": "end"} if isinstance(state["messages"][-1], ToolMessage) else None


def main() -> None:
    """Send two requests: one contains all arguments of the tool; for the other, the model has to invent them."""
    # the embedded model is too small to decide when to call a tool; omit initial_tool_choice with a larger model
    chat = ChatCocoa(max_tokens=64, initial_tool_choice="any")
    refuse_risky_arguments = ToolRiskMiddleware()
    agent = create_agent(chat, [book_table], middleware=[end_after_tool, refuse_risky_arguments])
    for request in REQUESTS:
        print(f"user: {request}")
        for message in agent.invoke({"messages": [HumanMessage(request)]})["messages"][1:]:
            if isinstance(message, ToolMessage):
                print(f"tool: {message.text}")
            elif isinstance(message, AIMessage) and message.tool_calls:
                (call,) = message.tool_calls
                risks = argument_risks(message)[call["id"] or ""]
                for name, value in call["args"].items():
                    print(f"  {name}={value!r}  risk {risks[name].risk:.3f}")
        print()


if __name__ == "__main__":
    main()
