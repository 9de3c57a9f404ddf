"""``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from cocoa_engine import CocoaConfig, __version__
from cocoa_engine.errors import RequestCancelledError
from cocoa_integrations._shared.async_stream import AsyncStream
from cocoa_integrations.server.answer_log import AnswerLog
from cocoa_integrations.server.errors import api_error, log_unexpected
from cocoa_integrations.server.lifecycle import ServerState, state_of
from cocoa_integrations.server.protocol.chat_answer import Answered, ChatJob, ChatStream
from cocoa_integrations.server.protocol.chat_request import ChatRequest
from cocoa_integrations.server.protocol.decoding import config_of_answer
from cocoa_integrations.server.protocol.risk_fields import RiskFields, usage_of
from cocoa_integrations.server.routes.models import served_name
from cocoa_integrations.server.streaming import DONE, EventStream, Interleaved, comment, error_event, event
from cocoa_integrations.server.work import Call
from cocoa_integrations.tool_calling import Plan

router = APIRouter()


@router.post("/chat/completions")
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation. Every answer has its risk in ``message.cocoa_risk`` and ``logprobs.cocoa_risk``."""
    state = state_of(request)
    engine, settings = state.engine, state.settings
    body.check(settings)
    config = body.config(engine.config, settings)
    plan = Plan(body.tool_request(), engine, body.template_options(engine))
    fields = RiskFields.of(body.options, body.logprobs, allow_logprobs=settings.risk_in_logprobs)
    envelope = Envelope.of(served_name(body.model, state), streams=body.streams, include_usage=body.include_usage)
    entries, processors = body.entries(), body.processors(engine)
    log = AnswerLog(envelope.fields["id"], entries if settings.log_prompts else None)
    async with AsyncExitStack() as resources:
        call = await resources.enter_async_context(state.open_call(request, body.answers))
        source = body.options.source
        job = await call.run(ChatJob.of, plan, entries, processors, fields, call.cancellation, source)
        configs = [config_of_answer(config, number) for number in range(body.answers)]
        if not body.streams:
            return _whole(envelope, await _answers(call, job, configs), fields, log)
        streams = [ChatStream(job, number, one) for number, one in enumerate(configs)]
        steps = [AsyncStream(engine, stream.choices()) for stream in streams]
        for step in steps:
            await resources.enter_async_context(step)
        chunks = Interleaved(steps, settings.progress_interval)
        resources.callback(chunks.close)
        try:
            first = await anext(chunks)  # errors are answered with their status
        except RequestCancelledError:
            raise call.cancelled() from None
        return EventStream(_events(state, call, envelope, streams, first, chunks, fields, log), resources.pop_all())
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class Envelope:
    """What all chunks of an answer have in common."""

    fields: dict[str, Any]
    include_usage: bool

    @classmethod
    def of(cls, model: str, *, streams: bool, include_usage: bool) -> Envelope:
        """A new one.

        Args:
            model: the name of the model.
            streams: whether the answer is a stream.
            include_usage: whether a stream has its usage.
        """
        fields = {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": "chat.completion.chunk" if streams else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"cocoa-{__version__}",
        }
        return cls(fields, include_usage)

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """The event of a chunk."""
        return event({**self.fields, "choices": choices, **({"usage": usage} if self.include_usage else {})})


async def _answers(call: Call, job: ChatJob, configs: list[CocoaConfig]) -> list[Answered]:
    """All answers; the first one alone, so that the others reuse its prompt."""
    first = await call.run(job.answer, 0, configs[0])
    others = [call.run(job.answer, number, config) for number, config in enumerate(configs) if number]
    return [first, *await asyncio.gather(*others)]


def _whole(envelope: Envelope, answers: list[Answered], fields: RiskFields, log: AnswerLog) -> Response:
    splits = [one.split for one in answers]
    generations = [one.generation for one in answers]
    usage = usage_of(generations, splits, fields)
    log.answered(generations, usage)
    body = {**envelope.fields, "choices": [one.choice for one in answers], "usage": usage}
    risk = usage["completion_tokens_details"].get("cocoa_max_risk")
    headers = {} if risk is None else {"x-cocoa-max-risk": f"{risk:.6g}"}
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text, headers=headers, media_type="application/json")


async def _events(
    state: ServerState,
    call: Call,
    envelope: Envelope,
    streams: list[ChatStream],
    first: tuple[int, list[dict[str, Any]]] | None,
    chunks: Interleaved[list[dict[str, Any]]],
    fields: RiskFields,
    log: AnswerLog,
) -> AsyncIterator[bytes]:
    """The events of a stream, up to ``[DONE]`` or an error."""
    item: tuple[int, list[dict[str, Any]]] | None = first
    try:
        while True:
            if item is None:
                yield comment(_progress(streams[0]))
            else:
                for choice in item[1]:
                    yield envelope.chunk([choice])
            try:
                item = await anext(chunks)
            except StopAsyncIteration:
                break
        answers = [one.answered for one in streams if one.answered is not None]
        generations = [one.generation for one in answers]
        usage = usage_of(generations, [one.split for one in answers], fields)
        log.answered(generations, usage)
        if envelope.include_usage:
            yield envelope.chunk([], usage)
        yield DONE
    except Exception as error:
        shown = call.cancelled() if isinstance(error, RequestCancelledError) else api_error(error)
        if shown.status == 500:
            log_unexpected(error, with_message=state.settings.log_prompts)
        log.ended(shown.code)
        yield error_event(shown)


def _progress(stream: ChatStream) -> str:
    progress = stream.prompt_progress
    if progress is None or progress[0] >= progress[1]:
        return "working"
    return f"reading the prompt: {progress[0]} of {progress[1]} tokens"
