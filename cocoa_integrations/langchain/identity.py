"""What tells the answers of one engine from those of another, for cache keys."""

from __future__ import annotations

import hashlib
from uuid import uuid4
from weakref import WeakKeyDictionary

from cocoa_engine import CocoaEngine

_ids: WeakKeyDictionary[CocoaEngine, str] = WeakKeyDictionary()
_as_loaded: WeakKeyDictionary[CocoaEngine, str] = WeakKeyDictionary()


def engine_id(engine: CocoaEngine) -> str:
    """A name no other engine ever has: names of models are not unique, and an ``id()`` is used again."""
    return _ids.setdefault(engine, uuid4().hex)


def settings_digest(engine: CocoaEngine) -> str:
    """Digest of what users change on an engine in place: generation config, chat template and calibrator."""
    generation_config = getattr(engine.model, "generation_config", None)
    settings = generation_config.to_dict() if generation_config is not None else {}
    template = getattr(engine.tokenizer, "chat_template", None)
    calibrator = None if engine.calibrator is None else engine.calibrator.model_dump_json()
    return hashlib.sha256(repr((sorted(settings.items()), template, calibrator)).encode()).hexdigest()


def remember_loaded(engine: CocoaEngine) -> CocoaEngine:
    """Note how an engine was when it was loaded; later calls change nothing."""
    if engine not in _as_loaded:
        _as_loaded[engine] = settings_digest(engine)
    return engine


def changes_since_loading(engine: CocoaEngine | None) -> dict[str, str]:
    """The digest of an engine that was changed since it was loaded; otherwise its loading options say it all."""
    if engine is None or (digest := settings_digest(engine)) == _as_loaded.get(engine, digest):
        return {}
    return {"settings": digest}
