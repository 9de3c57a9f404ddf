"""How fast the machine is now, in the process that measures: memory bandwidth and multiply-adds of torch's threads."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_FLOATS = 2**25  # 128 MiB: beyond the caches
_WIDTH = 768


def probe() -> dict[str, float]:
    """``gb_per_s`` of a copy, read and written bytes together, and ``gflop_per_s`` of a product of float32 matrices.

    Each is the best of three, which take about 0.1 seconds together on an idle machine.
    """
    source, target = torch.ones(_FLOATS), torch.empty(_FLOATS)
    a, b = torch.ones(_WIDTH, _WIDTH), torch.ones(_WIDTH, _WIDTH)
    return {
        "gb_per_s": 2 * 4 * _FLOATS / _seconds(lambda: target.copy_(source)) / 1e9,
        "gflop_per_s": 2 * _WIDTH**3 / _seconds(lambda: a @ b) / 1e9,
    }


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
