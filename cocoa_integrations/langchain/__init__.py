"""LangChain models that answer with CoCoA-SIG decoding and say how risky each span of the answer is."""

from cocoa_engine.errors import GenerationTimeoutError, UnsupportedFeatureError
from cocoa_integrations.langchain.callbacks import RiskCallbackHandler, get_risk_callback
from cocoa_integrations.langchain.chat import ChatCocoa
from cocoa_integrations.langchain.grounding import context_lift, with_context_lift
from cocoa_integrations.langchain.llm import CocoaLLM
from cocoa_integrations.langchain.runnables import get_risk, get_spans

__all__ = [
    "ChatCocoa",
    "CocoaLLM",
    "GenerationTimeoutError",
    "RiskCallbackHandler",
    "UnsupportedFeatureError",
    "context_lift",
    "get_risk",
    "get_risk_callback",
    "get_spans",
    "with_context_lift",
]
