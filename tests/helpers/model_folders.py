"""Folders with tiny models, to be loaded by name, and calibrators that fit them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cocoa_engine import CocoaEngine, RiskCalibrator
from cocoa_engine.risk.calibrator import Settings
from tests.helpers.made_up_risk import fitted
from tests.helpers.tiny_models import NUM_LAYERS, tiny_model, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def save_model(folder: Path, architecture: str = "llama", *, chat: bool = True, **options: Any) -> str:
    """Save a tiny model with its tokenizer, and return the name of the folder.

    Args:
        folder: where to save it; created if it is missing.
        architecture: the first argument of ``tiny_model``.
        chat: whether its tokenizer has a chat template.
        options: of ``tiny_model``.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE if chat else None
    tiny_model(architecture, **{"seed": 6, **options}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_calibrator(path: Path, model_name: str) -> str:
    """Save a calibrator of spans for a tiny model, and return the name of the file."""
    _fitted().model_copy(update={"model_name": model_name}).save(path)
    return str(path)


@cache
def _fitted() -> RiskCalibrator:
    middle = (NUM_LAYERS // 3, 2 * NUM_LAYERS // 3)
    settings = Settings(final_layer="post_norm", middle_layers=middle, gamma=0.3, max_candidates=8)
    return fitted(settings=settings, draws=2)


def counted_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that receives the name of each model whose weights are loaded from now on."""
    names: list[str] = []
    load = CocoaEngine.from_pretrained.__func__  # type: ignore[attr-defined]

    def counted(kind: Any, model_name: str | None = None, **options: Any) -> CocoaEngine:
        names.append(str(model_name))
        engine: CocoaEngine = load(kind, model_name, **options)
        return engine

    monkeypatch.setattr(CocoaEngine, "from_pretrained", classmethod(counted))
    return names
