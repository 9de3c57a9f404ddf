"""Compiles the kernels once per machine and keeps the library in the cache directory.

Any obstacle (no compiler, another processor, another OpenMP runtime) is reported as a reason, never raised as an error:
torch's operators then do the same work.
"""

import ctypes
import functools
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cocoa_engine.errors import safe_logger
from cocoa_engine.files import CACHE_VARIABLE, cache_directory, is_private, private_folder, temporary_folder, write_file
from cocoa_engine.interruptions import free_in_child

logger = safe_logger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = tuple(Path(__file__).with_name(name) for name in ("vectors.h", "blocks.h"))
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fPIC")
GCC_FLAGS = (
    "-Wno-psabi",
    # without this, GCC's tuning for some processors rounds products with one row differently from those with several
    "--param=avoid-fma-max-bits=0",
    # on ARM, GCC would move instructions apart until their operands no longer fit into the registers
    "-fno-schedule-insns",
)
PROCESSORS = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
"""The machines that the kernels run on, and the flag that allows all instructions of their processor."""
PROCESSOR_LINES = ("flags", "Features", "CPU implementer", "CPU part")
"""What /proc/cpuinfo says of the kind of a processor: the first on x86, the others on ARM."""
COMPILERS = ("g++", "c++", "clang++")
FOLDER = "kernels"  # in the cache directory; only this user may write to it
CHECKSUM = ".sha256"  # the ending of the file beside the library
BUILD_TIMEOUT = 120.0  # seconds; a build usually takes 15 to 40

KERNELS = {
    "cocoa_linear": "ppllpli",
    "cocoa_unpack": "lplplpi",
    "cocoa_attend": "pllpplplplllllfli",  # query, keys and values, mask, out, sizes
    "cocoa_layers": "pplpppplplpli",  # stack and leaves, x, taps, source heads, masses
    "cocoa_move": "ppllllpll",
    "cocoa_next_tokens": "pllllpi",
}
"""The arguments of each kernel: p for a pointer, l for a long, i for an int, f for a float."""

_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}


class Library(NamedTuple):
    """The loaded library, or the reason why there is none."""

    handle: ctypes.CDLL | None
    reason: str | None = None


class _UnfitError(Exception):
    """The kernels cannot run on this machine."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_building = free_in_child(threading.Lock())


def built() -> Library:
    """Load the kernels, and compile them first if this machine has no compiled library. The result is cached."""
    with _building:
        return _built()


@functools.cache
def _built() -> Library:
    try:
        return Library(_loaded())
    except Exception as error:  # after any failure, torch's operators do the work
        reason = first_line(error)
        logger.info("the native kernels are not available, decoding is slower: %s", reason)
        return Library(None, reason)


def _loaded() -> ctypes.CDLL:
    if platform.system() != "Linux" or platform.machine() not in PROCESSORS:
        here = f"{platform.system()} on {platform.machine()}"
        raise _UnfitError(f"the kernels need Linux on x86-64 or 64-bit ARM; this is {here}")
    compiler = _compiler()
    name = f"kernels-{_fingerprint(compiler)}.so"
    folders = [cache_directory() / FOLDER, temporary_folder()]
    for folder in folders:
        try:
            if (handle := _kept(folder / name)) is not None:
                return handle
        except OSError as error:  # it cannot be read, or nothing in it can be run (noexec)
            logger.warning("the kernels in %s cannot be used: %s", folder, error)
    folders = [folder for folder in folders if _is_closed(folder) and _holds_libraries(folder)]
    if not folders and not _holds_libraries(Path(tempfile.gettempdir())):
        raise _UnfitError(
            f"neither the cache directory nor {tempfile.gettempdir()} can hold a library to load: each is mounted "
            f"noexec, or cannot be written; set {CACHE_VARIABLE} to a folder elsewhere"
        )
    with tempfile.TemporaryDirectory(prefix="cocoa-kernels-", dir=next(iter(folders), None)) as temporary:
        if not is_private(Path(temporary)):
            raise _UnfitError(
                f"other users could exchange a library in {tempfile.gettempdir()} before it is loaded; set "
                f"{CACHE_VARIABLE} to a folder of yours"
            )
        made = _compile(compiler, Path(temporary))
        for folder in folders:
            try:
                # each atomically: another process may be reading or building it. If two build it at the same time and
                # their libraries differ, the checksum may be that of the other one, and the next process builds again
                data = made.read_bytes()
                write_file(folder / name, data, mode=0o644)
                write_file((folder / name).with_suffix(CHECKSUM), _checksum(data), mode=0o644)
                if (handle := _kept(folder / name)) is not None:
                    return handle
            except OSError as error:
                logger.info("the kernels cannot be stored in %s: %s", folder, error)
        logger.warning(
            "the kernels are built for this process alone; set %s to a folder to keep them in", CACHE_VARIABLE
        )
        return _declared(_opened(made.open("rb")))


def _is_closed(folder: Path) -> bool:
    """Whether nobody else can write to a folder, which is made if it is missing. Loading a library runs its code."""
    try:
        private_folder(folder)
    except OSError as error:
        where = "the cache directory" if folder.name == FOLDER else "the temporary folder"
        logger.warning("the kernels are not kept in %s: %s", where, error)
        return False
    return True


def _holds_libraries(folder: Path) -> bool:
    """Whether a file can be written to a folder and its content be run, as the loader does with a library."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
            mmap.mmap(file.fileno(), 1, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as error:
        logger.info("the kernels cannot be stored in %s: %s", folder, error)
        return False
    return True


def _kept(library: Path) -> ctypes.CDLL | None:
    """Load a library, if it is there, only this user can have written it, and it is as it was built.

    It is checked and loaded through one descriptor: what another file in its place has is not loaded. Loading a
    shortened file would end the process (SIGBUS). OSError: it cannot be loaded.
    """
    if not library.is_file():
        return None
    checksum, file = library.with_suffix(CHECKSUM), library.open("rb")
    if (
        checksum.is_file()
        and is_private(library, checksum)
        and os.path.samestat(os.fstat(file.fileno()), library.stat())
        and checksum.read_bytes() == _checksum(file.read())
    ):
        return _declared(_opened(file))
    file.close()
    logger.warning("%s is damaged, or other users could write it; it is built again", library)
    return None


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode("ascii")


def _compiler() -> str:
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and (compiler := shutil.which(name)):
            return compiler
    raise _UnfitError("no C++ compiler was found; install GCC (g++)")


def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, timeout=BUILD_TIMEOUT, check=True).stdout


def flags(version: bytes) -> tuple[str, ...]:
    """The flags of a compiler whose ``--version`` is given; without the one that names the processor."""
    return FLAGS if b"clang" in version else (*FLAGS, *GCC_FLAGS)


def _fingerprint(compiler: str) -> str:
    """A hash of everything that the library depends on. Different machines may share a home directory."""
    version = _version(compiler)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = sorted({line for line in lines if line.startswith(PROCESSOR_LINES)})
    sources = [file.read_bytes() for file in (SOURCE, *HEADERS)]
    parts = (*sources, *(part.encode() for part in (*flags(version), compiler, *processor)), version)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, folder: Path) -> Path:
    """Compile and link, without an OpenMP runtime: torch has loaded one, and a second would compete for the cores."""
    object_file, made = folder / "kernels.o", folder / "kernels.so"
    all_flags = (*flags(_version(compiler)), PROCESSORS[platform.machine()])
    for command in (
        [compiler, *all_flags, f"-I{HEADERS[0].parent}", "-c", str(SOURCE), "-o", str(object_file)],
        [compiler, "-shared", str(object_file), "-o", str(made)],
    ):
        environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)}  # the compiler has files of its own
        done = subprocess.run(command, capture_output=True, timeout=BUILD_TIMEOUT, check=False, env=environment)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").splitlines()
            said = [line for line in lines if "error" in line] or lines or ["?"]
            raise _UnfitError(f"{compiler} could not compile the kernels: {said[0].strip()}")
    return made


def _opened(file: BinaryIO) -> ctypes.CDLL:
    """Load an opened library. Its descriptor stays open: the loader takes another file of the same number for it."""
    with file:
        descriptor = os.dup(file.fileno())
    try:
        handle = ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=os.RTLD_NOW)
        handle._name = file.name  # which says the build
        return handle
    except OSError as error:
        os.close(descriptor)
        if "GOMP" in str(error):
            raise _UnfitError("this build of torch does not include GNU's OpenMP runtime") from error
        raise


def _declared(handle: ctypes.CDLL) -> ctypes.CDLL:
    for kernel, arguments in KERNELS.items():
        function = getattr(handle, kernel)
        function.argtypes, function.restype = [_TYPES[letter] for letter in arguments], None
    return handle
