"""Folders in the cache directory that are made once: they appear whole, and are made again when they are damaged."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from cocoa_engine.cache_directory import is_private, parse_note, private_folder
from cocoa_engine.logs import safe_logger
from cocoa_engine.output_files import write_file

logger = safe_logger(__name__)

MANIFEST = "manifest.json"
LOCK_TIMEOUT = 600.0  # seconds to wait for another process's conversion; the lock ends with its process

_BLOCK = 2**20  # bytes
_AT_LEAST = 2**30  # bytes that are read of a file, spread over it


def ensure(folder: Path, build: Callable[[Path], None]) -> None:
    """Make a folder, unless it is there and :func:`is_intact`.

    Safe to call from several threads and processes: one makes the folder while the others wait.

    Args:
        folder: the folder. It appears only when it is complete.
        build: writes the files into an empty folder beside it.

    Raises:
        OSError: the folder cannot be written, also :class:`filelock.Timeout`.
    """
    if is_intact(folder):
        return
    private_folder(folder.parent)
    with FileLock(folder.with_name(folder.name + ".lock"), timeout=LOCK_TIMEOUT):
        if not is_intact(folder):
            _build(folder, build)


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    """Make a temporary folder beside ``folder``, then rename it to ``folder``. The caller holds the lock."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir(mode=0o700)  # with some umasks, others could write to the files until they have their mode
    try:
        build(partial)
        for path in partial.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        files = {path.name: _fingerprint(path) for path in partial.iterdir()}
        write_file(partial / MANIFEST, json.dumps(files, indent=2))
        for path in partial.iterdir():
            path.chmod(0o644)  # whatever the umask is
        partial.chmod(0o755)
        if folder.is_dir():  # a damaged one
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_intact(folder: Path) -> bool:
    """Whether only this user can have written the files, and each is as it was written, by its size and CRC-32.

    At about 2 GB/s this takes a quarter of a second for the embedded model. The weights are loaded right afterwards,
    from the page cache. Of a file of 2 GiB or more, samples of a GiB or more in total are read.
    """
    try:
        files = parse_note((folder / MANIFEST).read_bytes()) or {}
        if not is_private(*(folder / name for name in (MANIFEST, *files))):
            logger.warning("other users could write to %s; what is in it is made again", folder)
            return False
        return bool(files) and all(_fingerprint(folder / name) == expected for name, expected in files.items())
    except (OSError, ValueError):  # ValueError: no name of a file
        return False


def _fingerprint(path: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    size, crc = path.stat().st_size, 0
    step = max(size // _AT_LEAST, 1) * _BLOCK
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            crc = zlib.crc32(file.read(_BLOCK), crc)
    return [size, crc]
