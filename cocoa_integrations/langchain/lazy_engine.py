"""An engine that is loaded when it is first needed, once, and shared by all models that ask for the same one."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from cocoa_engine import CocoaEngine, Runtime


class LazyEngine:
    """A promise of an engine; :meth:`get` keeps it. Get yours with :func:`lazy_engine`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._engine: CocoaEngine | None = None
        self._lock = threading.Lock()

    @property
    def loaded(self) -> CocoaEngine | None:
        """The engine, if it was loaded already."""
        return self._engine

    @property
    def runtime(self) -> Runtime:
        """How the engine runs its model."""
        return self._options.get("runtime") or Runtime()

    def get(self) -> CocoaEngine:
        """The engine, loaded now if it was not.

        Raises:
            ModelLoadError: it cannot be loaded; the next call tries again.
        """
        with self._lock:
            if self._engine is None:
                self._engine = CocoaEngine.from_pretrained(**self._options)
            return self._engine


# LangChain rebuilds a model at every call where configurable_fields() is used: weights must not follow.
_shared: weakref.WeakValueDictionary[str, LazyEngine] = weakref.WeakValueDictionary()
_guard = threading.Lock()


def lazy_engine(options: dict[str, Any]) -> LazyEngine:
    """The promise of ``CocoaEngine.from_pretrained(**options)``: one for equal options, as long as anybody holds it."""
    key = repr(sorted(options.items()))
    with _guard:
        engine = _shared.get(key)
        if engine is None:
            engine = _shared[key] = LazyEngine(options)
        return engine
