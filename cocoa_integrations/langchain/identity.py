"""Identity of engines, for cache keys."""

from __future__ import annotations

import hashlib
from uuid import uuid4
from weakref import WeakKeyDictionary

from cocoa_engine import CocoaEngine

_ids: WeakKeyDictionary[CocoaEngine, str] = WeakKeyDictionary()
_as_loaded: WeakKeyDictionary[CocoaEngine, str] = WeakKeyDictionary()


def engine_id(engine: CocoaEngine) -> str:
    """A unique id. The name of a model is not unique, and an ``id()`` can be reused."""
    return _ids.setdefault(engine, uuid4().hex)


def settings_digest(engine: CocoaEngine) -> str:
    """Digest of what users may change on an engine: generation config, chat template and calibrator."""
    generation_config = getattr(engine.model, "generation_config", None)
    settings = generation_config.to_dict() if generation_config is not None else {}
    template = getattr(engine.tokenizer, "chat_template", None)
    calibrator = None if engine.calibrator is None else engine.calibrator.model_dump_json()
    return hashlib.sha256(repr((sorted(settings.items()), template, calibrator)).encode()).hexdigest()


def remember_loaded(engine: CocoaEngine) -> CocoaEngine:
    """Store the digest of an engine that was just loaded. Later calls have no effect."""
    if engine not in _as_loaded:
        _as_loaded[engine] = settings_digest(engine)
    return engine


def changes_since_loading(engine: CocoaEngine | None) -> dict[str, str]:
    """The digest of an engine that was changed since it was loaded. Otherwise its loading options identify it."""
    if engine is None or (digest := settings_digest(engine)) == _as_loaded.get(engine, digest):
        return {}
    return {"settings": digest}
