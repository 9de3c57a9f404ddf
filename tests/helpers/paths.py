"""Folders of the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CORPUS = EXAMPLES / "corpus"
README = ROOT / "README.md"
