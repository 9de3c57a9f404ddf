"""CoCoA decoding as a LlamaIndex LLM, with per-span hallucination risk in its responses and events."""

from cocoa_engine.integration import need

need("llama_index.core", extra="llama-index", what=__name__)

from cocoa_integrations.llama_index.answers import MissingRiskWarning
from cocoa_integrations.llama_index.callbacks import CocoaRiskEvent, CocoaSpanEvent, RiskScores, collect_risk
from cocoa_integrations.llama_index.evaluation import RiskEvaluator
from cocoa_integrations.llama_index.llm import CocoaLLM
from cocoa_integrations.llama_index.query_engines import (
    RiskChatEngine,
    RiskCitationQueryEngine,
    RiskQueryEngine,
    RiskStreamingChatResponse,
)
from cocoa_integrations.llama_index.retry import RiskRetryQueryEngine
from cocoa_integrations.reports import argument_risks, field_risks, get_risk

__all__ = [
    "CocoaLLM",
    "CocoaRiskEvent",
    "CocoaSpanEvent",
    "MissingRiskWarning",
    "RiskChatEngine",
    "RiskCitationQueryEngine",
    "RiskEvaluator",
    "RiskQueryEngine",
    "RiskRetryQueryEngine",
    "RiskScores",
    "RiskStreamingChatResponse",
    "argument_risks",
    "collect_risk",
    "field_risks",
    "get_risk",
]
