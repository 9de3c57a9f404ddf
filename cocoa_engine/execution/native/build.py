"""The kernels' library: built once for a machine, kept in the cache directory, and tried before it is used.

Whatever stands in the way (no GCC, another processor, another OpenMP runtime) is a reason to do without it, never an
error: torch's own operators then do the same work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

from cocoa_engine.cache_directory import cache_directory
from cocoa_engine.execution.native.structures import mismatch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
# or, tuned for some processors, GCC rounds the products of one row otherwise than those of several
FUSED = "--param=avoid-fma-max-bits=0"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-Wno-psabi", FUSED)
COMPILERS = ("g++", "c++")
FOLDER = "kernels"  # within the cache directory, of this user alone
BUILD_TIMEOUT = 120.0  # seconds; a build takes a few


class Library(NamedTuple):
    """The loaded library, or why there is none."""

    handle: ctypes.CDLL | None
    reason: str | None = None


class _UnfitError(Exception):
    """This machine cannot have the kernels."""


_building = threading.Lock()


def built() -> Library:
    """The kernels, built now if this machine has not built them yet."""
    with _building:
        return _built()


@functools.cache
def _built() -> Library:
    try:
        return Library(_declared(_loaded()))
    except Exception as error:  # whatever a machine comes up with, it only means: not this way
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logger.info("no kernels of our own on this machine, decoding is slower: %s", reason)
        return Library(None, reason)


def _loaded() -> ctypes.CDLL:
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise _UnfitError(f"they are for Linux on x86-64, not {platform.system()} on {platform.machine()}")
    compiler = _compiler()
    name = f"kernels-{_fingerprint(compiler)}.so"
    try:
        kept = cache_directory() / FOLDER / name
        if kept.is_file() and _is_ours(kept):
            return _opened(kept)
    except (OSError, RuntimeError) as error:  # no home directory, none that can be read, none that code may lie in
        logger.info("no kernels can be had from the cache directory: %s", error)
    with tempfile.TemporaryDirectory(prefix="cocoa-kernels-") as folder:
        made = _compile(compiler, Path(folder))
        try:
            _keep(made, cache_directory() / FOLDER / name)
        except (OSError, RuntimeError) as error:
            logger.info("the kernels cannot be kept and are built for this process alone: %s", error)
        return _opened(made)


def _is_ours(kept: Path) -> bool:
    """Whether nobody else can have put a library there, or into it: what is loaded is run."""
    return all(
        status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        for status in (kept.stat(), kept.parent.stat())
    )


def _compiler() -> str:
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise _UnfitError("no C++ compiler was found; install GCC (g++)")


def _fingerprint(compiler: str) -> str:
    """Of all that the library depends on: unlike machines may share a home directory."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=BUILD_TIMEOUT, check=True).stdout
    processor = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), compiler.encode(), version, processor.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, folder: Path) -> Path:
    """Compile and link. Not against an OpenMP runtime: torch has loaded one, and two would fight for the cores."""
    object_file, made = folder / "kernels.o", folder / "kernels.so"
    for command in (
        [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(object_file)],
        [compiler, "-shared", str(object_file), "-o", str(made)],
    ):
        environment = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, timeout=BUILD_TIMEOUT, check=False, env=environment)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").splitlines()
            said = [line for line in lines if "error" in line] or lines or ["?"]
            raise _UnfitError(f"{compiler} could not build them: {said[0].strip()}")
    return made


def _keep(made: Path, kept: Path) -> None:
    """Put a file in its place in one go and whole, for another process may be reading or building it."""
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=kept.name, dir=kept.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(made.read_bytes())
            file.flush()
            os.fsync(file.fileno())
        Path(partial).chmod(0o644)
        Path(partial).replace(kept)
    finally:
        Path(partial).unlink(missing_ok=True)


def _opened(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    except OSError as error:
        if "GOMP" in str(error):
            raise _UnfitError("this build of torch does not bring GNU's OpenMP runtime") from error
        raise


def _declared(handle: ctypes.CDLL) -> ctypes.CDLL:
    if difference := mismatch(handle):
        raise _UnfitError(difference)
    pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    handle.cocoa_linear.argtypes = [pointer, pointer, long, long, pointer, long, integer]
    handle.cocoa_linear.restype = None
    handle.cocoa_attend.argtypes = [
        *(pointer, long, long),  # query
        *(pointer, pointer, long),  # keys, values
        *(pointer, long),  # mask
        pointer,  # out
        *[long] * 5,  # heads, kv_heads, width, head_dim, slots
        *(ctypes.c_float, long, integer),
    ]
    handle.cocoa_attend.restype = None
    handle.cocoa_layers.argtypes = [pointer, pointer, long, *[pointer] * 4, long, integer]
    handle.cocoa_layers.restype = None
    handle.cocoa_move.argtypes = [pointer, pointer, *[long] * 4, pointer, long, long]
    handle.cocoa_move.restype = None
    handle.cocoa_next_tokens.argtypes = [pointer, *[long] * 4, pointer, integer]
    handle.cocoa_next_tokens.restype = None
    return handle
