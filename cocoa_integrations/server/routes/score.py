"""``/v1/cocoa/score``: the risk of texts that somebody else wrote."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from cocoa_integrations.server.answering import Envelope, json_response
from cocoa_integrations.server.lifecycle import state_of
from cocoa_integrations.server.protocol.score_request import ScoreRequest, scored
from cocoa_integrations.server.routes.models import served_name

router = APIRouter()


@router.post("/cocoa/score")
async def score(body: ScoreRequest, request: Request) -> Response:
    """Measure the risk of given texts after a prompt. Nothing is decoded."""
    state = state_of(request)
    engine = state.engine
    body.check(state.settings)
    config = body.config(engine.config, state.settings)
    envelope = Envelope.of("score", "list", served_name(body.model, state))
    async with state.open_call(request) as call:
        entries, usage = await call.run(scored, body, engine, config, call.cancellation)
    state.metrics.scored(len(entries))
    risk = usage["completion_tokens_details"].get("cocoa_max_risk")
    headers = {} if risk is None else {"x-cocoa-max-risk": f"{risk:.6g}"}
    return json_response({**envelope.fields, "data": entries, "usage": usage}, headers)
