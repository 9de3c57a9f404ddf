"""Writing results: a file appears complete or not at all, and one process at a time writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident

from filelock import FileLock, Timeout

from cocoa_engine.errors import ConfigError

LOCK = ".lock"
"""The name of the lock of a folder. That of a file is ``.NAME.lock``, and is removed at the end."""

_held: set[tuple[int, Path]] = set()


def write_file(file: Path, text: str) -> None:
    """Write a text as UTF-8. The file is replaced when the whole text has been written to disk."""
    with draft_of(file) as draft, draft.open("w", encoding="utf-8") as target:
        target.write(text)


@contextmanager
def draft_of(file: Path) -> Iterator[Path]:
    """Yield a path with the same suffix to write to. At the end it is flushed to disk and becomes the file; after an
    error it is removed.

    What is not a regular file, such as ``/dev/stdout``, is yielded itself.

    Raises:
        ConfigError: the path cannot be one, because of a NUL character or a circle of links.
    """
    file = _resolved(file)  # the target of a link is replaced, not the link
    if file.exists() and not file.is_file():
        yield file
        return
    draft = _draft_name(file)
    try:
        yield draft
        with draft.open("rb+") as written:
            os.fsync(written.fileno())
        os.replace(draft, file)
    finally:
        with suppress(OSError):
            draft.unlink()


def _resolved(path: Path) -> Path:
    """The path without links.

    Raises:
        ConfigError: it contains a NUL character, or its links go in a circle.
    """
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _draft_name(file: Path) -> Path:
    return file.with_name(f".{file.stem}.{os.getpid()}{file.suffix}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes of this package from writing a file, or into a folder, meanwhile. A thread can nest it.

    Raises:
        ConfigError: another process has it, or it cannot be written.
    """
    is_folder, key = path.is_dir(), (get_ident(), _resolved(path))
    if key in _held:
        yield
        return
    lock = FileLock(path / LOCK if is_folder else path.with_name(f".{path.name}{LOCK}"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"another process is using {path}; wait for it, or name another") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    _held.add(key)
    try:
        yield
    finally:
        _held.discard(key)
        if not is_folder:
            with suppress(OSError):  # on Windows it cannot be removed while it is open
                os.unlink(lock.lock_file)
        lock.release()


def require_writable(file: Path) -> None:
    """Refuse a file that could not be written later. Nothing is left behind.

    Raises:
        ConfigError: it is a folder, its folder does not exist, or one of them is read-only.
    """
    resolved = _resolved(file)
    try:
        if resolved.exists():
            resolved.open("ab").close()
        if not resolved.exists() or resolved.is_file():
            draft = _draft_name(resolved)
            draft.open("xb").close()
            draft.unlink()
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error
