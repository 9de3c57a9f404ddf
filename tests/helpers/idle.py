"""Whether an engine has nothing left to do."""

from __future__ import annotations

from cocoa_engine import CocoaEngine


def assert_idle(engine: CocoaEngine) -> None:
    """No place is held, nobody waits, nothing is to be fed and no sequence is open."""
    scheduler = engine._scheduler
    assert (scheduler.running, len(scheduler._queue), scheduler._pending, scheduler._driving) == (0, 0, [], False)
    assert not engine._backend().backend._open  # type: ignore[attr-defined]
