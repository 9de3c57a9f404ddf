"""Connecting to a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cocoa_engine.errors import ConfigError
from cocoa_engine.model.load_options import LoadOptions
from cocoa_engine.optional import need

PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
"""For Ray Serve in a new cluster. It gives up if the process that listens does not start within 5 seconds, its default,
and a busy machine needs more."""


@contextmanager
def connected(what: str) -> Iterator[bool]:
    """Connect to a cluster: that of ``RAY_ADDRESS``, the one that runs on this machine, or else a new one.

    A new cluster has Ray's token authentication, and ends with the block. Yields whether it is new.

    Args:
        what: what needs the cluster, for the message if Ray is missing.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: there is no cluster at ``RAY_ADDRESS``.
    """
    ray = need("ray", extra="ray", what=what)
    if ray.is_initialized():
        yield False
        return
    options = {"log_to_driver": False, "logging_level": logging.WARNING}
    own = False
    try:
        ray.init(address="auto", **options)
    except (ConnectionError, RuntimeError) as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise ConfigError(f"there is no Ray cluster at RAY_ADDRESS={address}: {error}") from None
        own = True
        with suppress(Exception):
            ray.shutdown()
        for name, value in PATIENT.items():  # its processes inherit them
            os.environ.setdefault(name, value)
        ray.init(address="local", include_dashboard=False, **options)
    try:
        yield own
    finally:
        ray.shutdown()


def require_cores(needed: float, what: str) -> None:
    """Check that a new cluster, which is this machine, has enough cores. Ray would wait indefinitely for more.

    Raises:
        ConfigError: it has not.
    """
    import ray

    there = ray.cluster_resources().get("CPU", 0)
    if needed > there:
        raise ConfigError(
            f"{what} need {needed:g} CPU cores, and this machine has {there:g}: ask for fewer, or for less of a core "
            "each with --num-cpus"
        )


def everywhere(options: LoadOptions) -> LoadOptions:
    """The options with absolute paths, since actors have other working folders."""

    def absolute(name: str | None) -> str | None:
        return str(Path(name).resolve()) if name is not None and Path(name).exists() else name

    return options.model_copy(
        update={
            "model_name": absolute(options.model_name),
            "tokenizer_name": absolute(options.tokenizer_name),
            "calibrator": absolute(options.calibrator),
        }
    )
