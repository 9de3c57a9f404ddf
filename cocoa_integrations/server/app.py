"""The app: its routes, middleware and errors."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from cocoa_engine import CocoaEngine, __version__
from cocoa_engine.errors import ConfigError
from cocoa_integrations.server import errors
from cocoa_integrations.server.lifecycle import ServerState
from cocoa_integrations.server.middleware import Border, OnlyPaths, UnexpectedErrors
from cocoa_integrations.server.openapi import RESPONSES, describe
from cocoa_integrations.server.protocol.chat_request import ChatRequest
from cocoa_integrations.server.protocol.completion_request import CompletionRequest
from cocoa_integrations.server.protocol.score_request import ScoreRequest
from cocoa_integrations.server.record import Traced, can_trace
from cocoa_integrations.server.routes import METRICS, OPEN_PATHS, OPENAI, OWN
from cocoa_integrations.server.settings import ServerSettings


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
    for router in OPENAI:
        app.include_router(router, prefix="/v1", responses=RESPONSES)
        app.include_router(router, include_in_schema=False)
    for router in OWN:
        app.include_router(router)
    describe(app, (ChatRequest, CompletionRequest, ScoreRequest), needs_key=bool(settings.api_keys))
    errors.install(app, settings, on_busy=lambda: state.metrics.add("rejected"))
    # the last one that is added runs first
    app.add_middleware(Border, settings=settings, open_paths=OPEN_PATHS)
    app.add_middleware(UnexpectedErrors, log_prompts=settings.log_prompts)
    if can_trace():
        app.add_middleware(Traced, left_out=[*OPEN_PATHS, METRICS])
    app.add_middleware(OnlyPaths)
    return app
