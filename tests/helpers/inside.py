"""What no public name tells of an engine. Only this module reaches into one."""

from typing import Any

from cocoa_engine import CocoaEngine
from cocoa_engine.execution.backends import Chosen
from cocoa_engine.execution.backends.shared_cache import PrefixCache
from cocoa_engine.execution.session import Session


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
