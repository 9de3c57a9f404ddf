"""Decodes several requests together: each joins the running batch as soon as a slot is free, and leaves when done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from cocoa_engine.decoding.request import Request
from cocoa_engine.decoding.task import DecodeTask
from cocoa_engine.errors import ConfigError
from cocoa_engine.execution.scheduler import Scheduler
from cocoa_engine.process_exit import at_work
from cocoa_engine.results import Generation


@at_work
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
        requests: the checked requests.
        open_task: starts a request. It is called once the request has a batch slot.
        scheduler: the batch that all calls of the engine share.
        batch_size: at least 1.
        keep_errors: return the error of a running request as its result, instead of raising it. Errors of ``open_task``
            and of the scheduler are raised in any case.

    Returns:
        One result for each request, in order.

    Raises:
        ConfigError: ``batch_size`` is not a positive integer.
        EngineBusyError: the queue is full, and none of the requests has started.
        RequestCancelledError: a request was cancelled.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size must be a whole number, at least 1 (got {batch_size!r})")
    results: dict[int, Generation | Exception] = {}
    running: dict[int, DecodeTask] = {}
    waiting = deque(enumerate(requests))
    try:
        while waiting or running:
            # the scheduler may refuse only the first request: a later refusal would discard finished answers
            may_refuse = len(waiting) == len(requests)
            while (
                waiting
                and len(running) < batch_size
                and scheduler.enter(
                    wait=not running,
                    may_refuse=may_refuse,
                    cancellation=waiting[0][1].cancellation,
                    owner=waiting[0][1].cancellation,
                )
            ):
                number, request = waiting.popleft()
                try:
                    running[number] = open_task(request)
                except BaseException:
                    scheduler.leave(request.cancellation)
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
                scheduler.leave(requests[number].cancellation)
    finally:
        for number, task in running.items():
            task.close()
            scheduler.leave(requests[number].cancellation)
    return [results[number] for number in range(len(requests))]
