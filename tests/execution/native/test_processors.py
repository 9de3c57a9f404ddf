"""The kernels for other processors: NEON of 64-bit ARM, cross-compiled and emulated, and every kind of x86-64.

They compile the kernels seven times, which takes a minute and a half: ``make processors`` runs them, ``make test`` does
not.
Debian's packages ``g++-aarch64-linux-gnu``, ``qemu-user`` and ``clang`` have what these tests skip without.
"""

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch

from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.native import build, operators
from cocoa_engine.model.blocks import BLOCK_KINDS
from tests.helpers.emulated_kernels import DRIVER, EmulatedKernels
from tests.helpers.in_threads import threads
from tests.helpers.libraries import forget, needs_kernels

pytestmark = [pytest.mark.slow, pytest.mark.processors]

LIMIT = 600.0  # seconds for one compilation, on a busy machine
CROSS = {"gcc": ("aarch64-linux-gnu-g++",), "clang": ("clang++", "--target=aarch64-linux-gnu")}
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")

# the bits of an instruction that say which one it is, and their value
NEON = {
    "fmla v.4s": (0xFFE0FC00, 0x4E20CC00),
    "fmla v.4s by lane": (0xFFC0F400, 0x4F801000),
    "tbl v.16b": (0xFFE0FC00, 0x4E000000),
    "ucvtf v.4s": (0xFFFFFC00, 0x6E21D800),
    "fcvtl v.4s from halves": (0xFFFFFC00, 0x0E217800),
}


class Cross(NamedTuple):
    """The kernels, compiled for ARM."""

    compiler: tuple[str, ...]
    flags: tuple[str, ...]
    kernels: Path  # the object file


def run(*command: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(list(map(str, command)), capture_output=True, timeout=LIMIT, check=False)


def succeed(*command: str | Path) -> bytes:
    done = run(*command)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout


@pytest.fixture(scope="module", params=list(CROSS))
def cross(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cross:
    compiler, folder = CROSS[request.param], tmp_path_factory.mktemp(request.param)
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"{compiler[0]} is not installed")
    (folder / "empty.cpp").write_text("#include <vector>\n#include <linux/futex.h>\n")
    if (done := run(*compiler, "-c", folder / "empty.cpp", "-o", folder / "empty.o")).returncode:
        pytest.skip(f"{compiler[0]} has no headers for ARM: {done.stderr.decode(errors='replace').splitlines()[0]}")
    flags = build.flags(succeed(compiler[0], "--version"))
    made = folder / "kernels.o"
    succeed(*compiler, *flags, "-Werror", f"-I{build.SOURCE.parent}", "-c", build.SOURCE, "-o", made)
    return Cross(compiler, flags, made)


@pytest.fixture(scope="module")
def emulated(cross: Cross) -> Iterator[EmulatedKernels]:
    if EMULATOR is None:
        pytest.skip("qemu-aarch64 is not installed")
    program = cross.kernels.with_name("driver")
    flags = [flag for flag in cross.flags if flag != "-O3"]
    succeed(*cross.compiler, *flags, "-static", DRIVER, cross.kernels, "-o", program, "-lgomp", "-pthread")
    kernels = EmulatedKernels([EMULATOR, str(program)])
    build._declared(cast(ctypes.CDLL, kernels))
    yield kernels
    kernels.close()


@pytest.fixture
def on_arm(emulated: EmulatedKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use(emulated, monkeypatch)
    yield
    forget()


def use(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setattr(build, "_loaded", lambda: library)
    assert operators.handle() is library


def check_every_kernel() -> None:
    """Compare with torch, as an engine does before it uses the kernels; and with the numbers of gguf."""
    assert trial.obstacle() is None
    with torch.no_grad():
        for kind in BLOCK_KINDS:
            for found, expected in trial._blocks(kind):
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def check_rows_alone() -> None:
    """A row is the same to the bit whatever is fed with it."""
    for kind in BLOCK_KINDS:
        weight = trial.sample_blocks(kind, 11, 512, torch.Generator().manual_seed(2))
        linears, x = operators.Linears([weight], [None]), torch.randn(9, 512)
        alone = torch.cat([linears(row[None]) for row in x])
        for rows in range(2, 10):
            assert torch.equal(linears(x[:rows]), alone[:rows]), (kind, rows)
    for weights, both in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        linears = operators.Linears([torch.randn(11, 70).to(weights)], [None], rounds_inputs=both)
        x = torch.randn(13, 70)
        alone = torch.cat([linears(row[None]) for row in x])
        for rows in range(2, 14):
            assert torch.equal(linears(x[:rows]), alone[:rows]), (weights, both, rows)


def test_neon_instructions_do_the_work(cross: Cross) -> None:
    code = cross.kernels.read_bytes()
    words = [int.from_bytes(code[at : at + 4], "little") for at in range(0, len(code) - 3, 4)]
    counts = {name: sum(word & mask == value for word in words) for name, (mask, value) in NEON.items()}
    fused = counts["fmla v.4s"] + counts["fmla v.4s by lane"]
    assert fused > 10_000, counts
    assert min(counts["tbl v.16b"], counts["ucvtf v.4s"]) > 1000, counts
    assert counts["fcvtl v.4s from halves"] > 10, counts


def test_clang_accepts_the_source_for_macos() -> None:
    """With headers of Linux: Apple's are not free, and the kernels are not built on macOS."""
    folders = sorted(Path("/usr/aarch64-linux-gnu/include/c++").glob("*"))
    if shutil.which("clang++") is None or not folders:
        pytest.skip("needs clang++ and C++ headers for ARM")
    headers = (folders[-1], folders[-1] / "aarch64-linux-gnu", folders[-1].parents[1])
    included = [option for folder in (*headers, build.SOURCE.parent) for option in ("-isystem", folder)]
    # Clang defines __nonnull for Apple, which is a name of glibc
    options = ("-std=c++17", "-fsyntax-only", "-nostdinc++", "-U__nonnull", "-D_GNU_SOURCE")
    command = ("clang++", "--target=arm64-apple-macos11", *options, *included, build.SOURCE)
    succeed(*command)
    macros = succeed(*command, "-dM", "-E").decode()
    assert "#define NEON 1\n" in macros
    assert "#define __linux__" not in macros


@pytest.mark.usefixtures("on_arm")
def test_the_kernels_compute_the_same_on_arm() -> None:
    check_every_kernel()
    check_rows_alone()
    with threads(2):
        assert trial.obstacle() is None


@needs_kernels
@pytest.mark.parametrize(
    ("compiler", "kind", "needed"),
    [  # beside the one that this machine has; plain vectors, which none builds by default, by the faster compiler alone
        ("g++", "x86-64-v3", "avx2"),
        ("clang++", "x86-64", "sse2"),
        ("clang++", "x86-64-v3", "avx2"),
        ("clang++", "native", "sse2"),
    ],
)
def test_every_compiler_and_kind_of_x86_computes_the_same(
    compiler: str, kind: str, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = Path("/proc/cpuinfo")
    features = cpuinfo.read_text().split() if cpuinfo.exists() else []
    if platform.machine() != "x86_64" or needed not in features or shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler} and an x86-64 processor with {needed}")
    monkeypatch.setitem(build.PROCESSORS, "x86_64", f"-march={kind}")
    flags = ("-O1" if flag == "-O3" else flag for flag in build.FLAGS)
    monkeypatch.setattr(build, "FLAGS", (*flags, "-DPLAIN_VECTORS"))
    library = build._declared(ctypes.CDLL(str(build._compile(compiler, tmp_path))))
    try:
        use(library, monkeypatch)
        check_every_kernel()
        check_rows_alone()
    finally:
        forget()
