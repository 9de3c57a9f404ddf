"""A configured model that decodes: it makes checked requests and runs them in its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cocoa_engine.arguments import of_type
from cocoa_engine.cancellation import Cancellation
from cocoa_engine.config import CocoaConfig
from cocoa_engine.configured_model import ConfiguredModel
from cocoa_engine.decoding.batch import decode_batch
from cocoa_engine.decoding.request import Controls, Request, make_request
from cocoa_engine.decoding.task import DecodeTask
from cocoa_engine.model.passages import Passages, Source, passage_positions
from cocoa_engine.model.prompts import Messages, Prompt
from cocoa_engine.results import Generation
from cocoa_engine.timeline import Timeline


class DecodingModel(ConfiguredModel):
    """The base class of :class:`~cocoa_engine.CocoaEngine`: from a checked call to its answers."""

    def _request(
        self,
        prompt: Prompt,
        config: CocoaConfig,
        controls: Controls,
        source: Source | None = None,
        timeline: Timeline | None = None,
    ) -> Request:
        calibrator = self._risk.fitting(config)
        return make_request(
            self.session, prompt, config, controls, source=source, calibrator=calibrator, timeline=timeline
        )

    def _encoded_chat(
        self,
        messages: Messages,
        template_kwargs: Mapping[str, Any] | None,
        source: Source | None,
        cancellation: Cancellation | None,
    ) -> tuple[list[int], Passages | None]:
        """Token ids of chat messages, and the positions of the passages in them."""
        if cancellation is not None:
            run = of_type(cancellation, Cancellation, "cancellation").run
            return run(self._encoded_chat, messages, template_kwargs, source, None)
        text, token_ids = self._encoded_rendering(messages, template_kwargs or {})
        if source is None:
            return token_ids, None
        positions = passage_positions(self.session.tokens, text, token_ids, source, add_special_tokens=False)
        return token_ids, Passages(positions)

    def _generations(self, requests: Sequence[Request], configs: Sequence[CocoaConfig]) -> list[Generation]:
        return [one for one in self._decode(requests, configs, None) if isinstance(one, Generation)]

    def _task(self, request: Request, config: CocoaConfig) -> DecodeTask:
        backend = self.session.backend  # once for a call: it reads the model's state
        return DecodeTask(
            request, config, self.session, self._risk.measure(config, request.passages, backend=backend), backend
        )

    def _decode(
        self,
        requests: Sequence[Request],
        configs: Sequence[CocoaConfig],
        batch_size: int | None,
        *,
        keep_errors: bool = False,
    ) -> list[Generation | Exception]:
        config_of = {id(request): config for request, config in zip(requests, configs, strict=True)}
        return decode_batch(
            requests,
            lambda request: self._task(request, config_of[id(request)]),
            self.session.scheduler,
            self.runtime.max_batch_size if batch_size is None else batch_size,
            keep_errors=keep_errors,
        )
