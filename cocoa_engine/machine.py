"""What a measurement ran on, for the record beside the numbers."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Processor, memory, threads and versions."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "torch_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        **{name: version(name) for name in ("torch", "transformers", "cocoa-integrations")},
    }


def one_line(machine: Mapping[str, Any]) -> str:
    """The same in a line."""
    memory = f", {machine['memory_gib']} GiB" if machine["memory_gib"] else ""
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    names = ("python", "torch", "transformers", "cocoa-integrations")
    return (
        f"{machine['processor']}, {machine['cores']} cores{memory}{gpu}, {machine['torch_threads']} torch threads; "
        + ", ".join(f"{name} {machine[name]}" for name in names)
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None
