"""Tool calls and structured output, independent of frameworks: the request, the prompt, and the parsed answer."""

from cocoa_integrations.tool_calling.calls import Call, CallDelta, Reading, new_id
from cocoa_integrations.tool_calling.formats import invalid_call_text
from cocoa_integrations.tool_calling.json_text import object_of
from cocoa_integrations.tool_calling.plan import ROOT, Plan, fields_of_report, parts_of_report
from cocoa_integrations.tool_calling.request import ToolRequest

__all__ = [
    "ROOT",
    "Call",
    "CallDelta",
    "Plan",
    "Reading",
    "ToolRequest",
    "fields_of_report",
    "invalid_call_text",
    "new_id",
    "object_of",
    "parts_of_report",
]
