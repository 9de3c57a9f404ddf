"""``/metrics``, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from cocoa_integrations.server.lifecycle import state_of

router = APIRouter()


PATH = "/metrics"


@router.get(PATH)
async def metrics(request: Request) -> Response:
    """The metrics of the server, in the format that the header Accept asks for."""
    state = state_of(request)
    state.metrics.update()
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(state.metrics.registry), headers={"content-type": content_type})
