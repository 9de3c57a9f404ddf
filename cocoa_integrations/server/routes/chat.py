"""``/v1/chat/completions``."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from fastapi import APIRouter, Request, Response

from cocoa_integrations.server.answering import Envelope, answers_of, streamed, whole
from cocoa_integrations.server.lifecycle import state_of
from cocoa_integrations.server.protocol.chat_answer import ChatJob, ChatStream
from cocoa_integrations.server.protocol.chat_request import ChatRequest
from cocoa_integrations.server.protocol.decoding import config_of_answer
from cocoa_integrations.server.protocol.risk_fields import RiskFields, usage_of
from cocoa_integrations.server.record import Record
from cocoa_integrations.server.routes.models import served_name
from cocoa_integrations.tool_calling import Plan

router = APIRouter()


@router.post("/chat/completions")
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation. Every answer has its risk in ``message.cocoa_risk`` and ``logprobs.cocoa_risk``."""
    state = state_of(request)
    engine, settings = state.engine, state.settings
    body.check(settings)
    config = body.config(engine.config, settings)
    plan = Plan(body.tool_request(), engine, body.template_options(engine), calls_must_fit=True)
    fields = RiskFields.of(body.options, body.logprobs, allow_logprobs=settings.risk_in_logprobs)
    kind = "chat.completion.chunk" if body.streams else "chat.completion"
    envelope = Envelope.of("chatcmpl", kind, served_name(body.model, state), include_usage=body.include_usage)
    entries, processors = body.entries(), body.processors(engine)
    record = Record(state, "chat", body, config, envelope.fields, entries)
    async with AsyncExitStack() as resources:
        call = await resources.enter_async_context(state.open_call(request, body.answers))
        source = body.options.source
        job = await call.run(ChatJob.of, plan, entries, processors, fields, call.cancellation, source)
        configs = [config_of_answer(config, number) for number in range(body.answers)]
        if not body.streams:
            answers = await answers_of(call, job.answer, configs)
            return whole(envelope, answers, usage_of(answers, fields), record)
        streams = [ChatStream(job, number, one) for number, one in enumerate(configs)]
        return await streamed(state, call, resources, envelope, streams, partial(usage_of, fields=fields), record)
    raise AssertionError("unreachable")
