"""``/v1/cocoa/info`` and ``/version``: what is served, with which settings and limits."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Request

from cocoa_engine import CocoaEngine, RiskCalibrator, __version__
from cocoa_integrations._shared.workers import in_worker
from cocoa_integrations.server.lifecycle import state_of
from cocoa_integrations.server.protocol.decoding import OPERATORS
from cocoa_integrations.server.routes.models import names_of

router = APIRouter()
own = APIRouter()

PACKAGES = ("torch", "transformers", "fastapi", "uvicorn")


@own.get("/version")
async def server_version() -> dict[str, str]:
    """The version of the package."""
    return {"version": __version__}


@router.get("/cocoa/info")
async def info(request: Request) -> dict[str, Any]:
    """The model, the settings of requests that give none, where their risk comes from, the limits and the versions."""
    state = state_of(request)
    of_engine = await in_worker(state.engine, _of_engine, state.engine)
    limits = {name: value for name, value in state.settings if name.startswith("max_")}
    runtime = state.engine.runtime
    return {
        "object": "cocoa.info",
        "served_names": list(names_of(state)),
        **of_engine,
        "limits": {
            **limits,
            "context_window": state.engine.context_window,
            "max_batch_size": runtime.max_batch_size,
            "max_queue": runtime.max_queue,
        },
        "versions": {"cocoa": __version__, "python": platform.python_version(), **_versions()},
    }


def _of_engine(engine: CocoaEngine) -> dict[str, Any]:
    """The engine's model, settings and source of risk. The first call tries the backends and forward passes."""
    calibrator = engine.calibrator_for(engine.config)
    return {
        "model": engine.info().model_dump(mode="json"),
        "settings": engine.config.model_dump(mode="json", exclude=set(OPERATORS)),
        "risk_source": _risk_source(engine, calibrator),
        "calibrator": None if calibrator is None else _calibrator(calibrator),
    }


def _risk_source(engine: CocoaEngine, calibrator: RiskCalibrator | None) -> str:
    """Where the risk of a span comes from, if the request names no passages."""
    if engine.config.risk != "auto":
        return engine.config.risk
    return "token_probability" if calibrator is None or calibrator.span is None else "calibrator"


def _calibrator(calibrator: RiskCalibrator) -> dict[str, Any]:
    return {
        "model_name": calibrator.model_name,
        "spans": calibrator.span is not None,
        "answers": calibrator.answer is not None,
        "settings": calibrator.settings.model_dump(mode="json"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a build of its own name
            continue
    return found
