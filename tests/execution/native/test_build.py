"""Building the kernels: once, beside other processes, and never an error where they cannot be had."""

import logging
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.execution.forward import linears, trial
from cocoa_engine.execution.native import build
from cocoa_engine.files import CACHE_VARIABLE
from tests.helpers.libraries import QUICK_FLAGS, forget, keeping_compiler, needs_kernels
from tests.helpers.processes import LIMIT, forked
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, needs_kernels]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keeping_compiler(tmp_path_factory.mktemp("compiler"))


class Machine(NamedTuple):
    """One of which nothing is remembered, with folders that are empty."""

    cache: Path
    temporary: Path
    patch: pytest.MonkeyPatch
    log: pytest.LogCaptureFixture

    def libraries(self, cache: Path | None = None) -> list[Path]:
        return sorted(((cache or self.cache) / build.FOLDER).glob("*.so"))

    def start_again(self, *, compiles: bool) -> None:
        """Load the kernels as the next process would."""
        build._built.cache_clear()
        compiled: list[Path] = []
        original = build._compile
        with self.patch.context() as patch:
            patch.setattr(build, "_compile", lambda *given: (compiled.append(original(*given)), compiled[-1])[1])
            assert build.built().handle is not None, build.built().reason
        assert len(compiled) == compiles

    def warnings(self) -> list[str]:
        return [record.getMessage() for record in self.log.records if record.levelno >= logging.WARNING]


@pytest.fixture
def machine(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Machine]:
    made = Machine(tmp_path / "cache", tmp_path / "tmp", monkeypatch, caplog)
    monkeypatch.setenv(CACHE_VARIABLE, str(made.cache))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "FLAGS", QUICK_FLAGS)
    made.temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made.temporary))
    caplog.set_level(logging.INFO, logger="cocoa_engine")
    forget()
    yield made
    forget()


TOGETHER = """#!/bin/sh
case " $* " in *" -c "*)
    : > "$0.$$"
    until [ "$(ls "$0".* | wc -l)" -ge 2 ]; do sleep 0.05; done ;;
esac
exec "{compiler}" "$@"
"""


def test_it_is_built_once_for_each_source(machine: Machine, tmp_path: Path) -> None:
    machine.start_again(compiles=True)
    (made,) = machine.libraries()
    written = made.stat().st_mtime_ns
    machine.start_again(compiles=False)
    assert made.stat().st_mtime_ns == written
    changed = tmp_path / "kernels.cpp"
    changed.write_text(build.SOURCE.read_text() + "// changed\n")
    machine.patch.setattr(build, "SOURCE", changed)
    machine.start_again(compiles=True)
    assert len(machine.libraries()) == 2


def test_processes_that_build_at_once_both_have_it(machine: Machine, compiler: Path, tmp_path: Path) -> None:
    """Each compiles, and neither is done before the other has begun."""
    together = tmp_path / "together-g++"
    together.write_text(TOGETHER.format(compiler=compiler))
    together.chmod(0o755)
    machine.patch.setenv("CXX", str(together))
    assert forked(*[lambda: sys.exit(trial.obstacle())] * 2) == [0, 0]
    assert len(list(tmp_path.glob("together-g++.*"))) == 2
    assert len(machine.libraries()) == 1


# Where they are kept, and where they cannot be had.


def forbid_execution(machine: Machine, *folders: Path) -> None:
    """No file of these folders can be mapped to be run, as if they were mounted noexec."""
    opened, mapped = build._opened, build.mmap.mmap

    def require_exec(path: Path) -> None:
        if any(path.is_relative_to(folder) for folder in folders):
            raise PermissionError(f"{path}: failed to map segment from shared object")

    def open_library(file: Any) -> Any:
        require_exec(Path(file.name))
        return opened(file)

    def map_file(descriptor: int, *given: Any, prot: int = 0, **options: Any) -> Any:
        if prot & mmap.PROT_EXEC:
            require_exec(Path(f"/proc/self/fd/{descriptor}").readlink())
        return mapped(descriptor, *given, prot=prot, **options)

    machine.patch.setattr(build, "_opened", open_library)
    machine.patch.setattr(build, "mmap", SimpleNamespace(**{**vars(mmap), "mmap": map_file}))


BROKEN = "int main( { return 0; }\n"
OTHER_OPENMP = 'extern "C" void GOMP_not_there(); extern "C" void cocoa_linear() { GOMP_not_there(); }\n'


def use_source(machine: Machine, text: str) -> None:
    other = machine.temporary.with_name("other.cpp")
    other.write_text(text)
    machine.patch.setattr(build, "SOURCE", other)


FAULTS: dict[str, Callable[[Machine], Any]] = {
    "no folder": lambda machine: machine.cache.write_text("a file where the folder should be"),
    "no home": lambda machine: machine.patch.setenv(CACHE_VARIABLE, "~nobody-of-that-name/cache"),
    "no temporary folder": lambda machine: (machine.temporary / f"cocoa-engine-{os.getuid()}").write_text("here too"),
    # others could exchange what is built there
    "open temporary folder": lambda machine: machine.temporary.chmod(0o777),
    "noexec cache": lambda machine: forbid_execution(machine, machine.cache),
    "noexec temporary folder": lambda machine: forbid_execution(machine, machine.temporary),
    "no compiler": lambda machine: machine.patch.setattr(shutil, "which", lambda _: None),
    "other processor": lambda machine: machine.patch.setattr(platform, "machine", lambda: "riscv64"),
    "broken source": lambda machine: use_source(machine, BROKEN),
    "other OpenMP": lambda machine: use_source(machine, OTHER_OPENMP),
}


@pytest.mark.parametrize(
    ("faults", "place", "said"),
    [
        ("no folder", "temporary", ["not kept in the cache directory"]),
        ("no home", "temporary", []),
        ("noexec cache", "temporary", []),
        ("noexec temporary folder", "cache", []),
        ("open temporary folder", "cache", ["not kept in the temporary folder"]),
        ("no folder, no temporary folder", None, ["not kept in the cache directory", "for this process alone"]),
    ],
)
def test_another_folder_takes_the_place_of_one_that_cannot_be_used(
    faults: str, place: str | None, said: list[str], machine: Machine
) -> None:
    for fault in faults.split(", "):
        FAULTS[fault](machine)
    used: list[Path] = []
    compile_in = build._compile
    with machine.patch.context() as patch:
        patch.setattr(build, "_compile", lambda compiler, folder: used.append(folder) or compile_in(compiler, folder))
        assert trial.obstacle() is None
    assert len(used) == 1
    assert used[0].is_relative_to(machine.cache) or faults != "open temporary folder"
    assert all(message in machine.log.text for message in said)
    assert bool(machine.warnings()) == bool(said)
    for folder in ("cache", "temporary"):
        assert bool([*getattr(machine, folder).rglob("kernels*.so")]) == (folder == place)
    machine.start_again(compiles=place is None)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ("no compiler", "install GCC"),
        ("broken source", "could not compile"),
        ("other processor", "Linux on riscv64"),
        ("other OpenMP", "OpenMP"),
        ("noexec cache, noexec temporary folder", f"mounted noexec.*set {CACHE_VARIABLE} to a folder elsewhere"),
        ("no folder, noexec cache, noexec temporary folder", f"mounted noexec.*set {CACHE_VARIABLE} to a folder"),
        ("no folder, open temporary folder", "other users could exchange a library"),
    ],
)
def test_without_kernels_torch_does_the_work(faults: str, said: str, machine: Machine) -> None:
    """Nothing is compiled that could not be loaded."""
    stock = CocoaEngine(tiny_model("llama"), tiny_tokenizer(), runtime=Runtime(linears="stock"))
    expected = stock.generate([5, 6, 7], max_new_tokens=12)
    forget()
    for fault in faults.split(", "):
        FAULTS[fault](machine)
    if "folder" in faults:
        machine.patch.setattr(build, "_compile", lambda *_: pytest.fail("it cannot be loaded"))
    reason = trial.obstacle()
    assert re.search(said, str(reason), re.DOTALL)
    assert machine.log.messages[-1].endswith(f"decoding is slower: {reason}")
    assert not list(machine.temporary.rglob("*.so"))
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer(), runtime=Runtime(linears="native"))
    info = engine.info()
    assert info.linears == ("packed" if linears.can_pack() else "transposed")
    assert info.native_obstacle == reason
    assert engine.generate([5, 6, 7], max_new_tokens=12).token_ids == expected.token_ids


def truncate(library: Path) -> None:
    start = library.read_bytes()[:4096]  # loading this would end the process
    library.unlink()  # this process has mapped the file
    library.write_bytes(start)


def replace_by_another(library: Path) -> None:
    library.unlink()
    source = library.with_suffix(".cpp")
    source.write_text('extern "C" int other() { return 0; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=LIMIT)
    source.unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "is damaged"),
        (replace_by_another, "is damaged"),
        (lambda library: library.with_suffix(".sha256").unlink(), "is damaged"),
        (lambda library: library.with_suffix(".sha256").write_bytes(b"\xff"), "is damaged"),
        (lambda library: library.chmod(0o666), "other users could write it"),
        (lambda library: library.with_suffix(".sha256").chmod(0o666), "other users could write it"),
    ],
    ids=["truncated", "another", "no checksum", "odd checksum", "writable", "checksum writable"],
)
def test_a_library_that_is_not_as_it_was_built_is_built_again(
    damage: Callable[[Path], Any], said: str, machine: Machine
) -> None:
    assert build.built().handle is not None
    (made,) = machine.libraries()
    damage(made)
    machine.start_again(compiles=True)
    (message,) = machine.warnings()
    assert said in message
    assert not made.stat().st_mode & 0o022
    machine.start_again(compiles=False)


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        (None, "other users could write to"),
        pytest.param(
            12345,
            "belongs to another user",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away"),
        ),
    ],
)
def test_a_folder_that_others_could_write_to_is_closed_to_them_or_left(
    owner: int | None, said: str, machine: Machine
) -> None:
    folder = machine.cache / build.FOLDER
    folder.mkdir(parents=True)
    if owner is None:
        folder.chmod(0o777)
    else:
        os.chown(folder, owner, owner)
    machine.start_again(compiles=True)
    (message,) = machine.warnings()
    assert said in message
    assert not folder.stat().st_mode & 0o022
    assert bool(machine.libraries()) == (owner is None)
    assert bool(list(machine.temporary.glob("cocoa-engine-*/*.so"))) == (owner is not None)
    machine.start_again(compiles=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.usefixtures("machine")
def test_the_trial_is_the_same_whatever_torch_s_defaults(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            assert trial.obstacle() is None
    finally:
        torch.set_default_dtype(before)


def test_a_compiler_may_say_anything(machine: Machine, compiler: Path, tmp_path: Path) -> None:
    wrapper = tmp_path / "my compiler"
    wrapper.write_text(f'#!/bin/sh\nprintf "\\351\\377" >&2\nexec "{compiler}" "$@"\n')
    wrapper.chmod(0o755)
    machine.patch.setenv("CXX", str(wrapper))
    assert trial.obstacle() is None


@pytest.mark.parametrize(
    ("asked", "dtype", "free", "linear_backend"),
    [
        ("auto", torch.float32, 2**40, "native"),
        ("auto", torch.float32, 0, "native"),
        ("auto", torch.bfloat16, 2**40, "packed" if linears.can_pack(torch.bfloat16) else "native"),
        ("auto", torch.bfloat16, 0, "native"),  # no second copy
        ("auto", torch.float16, 0, "transposed"),
        ("native", torch.bfloat16, 2**40, "native"),
        ("packed", torch.float32, 0, "packed"),
        ("transposed", torch.float32, 0, "transposed"),
        ("bfloat16", torch.float32, 0, "bfloat16"),
        ("stock", torch.float32, 2**40, "stock"),
    ],
)
def test_which_linear_backend_is_chosen(
    asked: str, dtype: torch.dtype, free: int, linear_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))  # type: ignore[attr-defined]
    assert linears.choose_linear_backend(tiny_model("llama").to(dtype), asked) == linear_backend


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor")
def test_x86_without_avx2_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build.PROCESSORS, "x86_64", "-march=x86-64")
    with pytest.raises(build._UnfitError, match="needs AVX2 or AVX-512"):
        build._compile(build._compiler(), tmp_path)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_library_that_others_could_exchange_is_built_again(level: int, machine: Machine) -> None:
    """They could write to its folder, to the cache directory, or to the folder above it."""
    cache = machine.cache / "below"
    machine.patch.setenv(CACHE_VARIABLE, str(cache))
    assert build.built().handle is not None
    (made,) = machine.libraries(cache)
    place = made.parents[level]
    place.chmod(0o777)
    machine.start_again(compiles=True)
    assert place.stat().st_mode & 0o022 == (0o022 if level == 2 else 0)
    machine.start_again(compiles=False)


def test_what_was_checked_is_loaded(machine: Machine) -> None:
    """A library that takes the place of the checked one before it is loaded is not."""
    assert build.built().handle is not None
    (made,) = machine.libraries()
    opened = build._opened

    def exchange(file: Any) -> Any:
        replace_by_another(made)
        return opened(file)

    machine.patch.setattr(build, "_opened", exchange)
    machine.start_again(compiles=False)  # the other one has no kernels
    assert build.built().handle._name == str(made)


def test_an_exchange_while_it_is_checked_is_seen(machine: Machine) -> None:
    """The opened file is another one than that whose owner and rights are looked at."""
    assert build.built().handle is not None
    (made,) = machine.libraries()
    good = made.read_bytes()

    def exchange(*paths: Path) -> bool:
        made.unlink()
        made.write_bytes(good)
        return True

    machine.patch.setattr(build, "is_private", exchange)
    assert build._kept(made) is None
