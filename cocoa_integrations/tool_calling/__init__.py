"""Tool calls and structured output, independent of frameworks: the request, the prompt, and the parsed answer."""

from cocoa_integrations.tool_calling.argument_risk import ROOT, fields_of_report, parts_of_report, tool_call_risks
from cocoa_integrations.tool_calling.plan import Plan
from cocoa_integrations.tool_calling.reading import Call, Reading, new_id
from cocoa_integrations.tool_calling.request import ToolRequest

__all__ = [
    "ROOT",
    "Call",
    "Plan",
    "Reading",
    "ToolRequest",
    "fields_of_report",
    "new_id",
    "parts_of_report",
    "tool_call_risks",
]
