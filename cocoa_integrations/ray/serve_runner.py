"""``cocoa serve --ray``: the server on a Ray cluster, until a signal."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from cocoa_engine import CocoaConfig
from cocoa_engine.cli.output import Progress, print_note
from cocoa_engine.errors import CocoaError
from cocoa_engine.integration import LoadOptions, safe_logger
from cocoa_integrations.ray.jobs import connected, everywhere, last_line
from cocoa_integrations.ray.settings import RaySettings
from cocoa_integrations.server.process import listening
from cocoa_integrations.server.settings import ServerSettings

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = safe_logger("cocoa_integrations.ray")

NAME = "cocoa"
"""Of the application in Ray Serve."""

PATIENCE = 5.0
"""Seconds in which gateways must answer."""

POLL = 0.2
"""Seconds between questions whether a signal has come, and whether requests still run."""


def serve(load: LoadOptions, config: CocoaConfig, server: ServerSettings, **of_ray: Any) -> None:
    """Serve replicas of an engine until SIGTERM or Ctrl-C. Running answers then have ``shutdown_timeout`` to end.

    ``of_ray`` has fields of :class:`~cocoa_integrations.ray.RaySettings`; `None` is the default.
    """
    load = everywhere(load)
    counts = {name: value for name, value in of_ray.items() if value is not None}
    with listening(server) as opened:
        port = opened.getsockname()[1]  # a free one for 0
    # the address is known here, and so are the names by which clients may call
    named = server.model_copy(update={"allowed_hosts": server.known_hosts, "port": port})
    model = load.model_copy(update={"model_name": None})
    settings = RaySettings(model=load.model_name, loading=model, decoding=config, server=named, **counts)
    replicas = (settings.min_replicas or 1) if settings.scales else settings.replicas
    progress = Progress("serve")
    with ExitStack() as running:
        # in this order, since Ray takes signals too
        with progress.stage("starting Ray"):
            cluster = connected("cocoa serve --ray", replicas * settings.num_cpus, f"{replicas} replicas")
            own = running.enter_context(cluster)
        signals = running.enter_context(_signals())
        _serve(settings, signals, own, progress)
    if signal.SIGINT in signals:
        raise KeyboardInterrupt


def _serve(settings: RaySettings, signals: list[int], own: bool, progress: Progress) -> None:
    from ray import serve

    from cocoa_integrations.ray.application import ENGINE, GATEWAY, app

    address = {"host": settings.server.host, "port": settings.server.port}
    with progress.stage("starting Ray Serve"):
        serve.start(http_options=address)
    try:
        try:
            with progress.stage("starting the replicas"):
                serve.run(app(settings), name=NAME, route_prefix="/")
        except RuntimeError as error:
            state = serve.status().applications.get(NAME)
            has_status = state is not None and ENGINE in state.deployments
            told = state.deployments[ENGINE].message if has_status else str(error)
            raise CocoaError(f"the replicas could not start: {last_line(told)}") from None
        print_note(f"serving on http://{address['host']}:{address['port']} (Ctrl-C stops)")
        while not signals:
            time.sleep(POLL)
        drain(serve.get_deployment_handle(GATEWAY, NAME), settings.server.shutdown_timeout)
    finally:
        serve.delete(NAME)  # waits for running answers
        if own:
            serve.shutdown()


def drain(gateways: "DeploymentHandle", timeout: float) -> None:
    """Let gateways refuse new requests, and end those that run after ``timeout`` seconds.

    Without this, Ray Serve would answer new requests with a plain 404 as soon as the application is deleted.
    """

    def told(method: str) -> list[Any]:
        """What a method of every gateway returns; an exception if one does not answer."""
        try:
            return list(gateways.broadcast(method).results(timeout_s=PATIENCE, return_exceptions=True))
        except Exception as error:  # of Ray, whose cluster may be busy or about to end
            logger.warning("gateways do not answer: %s", error)
            return [error]

    deadline = time.monotonic() + timeout
    try:
        while any(told("drain")) and time.monotonic() < deadline:
            time.sleep(POLL)
    finally:  # also if a second signal does not wait
        told("end")
        time.sleep(POLL)  # the errors are sent


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Take SIGTERM and SIGINT within the block. Yields those that have come; a second one does not wait."""
    came: list[int] = []

    def take(number: int, frame: object) -> None:
        came.append(number)
        signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
