"""What is made from a GGUF file and kept in the cache directory, so that the next start need not make it again.

The tokenizer is kept by the content of the file's metadata, the unpacked weights by that of the whole file. A file of
the same content elsewhere finds them, and a file that has changed does not.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerFast

from cocoa_engine.cache_directory import cache_directory, read_note, write_note
from cocoa_engine.logs import safe_logger
from cocoa_engine.model import gguf_metadata, gguf_tokenizer, kept_folders
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.output_files import write_file, writing_to

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = safe_logger(__name__)

FOLDER = "gguf"
KEPT = {"tokenizer": 32, "unpacked": 4}
YOUNG = 2.0  # seconds; a file that was changed later than this may change again without another time of change

TOKENIZER = "tokenizer.json"
_SPECIAL = "special_tokens.json"


def tokenizer(file: GgufFile, **options: Any) -> PreTrainedTokenizerFast:
    """:func:`gguf_tokenizer.load`, from the cache if it was made before. If it cannot be kept, it is made each time."""
    rules = _source_digest(gguf_tokenizer)
    folder = _folder() / f"tokenizer-{file.metadata_digest()}-{rules}-{version('tokenizers')}"

    def build(partial: Path) -> None:
        made, special = gguf_tokenizer.make(file)
        write_file(partial / TOKENIZER, made.to_str())
        write_file(partial / _SPECIAL, json.dumps(special))

    if not keep(folder, build):
        return gguf_tokenizer.load(file, **options)
    special = json.loads((folder / _SPECIAL).read_text(encoding="utf-8"))
    return gguf_tokenizer.wrapped(file, special, tokenizer_file=str(folder / TOKENIZER), **options)


def unpacked_folder(file: GgufFile, dtype: torch.dtype | str) -> Path:
    """Where the checkpoint is kept that transformers makes of a file of one part.

    Args:
        dtype: that of the weights, or ``"auto"``.
    """
    name, rules = str(dtype).removeprefix("torch."), _source_digest(gguf_metadata)  # which it agreed with
    return _folder() / f"unpacked-{content_digest(file)}-{name}-{rules}-{version('transformers')}"


def keep(folder: Path, build: Callable[[Path], None]) -> bool:
    """Make a folder of this cache if it is not there. Returns whether it is there now.

    Of each kind of folder, the :data:`KEPT` that were used last stay.

    Args:
        build: as for :func:`kept_folders.ensure`. It may raise :class:`OSError` too.
    """
    try:
        kept_folders.ensure(folder, build)
    except OSError as error:
        logger.warning("%s is not kept, and is made again at each start: %s", folder, error)
        return False
    with suppress(OSError):  # the cache may be read-only
        os.utime(folder)
        kind = folder.name.partition("-")[0]
        found = [each for each in folder.parent.glob(f"{kind}-*") if (each / kept_folders.MANIFEST).exists()]
        found.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        for old in found[KEPT[kind] :]:
            shutil.rmtree(old)
    return True


def require_space(file: GgufFile, dtype: torch.dtype | str) -> None:
    """Check that what a file is unpacked to would leave at least as much free space on the disk as it takes.

    Raises:
        OSError: it would not.
    """
    size = dtype.itemsize if isinstance(dtype, torch.dtype) else torch.float32.itemsize
    size *= sum(math.prod(entry.shape) for entry in file.tensors.values())
    if shutil.disk_usage(_folder()).free < 2 * size:
        raise OSError(f"its {size / 1e9:.1f} GB would be more than half of the free space")


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write the model that transformers unpacked.

    Raises:
        OSError: it cannot be written, or would not be read as it is.
    """
    model.hf_quantizer = None  # the weights are unpacked, but transformers marks the model as quantised
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with writing_to(folder, Exception):
        model.save_pretrained(folder, save_original_format=False)
    again, report = type(model).from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    weights, found = model.state_dict(), again.state_dict()
    if report["missing_keys"] or found.keys() != weights.keys():
        raise OSError("the saved model has other weights")
    if not all(torch.equal(weight, found[name]) for name, weight in weights.items()):
        raise OSError("the weights of the saved model differ")


def content_digest(file: GgufFile) -> str:
    """SHA-256 of a file of one part.

    The digest is stored with the file's path, size, inode and times of change. While these are unchanged, the file is
    not read again.
    """
    path = file.path.resolve()
    place = hashlib.sha256(os.fsencode(path)).hexdigest()
    memo = _folder() / f"digest-{place}.json"
    state = _state(path)
    known = read_note(memo) or {}
    if known.get("state") == state and _is_sha256(known.get("sha256")):
        return str(known["sha256"])
    digest = file.digest()
    if _state(path) == state and time.time() - max(state[3:]) / 1e9 > YOUNG:
        try:
            write_note(memo, json.dumps({"state": state, "sha256": digest}))
        except OSError as error:
            logger.info("%s is not kept: %s", memo, error)
    return digest


def _source_digest(module: ModuleType) -> str:
    return hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()[:16]


def _is_sha256(value: Any) -> bool:
    """It becomes part of a folder's name."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _folder() -> Path:
    return cache_directory() / FOLDER
