"""Finds the GGUF file that a model's name means, so that ``gguf_file=`` need not be written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from cocoa_engine.errors import ModelLoadError

SUFFIX = ".gguf"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


class Location(NamedTuple):
    """Where a model is: the local folder or the Hub id, and its GGUF file there. `None`: it is no GGUF file."""

    source: str
    file: str | None


def locate(name: str) -> Location:
    """What the name of a model means.

    Args:
        name: a Hub id, a folder, a GGUF file, or a Hub id with the name of a GGUF file in that repository, such as
            ``owner/model/model-q8_0.gguf``.

    Returns:
        The name itself, or its folder and file. A folder with one GGUF file and no ``config.json`` means that file. The
        file of a model that was split is its first part.

    Raises:
        ModelLoadError: there is no such file, or a folder has several GGUF files and nothing else.
    """
    path = Path(name).expanduser()
    if name.lower().endswith(SUFFIX):
        if path.is_file():
            return Location(str(path.parent), parts(path.name)[0])
        if not path.is_dir():
            return _on_the_hub(name, path)
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(file.name for file in path.iterdir() if file.name.lower().endswith(SUFFIX))
        if len({parts(file)[0] for file in files}) == 1:
            return Location(name, parts(files[0])[0])
        if files:
            listed = ", ".join(files[:5]) + (", ..." if len(files) > 5 else "")
            raise ModelLoadError(f"{path} has {len(files)} GGUF files ({listed}); name one, such as {path / files[0]}")
    return Location(name, None)


def _on_the_hub(name: str, path: Path) -> Location:
    """A file in a repository of the Hub, if no local path can be meant."""
    words = name.split("/")
    if len(words) < 3 or name.startswith((".", "~")) or path.is_absolute() or Path(words[0]).exists():
        raise ModelLoadError(
            f"there is no file {path}; name a GGUF file, or one in a repository of the Hub: owner/model/file{SUFFIX}"
        )
    return Location("/".join(words[:2]), parts("/".join(words[2:]))[0])


def parts(file: str) -> list[str]:
    """The names of all parts of a model that was split, from the name of one; otherwise the name itself."""
    if (found := _PART.search(file)) is None:
        return [file]
    return [f"{file[: found.start()]}-{number:05d}-of-{found[2]}{SUFFIX}" for number in range(1, int(found[2]) + 1)]
