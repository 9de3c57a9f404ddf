"""Tool calls and structured output, apart from any framework: what is asked for, how a model is told, what it wrote."""

from cocoa_integrations.tool_calling.argument_risk import tool_call_risks
from cocoa_integrations.tool_calling.plan import Plan
from cocoa_integrations.tool_calling.reading import Call, Reading, new_id
from cocoa_integrations.tool_calling.request import ToolRequest

__all__ = ["Call", "Plan", "Reading", "ToolRequest", "new_id", "tool_call_risks"]
