"""What no public name tells of an engine, and what its forward passes feed. Only this module reaches into one."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from torch import nn

from cocoa_engine import CocoaEngine
from cocoa_engine.execution.backends import Chosen
from cocoa_engine.execution.backends.shared_cache import PrefixCache
from cocoa_engine.execution.forward.base import Segment
from cocoa_engine.execution.session import Session
from tests.helpers.in_threads import PATIENCE


def backend_inside(engine: CocoaEngine) -> Any:
    return engine.session.backend


def use_backend(engine: CocoaEngine, chosen: Chosen) -> CocoaEngine:
    """Let an engine run its model so, whatever it would choose itself."""

    class Pinned(Session):
        @property
        def chosen(self) -> Chosen:
            return chosen

    engine.session.__class__ = Pinned
    return engine


def sequences_running(engine: CocoaEngine) -> int:
    return engine.session.scheduler.running


def calls_waiting(engine: CocoaEngine) -> int:
    return engine.session.scheduler.waiting


def opened_trees(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that receives the sequences that the engine opens from now on."""
    backend, opened = backend_inside(engine), list[Any]()
    open_trees = backend.open
    monkeypatch.setattr(backend, "open", lambda *args: opened.extend(trees := open_trees(*args)) or trees)
    return opened


def open_sequences(engine: CocoaEngine) -> int:
    """How many sequences have keys and values in the backend's memory."""
    return len(backend_inside(engine).open_trees)


def prefixes_of(engine: CocoaEngine) -> PrefixCache:
    prefixes: PrefixCache = backend_inside(engine).prefixes
    return prefixes


def kept_prompts(prefixes: PrefixCache) -> list[Any]:
    return list(prefixes._entries)


def assert_idle(engine: CocoaEngine) -> None:
    """No batch slot is held, no call waits, nothing is to be fed and no sequence is open."""
    scheduler = engine.session.scheduler
    assert (scheduler.running, scheduler.waiting, scheduler.idle) == (0, 0, True)
    assert open_sequences(engine) == 0


class Pass(NamedTuple):
    """One pass: a piece of a prompt or a step, and the number of tokens of each sequence in it."""

    is_prompt: bool
    widths: list[int]


def record(engine: CocoaEngine, before: Callable[[Sequence[Segment], bool], None] | None = None) -> list[Pass]:
    """A list that fills as it runs. ``before`` is called first in each pass; what it raises, the pass raises."""
    forward: Any = backend_inside(engine).forward
    passes: list[Pass] = []

    class Recorded(type(forward)):  # type: ignore[misc]
        def __call__(self, segments: Sequence[Segment], capture: Any) -> Any:
            if before is not None:
                before(segments, capture is None)
            output = super().__call__(segments, capture)
            passes.append(Pass(capture is None, [segment.width for segment in segments]))
            return output

    forward.__class__ = Recorded
    return passes


@contextmanager
def failing(engine: CocoaEngine, error: Exception) -> Iterator[None]:
    """Every pass raises ``error`` meanwhile."""

    def fail(*_: Any) -> None:
        raise error

    forward: Any = backend_inside(engine).forward
    kind = type(forward)
    record(engine, fail)
    try:
        yield
    finally:
        forward.__class__ = kind


def steps(passes: Sequence[Pass]) -> list[list[int]]:
    """The widths of those that are no prompt's."""
    return [each.widths for each in passes if not each.is_prompt]


_LEFT_BY_TRANSFORMERS = "transformers.utils.output_capturing"  # after any output_hidden_states=True, for good


def hook_count(model: nn.Module) -> int:
    """Forward hooks and pre-hooks of all modules, without those that transformers itself leaves for good.

    The references ask a shared model for its hidden states: whether that came first depends on the order of the tests.
    """
    return sum(
        getattr(hook, "__module__", None) != _LEFT_BY_TRANSFORMERS
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


class Gate:
    """Counts the forward passes of an engine, and lets each begin only when it is allowed to."""

    def __init__(self) -> None:
        self.reached = 0  # passes that have begun, or wait to
        self._allowed = threading.Semaphore(0)
        self._open = False

    def __call__(self, event: object) -> None:
        self.reached += 1
        if not self._open:
            assert self._allowed.acquire(timeout=PATIENCE)

    def allow(self, passes: int = 1) -> None:
        self._allowed.release(passes)

    def open(self) -> None:
        self._open = True
        self._allowed.release(1000)


@contextmanager
def gated(engine: CocoaEngine) -> Iterator[Gate]:
    """A gate before the passes of an engine; it is open after the block."""
    gate = Gate()
    observers = engine.session.scheduler.observers
    observers.append(gate)
    try:
        yield gate
    finally:
        gate.open()
        observers.remove(gate)
