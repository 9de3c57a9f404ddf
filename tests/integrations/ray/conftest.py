"""A cluster on this machine, and two replicas of a tiny model in it, each started once for a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.ray_cluster import Deployed, cluster, served
from tests.helpers.reasoning_models import speaker


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model whose answers do not end by themselves."""
    folder, engine = tmp_path_factory.mktemp("model"), speaker(ends=False)
    for part in (engine.model, engine.tokenizer):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster of four logical cores; a folder for its files."""
    pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("ray")
    with cluster(folder):
        yield folder


@pytest.fixture(scope="module")
def deployed(ray_cluster: Path, tiny_folder: str) -> Iterator[Deployed]:
    """Two replicas, each with places for three answers, behind a gateway where two requests can wait."""
    with served(
        model=tiny_folder,
        loading={"runtime": {"draft_tokens": 0}},  # answers take longer
        replicas=2,
        max_batch_size=2,
        max_queue=1,
        max_waiting=2,
        health_check_period_s=1,
        metrics_interval_s=0.5,
    ) as running:
        yield running
