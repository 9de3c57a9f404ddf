"""The directory for files that the package creates once per machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
