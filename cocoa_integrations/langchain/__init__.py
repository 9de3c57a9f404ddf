"""LangChain models that answer with CoCoA-SIG decoding and say how risky each span of the answer is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cocoa_engine.errors import GenerationTimeoutError, HallucinationRiskError, UnsupportedFeatureError
from cocoa_engine.extras import need
from cocoa_integrations.langchain.callbacks import RiskCallbackHandler, get_risk_callback
from cocoa_integrations.langchain.chat import ChatCocoa
from cocoa_integrations.langchain.gates import risk_gate
from cocoa_integrations.langchain.llm import CocoaLLM
from cocoa_integrations.langchain.parsers import RiskOutputParser
from cocoa_integrations.langchain.runnables import get_risk, get_spans, max_risk

if TYPE_CHECKING:
    from cocoa_integrations.langchain.middleware import RiskMiddleware as RiskMiddleware

__all__ = [
    "ChatCocoa",
    "CocoaLLM",
    "GenerationTimeoutError",
    "HallucinationRiskError",
    "RiskCallbackHandler",
    "RiskOutputParser",
    "UnsupportedFeatureError",
    "get_risk",
    "get_risk_callback",
    "get_spans",
    "max_risk",
    "risk_gate",
]


def __getattr__(name: str) -> Any:
    """``RiskMiddleware``, which alone needs the package ``langchain`` and is imported when it is asked for."""
    if name == "RiskMiddleware":
        need("langchain.agents", extra="agents", what=name)
        from cocoa_integrations.langchain.middleware import RiskMiddleware

        return RiskMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
