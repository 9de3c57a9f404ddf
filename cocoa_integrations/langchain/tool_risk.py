"""Middleware that keeps an agent from running a tool on arguments that may be made up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from cocoa_engine.extras import need

need("langchain.agents", extra="agents", what="ToolRiskMiddleware")

from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.types import Command

from cocoa_engine.errors import ConfigError
from cocoa_integrations.langchain.runnables import argument_risks, find_risk
from cocoa_integrations.limits import Limit, Metric, figure


class ToolRiskMiddleware(AgentMiddleware[Any, Any]):
    """Refuses to run a tool where the risk of one of its arguments reaches the threshold; the model is told which one.

    ``create_agent(ChatCocoa(calibrator="risk.json"), tools, middleware=[ToolRiskMiddleware(0.5)])``. The tool
    is not run, and in its place a ``ToolMessage`` of status ``"error"`` names the arguments, so that the model asks the
    user or calls again. A call without a report (of another model, or made by hand) is let through.

    Args:
        threshold: from where on a risk is too high: a probability with a calibrator, else a raw MLDS.
        metric: the figure of an argument that the threshold is for, as in
            :func:`~cocoa_integrations.langchain.risk_gate`. Arguments that were written in one span have its risk and
            MLDS in common; ``self_information`` (-log p, in nats) is that of the argument's own tokens.
        tools: only these are watched; none is all.
        arguments: only these arguments are; none is all.

    Raises:
        ConfigError: ``threshold`` is no finite number, or ``metric`` is unknown.
    """

    def __init__(
        self,
        threshold: float,
        *,
        metric: Metric = "risk",
        tools: Collection[str] | None = None,
        arguments: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(tools, str) or isinstance(arguments, str):
            raise ConfigError("tools and arguments take lists of names")
        self.limit = Limit(threshold, metric)
        self.watched_tools = tools
        self.watched_arguments = arguments

    @property
    def name(self) -> str:
        """By what is watched, and how: LangChain lets an agent have several only under different names."""
        parts = [f"{self.limit.metric} {self.limit.threshold}"]
        for what, watched in (("tools", self.watched_tools), ("arguments", self.watched_arguments)):
            if watched is not None:
                parts.append(" ".join([what, *watched]))
        return f"{type(self).__name__}[{', '.join(parts)}]"

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Run the tool, or refuse."""
        return self._refusal(request) or handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """See :meth:`wrap_tool_call`."""
        return self._refusal(request) or await handler(request)

    def _refusal(self, request: ToolCallRequest) -> ToolMessage | None:
        call = request.tool_call
        if self.watched_tools is not None and call["name"] not in self.watched_tools:
            return None
        figures = _arguments_of(request.state, call["id"])
        values = {
            name: figure(measured, self.limit.metric)
            for name, measured in figures.items()
            if self.watched_arguments is None or name in self.watched_arguments
        }
        risky = {name: value for name, value in values.items() if value >= self.limit.threshold}
        if not risky:
            return None
        listed = ", ".join(f"{name}={call['args'].get(name)!r} ({value:.2f})" for name, value in risky.items())
        return ToolMessage(
            f"{call['name']} was not run: the {self.limit.metric.replace('_', ' ')} of these arguments reaches "
            f"{self.limit.threshold:.3g}: {listed}",
            name=call["name"],
            tool_call_id=call["id"] or "",
            status="error",
        )


def _arguments_of(state: Any, call_id: str | None) -> dict[str, dict[str, Any]]:
    """What was measured of a call's arguments, from the newest message that made it."""
    messages = state["messages"] if isinstance(state, dict) else getattr(state, "messages", state)
    for message in reversed(list(messages)):
        if isinstance(message, AIMessage) and any(call["id"] == call_id for call in message.tool_calls):
            return argument_risks(message).get(call_id or "", {}) if find_risk(message) is not None else {}
    return {}
