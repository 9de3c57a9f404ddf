"""The number of replicas on a Ray cluster of this machine follows the load."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.helpers.in_threads import start
from tests.helpers.ray_cluster import LIMIT, STARTS, STUCK, Deployed, eventually, served

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(STUCK)]

CONVERSATIONS = [
    [{"role": "user", "content": f"Say {word}."}] for word in ("one", "two", "three", "four", "five", "six")
]
"""Several, since all calls of one go to the same replica."""


def ask(deployed: Deployed, number: int) -> httpx.Response:
    return deployed.post({"messages": CONVERSATIONS[number], "max_tokens": 60})


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_the_load_decides_how_many_replicas_run(ray_cluster: Path, tiny_folder: str) -> None:
    settings = {"target_ongoing_requests": 1, "upscale_delay_s": 1, "downscale_delay_s": 2, "metrics_interval_s": 0.5}
    with served(
        model=tiny_folder,
        loading={"runtime": {"draft_tokens": 0}},
        min_replicas=1,
        max_replicas=2,
        max_batch_size=4,
        health_check_period_s=1,
        **settings,
    ) as deployed:
        assert deployed.count == 1
        expected = [text_of(ask(deployed, number)) for number in range(len(CONVERSATIONS))]
        assert len(set(expected)) > 1
        over = threading.Event()
        answers: list[tuple[int, httpx.Response]] = []

        def load(first: int) -> None:
            for number in itertools.count(first):
                if over.is_set():
                    return
                chosen = number % len(CONVERSATIONS)
                answers.append((chosen, ask(deployed, chosen)))

        threads = [start(partial(load, number)) for number in range(4)]
        try:
            eventually(lambda: deployed.count == 2, STARTS)
            eventually(lambda: list(map(bool, deployed.values("cocoa:request_success_total").values())) == [True] * 2)
        finally:
            over.set()
            for thread in threads:
                thread.join(LIMIT)
        assert {number: text_of(answer) for number, answer in answers} == dict(enumerate(expected))
        assert all(text_of(answer) == expected[number] for number, answer in answers)
        eventually(lambda: deployed.count == 1)
        assert text_of(ask(deployed, 0)) == expected[0]
