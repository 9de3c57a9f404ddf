"""What is noted about one request that decodes: in the log, in the metrics and in the trace."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cocoa_engine import CocoaConfig
from cocoa_integrations.server.answer_log import AnswerLog
from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.lifecycle import ServerState
from cocoa_integrations.server.protocol.answers import Answered
from cocoa_integrations.server.protocol.decoding import DecodingRequest
from cocoa_integrations.server.tracing import AnswerTrace


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
        for answered in answers:
            self._metrics.answered(answered.generation, answered.split, answered.timeline)
        self._log.answered([answered.generation for answered in answers], usage)
        reasons = [answered.finish_reason for answered in answers]
        self._trace.answered([answered.answer for answered in answers], reasons, usage)

    def ended(self, error: ApiError) -> None:
        """A stream ended with an error."""
        self._log.ended(error.code)
        self._trace.ended(error.code or error.kind)
