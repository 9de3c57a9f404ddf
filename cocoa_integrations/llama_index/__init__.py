"""CoCoA decoding as a LlamaIndex LLM, with per-span hallucination risk in its responses and events."""

from cocoa_integrations.llama_index.callbacks import collect_risk
from cocoa_integrations.llama_index.events import CocoaRiskEvent, CocoaSpanEvent
from cocoa_integrations.llama_index.llm import CocoaLLM

__all__ = ["CocoaLLM", "CocoaRiskEvent", "CocoaSpanEvent", "collect_risk"]
