"""The gateway: it checks who calls, hands requests to replicas, and answers for all of them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cocoa_integrations.ray.relay import Ask, Drain, Relay
from cocoa_integrations.server.errors import SERVER, ApiError, response_of
from cocoa_integrations.server.middleware import Bodies, Border, OnlyPaths, UnexpectedErrors
from cocoa_integrations.server.routes import METRICS, OPEN_PATHS
from cocoa_integrations.server.routes.info import LIVE, READY
from cocoa_integrations.server.settings import ServerSettings, is_loopback

LABEL = "replica"
"""The label of metrics that tells the replicas apart."""


class Board:
    """The latest metrics of every replica. The replicas send them: one whose slots are taken cannot be asked.

    Args:
        max_age: seconds after which the metrics of a replica that sends no others are dropped: it has ended.
    """

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self._kept: dict[str, tuple[float, Sequence[Metric]]] = {}

    def keep(self, replica: str, metrics: Sequence[Metric]) -> None:
        """Replace the metrics of a replica."""
        self._kept[replica] = (time.monotonic(), metrics)

    def read(self) -> dict[str, Sequence[Metric]]:
        """The metrics by replica, without those of replicas that have ended."""
        oldest = time.monotonic() - self._max_age
        self._kept = {replica: latest for replica, latest in self._kept.items() if latest[0] >= oldest}
        return {replica: metrics for replica, (_, metrics) in self._kept.items()}


@dataclass(frozen=True)
class Replicas:
    """What a gateway knows of the replicas.

    Attributes:
        ask: hands a request to one of them.
        ready: the number of those that run.
        board: their metrics.
    """

    ask: Ask
    ready: Callable[[], Awaitable[int]]
    board: Board


def gateway(replicas: Replicas, settings: ServerSettings, *, retries: int = 2, drain: Drain | None = None) -> ASGIApp:
    """The ASGI app of a gateway.

    Args:
        replicas: what answers.
        settings: who may use the server, and the limits of a request.
        retries: how often a request is restarted because its replica ended.
        drain: says when the gateway stops. By default it never does.
    """
    drain = Drain(settings.retry_after) if drain is None else drain

    async def live(request: Request) -> Response:
        return JSONResponse({"status": "ready"})

    async def health(request: Request) -> Response:
        try:
            drain.require_open()
        except ApiError as error:
            return response_of(error)
        if count := await replicas.ready():
            return JSONResponse({"status": "ok", "replicas": count})
        message = "no replica takes calls; try again later"
        return response_of(
            ApiError(503, message, kind=SERVER, code="no_replica", retry_after=max(1, settings.retry_after))
        )

    async def metrics(request: Request) -> Response:
        registry = CollectorRegistry()
        registry.register(_Together(replicas.board.read()))
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    relay = Relay(
        replicas.ask,
        retries=retries,
        retry_after=settings.retry_after,
        log_prompts=settings.log_prompts,
        drain=drain,
        bodies=Bodies(settings.max_body_bytes),
    )
    routes = [
        Route(LIVE, live),
        *(Route(path, health) for path in READY),
        Route(METRICS, metrics),
        Mount("/", relay),
    ]
    app: ASGIApp = Border(Starlette(routes=routes), settings, OPEN_PATHS)
    if not (settings.api_keys or settings.allow_no_key):
        app = ThisMachine(app)
    return OnlyPaths(UnexpectedErrors(app, settings.log_prompts))


class ThisMachine:
    """Refuses requests from other machines: without a key anyone could use the server.

    Ray Serve opens the socket, so that the address in the settings alone does not say who can reach it.

    Args:
        app: the app.
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


class _Together(Collector):
    """The metrics of all replicas, with a label for the replica."""

    def __init__(self, of_replicas: Mapping[str, Sequence[Metric]]) -> None:
        self._of_replicas = of_replicas

    def collect(self) -> Iterator[Metric]:
        """One metric of each name, with the samples of all replicas."""
        together: dict[str, Metric] = {}
        for replica, metrics in self._of_replicas.items():
            for metric in metrics:
                merged = together.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    merged.samples.append(sample._replace(labels={**sample.labels, LABEL: replica}))
        yield from together.values()
