"""``/v1/cocoa/score``: the risk of texts that somebody else wrote."""

from __future__ import annotations

from contextlib import AsyncExitStack

from fastapi import APIRouter, Request, Response

from cocoa_integrations.server.answering import Envelope, admitted, json_response
from cocoa_integrations.server.lifecycle import ServerState, state_of
from cocoa_integrations.server.openapi import takes
from cocoa_integrations.server.protocol.score_request import ScoreJob, ScoreRequest
from cocoa_integrations.server.routes.info import served_name
from cocoa_integrations.server.work import Call

router = APIRouter()


@router.post("/cocoa/score", openapi_extra=takes(ScoreRequest))
async def score(request: Request) -> Response:
    """Measure the risk of given texts after a prompt. Nothing is decoded."""
    state = state_of(request)
    async with AsyncExitStack() as resources:
        call, body = await admitted(ScoreRequest, request, resources)
        envelope, job = await call.run(_prepared, body, state, call)
        for batch in job.batches:
            async with state.later_texts if batch.start else state.first_texts, state.scoring:
                await call.run(job.score, batch)
        return await call.run(_answered, envelope, job, state)
    raise AssertionError("unreachable")


def _prepared(body: ScoreRequest, state: ServerState, call: Call) -> tuple[Envelope, ScoreJob]:
    config = body.config(call.engine.config, state.settings)
    envelope = Envelope.of("score", "list", served_name(body.model, state))
    return envelope, ScoreJob(body, call.engine, config, call.cancellation)


def _answered(envelope: Envelope, job: ScoreJob, state: ServerState) -> Response:
    entries, usage = job.answer()
    state.metrics.scored(len(entries))
    risk = usage["completion_tokens_details"].get("cocoa_max_risk")
    headers = {} if risk is None else {"x-cocoa-max-risk": f"{risk:.6g}"}
    return json_response({**envelope.fields, "data": entries, "usage": usage}, headers)
