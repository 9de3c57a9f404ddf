"""LangChain models that answer with CoCoA-SIG decoding and say how risky each span of the answer is."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cocoa_engine.errors import GenerationTimeoutError, UnsupportedFeatureError
from cocoa_integrations.langchain.callbacks import RiskCallbackHandler, get_risk_callback
from cocoa_integrations.langchain.chat import ChatCocoa
from cocoa_integrations.langchain.llm import CocoaLLM
from cocoa_integrations.langchain.runnables import argument_risks, get_risk, get_spans

if TYPE_CHECKING:
    from cocoa_integrations.langchain.tool_risk import ToolRiskMiddleware

__all__ = [
    "ChatCocoa",
    "CocoaLLM",
    "GenerationTimeoutError",
    "RiskCallbackHandler",
    "ToolRiskMiddleware",
    "UnsupportedFeatureError",
    "argument_risks",
    "get_risk",
    "get_risk_callback",
    "get_spans",
]

_LAZY = {"ToolRiskMiddleware": "tool_risk"}
"""What needs the package langchain, by the module it is in."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"cocoa_integrations.langchain.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
