"""Folders of the repository."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXAMPLES = ROOT / "examples"
CORPUS = EXAMPLES / "corpus"
README = ROOT / "README.md"
