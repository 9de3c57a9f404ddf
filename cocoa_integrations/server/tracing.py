"""OpenTelemetry: one server span for each request, which continues the trace of the client (``traceparent``).

Without ``opentelemetry-api`` (the extra ``tracing``), or without an SDK that records, nothing happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cocoa_engine import CocoaConfig, __version__
from cocoa_integrations.tracing import HasReport, RiskTrace

PROVIDER = "cocoa"


def can_trace() -> bool:
    """Whether OpenTelemetry is installed."""
    try:
        return find_spec("opentelemetry.trace") is not None
    except ModuleNotFoundError:
        return False


class Traced:
    """Starts a server span for each request, unless an instrumentation of ASGI has started one.

    Args:
        app: the app.
        left_out: paths that are called so often that their spans would be noise.
    """

    def __init__(self, app: ASGIApp, left_out: Sequence[str] = ()) -> None:
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


class AnswerTrace:
    """Writes what a request asks for, and its answers, to the current span. It writes no text.

    Args:
        operation: ``chat`` or ``text_completion``.
        model: the name of the model in the answer.
        answer_id: the id of the answer.
        answers: the number of answers.
        config: the settings.
    """

    def __init__(self, operation: str, model: str, answer_id: str, answers: int, config: CocoaConfig) -> None:
        self._risks = RiskTrace()
        self._span = self._risks.span if self._risks.is_recording else None
        if self._span is None:
            return
        self._span.update_name(f"{operation} {model}")
        given = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.request.choice.count": answers if answers != 1 else None,
            "gen_ai.request.max_tokens": config.max_new_tokens,
            "gen_ai.request.temperature": config.temperature,
            "gen_ai.request.seed": config.seed,
            "gen_ai.response.id": answer_id,
            "gen_ai.response.model": model,
            "cocoa.method": config.method,
        }
        self._span.set_attributes({name: value for name, value in given.items() if value is not None})

    def answered(self, answers: Sequence[HasReport], choices: Sequence[str], usage: Mapping[str, Any]) -> None:
        """Write the complete answers.

        Args:
            answers: the answers.
            choices: their finish reasons, as the client gets them.
            usage: the usage.
        """
        if self._span is None:
            return
        self._span.set_attribute("gen_ai.response.finish_reasons", list(choices))
        self._span.set_attribute("gen_ai.usage.input_tokens", usage["prompt_tokens"])
        self._span.set_attribute("gen_ai.usage.output_tokens", usage["completion_tokens"])
        for answer in answers:
            self._risks.record(answer)

    def ended(self, code: str) -> None:
        """Write that a stream ended with an error."""
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", code)
            self._span.set_status(StatusCode.ERROR)
