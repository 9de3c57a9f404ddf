"""What is noted about one request that decodes: in the log, in the metrics and in the trace."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cocoa_engine import CocoaConfig, __version__
from cocoa_engine.safe_text import one_line
from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.lifecycle import ServerState
from cocoa_integrations.server.protocol.answers import Answered
from cocoa_integrations.tracing import RiskTrace

logger = logging.getLogger("cocoa_integrations.server.answers")  # whose lines are not shortened


def can_trace() -> bool:
    """Whether OpenTelemetry is installed."""
    with suppress(ModuleNotFoundError):
        return find_spec("opentelemetry.trace") is not None
    return False


class Traced:
    """Starts a server span for each request, unless an instrumentation of ASGI has started one.

    Paths that are ``left_out`` are called so often that their spans would be noise.
    """

    def __init__(self, app: ASGIApp, left_out: Sequence[str]) -> None:
        self._app, self._left_out = app, frozenset(left_out)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        from opentelemetry import propagate, trace

        if scope["type"] != "http" or scope["path"] in self._left_out or trace.get_current_span().is_recording():
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        attributes = {"http.request.method": method, "url.path": path, "url.scheme": scope.get("scheme", "http")}
        tracer = trace.get_tracer("cocoa_integrations.server", __version__)
        context = propagate.extract(dict(Headers(scope=scope)))
        with tracer.start_as_current_span(
            method, context=context, kind=trace.SpanKind.SERVER, attributes=attributes
        ) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(trace.StatusCode.ERROR)
                await send(message)

            await self._app(scope, receive, noting)


class Record:
    """Notes what becomes of one request. The current span of a trace gets no text.

    Args:
        state: the state of the server.
        operation: OpenTelemetry's name of what is asked for, ``chat`` or ``text_completion``.
        config: the settings.
        envelope: what its chunks have in common.
        prompt: the messages or prompts.
        count: the number of answers to each prompt.
    """

    def __init__(
        self,
        state: ServerState,
        operation: str,
        config: CocoaConfig,
        envelope: Mapping[str, Any],
        prompt: Sequence[Any],
        count: int,
    ) -> None:
        self._metrics, self._answer_id = state.metrics, envelope["id"]
        self._prompt = prompt if state.settings.log_prompts else None
        self._begun, self._has_span = time.monotonic(), False
        self._risks = RiskTrace()
        self._span = self._risks.span if self._risks.is_recording else None
        if self._span is not None:
            self._span.update_name(f"{operation} {envelope['model']}")
            attributes = {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "cocoa",
                "gen_ai.request.model": envelope["model"],
                "gen_ai.request.choice.count": count if count != 1 else None,
                "gen_ai.request.max_tokens": config.max_new_tokens,
                "gen_ai.request.temperature": config.temperature,
                "gen_ai.request.seed": config.seed,
                "gen_ai.response.id": envelope["id"],
                "gen_ai.response.model": envelope["model"],
                "cocoa.method": config.method,
            }
            self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def first_span(self) -> None:
        """A span of a stream is decided. Only the first call counts."""
        if not self._has_span:
            self._has_span = True
            self._metrics.add("time_to_first_token_seconds", time.monotonic() - self._begun)

    def answered(self, answers: Sequence[Answered], usage: Mapping[str, Any]) -> None:
        """All answers are complete."""
        for answered in answers:
            self._metrics.answered(answered.answer)
        risk = usage["completion_tokens_details"].get("cocoa_max_risk")
        logger.info(
            "%s: %d prompt tokens (%d cached), %d new tokens, finish reason %s, highest risk %s, %.2f s",
            self._answer_id,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            ", ".join(str(answered.answer.finish_reason) for answered in answers),
            "not reported" if risk is None else f"{risk:.3f}",
            time.monotonic() - self._begun,
        )
        if self._prompt is not None:
            for kind, text in (("prompt", self._prompt), *(("answer", answered.answer.text) for answered in answers)):
                logger.info("%s: %s %s", self._answer_id, kind, one_line(json.dumps(text, ensure_ascii=False)))
        if self._span is not None:
            finish_reasons = [str(answered.choice["finish_reason"]) for answered in answers]
            self._span.set_attribute("gen_ai.response.finish_reasons", finish_reasons)
            self._span.set_attribute("gen_ai.usage.input_tokens", usage["prompt_tokens"])
            self._span.set_attribute("gen_ai.usage.output_tokens", usage["completion_tokens"])
            for answered in answers:
                self._risks.record(answered.answer)

    def ended(self, error: ApiError) -> None:
        """A stream ended with an error."""
        logger.info("%s: ended with %s after %.2f s", self._answer_id, error.code, time.monotonic() - self._begun)
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", error.code or error.kind)
            self._span.set_status(StatusCode.ERROR)
