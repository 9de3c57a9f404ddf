"""The app: its routes, middleware and errors, and its OpenAPI document."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cocoa_engine import CocoaEngine, __version__
from cocoa_engine.errors import ConfigError
from cocoa_integrations.server import errors
from cocoa_integrations.server.middleware import guarded, only_paths
from cocoa_integrations.server.process import ServerState
from cocoa_integrations.server.record import traced
from cocoa_integrations.server.routes import answers, info, page
from cocoa_integrations.server.settings import ServerSettings

_ERRORS = {
    400: "The request is not valid; `param` names the parameter.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "As many answers as the engine runs and queues are being decoded; try again after `Retry-After` seconds.",
    500: "An internal error.",
    503: "The model is being loaded, or the server shuts down; try again after `Retry-After` seconds.",
}


class ErrorFields(BaseModel):
    """What is wrong, and how to mend it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error, as OpenAI's."""

    error: ErrorFields


def create_app(
    engine_or_loader: CocoaEngine | Callable[[], CocoaEngine], settings: ServerSettings | None = None
) -> FastAPI:
    """An ASGI app that serves an engine with OpenAI's protocol. Every answer carries the risk of its spans.

    Args:
        engine_or_loader: the engine, or a function that loads it. The function is called in a thread when the app
            starts; until it returns, requests are answered with status 503.
        settings: who may use the server, and the limits of a request.

    Raises:
        ConfigError: the first argument is neither an engine nor a function.
    """
    if not (isinstance(engine_or_loader, CocoaEngine) or callable(engine_or_loader)):
        raise ConfigError(f"create_app takes a CocoaEngine or a function, not {type(engine_or_loader).__name__}")
    settings = ServerSettings() if settings is None else settings
    state = ServerState(engine_or_loader, settings)
    # no pages of documentation: they would load scripts from elsewhere
    app = FastAPI(title="cocoa serve", version=__version__, docs_url=None, redoc_url=None, lifespan=state.lifespan)
    app.state.cocoa = state
    for router in (answers.router, info.router):
        responses: dict[int | str, dict[str, Any]] = {
            status: {"model": ErrorBody, "description": description} for status, description in _ERRORS.items()
        }
        app.include_router(router, prefix="/v1", responses=responses)
        app.include_router(router, include_in_schema=False)
    for router in (info.own, page.router):
        app.include_router(router)
    app.openapi = partial(_document, app, bool(settings.api_keys))  # type: ignore[method-assign]
    errors.install(app, settings, on_busy=lambda: state.metrics.add("rejected"))
    # the last one that is added runs first
    app.add_middleware(guarded, settings=settings, open_paths=info.OPEN_PATHS)
    app.add_middleware(traced, left_out={*info.OPEN_PATHS, info.METRICS})
    app.add_middleware(only_paths)
    return app


def _document(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document, with the bodies of requests, and the API key if clients must send one."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document["components"]["schemas"]
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas |= models_json_schema(
            [(body, "validation") for body in answers.BODIES], ref_template=answers.REFERENCE
        )[1]["$defs"]
        if needs_key:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        app.openapi_schema = document
    return app.openapi_schema
