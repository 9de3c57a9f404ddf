"""The directory for files that the package creates once per machine."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "COCOA_CACHE_DIR"


def cache_directory() -> Path:
    """``$COCOA_CACHE_DIR``, or ``cocoa-engine`` in the platform's cache directory. It may not exist yet."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "cocoa-engine"


def is_private(*paths: Path) -> bool:
    """Whether no other user can have written these files and folders: they belong to this user or root.

    Raises:
        OSError: one of them does not exist.
    """
    if not hasattr(os, "getuid"):
        return True
    return all(
        status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        for status in (path.stat() for path in paths)
    )


def read_note(file: Path, *folders: Path) -> dict[str, Any] | None:
    """The JSON object in a small file of the cache.

    Args:
        file: the file.
        folders: those that must be private too.

    Returns:
        The object; `None` if the file cannot be read or is damaged, or another user can have written it.
    """
    try:
        return parse_note(file.read_bytes()) if is_private(file, *folders) else None
    except OSError:
        return None


def parse_note(text: bytes) -> dict[str, Any] | None:
    """The JSON object that was written as ``text``; `None` for anything else: a power failure may have damaged it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, thousands of digits; nested too deeply
        return None
    return found if isinstance(found, dict) else None
