"""Notes on which weights the lean forward pass was compared with transformers' modules.

The comparison needs these modules. A new process that finds the note does without them, see
:class:`~cocoa_engine.model.light_model.LightModel`.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch import nn

from cocoa_engine.cache_directory import cache_directory, keep_newest, read_note, write_note
from cocoa_engine.logs import safe_logger
from cocoa_engine.model.weight_fingerprint import WeightFingerprint, weight_fingerprint

logger = safe_logger(__name__)

FOLDER = "checked"
KEPT = 64
"""The number of notes that stay, those that were written last."""

_asked: weakref.WeakKeyDictionary[nn.Module, tuple[Path, WeightFingerprint]] = weakref.WeakKeyDictionary()


def noted(weights: str, kernels: str) -> str | None:
    """What the comparison found with these weights, kernels and versions of the code, if it was made here.

    Args:
        weights: a digest of the weights, or of samples of them, and of the settings that belong to them.
        kernels: the name of the compiled kernels.
    """
    file = _note_of(weights, kernels)
    found = (read_note(file) or {}).get("found")
    return found if isinstance(found, str) and found else None


def will_note(model: nn.Module, weights: str, kernels: str) -> None:
    """Say which weights a model has, for :func:`note`. The arguments are those of :func:`noted`."""
    _asked[model] = _note_of(weights, kernels), weight_fingerprint(model.parameters())


def note(model: nn.Module, found: str | None) -> None:
    """Keep what the comparison found, if :func:`will_note` was told of the model and its weights are as they were.

    Args:
        model: transformers' model.
        found: the result; ``None``: the lean pass is not used, or not with the kernels.
    """
    file, as_loaded = _asked.pop(model, (None, None))
    if file is None or found is None or weight_fingerprint(model.parameters()) != as_loaded:
        return
    try:
        write_note(file, json.dumps({"found": found}))
        keep_newest(file.parent, "*.json", KEPT)
    except OSError as error:
        logger.info("%s is not kept: %s", file, error)


def _note_of(weights: str, kernels: str) -> Path:
    known = [weights, kernels, _code(), *map(_version, ("cocoa-integrations", "torch", "transformers"))]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return cache_directory() / FOLDER / f"{digest[:32]}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # it is run from its folder
        return ""


@cache
def _code() -> str:
    """A digest of the code that is compared, the kernels included."""
    digest, package = hashlib.sha256(), Path(__file__).parent.parent
    for file in sorted(each for folder in ("execution", "model") for each in (package / folder).rglob("*")):
        if file.suffix in (".py", ".cpp", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
