"""``/v1/completions``."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response

from cocoa_engine import CocoaConfig
from cocoa_integrations.chat_service.answer import ChatCall
from cocoa_integrations.server.answering import Envelope, admitted, answers_of, streamed, whole
from cocoa_integrations.server.lifecycle import ServerState, state_of
from cocoa_integrations.server.openapi import takes
from cocoa_integrations.server.protocol.answers import CompletionJob, Echo, RiskFields, StreamedAnswer, usage_of
from cocoa_integrations.server.protocol.completion_request import CompletionRequest
from cocoa_integrations.server.protocol.decoding import config_of_answer
from cocoa_integrations.server.record import Record
from cocoa_integrations.server.routes.info import served_name
from cocoa_integrations.server.work import Call

router = APIRouter()


@router.post("/completions", openapi_extra=takes(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continue texts. Every answer has its risk in ``cocoa_risk``, and with ``logprobs`` in ``logprobs.cocoa_risk``."""
    state = state_of(request)
    async with AsyncExitStack() as resources:
        call, body = await admitted(CompletionRequest, request, resources)
        jobs, configs, envelope, record = await call.run(_prepared, body, state, call)
        usage = partial(usage_of, fields=jobs[0].fields, n=body.answers)
        if not body.streams:
            of_prompts = await asyncio.gather(*(answers_of(call, job.answer, configs) for job in jobs))
            answers = [answer for of_prompt in of_prompts for answer in of_prompt]
            return await call.run(whole, envelope, answers, usage, record)
        kind = Echo if body.only_echoes else StreamedAnswer
        streams = [kind(job, number, each) for job in jobs for number, each in enumerate(configs)]
        return await streamed(state, call, resources, envelope, streams, usage, record)
    raise AssertionError("unreachable")


def _prepared(
    body: CompletionRequest, state: ServerState, call: Call
) -> tuple[list[CompletionJob], list[CocoaConfig], Envelope, Record]:
    """What is decoded, the settings of each answer to a prompt, and what is sent and noted."""
    engine, settings = call.engine, state.settings
    config = body.config(engine.config, settings)
    envelope = Envelope.of("cmpl", "text_completion", served_name(body.model, state), include_usage=body.include_usage)
    record = Record(state, "text_completion", body, config, envelope.fields, body.prompts)
    # `logprobs` without tokens would surprise clients of this old protocol
    fields = RiskFields.of(body.options, body.logprobs is not None, allow_logprobs=settings.risk_in_logprobs)
    asked = ChatCall(
        config=config,
        source=body.options.source,
        logprobs=body.logprobs is not None,
        lists_special=True,
        candidates=body.options.candidates,
        logits_processor=body.processors(engine),
        cancellation=call.cancellation,
    )
    listing = (body.logprobs, body.echoes, body.only_echoes)
    jobs = [
        CompletionJob(engine, replace(asked, prompt=prompt), fields, number * body.answers, *listing)
        for number, prompt in enumerate(body.prompts)
    ]
    return jobs, [config_of_answer(config, number) for number in range(body.answers)], envelope, record
