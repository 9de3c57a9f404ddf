"""The peak memory of this process."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """Peak resident memory of this process in bytes.

    On Linux this is the kernel's ``VmHWM``, which is reset when a program starts; ``ru_maxrss`` would start at the
    memory of the parent process. On other systems it is ``ru_maxrss``.
    """
    if _STATUS.exists() and (found := re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
