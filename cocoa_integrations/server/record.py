"""What is noted about one request that decodes: in the log, in the metrics and in the trace."""

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cocoa_engine import CocoaConfig, __version__
from cocoa_engine.errors import one_line
from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.process import ServerState
from cocoa_integrations.server.protocol.answers import Answered
from cocoa_integrations.tracing import RiskTrace

# whose lines are not shortened: this calls safe for prompts and answers, and the server makes the rest
logger = logging.getLogger("cocoa_integrations.server.answers")  # noqa: TID251


def traced(app: ASGIApp, left_out: Collection[str]) -> ASGIApp:
    """Start a server span for each request, unless an instrumentation of ASGI has started one.

    Paths that are ``left_out`` are called so often that their spans would be noise. Without OpenTelemetry there are
    none.
    """
    try:
        from opentelemetry import propagate, trace
    except ImportError:  # other packages may have a part of its namespace
        return app

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in left_out or trace.get_current_span().is_recording():
            await app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        attributes = {"http.request.method": method, "url.path": path, "url.scheme": scope.get("scheme", "http")}
        with trace.get_tracer("cocoa_integrations.server", __version__).start_as_current_span(
            method,
            context=propagate.extract(dict(Headers(scope=scope))),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
        ) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(trace.StatusCode.ERROR)
                await send(message)

            await app(scope, receive, noting)

    return serve


class Record:
    """Notes what becomes of one request. The current span of a trace gets no text.

    ``operation`` is OpenTelemetry's name of what is asked for, ``envelope`` what its chunks have in common, and
    ``count`` the number of answers to each prompt.
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
        if (span := self._risks.span) is not None:
            span.update_name(f"{operation} {envelope['model']}")
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
            span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def first_span(self) -> None:
        """A span of a stream is decided. Only the first call counts."""
        if not self._has_span:
            self._has_span = True
            self._metrics.add("time_to_first_token_seconds", time.monotonic() - self._begun)

    def answered(self, answers: Sequence[Answered], usage: Mapping[str, Any]) -> None:
        """All answers are complete."""
        for answer, _ in answers:
            self._metrics.answered(answer)
        risk = usage["completion_tokens_details"].get("cocoa_max_risk")
        logger.info(
            "%s: %d prompt tokens (%d cached), %d new tokens, finish reason %s, highest risk %s, %.2f s",
            self._answer_id,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            ", ".join(str(answer.finish_reason) for answer, _ in answers),
            "not reported" if risk is None else f"{risk:.3f}",
            time.monotonic() - self._begun,
        )
        if self._prompt is not None:
            for kind, text in (("prompt", self._prompt), *(("answer", answer.text) for answer, _ in answers)):
                logger.info("%s: %s %s", self._answer_id, kind, one_line(json.dumps(text, ensure_ascii=False)))
        if (span := self._risks.span) is not None:
            span.set_attribute(
                "gen_ai.response.finish_reasons", [str(choice["finish_reason"]) for _, choice in answers]
            )
            span.set_attribute("gen_ai.usage.input_tokens", usage["prompt_tokens"])
            span.set_attribute("gen_ai.usage.output_tokens", usage["completion_tokens"])
            for answer, _ in answers:
                self._risks.record(answer)

    def ended(self, error: ApiError) -> None:
        """A stream ended with an error."""
        logger.info("%s: ended with %s after %.2f s", self._answer_id, error.code, time.monotonic() - self._begun)
        if (span := self._risks.span) is not None:
            from opentelemetry.trace import StatusCode

            span.set_attribute("error.type", error.code or error.kind)
            span.set_status(StatusCode.ERROR)
