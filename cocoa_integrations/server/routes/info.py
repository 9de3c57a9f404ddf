"""What is served, with which settings, limits, names and metrics, and whether the server lives."""

import platform
from typing import Any

import fastapi
import torch
import transformers
import uvicorn
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from cocoa_engine import CocoaEngine, __version__
from cocoa_integrations._shared.engines import in_worker
from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.process import ServerState, state_of
from cocoa_integrations.server.protocol.requests import OPERATORS

router = APIRouter()
own = APIRouter()


@own.get("/version")
async def server_version() -> dict[str, str]:
    """The version of the package."""
    return {"version": __version__}


@router.get("/cocoa/info")
async def info(request: Request) -> dict[str, Any]:
    """The model, the settings of requests that give none, where their risk comes from, the limits and the versions."""
    state = state_of(request)
    runtime = state.engine.runtime
    return {
        "object": "cocoa.info",
        "served_names": list(names_of(state)),
        **await in_worker(state.engine, _of_engine, state.engine),
        "limits": {
            **{name: value for name, value in state.settings if name.startswith("max_")},
            "context_window": state.engine.context_window,
            "max_batch_size": runtime.max_batch_size,
            "max_queue": runtime.max_queue,
        },
        "versions": {
            "cocoa": __version__,
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in (torch, transformers, fastapi, uvicorn)},
        },
    }


def _of_engine(engine: CocoaEngine) -> dict[str, Any]:
    """The engine's model, settings and source of risk, if the request names no passages.

    The first call tries the backends and forward passes.
    """
    calibrator, risk_source = engine.calibrator_for(engine.config), engine.config.risk
    if risk_source == "auto":
        risk_source = "token_probability" if calibrator is None or calibrator.span is None else "calibrator"
    return {
        "model": engine.info().model_dump(mode="json"),
        "settings": engine.config.model_dump(mode="json", exclude=set(OPERATORS)),
        "risk_source": risk_source,
        "calibrator": calibrator
        and {
            "model_name": calibrator.model_name,
            "spans": calibrator.span is not None,
            "answers": calibrator.answer is not None,
            "settings": calibrator.settings.model_dump(mode="json"),
        },
    }


READY = ("/health", "/ready", "/health/ready")
LIVE = "/health/live"
METRICS = "/metrics"
OPEN_PATHS = frozenset((*READY, LIVE, "/"))
"""The paths that need no key."""


@own.get(LIVE)
async def live(request: Request) -> dict[str, str]:
    """Status 200 as long as the process answers; ``status`` is ``loading``, ``ready``, ``draining`` or ``failed``."""
    return {"status": state_of(request).phase}


@own.get(READY[2])
@own.get(READY[1])
@own.get(READY[0])
async def health(request: Request) -> dict[str, str]:
    """Status 200 if the server accepts calls, and 503 while it loads its model or shuts down."""
    state_of(request).require_ready()
    return {"status": "ok"}


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
    """The name of the model in the answer to a request that names it so.

    An unknown name is refused with an :class:`ApiError` if the settings name the model, and with ``strict`` always.
    """
    names = names_of(state)
    if name in names:
        return str(name)
    if name is None or not (strict or state.settings.served_names):
        return names[0]
    message = f"the model {name[:100]!r} is not served; served are {', '.join(names)}"
    raise ApiError(404, message, param="model", code="model_not_found")


def _entry(name: str, state: ServerState) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "cocoa",
        "max_model_len": state.engine.context_window,
    }


@own.get(METRICS)
async def metrics(request: Request) -> Response:
    """The metrics of the server, in the format that the header Accept asks for."""
    return exposition(request, state_of(request).metrics.registry)


def exposition(request: Request, registry: CollectorRegistry) -> Response:
    """The response with some metrics."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), headers={"content-type": content_type})
