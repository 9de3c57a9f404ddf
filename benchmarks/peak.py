"""The most memory that this process has held."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """Resident memory at its highest since this program began.

    On Linux the kernel's ``VmHWM``, which a new program starts afresh; ``ru_maxrss`` would begin at what the parent
    held. Elsewhere it is ``ru_maxrss``.
    """
    if _STATUS.exists() and (found := re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
