"""The served model, as OpenAI lists models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.lifecycle import ServerState, state_of

router = APIRouter()


@router.get("/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The names under which the model is served."""
    state = state_of(request)
    return {"object": "list", "data": [_entry(name, state) for name in names_of(state)]}


@router.get("/models/{name:path}")
async def retrieve_model(name: str, request: Request) -> dict[str, Any]:
    """One of the names of the model."""
    state = state_of(request)
    return _entry(served_name(name, state, strict=True), state)


def names_of(state: ServerState) -> tuple[str, ...]:
    """The names of the model: those that it is served under, or its own."""
    return state.settings.served_names or (state.engine.model_name,)


def served_name(name: str | None, state: ServerState, *, strict: bool = False) -> str:
    """The name of the model in the answer to a request.

    Args:
        name: the name in the request.
        state: the state of the server.
        strict: whether an unknown name is always refused. Otherwise it is served, unless the settings name the model.

    Raises:
        ApiError: the name is refused.
    """
    names = names_of(state)
    if name is not None and name in names:
        return name
    if name is None or not (strict or state.settings.served_names):
        return names[0]
    raise ApiError(
        404,
        f"the model {name[:100]!r} is not served; served are {', '.join(names)}",
        param="model",
        code="model_not_found",
    )


def _entry(name: str, state: ServerState) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "cocoa",
        "max_model_len": state.engine.context_window,
    }
