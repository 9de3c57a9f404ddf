"""``/v1/completions``."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

from fastapi import APIRouter, Request, Response

from cocoa_engine import CocoaConfig
from cocoa_integrations.server.answering import Envelope, admitted, answers_of, streamed, whole
from cocoa_integrations.server.lifecycle import ServerState, state_of
from cocoa_integrations.server.openapi import takes
from cocoa_integrations.server.protocol.completion_answer import CompletionJob, CompletionStream
from cocoa_integrations.server.protocol.completion_request import CompletionRequest
from cocoa_integrations.server.protocol.decoding import config_of_answer
from cocoa_integrations.server.protocol.risk_fields import usage_of
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
            answers = [one for of_prompt in of_prompts for one in of_prompt]
            return await call.run(whole, envelope, answers, usage, record)
        streams = [CompletionStream(job, number, one) for job in jobs for number, one in enumerate(configs)]
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
    jobs = CompletionJob.all_of(body, engine, call.cancellation, allow_logprobs=settings.risk_in_logprobs)
    return jobs, [config_of_answer(config, number) for number in range(body.answers)], envelope, record
