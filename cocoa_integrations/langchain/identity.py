"""Identity of engines, for cache keys."""

from __future__ import annotations

from uuid import uuid4
from weakref import WeakKeyDictionary

from cocoa_engine import CocoaEngine

_ids: WeakKeyDictionary[CocoaEngine, str] = WeakKeyDictionary()


def engine_id(engine: CocoaEngine) -> str:
    """A unique id. The name of a model is not unique, and an ``id()`` can be reused."""
    return _ids.setdefault(engine, uuid4().hex)
