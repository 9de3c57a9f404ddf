"""Install what ``requirements-lock.txt`` lists, each file checked by its hash; nothing on platforms that it is not for.

``make .venv/.dev`` runs this with the Python of the environment, before pip resolves the rest.
"""

import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.installation.write_lock import LIMIT, LOCK, PLATFORM, this_platform

PIP = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile"]


def install(requirements: Path, **options: bool) -> subprocess.CompletedProcess[bytes]:
    """Run pip for exactly these requirements."""
    command = [*PIP, "--no-deps", "--require-hashes", "-r", str(requirements)]
    return subprocess.run(command, timeout=LIMIT, **options)


def prefer_cpu_build() -> None:
    """Install the CPU build of torch if an index offers it and no build of this version is installed.

    pip itself prefers a file whose hash its index states, which those of a folder (``--find-links``) lack: it would
    choose the build on PyPI, with its gigabytes of CUDA packages.
    """
    entry = re.search(r"^torch==(\S+)(( \\\n +--hash=\S+)+)$", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    assert entry is not None
    try:
        installed = version("torch").partition("+")[0] == entry[1]
    except PackageNotFoundError:
        installed = False
    if not installed:
        with tempfile.TemporaryDirectory() as folder:
            requirement = Path(folder) / "torch.txt"
            requirement.write_text(f"torch=={entry[1]}+cpu{entry[2]}\n", encoding="utf-8")
            install(requirement, check=False, capture_output=True)  # without it, the whole lock brings the other build


def main() -> None:
    """Install the lock."""
    if this_platform() == PLATFORM:
        prefer_cpu_build()
        if code := install(LOCK, check=False).returncode:
            raise SystemExit(code)


if __name__ == "__main__":
    main()
