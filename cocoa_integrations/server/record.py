"""What is noted about one request that decodes: in the log, in the metrics and in the trace."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cocoa_engine import CocoaConfig, Generation, __version__
from cocoa_engine.safe_text import one_line
from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.lifecycle import ServerState
from cocoa_integrations.server.protocol.chat_answer import Answered
from cocoa_integrations.server.protocol.decoding import DecodingRequest
from cocoa_integrations.tracing import RiskTrace

logger = logging.getLogger("cocoa_integrations.server.answers")  # whose lines are not shortened


@dataclass(frozen=True)
class AnswerLog:
    """What is written about one request.

    Attributes:
        answer_id: the id of the answer.
        prompt: the messages or prompts; ``None`` if they are not to be written.
    """

    answer_id: str
    prompt: Sequence[Any] | None
    _begun: float = field(default_factory=time.monotonic)

    def answered(self, generations: Sequence[Generation], usage: Mapping[str, Any]) -> None:
        """Write that the request was answered."""
        details = usage["completion_tokens_details"]
        risk = details.get("cocoa_max_risk")
        logger.info(
            "%s: %d prompt tokens (%d cached), %d new tokens, finish reason %s, highest risk %s, %.2f s",
            self.answer_id,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            ", ".join(str(one.finish_reason) for one in generations),
            "not reported" if risk is None else f"{risk:.3f}",
            time.monotonic() - self._begun,
        )
        if self.prompt is not None:
            logger.info("%s: prompt %s", self.answer_id, one_line(json.dumps(self.prompt, ensure_ascii=False)))
            for one in generations:
                logger.info("%s: answer %s", self.answer_id, one_line(json.dumps(one.text, ensure_ascii=False)))

    def ended(self, code: str | None) -> None:
        """Write that the request ended with an error."""
        logger.info("%s: ended with %s after %.2f s", self.answer_id, code, time.monotonic() - self._begun)


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

    def answered(self, generations: Sequence[Generation], choices: Sequence[str], usage: Mapping[str, Any]) -> None:
        """Write the complete answers.

        Args:
            generations: the answers.
            choices: their finish reasons, as the client gets them.
            usage: the usage.
        """
        if self._span is None:
            return
        self._span.set_attribute("gen_ai.response.finish_reasons", list(choices))
        self._span.set_attribute("gen_ai.usage.input_tokens", usage["prompt_tokens"])
        self._span.set_attribute("gen_ai.usage.output_tokens", usage["completion_tokens"])
        for generation in generations:
            self._risks.record(generation)

    def ended(self, code: str) -> None:
        """Write that a stream ended with an error."""
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", code)
            self._span.set_status(StatusCode.ERROR)


class Record:
    """Notes what becomes of one request.

    Args:
        state: the state of the server.
        operation: OpenTelemetry's name of what is asked for.
        body: the request.
        config: its settings.
        envelope: what its chunks have in common: ``id`` and ``model``.
        prompt: the messages or prompts.
    """

    def __init__(
        self,
        state: ServerState,
        operation: str,
        body: DecodingRequest,
        config: CocoaConfig,
        envelope: Mapping[str, Any],
        prompt: Sequence[Any],
    ) -> None:
        self._metrics = state.metrics
        self._log = AnswerLog(envelope["id"], prompt if state.settings.log_prompts else None)
        self._trace = AnswerTrace(operation, envelope["model"], envelope["id"], body.answers, config)
        self._begun = time.monotonic()
        self._has_begun = False

    def first_span(self) -> None:
        """A span of a stream is decided. Only the first call counts."""
        if not self._has_begun:
            self._has_begun = True
            self._metrics.first_span(time.monotonic() - self._begun)

    def answered(self, answers: Sequence[Answered], usage: Mapping[str, Any]) -> None:
        """All answers are complete."""
        generations = [one.generation for one in answers]
        for one in answers:
            self._metrics.answered(one.generation, one.split, one.timeline)
        self._log.answered(generations, usage)
        self._trace.answered(generations, [one.finish_reason for one in answers], usage)

    def ended(self, error: ApiError) -> None:
        """A stream ended with an error."""
        self._log.ended(error.code)
        self._trace.ended(error.code or error.kind)
