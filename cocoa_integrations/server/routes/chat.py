"""``/v1/chat/completions``."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from fastapi import APIRouter, Request, Response

from cocoa_engine import CocoaConfig
from cocoa_integrations.chat_service.answer import ChatCall
from cocoa_integrations.server.answering import Envelope, admitted, answers_of, streamed, whole
from cocoa_integrations.server.lifecycle import ServerState, state_of
from cocoa_integrations.server.openapi import takes
from cocoa_integrations.server.protocol.answers import ChatJob, RiskFields, StreamedAnswer, usage_of
from cocoa_integrations.server.protocol.chat_request import ChatRequest
from cocoa_integrations.server.protocol.decoding import config_of_answer
from cocoa_integrations.server.record import Record
from cocoa_integrations.server.routes.info import served_name
from cocoa_integrations.server.work import Call

router = APIRouter()


@router.post("/chat/completions", openapi_extra=takes(ChatRequest))
async def chat(request: Request) -> Response:
    """Answer a conversation. Every answer has its risk in ``message.cocoa_risk`` and ``logprobs.cocoa_risk``."""
    state = state_of(request)
    async with AsyncExitStack() as resources:
        call, body = await admitted(ChatRequest, request, resources)
        job, configs, envelope, record = await call.run(_prepared, body, state, call)
        usage = partial(usage_of, fields=job.fields)
        if not body.streams:
            answers = await answers_of(call, job.answer, configs)
            return await call.run(whole, envelope, answers, usage, record)
        streams = [StreamedAnswer(job, number, each) for number, each in enumerate(configs)]
        return await streamed(state, call, resources, envelope, streams, usage, record)
    raise AssertionError("unreachable")


def _prepared(body: ChatRequest, state: ServerState, call: Call) -> tuple[ChatJob, list[CocoaConfig], Envelope, Record]:
    """What is decoded, the settings of each answer, and what is sent and noted."""
    engine, settings = call.engine, state.settings
    config = body.config(engine.config, settings)
    fields = RiskFields.of(body.options, body.logprobs, allow_logprobs=settings.risk_in_logprobs)
    tools, template, messages = body.tool_request(), body.template_options(engine), body.entries()
    kind = "chat.completion.chunk" if body.streams else "chat.completion"
    envelope = Envelope.of("chatcmpl", kind, served_name(body.model, state), include_usage=body.include_usage)
    asked = ChatCall(
        messages=messages,
        config=config,
        tools=tools,
        template=template,
        source=body.options.source,
        logprobs=bool(fields.logprobs),
        candidates=body.options.candidates,
        calls_must_fit=True,
        logits_processor=body.processors(engine),
        cancellation=call.cancellation,
    )
    record = Record(state, "chat", body, config, envelope.fields, messages)
    configs = [config_of_answer(config, number) for number in range(body.answers)]
    return ChatJob(engine, asked, fields), configs, envelope, record
