"""The gateway: it checks who calls, hands requests to replicas, and answers for all of them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cocoa_integrations.ray.relay import Ask, Drain, Relay
from cocoa_integrations.server.errors import SERVER, ApiError, response_of
from cocoa_integrations.server.middleware import Border, OnlyPaths, UnexpectedErrors
from cocoa_integrations.server.routes import METRICS, OPEN_PATHS
from cocoa_integrations.server.routes.info import LIVE, READY, exposition
from cocoa_integrations.server.settings import ServerSettings, is_loopback

LABEL = "replica"
"""The label of metrics that tells the replicas apart."""


class Board(Collector):
    """The latest metrics of every replica. The replicas send them: one whose slots are taken cannot be asked.

    Args:
        max_age: seconds after which the metrics of a replica that sends no others are dropped: it has ended.
    """

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self._latest: dict[str, tuple[float, Sequence[Metric]]] = {}

    def keep(self, replica: str, metrics: Sequence[Metric]) -> None:
        """Replace the metrics of a replica."""
        self._latest[replica] = (time.monotonic(), metrics)

    def collect(self) -> Iterator[Metric]:
        """One metric of each name, with the samples of all replicas, each with a label for its replica."""
        oldest = time.monotonic() - self._max_age
        self._latest = {replica: latest for replica, latest in self._latest.items() if latest[0] >= oldest}
        together: dict[str, Metric] = {}
        for replica, (_, metrics) in self._latest.items():
            for metric in metrics:
                merged = together.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    merged.samples.append(sample._replace(labels={**sample.labels, LABEL: replica}))
        yield from together.values()


def gateway(
    ask: Ask,
    ready: Callable[[], Awaitable[int]],
    settings: ServerSettings,
    *,
    board: Board,
    drain: Drain,
    retries: int = 2,
) -> ASGIApp:
    """The ASGI app of a gateway.

    Args:
        ask: hands a request to one of the replicas.
        ready: the number of replicas that run.
        settings: who may use the server, and the limits of a request.
        board: the metrics of the replicas.
        drain: says when the gateway stops.
        retries: how often a request is restarted because its replica ended.
    """

    async def live(request: Request) -> Response:
        return JSONResponse({"status": "ready"})

    async def health(request: Request) -> Response:
        try:
            drain.require_open()
        except ApiError as error:
            return response_of(error)
        if count := await ready():
            return JSONResponse({"status": "ok", "replicas": count})
        message, after = "no replica takes calls; try again later", max(1, settings.retry_after)
        return response_of(ApiError(503, message, kind=SERVER, code="no_replica", retry_after=after))

    async def metrics(request: Request) -> Response:
        registry = CollectorRegistry()
        registry.register(board)
        return exposition(request, registry)

    routes = [
        Route(LIVE, live),
        *(Route(path, health) for path in READY),
        Route(METRICS, metrics),
        Mount("/", Relay(ask, settings, retries=retries, drain=drain)),
    ]
    app: ASGIApp = Border(Starlette(routes=routes), settings, OPEN_PATHS)
    if not (settings.api_keys or settings.allow_no_key):
        app = ThisMachine(app)
    return OnlyPaths(UnexpectedErrors(app, settings.log_prompts))


class ThisMachine:
    """Refuses requests from other machines: without a key anyone could use the server.

    Ray Serve opens the socket, so that the address in the settings alone does not say who can reach it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        client = scope.get("client")
        if scope["type"] == "http" and not (client and is_loopback(client[0])):
            message = (
                "this server has no API key and serves only programs of its own machine: set COCOA_API_KEYS, or "
                "allow_no_key if something else checks who calls"
            )
            await response_of(ApiError(403, message, code="no_api_key"))(scope, receive, send)
            return
        await self._app(scope, receive, send)
