"""The number of replicas on a Ray cluster of this machine follows the load."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.in_threads import join, start
from tests.helpers.ray_cluster import STARTS, STUCK, Deployed, eventually, served

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(STUCK)]

CONVERSATIONS = [
    [{"role": "user", "content": f"Say {word}."}] for word in ("one", "two", "three", "four", "five", "six")
]
"""Several, since all calls of one go to the same replica."""


def ask(deployed: Deployed, number: int) -> str:
    response = deployed.post({"messages": CONVERSATIONS[number], "max_tokens": 60})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_the_load_decides_how_many_replicas_run(ray_cluster: Path, tiny_folder: str) -> None:
    delays = {"upscale_delay_s": 1, "downscale_delay_s": 2, "metrics_interval_s": 0.5, "health_check_period_s": 1}
    numbers = {"min_replicas": 1, "max_replicas": 2, "max_batch_size": 4, "target_ongoing_requests": 1}
    loading = {"runtime": {"draft_tokens": 0}}
    with served(model=tiny_folder, loading=loading, **numbers, **delays) as deployed:
        assert deployed.count == 1
        expected = [ask(deployed, number) for number in range(len(CONVERSATIONS))]
        assert len(set(expected)) > 1
        over = threading.Event()
        answers: list[tuple[int, str]] = []

        def load(number: int) -> None:
            while not over.is_set():
                answers.append((number, ask(deployed, number)))
                number = (number + 1) % len(CONVERSATIONS)

        threads = [start(partial(load, number)) for number in range(4)]
        try:
            eventually(lambda: deployed.count == 2, STARTS)
            eventually(lambda: list(map(bool, deployed.values("cocoa:request_success_total").values())) == [True] * 2)
        finally:
            over.set()
            join(threads)
        assert set(answers) == set(enumerate(expected))
        eventually(lambda: deployed.count == 1)
        assert ask(deployed, 0) == expected[0]
