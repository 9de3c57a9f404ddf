"""The metrics of one server, for Prometheus: vLLM's names with ``cocoa:`` before them, and histograms of risk."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cocoa_engine import Timeline
from cocoa_integrations.chat_service.answer import Answer

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
SECONDS_OF_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
RISKS = tuple(step / 20 for step in range(1, 20))
"""Upper bounds of buckets. A calibrated risk is in [0, 1]."""

_METRICS: dict[str, tuple[Any, ...]] = {
    "num_requests_running": (Gauge, "Answers that are being decoded."),
    "num_requests_waiting": (Gauge, "Answers that wait for a batch slot."),
    "prompt_tokens": (Counter, "Tokens of prompts."),
    "generation_tokens": (Counter, "Tokens of answers."),
    "prefix_cache_queries": (Counter, "Tokens of prompts that were looked up in the cache."),
    "prefix_cache_hits": (Counter, "Tokens of prompts that were found in the cache."),
    "request_success": (Counter, "Complete answers. risk: max_risk stopped the answer.", "finished_reason"),
    "spans": (Counter, "Spans of answers."),
    "risk_points": (Counter, "Spans at which several candidates competed."),
    "flagged_spans": (Counter, "Spans whose risk reaches the threshold."),
    "scored_texts": (Counter, "Given texts whose risk was measured."),
    "cancelled": (Counter, "Requests that were ended, by whom: client or shutdown.", "by"),
    "rejected": (Counter, "Requests refused because the server was busy."),
    "request_prompt_tokens": (TOKENS, "Tokens of the prompt of an answer."),
    "request_generation_tokens": (TOKENS, "Tokens of an answer."),
    "time_to_first_token_seconds": (SECONDS, "Time until the first span of a streamed answer is decided."),
    "inter_token_latency_seconds": (
        SECONDS_OF_TOKENS,
        "Mean time of a token of an answer after the first one, from the end of the prompt.",
    ),
    "e2e_request_latency_seconds": (SECONDS, "Time of an answer, the wait included."),
    "request_queue_time_seconds": (SECONDS, "Wait for a batch slot."),
    "request_prefill_time_seconds": (SECONDS, "Time in which the prompt is read."),
    "request_decode_time_seconds": (SECONDS, "Time from the prompt to the end."),
    "span_risk": (RISKS, "Risk of a span; by risk_source.", "risk_source"),
    "answer_max_risk": (RISKS, "Highest risk of the spans of an answer, without its reasoning.", "risk_source"),
}
"""The kind, or the buckets of a histogram, the description and the labels besides ``model_name``."""


class Metrics:
    """The metrics of one app, in a registry of their own. ``model_name`` is a label of all values."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.model_name = ""
        self._of: dict[str, Any] = {}
        for name, (kind, text, *labels) in _METRICS.items():
            make = partial(Histogram, buckets=kind) if isinstance(kind, tuple) else kind
            self._of[name] = make(f"cocoa:{name}", text, ("model_name", *labels), registry=self.registry)

    def of_model(self, name: str, *, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Name the model, and tell the numbers of its answers that are being decoded and that wait."""
        self.model_name = name
        self._of["num_requests_running"].labels(name).set_function(running)
        self._of["num_requests_waiting"].labels(name).set_function(waiting)

    def add(self, name: str, value: float | None = 1, *labels: str) -> None:
        """Add to a counter, or to a histogram; nothing if the value is not a finite number."""
        if value is not None and math.isfinite(value):
            metric = self._of[name].labels(self.model_name, *labels)
            (metric.inc if isinstance(metric, Counter) else metric.observe)(value)

    def answered(self, answer: Answer) -> None:
        """Count a complete answer."""
        generation, without_reasoning, timeline = answer.generation, answer.answered, answer.timeline or Timeline()
        assert generation is not None
        assert without_reasoning is not None
        usage, spans, source = generation.usage, generation.spans, generation.risk_source or "none"
        values: dict[str, float | None] = {
            "prompt_tokens": usage.prompt_tokens,
            "generation_tokens": usage.completion_tokens,
            "prefix_cache_queries": usage.prompt_tokens,
            "prefix_cache_hits": usage.cached_tokens,
            "request_prompt_tokens": usage.prompt_tokens,
            "request_generation_tokens": usage.completion_tokens,
            "request_queue_time_seconds": timeline.queue_seconds,
            "request_prefill_time_seconds": timeline.prefill_seconds,
            "request_decode_time_seconds": timeline.decode_seconds,
            "spans": len(spans),
            "risk_points": sum(span.kind == "risk_point" for span in spans),
            "flagged_spans": sum(span.flagged for span in spans),
        }
        if timeline.ended is not None:
            values["e2e_request_latency_seconds"] = timeline.ended - timeline.created
        if timeline.decode_seconds is not None and usage.completion_tokens > 1:
            values["inter_token_latency_seconds"] = timeline.decode_seconds / (usage.completion_tokens - 1)
        for name, value in values.items():
            self.add(name, value)
        self.add("request_success", 1, generation.finish_reason or "stop")
        for span in spans:
            self.add("span_risk", span.risk, source)
        if without_reasoning.spans:
            self.add("answer_max_risk", without_reasoning.max_risk, source)
