"""A description of the machine, to store beside a measurement."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Processor, memory, threads and package versions."""
    import psutil
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "torch_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        **{name: version(name) for name in ("torch", "transformers", "cocoa-integrations")},
    }


def one_line(machine: Mapping[str, Any]) -> str:
    """The description in one line."""
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    names = ("python", "torch", "transformers", "cocoa-integrations")
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB{gpu}, "
        f"{machine['torch_threads']} torch threads; " + ", ".join(f"{name} {machine[name]}" for name in names)
    )


def _processor() -> str:
    """The processor's name, with its generation on x86-64: a virtual machine's name may leave that out."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in found:
        return platform.processor() or platform.machine()
    generation = [f"{name.removeprefix('cpu ')} {found[name]}" for name in ("cpu family", "model") if name in found]
    return ", ".join([found["model name"], " ".join(generation)]) if generation else found["model name"]
