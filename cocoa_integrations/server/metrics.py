"""The metrics of one server, for Prometheus: vLLM's names with ``cocoa:`` before them, and histograms of risk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cocoa_engine import Generation, Timeline
from cocoa_integrations._shared.reasoning import Split

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
SECONDS_OF_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
RISKS = tuple(step / 20 for step in range(1, 20))
"""Upper bounds of buckets. A calibrated risk is in [0, 1]."""

LABELS = ("model_name",)


class Metrics:
    """The metrics of one app, in a registry of their own.

    Args:
        running: the number of answers that are being decoded.
        waiting: the number of answers that wait.

    Attributes:
        registry: what ``/metrics`` shows.
        model_name: the label of all values. It is set when the model is loaded.
    """

    def __init__(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.model_name = ""
        self._load = {
            self._gauge("num_requests_running", "Answers that are being decoded."): running,
            self._gauge("num_requests_waiting", "Answers that wait for a batch slot."): waiting,
        }
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self._queries = self._counter("prefix_cache_queries", "Tokens of prompts that were looked up in the cache.")
        self._hits = self._counter("prefix_cache_hits", "Tokens of prompts that were found in the cache.")
        self._success = self._counter(
            "request_success", "Complete answers. risk: max_risk stopped the answer.", "finished_reason"
        )
        self._of_prompt = self._histogram("request_prompt_tokens", "Tokens of the prompt of an answer.", TOKENS)
        self._of_answer = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._first = self._histogram(
            "time_to_first_token_seconds", "Time until the first span of a streamed answer is decided.", SECONDS
        )
        self._between = self._histogram(
            "inter_token_latency_seconds",
            "Mean time of a token of an answer after the first one, from the end of the prompt.",
            SECONDS_OF_TOKENS,
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Time of an answer, the wait included.", SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Wait for a batch slot.", SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Time in which the prompt is read.", SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "Time from the prompt to the end.", SECONDS)
        self._spans = self._counter("spans", "Spans of answers.")
        self._risk_points = self._counter("risk_points", "Spans at which several candidates competed.")
        self._flagged = self._counter("flagged_spans", "Spans whose risk reaches the threshold.")
        self._span_risk = self._histogram("span_risk", "Risk of a span; by risk_source.", RISKS, "risk_source")
        self._answer_risk = self._histogram(
            "answer_max_risk", "Highest risk of the spans of an answer, without its reasoning.", RISKS, "risk_source"
        )
        self._scored = self._counter("scored_texts", "Given texts whose risk was measured.")
        self._cancelled = self._counter("cancelled", "Requests that were ended, by whom: client or shutdown.", "by")
        self._rejected = self._counter("rejected", "Requests refused because the server was busy.")

    def answered(self, generation: Generation, split: Split, timeline: Timeline) -> None:
        """Count a complete answer.

        Args:
            generation: the answer.
            split: separates its reasoning.
            timeline: its phases.
        """
        name, usage = self.model_name, generation.usage
        self._prompt_tokens.labels(name).inc(usage.prompt_tokens)
        self._generation_tokens.labels(name).inc(usage.completion_tokens)
        self._queries.labels(name).inc(usage.prompt_tokens)
        self._hits.labels(name).inc(usage.cached_tokens)
        self._success.labels(name, generation.finish_reason or "stop").inc()
        self._of_prompt.labels(name).observe(usage.prompt_tokens)
        self._of_answer.labels(name).observe(usage.completion_tokens)
        for seconds, histogram in (
            (timeline.queue_seconds, self._queue),
            (timeline.prefill_seconds, self._prefill),
            (timeline.decode_seconds, self._decode),
            (None if timeline.ended is None else timeline.ended - timeline.created, self._whole),
        ):
            if seconds is not None:
                histogram.labels(name).observe(seconds)
        if timeline.decode_seconds is not None and usage.completion_tokens > 1:
            self._between.labels(name).observe(timeline.decode_seconds / (usage.completion_tokens - 1))
        self._spans.labels(name).inc(len(generation.spans))
        self._risk_points.labels(name).inc(sum(span.kind == "risk_point" for span in generation.spans))
        self._flagged.labels(name).inc(sum(span.flagged for span in generation.spans))
        source = generation.risk_source or "none"
        for span in generation.spans:
            if span.risk is not None and math.isfinite(span.risk):
                self._span_risk.labels(name, source).observe(span.risk)
        if split.answered.spans and math.isfinite(split.answered.max_risk):
            self._answer_risk.labels(name, source).observe(split.answered.max_risk)

    def first_span(self, seconds: float) -> None:
        """Record the time until the first span of a streamed answer."""
        self._first.labels(self.model_name).observe(seconds)

    def scored(self, count: int) -> None:
        """Count given texts."""
        self._scored.labels(self.model_name).inc(count)

    def cancelled(self, by: str) -> None:
        """Count a request that was ended."""
        self._cancelled.labels(self.model_name, by).inc()

    def rejected(self) -> None:
        """Count a request that was refused because the server was busy."""
        self._rejected.labels(self.model_name).inc()

    def update(self) -> None:
        """Read the gauges."""
        for gauge, value in self._load.items():
            gauge.labels(self.model_name).set(value())

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"cocoa:{name}", text, LABELS, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"cocoa:{name}", text, (*LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"cocoa:{name}", text, (*LABELS, *labels), buckets=buckets, registry=self.registry)
