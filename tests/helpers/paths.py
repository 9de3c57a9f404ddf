"""Folders of the repository, and what its pyproject.toml asks for."""

import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXAMPLES = ROOT / "examples"
CORPUS = EXAMPLES / "corpus"
README = ROOT / "README.md"


def requirements(lines: Iterable[str]) -> list[Requirement]:
    """Requirements; those on an extra of this package are replaced by what it brings."""
    found, project = list[Requirement](), PYPROJECT["project"]
    for one in map(Requirement, lines):
        extras = one.extras if canonicalize_name(one.name) == project["name"] else ()
        brought = [line for extra in sorted(extras) for line in project["optional-dependencies"][extra]]
        found += requirements(brought) if extras else [one]
    return found
