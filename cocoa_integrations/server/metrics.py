"""The metrics of one server, for Prometheus: vLLM's names with ``cocoa:`` before them, and histograms of risk."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cocoa_engine import Timeline
from cocoa_integrations.chat_service.answer import Answer

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
SECONDS_OF_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
RISKS = tuple(step / 20 for step in range(1, 20))
"""Upper bounds of buckets. A calibrated risk is in [0, 1]."""

_GAUGES = {
    "num_requests_running": "Answers that are being decoded.",
    "num_requests_waiting": "Answers that wait for a batch slot.",
}
_COUNTERS: dict[str, tuple[str, ...]] = {
    "prompt_tokens": ("Tokens of prompts.",),
    "generation_tokens": ("Tokens of answers.",),
    "prefix_cache_queries": ("Tokens of prompts that were looked up in the cache.",),
    "prefix_cache_hits": ("Tokens of prompts that were found in the cache.",),
    "request_success": ("Complete answers. risk: max_risk stopped the answer.", "finished_reason"),
    "spans": ("Spans of answers.",),
    "risk_points": ("Spans at which several candidates competed.",),
    "flagged_spans": ("Spans whose risk reaches the threshold.",),
    "scored_texts": ("Given texts whose risk was measured.",),
    "cancelled": ("Requests that were ended, by whom: client or shutdown.", "by"),
    "rejected": ("Requests refused because the server was busy.",),
}
"""The description and the further labels."""

_HISTOGRAMS: dict[str, tuple[Any, ...]] = {
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


class Metrics:
    """The metrics of one app, in a registry of their own.

    Attributes:
        registry: what ``/metrics`` shows.
        model_name: the label of all values. It is set when the model is loaded.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.model_name = ""
        own: Any = {"registry": self.registry}
        self._gauges = {name: Gauge(f"cocoa:{name}", text, ("model_name",), **own) for name, text in _GAUGES.items()}
        self._of: dict[str, Counter | Histogram] = {
            name: Counter(f"cocoa:{name}", text, ("model_name", *labels), **own)
            for name, (text, *labels) in _COUNTERS.items()
        }
        for name, (buckets, text, *labels) in _HISTOGRAMS.items():
            self._of[name] = Histogram(f"cocoa:{name}", text, ("model_name", *labels), buckets=buckets, **own)

    def of_model(self, name: str, *, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Name the model, and tell the numbers of its answers that are being decoded and that wait."""
        self.model_name = name
        self._gauges["num_requests_running"].labels(name).set_function(running)
        self._gauges["num_requests_waiting"].labels(name).set_function(waiting)

    def add(self, name: str, value: float | None = 1, *labels: str) -> None:
        """Add to a counter, or to a histogram; nothing if the value is not a finite number."""
        if value is None or not math.isfinite(value):
            return
        metric = self._of[name].labels(self.model_name, *labels)
        if isinstance(metric, Counter):
            metric.inc(value)
        else:
            metric.observe(value)

    def answered(self, answer: Answer) -> None:
        """Count a complete answer."""
        generation, without_reasoning, timeline = answer.generation, answer.answered, answer.timeline or Timeline()
        assert generation is not None
        assert without_reasoning is not None
        usage, spans, source = generation.usage, generation.spans, generation.risk_source or "none"
        self.add("prompt_tokens", usage.prompt_tokens)
        self.add("generation_tokens", usage.completion_tokens)
        self.add("prefix_cache_queries", usage.prompt_tokens)
        self.add("prefix_cache_hits", usage.cached_tokens)
        self.add("request_success", 1, generation.finish_reason or "stop")
        self.add("request_prompt_tokens", usage.prompt_tokens)
        self.add("request_generation_tokens", usage.completion_tokens)
        self.add("request_queue_time_seconds", timeline.queue_seconds)
        self.add("request_prefill_time_seconds", timeline.prefill_seconds)
        self.add("request_decode_time_seconds", timeline.decode_seconds)
        if timeline.ended is not None:
            self.add("e2e_request_latency_seconds", timeline.ended - timeline.created)
        if timeline.decode_seconds is not None and usage.completion_tokens > 1:
            self.add("inter_token_latency_seconds", timeline.decode_seconds / (usage.completion_tokens - 1))
        self.add("spans", len(spans))
        self.add("risk_points", sum(span.kind == "risk_point" for span in spans))
        self.add("flagged_spans", sum(span.flagged for span in spans))
        for span in spans:
            self.add("span_risk", span.risk, source)
        if without_reasoning.spans:
            self.add("answer_max_risk", without_reasoning.max_risk, source)
