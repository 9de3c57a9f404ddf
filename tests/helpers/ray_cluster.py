"""A Ray cluster on this machine with two replicas of a tiny model, for tests of ``cocoa_integrations.ray``."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from cocoa_integrations.ray.jobs import PATIENT
from tests.helpers.in_threads import wait_until
from tests.helpers.processes import free_port
from tests.helpers.served import CHAT

TOKEN = secrets.token_hex(32)
"""Of all clusters of this process: Ray reads a token once."""

LIMIT = 180.0
"""Seconds after which a request is taken to be stuck. A cluster beside other work on few cores needs a minute."""

STARTS = 600.0
"""Likewise for a cluster or a replica that starts: its processes import much."""

STUCK = 1800
"""Likewise for a test: its cluster starts first, and then its replicas."""


@contextmanager
def cluster(folder: Path, *, num_cpus: int = 4) -> Iterator[None]:
    """A cluster of this process, with token authentication; the token is in the folder. It ends with the block.

    On two real cores, two replicas and what Ray Data needs would not fit: these are logical ones.
    """
    import ray

    token = folder / "token"
    token.write_text(TOKEN, encoding="utf-8")
    token.chmod(0o600)
    os.environ.update(
        RAY_AUTH_TOKEN_PATH=str(token),
        **{PATIENT: "60"},
        OMP_NUM_THREADS="1",
        RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S="10",  # on a busy machine a session would go elsewhere
    )
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=128 * 2**20,
        _node_ip_address="127.0.0.1",
        configure_logging=True,
        log_to_driver=bool(os.environ.get("COCOA_RAY_LOGS")),
    )
    try:
        yield
    finally:
        ray.shutdown()


def replicas() -> list[psutil.Process]:
    """The processes of this cluster's replicas of the engine."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if process.cmdline()[:1] == ["ray::ServeReplica:default:Engine"] or ":Engine." in process.cmdline()[0]:
                found.append(process)
    return found


def eventually(condition: Callable[[], bool], limit: float = LIMIT) -> None:
    """Wait for something that the cluster does. It is asked seldom, since asking costs it time."""
    wait_until(condition, limit, pause=0.2)


@dataclass(frozen=True)
class Deployed:
    """An application that is served at an address."""

    url: str

    def post(self, body: Any, path: str = CHAT, **headers: str) -> httpx.Response:
        """The response to one request."""
        return httpx.post(self.url + path, json=body, headers=headers, timeout=LIMIT)

    def values(self, name: str) -> dict[str, float]:
        """The value of a metric for each replica; where it has more labels, their sum."""
        text = httpx.get(self.url + "/metrics", timeout=LIMIT).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    replica = sample.labels["replica"]
                    found[replica] = found.get(replica, 0) + sample.value
        return found

    @property
    def running(self) -> int:
        """The number of answers that are being decoded."""
        return int(sum(self.values("cocoa:num_requests_running").values()))

    @property
    def count(self) -> int:
        """The number of replicas that take calls."""
        return int(httpx.get(self.url + "/health", timeout=LIMIT).json().get("replicas", 0))


@contextmanager
def served(**settings: Any) -> Iterator[Deployed]:
    """The application in the cluster."""
    from ray import serve

    from cocoa_integrations.ray import RaySettings, app

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    serve.run(app(RaySettings(**settings)))
    try:
        yield Deployed(f"http://127.0.0.1:{port}")
    finally:
        serve.shutdown()
