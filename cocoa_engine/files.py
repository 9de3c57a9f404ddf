"""Files of the package: results appear complete or not at all, and no other user can write to the cache.

Other users may write to the folder of a result, too. Drafts are therefore made under new names, are read by nobody
else, and are written through the descriptor that they were made with.
"""

import io
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from threading import get_ident
from typing import Any, BinaryIO, cast

from filelock import FileLock, Timeout

from cocoa_engine.errors import ConfigError, OutputError, safe_logger

LOCK = ".lock"
"""The name of the lock of a folder. That of a file is ``.NAME.lock``, and is removed at the end."""

_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # Windows has none
_NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)

_held: set[tuple[int, Path]] = set()


def write_file(file: Path, data: str | bytes, mode: int | None = None) -> None:
    """Write a file, a text as UTF-8. The file is replaced when everything has been written to disk.

    The mode and the errors are those of :func:`draft_of`.
    """
    with draft_of(file, mode) as draft:
        draft.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def draft_of(file: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Yield a new file to write to, opened for reading too. At the end it is flushed to disk and becomes ``file``;
    after an error it is removed. Its ``name`` is its path.

    Until then nobody else can read it. Then it has ``mode``, by default that of the file of this user that it replaces,
    or that of any new file. A pipe, a device or a descriptor of this process (:func:`is_stream`) is written directly.

    Raises:
        ConfigError: the path cannot be one, because of a NUL character, a circle of links, or a link of another user.
        OutputError: it cannot be written, here or in the block.
    """
    if is_stream(file):
        with writing_to(file):
            number = _descriptor_of(file)
            stream = os.open(file, os.O_WRONLY) if number is None else os.dup(number)
        with cast(BinaryIO, io.BufferedWriter(_Written(stream, file, str(file), "w"))) as draft:
            yield draft
        return
    file = _resolved(file)  # the target of a link is replaced, not the link
    with writing_to(file):
        mode = _mode_of(file) if mode is None else mode
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name[:64]}.", dir=file.parent)
    try:
        with cast(BinaryIO, io.BufferedRandom(_Written(descriptor, file, name))) as draft:
            yield draft
            with writing_to(file):
                draft.flush()
                if hasattr(os, "fchmod"):
                    os.fchmod(descriptor, mode)
                os.fsync(descriptor)
        with writing_to(file):
            os.replace(name, file)
    finally:
        with suppress(OSError):
            os.unlink(name)


def append(file: Path, data: bytes) -> int:
    """Append to a file, which is created if it is missing. On return the data has been written to disk.

    Returns the offset of the data in the file. The errors are those of :func:`draft_of`.
    """
    with open_in_place(file) as end:
        offset = end.seek(0, os.SEEK_END)
        end.write(data)
        end.flush()
        with writing_to(file):
            os.fsync(end.fileno())
    return offset


def open_in_place(file: Path) -> BinaryIO:
    """Open a file to read, shorten and extend it. It is created if it is missing. What is written goes to its end.

    The errors are those of :func:`draft_of`.
    """
    resolved = _resolved(file)
    with writing_to(file):
        descriptor = os.open(resolved, os.O_RDWR | os.O_APPEND | os.O_CREAT | _NO_LINK | _NO_WAIT, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ConfigError(f"{file} cannot be written: it is not a regular file")
        return cast(BinaryIO, io.BufferedRandom(_Written(descriptor, file, str(file))))


class _Written(io.FileIO):
    """An opened file whose errors of writing are :class:`OutputError`, in whichever library they occur.

    ``file`` is what messages name, ``name`` its path.
    """

    def __init__(self, descriptor: int, file: Path, name: str, mode: str = "r+") -> None:
        super().__init__(descriptor, mode)
        self.name = name
        self._file = file

    def write(self, data: Any, /) -> int:
        with writing_to(self._file):
            return super().write(data)

    def truncate(self, size: int | None = None, /) -> int:
        with writing_to(self._file):
            return super().truncate(size)

    def close(self) -> None:
        with writing_to(self._file):
            super().close()


@contextmanager
def writing_to(file: Path) -> Iterator[None]:
    """Let errors in the block, which only writes, be an :class:`OutputError`: a file or a folder cannot be written."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{file} cannot be written: {error.strerror or error}") from error


def is_stream(file: Path) -> bool:
    """Whether a path is a pipe, a socket, a device or a descriptor of this process, such as ``/dev/stdout``."""
    try:
        return _descriptor_of(file) is not None or (file.exists() and not file.is_file() and not file.is_dir())
    except (OSError, RuntimeError, ValueError):
        return False


def _descriptor_of(file: Path) -> int | None:
    """The number of this process's descriptor that a path names, whatever is opened there."""
    for _ in range(40):
        if file.name.isdecimal() and file.parent.resolve() in (Path(f"/proc/{os.getpid()}/fd"), Path("/dev/fd")):
            return int(file.name)
        if not file.is_symlink():
            break
        file = file.parent / os.readlink(file)
    return None


def _resolved(file: Path) -> Path:
    """The path without links. A link of another user is refused: it could lead anywhere."""
    try:
        file.resolve()  # finds circles
        while file.is_symlink():
            if hasattr(os, "geteuid") and file.lstat().st_uid not in (os.geteuid(), 0):
                raise ConfigError(f"{file} cannot be written: it is a link of another user; remove it or name another")
            file = file.parent / os.readlink(file)
        return file.parent.resolve() / file.name
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _mode_of(file: Path) -> int:
    """The mode that a file will have: its own if it is a file of this user, otherwise that of any new file."""
    with suppress(FileNotFoundError):
        there = file.stat(follow_symlinks=False)
        if not hasattr(os, "geteuid") or there.st_uid == os.geteuid():
            return there.st_mode & 0o777
    # made to be looked at: reading the umask would change it for other threads
    new = file.with_name(f".{token_hex(8)}")
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _NO_LINK, 0o666)
    try:
        return os.fstat(descriptor).st_mode & 0o777
    finally:
        os.close(descriptor)
        os.unlink(new)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes of this package from writing a file, or into a folder, meanwhile. A thread can nest it.

    A pipe, a device or a descriptor (:func:`is_stream`) has no lock. If another process has it, this is a ConfigError.
    """
    is_folder, key = path.is_dir(), (get_ident(), _resolved(path))
    if key in _held or is_stream(path):
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
    """Refuse (ConfigError) a file that could not be written later. Nothing is left behind.

    A pipe, a device or a descriptor (:func:`is_stream`) is not opened: a reader would see its end.
    """
    if is_stream(file):
        return
    resolved = _resolved(file)
    try:
        if resolved.exists():
            os.close(os.open(resolved, os.O_WRONLY | os.O_APPEND))
        tempfile.TemporaryFile(dir=resolved.parent).close()
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error


logger = safe_logger(__name__)

CACHE_VARIABLE = "COCOA_CACHE_DIR"


def cache_directory() -> Path:
    """``$COCOA_CACHE_DIR``, or ``cocoa-engine`` in the platform's cache directory. It may not exist yet.

    Of a user without a home, it is the folder among the temporary files.
    """
    try:
        if chosen := os.environ.get(CACHE_VARIABLE):
            return Path(chosen).expanduser()
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # there is no home
        return temporary_folder()
    return base / "cocoa-engine"


def temporary_folder() -> Path:
    """This user's folder among the temporary files, for what cannot be kept in the cache directory."""
    return Path(tempfile.gettempdir()) / (f"cocoa-engine-{os.geteuid()}" if _OWNERS else "cocoa-engine")


def private_folder(folder: Path, mode: int = 0o755) -> Path:
    """Make a folder of the cache directory if it is missing, and withdraw the rights of others to write to it.

    This includes the folders on the way to it, up to the cache directory; a sticky one, such as ``/tmp``, stays as it
    is. Folders that are made have ``mode``. Returns the folder, which :func:`is_private`.

    Raises:
        OSError: it cannot be made.
        PermissionError: another user could write to it all the same.
    """
    within = [parent for parent in folder.parents if parent.is_relative_to(cache_directory())]
    for level in (*reversed(within), folder):
        _make(level, mode)
        status = level.stat()
        if _OWNERS and level.lstat().st_uid == status.st_uid == os.geteuid() and _is_open(status):
            logger.warning("other users could write to %s; they no longer can", level)
            level.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)
    if why := _open_to_others(folder):
        raise PermissionError(why)
    return folder


def is_private(*paths: Path) -> bool:
    """Whether no other user can have written these files and folders, or can exchange them.

    They and all folders above them, those of links included, belong to this user or root and are writable by no one
    else. Sticky folders above them, such as ``/tmp``, may be: nobody can remove another user's file there. What a
    private file holds is therefore the same whenever it is read.

    Raises:
        OSError: one of them does not exist.
    """
    return not any(map(_open_to_others, paths))


_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OWNERS = hasattr(os, "geteuid")  # Windows has none
_UNMAPPED = 65534  # the owner of everything outside, in a container without root


def _make(folder: Path, mode: int) -> None:
    """Make a folder and those above it, with a mode that leaves others no right to write, whatever the umask is."""
    try:
        folder.mkdir(mode=mode)
    except FileNotFoundError:
        _make(folder.parent, mode)
        folder.mkdir(mode=mode, exist_ok=True)
    except FileExistsError:
        if not folder.is_dir():
            raise


def _is_open(status: os.stat_result) -> bool:
    """Whether other users can write to a file, or can exchange what is in a folder."""
    return bool(status.st_mode & _OTHERS) and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)


def _open_to_others(path: Path) -> str | None:
    """Why another user can write to a path, or exchange it; `None`: none can."""
    if not _OWNERS:
        return None
    ours = (os.geteuid(), 0)
    status = path.stat()
    if status.st_uid not in ours or status.st_mode & _OTHERS:
        return f"{path} belongs to another user, or other users can write to it"
    for step, status in _on_the_way(path.absolute()):
        if status.st_uid not in (*ours, _UNMAPPED):
            return f"{step}, on the way to {path}, belongs to another user"
        if not stat.S_ISLNK(status.st_mode) and _is_open(status):
            return f"other users can write to {step}, on the way to {path}"
    return None


def _on_the_way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """A path and all folders above it, and the same of the target of each link among them."""
    for part in (path, *path.parents):
        status = part.lstat()
        yield part, status
        if stat.S_ISLNK(status.st_mode):
            yield from _on_the_way(part.parent / os.readlink(part))


def read_note(file: Path) -> dict[str, Any] | None:
    """The JSON object in a small file of the cache; `None` if it is damaged, or another user can have written it."""
    try:
        return parse_note(file.read_bytes()) if is_private(file) else None
    except OSError:
        return None


def write_note(file: Path, data: str | bytes) -> None:
    """Write a small file of the cache, which others may read; an OSError if another user could exchange it."""
    private_folder(file.parent)
    write_file(file, data, mode=0o644)


def keep_newest(folder: Path, pattern: str, count: int) -> None:
    """Delete the files of a folder whose names match, except those that were written last."""
    files = sorted(folder.glob(pattern), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[count:]:
        file.unlink(missing_ok=True)


def parse_note(text: bytes) -> dict[str, Any] | None:
    """The JSON object that was written as ``text``; `None` for anything else: a power failure may have damaged it."""
    try:
        note = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, thousands of digits; nested too deeply
        return None
    return note if isinstance(note, dict) else None
