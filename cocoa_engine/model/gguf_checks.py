"""Notes which GGUF files the lean forward pass was compared with transformers' modules on.

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
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.output_files import write_file

logger = logging.getLogger(__name__)

KEPT = 64
"""The number of notes that stay; each is a line."""

_notes: weakref.WeakKeyDictionary[nn.Module, Path] = weakref.WeakKeyDictionary()


def noted(file: GgufFile) -> str | None:
    """What the comparison found with the weights of this file and this version of the code, if it was made here."""
    note = _note_of(file)
    try:
        found = json.loads(note.read_text(encoding="utf-8"))["found"] if is_private(note, note.parent) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found else None


def will_note(model: nn.Module, file: GgufFile) -> None:
    """Say which file a model is of, for :func:`note`."""
    _notes[model] = _note_of(file)


def note(model: nn.Module, found: str) -> None:
    """Keep what the comparison found, if the model is of a file. It is not kept if it cannot be written."""
    if (file := _notes.get(model)) is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps({"found": found}))
    except OSError as error:
        logger.info("%s is not kept: %s", file, error)
        return
    with suppress(OSError):
        known = sorted(file.parent.glob("checked-*.json"), key=lambda each: each.stat().st_mtime, reverse=True)
        for old in known[KEPT:]:
            old.unlink()


def _note_of(file: GgufFile) -> Path:
    known = [file.sample_digest(), _code(), version("torch"), version("transformers")]
    known.append(torch.backends.cpu.get_cpu_capability())
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return cache_directory() / "gguf" / f"checked-{digest[:32]}.json"


@cache
def _code() -> str:
    """A digest of the code that is compared, the kernels included."""
    digest, package = hashlib.sha256(), Path(__file__).parent.parent
    for file in sorted(each for folder in ("execution", "model") for each in (package / folder).rglob("*")):
        if file.suffix in (".py", ".cpp", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
