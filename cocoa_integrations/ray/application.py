"""The application of Ray Serve: gateways that take requests, and replicas of the engine."""

# No `from __future__ import annotations`: Ray reads the annotation of `app`.
import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import Metric
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message

from cocoa_engine.errors import EngineBusyError
from cocoa_integrations.ray.gateway import Ask, Board, Drain, Forwarded, Replica, ReplicaLostError, gateway
from cocoa_integrations.ray.settings import RaySettings
from cocoa_integrations.server.command import given_keys
from cocoa_integrations.server.process import one_arena
from cocoa_integrations.server.settings import ServerSettings

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
ENGINE, GATEWAY = "Engine", "Gateway"

PATIENCE = 5.0
"""Seconds in which gateways must take the metrics of a replica."""

QUIET = {"enable_access_log": False}
"""The metrics that replicas send would fill the log."""

LAST_WORDS = 5.0
"""Seconds that a gateway has after its replicas to end its streams."""


def app(settings: RaySettings) -> serve.Application:
    """The application: ``serve run cocoa_integrations.ray:app model=FOLDER replicas=2``.

    Args:
        settings: the settings; in a configuration file of Ray Serve they are ``args``.
    """
    engine = serve.deployment(Engine).options(**engine_options(settings)).bind(settings)
    deployment = serve.deployment(serve.ingress(_build_gateway)(Gateway))
    return deployment.options(**gateway_options(settings)).bind(engine, settings)


def engine_options(settings: RaySettings) -> dict[str, Any]:
    """The options of Ray Serve for the replicas of the engine."""
    variables = one_arena()  # a worker has arenas of many threads before a replica is made in it
    actor: dict[str, Any] = {
        "num_cpus": settings.num_cpus,
        "num_gpus": settings.num_gpus,
        **({"resources": dict(settings.resources)} if settings.resources else {}),
        **({"runtime_env": {"env_vars": variables}} if variables else {}),
        **({"accelerator_type": settings.accelerator_type} if settings.accelerator_type is not None else {}),
    }
    options: dict[str, Any] = {
        "name": ENGINE,
        "ray_actor_options": actor,
        # a replica refuses what is more, and Ray Serve asks the next one
        "max_ongoing_requests": settings.slots,
        "max_queued_requests": settings.waiting,
        "request_router_config": RequestRouterConfig(request_router_class=ROUTER),
        "health_check_period_s": settings.health_check_period_s,
        "graceful_shutdown_timeout_s": settings.server.shutdown_timeout,
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_constructor_retry_count": 3,
        "logging_config": QUIET,
    }
    if settings.placement_group_bundles is not None:
        options["placement_group_bundles"] = [dict(bundle) for bundle in settings.placement_group_bundles]
        options["placement_group_strategy"] = settings.placement_group_strategy
    if settings.scales:
        target = settings.target_ongoing_requests or settings.runtime.max_batch_size
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=1 if settings.min_replicas is None else settings.min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=target,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
        )
    else:
        options["num_replicas"] = settings.replicas
    return options


def gateway_options(settings: RaySettings) -> dict[str, Any]:
    """The options of Ray Serve for the gateways. They wait for replicas, and need hardly any processor time."""
    return {
        "name": GATEWAY,
        "num_replicas": settings.gateways,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": 10_000,  # Ray Serve's own refusal would be plain text
        "max_constructor_retry_count": 3,
        "graceful_shutdown_timeout_s": settings.server.shutdown_timeout + LAST_WORDS,
        "graceful_shutdown_wait_loop_s": 0.5,
        "logging_config": QUIET,
    }


class Engine(Replica):
    """A replica of the engine."""

    def __init__(self, settings: RaySettings) -> None:
        super().__init__(settings.load(), settings.server)
        threading.Thread(target=self._send_metrics, args=(settings.metrics_interval_s,), daemon=True).start()

    def _send_metrics(self, interval: float) -> None:
        """Send the metrics to every gateway now and then, as long as the process lives."""
        context = serve.get_replica_context()
        while True:
            with suppress(Exception):  # no gateway runs yet, or the cluster is busy
                gateways = serve.get_deployment_handle(GATEWAY, context.app_name)
                answers = gateways.broadcast("keep", context.replica_id.unique_id, self.metrics())
                answers.results(timeout_s=PATIENCE, return_exceptions=True)
            time.sleep(interval)


class Gateway:
    """A gateway before the replicas of the engine."""

    def __init__(self, engine: DeploymentHandle, settings: RaySettings) -> None:
        self._board = Board(max_age=5 * settings.metrics_interval_s)
        self._drain = Drain(settings.server.retry_after)
        server = settings.server
        # with the keys of this node. With a key, clients may use any name of the cluster
        keys = tuple(given_keys([key.get_secret_value() for key in server.api_keys], settings.api_key_file))
        hosts = ("*",) if server.allowed_hosts is None and (keys or server.allow_no_key) else server.allowed_hosts
        own = ServerSettings(**{**dict(server), "api_keys": keys, "allowed_hosts": hosts})
        ask, running, retries = _asking(engine), _Running().count, settings.retries
        self.checked = gateway(ask, running, own, board=self._board, drain=self._drain, retries=retries)

    def keep(self, replica: str, metrics: Sequence[Metric]) -> None:
        """Take the metrics of a replica."""
        self._board.keep(replica, metrics)

    async def drain(self) -> int:
        """Refuse further requests with status 503. Returns the number of those that run."""
        self._drain.begin()
        return len(self._drain)

    async def end(self) -> None:
        """End the requests that run; streams with an error."""
        self._drain.end()


def _build_gateway() -> ASGIApp:
    """What Ray Serve calls for each request: the app of the gateway of this process."""

    async def serving(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await serve.get_replica_context().servable_object.checked(scope, receive, send)

    return serving


def _asking(handle: DeploymentHandle) -> Ask:
    """What hands requests to the replicas behind a handle of Ray Serve."""

    async def ask(request: Forwarded, session: str | None) -> AsyncGenerator[Message, None]:
        routed = handle.options(method_name="answer", stream=True)
        if session is not None:
            routed = routed.options(session_id=session)
        response = routed.remote(request)
        over = False
        try:
            async for messages in response:
                for message in messages:
                    yield message
            over = True
        except BackPressureError:
            over = True
            raise EngineBusyError("all replicas are busy; try again later") from None
        except (RayActorError, ReplicaUnavailableError, DeploymentUnavailableError) as error:
            over = True
            raise ReplicaLostError(f"a replica ended: {type(error).__name__}") from None
        finally:
            if not over:
                response.cancel()

    return ask


class _Running:
    """The number of replicas that run. The controller of Ray Serve is asked for it once a second at most."""

    def __init__(self) -> None:
        self._asked, self._count = -math.inf, 0

    async def count(self) -> int:
        """The number."""
        if time.monotonic() - self._asked >= 1:
            self._asked = time.monotonic()
            name = serve.get_replica_context().app_name
            deployments = (await asyncio.to_thread(serve.status)).applications[name].deployments
            self._count = int(deployments[ENGINE].replica_states.get("RUNNING", 0))
        return self._count
