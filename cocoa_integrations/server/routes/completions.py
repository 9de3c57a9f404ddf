"""``/v1/completions``."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

from fastapi import APIRouter, Request, Response

from cocoa_integrations.server.answering import Envelope, answers_of, streamed, whole
from cocoa_integrations.server.lifecycle import state_of
from cocoa_integrations.server.protocol.completion_answer import CompletionJob, CompletionStream
from cocoa_integrations.server.protocol.completion_request import CompletionRequest
from cocoa_integrations.server.protocol.decoding import config_of_answer
from cocoa_integrations.server.protocol.risk_fields import usage_of
from cocoa_integrations.server.record import Record
from cocoa_integrations.server.routes.models import served_name

router = APIRouter()


@router.post("/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue texts. Every answer has its risk in ``cocoa_risk``, and with ``logprobs`` in ``logprobs.cocoa_risk``."""
    state = state_of(request)
    engine, settings = state.engine, state.settings
    body.check(settings)
    config = body.config(engine.config, settings)
    envelope = Envelope.of("cmpl", "text_completion", served_name(body.model, state), include_usage=body.include_usage)
    record = Record(state, "text_completion", body, config, envelope.fields, body.prompts)
    configs = [config_of_answer(config, number) for number in range(body.answers)]
    async with AsyncExitStack() as resources:
        count, param = body.answers * len(body.prompts), "prompt" if body.answers == 1 else "n"
        call = await resources.enter_async_context(state.open_call(request, count, param))
        jobs = CompletionJob.all_of(body, engine, call.cancellation, allow_logprobs=settings.risk_in_logprobs)
        fields = jobs[0].fields
        if not body.streams:
            of_prompts = await asyncio.gather(*(answers_of(call, job.answer, configs) for job in jobs))
            answers = [one for of_prompt in of_prompts for one in of_prompt]
            return whole(envelope, answers, usage_of(answers, fields, n=body.answers), record)
        streams = [CompletionStream(job, number, one) for job in jobs for number, one in enumerate(configs)]
        usage = partial(usage_of, fields=fields, n=body.answers)
        return await streamed(state, call, resources, envelope, streams, usage, record)
    raise AssertionError("unreachable")
