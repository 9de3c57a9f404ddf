"""The directory for files that the package creates once per machine."""

import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cocoa_engine.errors import safe_logger
from cocoa_engine.output_files import write_file

logger = safe_logger(__name__)

CACHE_VARIABLE = "COCOA_CACHE_DIR"


def cache_directory() -> Path:
    """``$COCOA_CACHE_DIR``, or ``cocoa-engine`` in the platform's cache directory. It may not exist yet.

    Of a user without a home, it is the folder among the temporary files.
    """
    try:
        if chosen := os.environ.get(CACHE_VARIABLE):
            return Path(chosen).expanduser()
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # there is no home
        return temporary_folder()
    return base / "cocoa-engine"


def temporary_folder() -> Path:
    """This user's folder among the temporary files, for what cannot be kept in the cache directory."""
    return Path(tempfile.gettempdir()) / (f"cocoa-engine-{os.geteuid()}" if _OWNERS else "cocoa-engine")


def private_folder(folder: Path, mode: int = 0o755) -> Path:
    """Make a folder of the cache directory if it is missing, and withdraw the rights of others to write to it.

    This includes the folders on the way to it, up to the cache directory; a sticky one, such as ``/tmp``, stays as it
    is. Folders that are made have ``mode``. Returns the folder, which :func:`is_private`.

    Raises:
        OSError: it cannot be made.
        PermissionError: another user could write to it all the same.
    """
    within = [parent for parent in folder.parents if parent.is_relative_to(cache_directory())]
    for level in (*reversed(within), folder):
        _make(level, mode)
        status = level.stat()
        if _OWNERS and level.lstat().st_uid == status.st_uid == os.geteuid() and _is_open(status):
            logger.warning("other users could write to %s; they no longer can", level)
            level.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)
    if why := _open_to_others(folder):
        raise PermissionError(why)
    return folder


def is_private(*paths: Path) -> bool:
    """Whether no other user can have written these files and folders, or can exchange them.

    They and all folders above them, those of links included, belong to this user or root and are writable by no one
    else. Sticky folders above them, such as ``/tmp``, may be: nobody can remove another user's file there. What a
    private file holds is therefore the same whenever it is read.

    Raises:
        OSError: one of them does not exist.
    """
    return not any(map(_open_to_others, paths))


_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OWNERS = hasattr(os, "geteuid")  # Windows has none
_UNMAPPED = 65534  # the owner of everything outside, in a container without root


def _make(folder: Path, mode: int) -> None:
    """Make a folder and those above it, with a mode that leaves others no right to write, whatever the umask is."""
    try:
        folder.mkdir(mode=mode)
    except FileNotFoundError:
        _make(folder.parent, mode)
        folder.mkdir(mode=mode, exist_ok=True)
    except FileExistsError:
        if not folder.is_dir():
            raise


def _is_open(status: os.stat_result) -> bool:
    """Whether other users can write to a file, or can exchange what is in a folder."""
    return bool(status.st_mode & _OTHERS) and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)


def _open_to_others(path: Path) -> str | None:
    """Why another user can write to a path, or exchange it; `None`: none can."""
    if not _OWNERS:
        return None
    ours = (os.geteuid(), 0)
    status = path.stat()
    if status.st_uid not in ours or status.st_mode & _OTHERS:
        return f"{path} belongs to another user, or other users can write to it"
    for step, status in _on_the_way(path.absolute()):
        if status.st_uid not in (*ours, _UNMAPPED):
            return f"{step}, on the way to {path}, belongs to another user"
        if not stat.S_ISLNK(status.st_mode) and _is_open(status):
            return f"other users can write to {step}, on the way to {path}"
    return None


def _on_the_way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """A path and all folders above it, and the same of the target of each link among them."""
    for part in (path, *path.parents):
        status = part.lstat()
        yield part, status
        if stat.S_ISLNK(status.st_mode):
            yield from _on_the_way(part.parent / os.readlink(part))


def read_note(file: Path) -> dict[str, Any] | None:
    """The JSON object in a small file of the cache; `None` if it is damaged, or another user can have written it."""
    try:
        return parse_note(file.read_bytes()) if is_private(file) else None
    except OSError:
        return None


def write_note(file: Path, data: str | bytes) -> None:
    """Write a small file of the cache, which others may read; an OSError if another user could exchange it."""
    private_folder(file.parent)
    write_file(file, data, mode=0o644)


def keep_newest(folder: Path, pattern: str, count: int) -> None:
    """Delete the files of a folder whose names match, except those that were written last."""
    files = sorted(folder.glob(pattern), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[count:]:
        file.unlink(missing_ok=True)


def parse_note(text: bytes) -> dict[str, Any] | None:
    """The JSON object that was written as ``text``; `None` for anything else: a power failure may have damaged it."""
    try:
        note = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, thousands of digits; nested too deeply
        return None
    return note if isinstance(note, dict) else None
