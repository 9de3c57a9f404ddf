"""Notes on which weights the lean forward pass was compared with transformers' modules.

The comparison needs these modules. A new process that finds the note does without them, see
:class:`~cocoa_engine.model.light_model.LightModel`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from cocoa_engine.cache_directory import cache_directory, is_private
from cocoa_engine.output_files import write_file

logger = logging.getLogger(__name__)

KEPT = 64
"""The number of notes that stay; each is a line."""

_notes: weakref.WeakKeyDictionary[nn.Module, Path] = weakref.WeakKeyDictionary()


def noted(weights: str) -> str | None:
    """What the comparison found with these weights and this version of the code, if it was made here.

    Args:
        weights: a digest of the weights and the settings that belong to them.
    """
    note = _note_of(weights)
    try:
        found = json.loads(note.read_text(encoding="utf-8"))["found"] if is_private(note, note.parent) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found else None


def will_note(model: nn.Module, weights: str) -> None:
    """Say which weights a model has, for :func:`note`."""
    _notes[model] = _note_of(weights)


def note(model: nn.Module, found: str) -> None:
    """Keep what the comparison found, if :func:`will_note` was told of the model. It may fail to be written."""
    if (file := _notes.get(model)) is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps({"found": found}))
    except OSError as error:
        logger.info("%s is not kept: %s", file, error)
        return
    with suppress(OSError):
        known = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime, reverse=True)
        for old in known[KEPT:]:
            old.unlink()


def _note_of(weights: str) -> Path:
    known = [weights, _code(), version("torch"), version("transformers")]
    known.append(torch.backends.cpu.get_cpu_capability())
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return cache_directory() / "checked" / f"{digest[:32]}.json"


@cache
def _code() -> str:
    """A digest of the code that is compared, the kernels included."""
    digest, package = hashlib.sha256(), Path(__file__).parent.parent
    for file in sorted(each for folder in ("execution", "model") for each in (package / folder).rglob("*")):
        if file.suffix in (".py", ".cpp", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
