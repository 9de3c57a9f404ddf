"""LangChain models with CoCoA-SIG decoding that report the hallucination risk of each span of an answer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cocoa_engine.errors import GenerationTimeoutError, HallucinationRiskError, UnsupportedFeatureError
from cocoa_engine.integration import need

need("langchain_core", extra="langchain", what=__name__)
from cocoa_integrations.langchain.answers import RiskOutputParser
from cocoa_integrations.langchain.callbacks import RiskCallbackHandler, RiskScores, get_risk_callback
from cocoa_integrations.langchain.chat import ChatCocoa
from cocoa_integrations.langchain.citations import with_citations
from cocoa_integrations.langchain.evaluation import risk_evaluator
from cocoa_integrations.langchain.gates import risk_gate
from cocoa_integrations.langchain.llm import CocoaLLM
from cocoa_integrations.langchain.retry import with_risk_retry
from cocoa_integrations.reports import argument_risks, field_risks, get_risk, get_spans, max_risk

if TYPE_CHECKING:
    from cocoa_integrations.langchain.agents import RiskMiddleware as RiskMiddleware
    from cocoa_integrations.langchain.agents import RiskyToolCalls as RiskyToolCalls
    from cocoa_integrations.langchain.agents import ToolRiskMiddleware as ToolRiskMiddleware

__all__ = [
    "ChatCocoa",
    "CocoaLLM",
    "GenerationTimeoutError",
    "HallucinationRiskError",
    "RiskCallbackHandler",
    "RiskOutputParser",
    "RiskScores",
    "UnsupportedFeatureError",
    "argument_risks",
    "field_risks",
    "get_risk",
    "get_risk_callback",
    "get_spans",
    "max_risk",
    "risk_evaluator",
    "risk_gate",
    "with_citations",
    "with_risk_retry",
]


def __getattr__(name: str) -> Any:
    if name in ("RiskMiddleware", "RiskyToolCalls", "ToolRiskMiddleware"):  # they need the package langchain
        return getattr(import_module("cocoa_integrations.langchain.agents"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
