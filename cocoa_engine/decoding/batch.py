"""Requests decoded together: each joins the running batch when there is a place, and leaves when it is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from cocoa_engine.decoding.request import Request
from cocoa_engine.decoding.task import DecodeTask
from cocoa_engine.execution.scheduler import Scheduler
from cocoa_engine.results import Generation


def decode_batch(
    requests: Sequence[Request],
    open_task: Callable[[Request], DecodeTask],
    scheduler: Scheduler,
    batch_size: int,
    *,
    keep_errors: bool = False,
) -> list[Generation | Exception]:
    """Decode requests, at most ``batch_size`` at a time.

    Args:
        open_task: begins a request, for which a place is held by then.
        keep_errors: return the error of a request in its place, instead of raising the first one.

    Returns:
        One result for each request, in order.
    """
    results: dict[int, Generation | Exception] = {}
    running: dict[int, DecodeTask] = {}
    waiting = deque(enumerate(requests))
    try:
        while waiting or running:
            # refused only before anything was decoded: later that would throw away finished answers
            may_refuse = len(waiting) == len(requests)
            while (
                waiting
                and len(running) < batch_size
                and scheduler.enter(wait=not running, may_refuse=may_refuse, cancellation=waiting[0][1].cancellation)
            ):
                number, request = waiting.popleft()
                try:
                    running[number] = open_task(request)
                except BaseException:
                    scheduler.leave()
                    raise
            scheduler.feed([task.work for task in running.values() if task.work is not None])
            for number, task in list(running.items()):
                try:
                    task.advance()
                    if task.work is not None:
                        continue
                    task.ready()
                    results[number] = task.generation()
                except Exception as error:
                    if not keep_errors:
                        raise
                    results[number] = error
                del running[number]
                task.close()
                scheduler.leave()
    finally:
        for task in running.values():
            task.close()
            scheduler.leave()
    return [results[number] for number in range(len(requests))]
