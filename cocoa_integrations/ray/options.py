"""The options of ``cocoa score``, ``cocoa eval`` and ``cocoa serve`` for a Ray cluster. Entry points lead here.

Each function has the options of one command, and returns what runs it on the cluster; `None` without ``--ray``. Ray is
imported by what it returns.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Annotated, Any

import typer

from cocoa_engine.errors import ConfigError

PANEL = "Ray"
CLUSTER = "that of RAY_ADDRESS, the one of this machine, or a new one."

Ray = Annotated[
    bool,
    typer.Option(
        "--ray",
        help=f"Share the work among the actors of a Ray cluster: {CLUSTER} An interrupted run is resumed by the same "
        "command.",
        rich_help_panel=PANEL,
    ),
]
Replicated = Annotated[
    bool, typer.Option("--ray", help=f"Serve replicas on a Ray cluster: {CLUSTER}", rich_help_panel=PANEL)
]


def _limit(least: float, text: str) -> Any:
    """An optional number of at most 10,000."""
    return typer.Option(min=least, max=10_000, help=text, show_default=False, rich_help_panel=PANEL)


Actors = Annotated[int | None, _limit(1, "Largest number of actors; each loads the model. Default: 2.")]
NumCpus = Annotated[float | None, _limit(0.01, "CPU cores of each. Default: 1.")]
NumGpus = Annotated[float | None, _limit(0, "GPUs of each. Default: none.")]
Replicas = Annotated[int | None, _limit(1, "Number of replicas. Default: 1.")]
MinReplicas = Annotated[int | None, _limit(0, "Least number of replicas, if the load decides.")]
MaxReplicas = Annotated[int | None, _limit(1, "Largest number of replicas, if the load decides.")]

Runner = Callable[..., Any]


def score(ray: Ray = False, actors: Actors = None, num_cpus: NumCpus = None, num_gpus: NumGpus = None) -> Runner | None:
    """What scores rows on a cluster: :func:`cocoa_integrations.ray.jobs.score`."""
    return _runner("jobs.score", ray, actors=actors, num_cpus=num_cpus, num_gpus=num_gpus)


def evaluate(
    ray: Ray = False, actors: Actors = None, num_cpus: NumCpus = None, num_gpus: NumGpus = None
) -> Runner | None:
    """What answers samples on a cluster: :meth:`cocoa_integrations.ray.jobs.Pool.of`."""
    return _runner("jobs.Pool.of", ray, actors=actors, num_cpus=num_cpus, num_gpus=num_gpus)


def serve(
    ray: Replicated = False,
    replicas: Replicas = None,
    min_replicas: MinReplicas = None,
    max_replicas: MaxReplicas = None,
    num_cpus: NumCpus = None,
    num_gpus: NumGpus = None,
) -> Runner | None:
    """What serves replicas on a cluster: :func:`cocoa_integrations.ray.jobs.serve`."""
    counts = {"replicas": replicas, "min_replicas": min_replicas, "max_replicas": max_replicas}
    return _runner("jobs.serve", ray, **counts, num_cpus=num_cpus, num_gpus=num_gpus)


def _runner(function: str, ray: bool, **options: float | None) -> Runner | None:
    """A function of this package with these options; `None` without ``--ray``, which every option needs."""
    if ray:
        module, _, name = function.partition(".")
        return partial(attrgetter(name)(import_module(f"cocoa_integrations.ray.{module}")), **options)
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --ray")
    return None
