"""Whether the server lives, and whether it serves."""

from __future__ import annotations

from fastapi import APIRouter, Request

from cocoa_integrations.server.lifecycle import state_of

router = APIRouter()

READY = ("/health", "/ready", "/health/ready")
LIVE = "/health/live"
PATHS = (*READY, LIVE)


async def health(request: Request) -> dict[str, str]:
    """Status 200 if the server accepts calls, and 503 while it loads its model or shuts down."""
    state = state_of(request)
    state.require_ready()
    return {"status": "ok"}


@router.get(LIVE)
async def live(request: Request) -> dict[str, str]:
    """Status 200 as long as the process answers; ``status`` is ``loading``, ``ready``, ``draining`` or ``failed``."""
    return {"status": state_of(request).phase}


for path in READY:
    router.add_api_route(path, health, methods=["GET"])
