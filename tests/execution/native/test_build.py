"""Building the kernels: once, beside other processes, and never an error where they cannot be had."""

from __future__ import annotations

import logging
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.cache_directory import CACHE_VARIABLE
from cocoa_engine.execution.forward import linears, trial
from cocoa_engine.execution.native import build
from tests.helpers.libraries import QUICK_FLAGS, forget, keeping_compiler, needs_kernels
from tests.helpers.processes import LIMIT, python
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keeping_compiler(tmp_path_factory.mktemp("compiler"))


@pytest.fixture
def anew(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, and nothing remembered of the machine."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "FLAGS", QUICK_FLAGS)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    forget()
    yield folder
    forget()


BUILDS_TWICE = f"""
import os
from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.native import build
build.FLAGS = {QUICK_FLAGS}
child = os.fork()  # both have imported torch already
os.write(1, str(trial.obstacle()).encode() + b"\\n")  # in one piece, unlike print
assert not child or os.waitpid(child, 0)[1] == 0
"""

TOGETHER = """#!/bin/sh
case " $* " in *" -c "*)
    : > "$0.$$"
    until [ "$(ls "$0".* | wc -l)" -ge 2 ]; do sleep 0.05; done ;;
esac
exec "{compiler}" "$@"
"""


def libraries(cache: Path) -> list[Path]:
    return sorted((cache / build.FOLDER).glob("*.so"))


def temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"cocoa-engine-{os.getuid()}"


def start_again(monkeypatch: pytest.MonkeyPatch, *, compiles: bool) -> None:
    """Load the kernels as the next process would."""
    build._built.cache_clear()
    compiled: list[Path] = []
    original = build._compile
    with monkeypatch.context() as patch:
        patch.setattr(build, "_compile", lambda *given: (compiled.append(original(*given)), compiled[-1])[1])
        assert build.built().handle is not None, build.built().reason
    assert len(compiled) == compiles


@needs_kernels
def test_it_is_built_once_for_each_source(anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_again(monkeypatch, compiles=True)
    (made,) = libraries(anew)
    written = made.stat().st_mtime_ns
    start_again(monkeypatch, compiles=False)
    assert made.stat().st_mtime_ns == written
    changed = tmp_path / "kernels.cpp"
    changed.write_text(build.SOURCE.read_text() + "// changed\n")
    monkeypatch.setattr(build, "SOURCE", changed)
    start_again(monkeypatch, compiles=True)
    assert len(libraries(anew)) == 2


@needs_kernels
def test_processes_that_build_at_once_both_have_it(
    anew: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compiles, and neither is done before the other has begun."""
    together = tmp_path / "together-g++"
    together.write_text(TOGETHER.format(compiler=compiler))
    together.chmod(0o755)
    monkeypatch.setenv("CXX", str(together))
    assert python(BUILDS_TWICE).split() == ["None", "None"]
    assert len(list(tmp_path.glob("together-g++.*"))) == 2
    assert len(libraries(anew)) == 1


@needs_kernels
@pytest.mark.parametrize("why", ["no folder", "no home"])
def test_without_the_cache_directory_they_are_kept_with_temporary_files(
    why: str, anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "no home":
        monkeypatch.setenv(CACHE_VARIABLE, "~nobody-of-that-name/cache")
    else:
        anew.write_text("a file where the folder should be")
    with caplog.at_level(logging.INFO, logger="cocoa_engine"):
        assert trial.obstacle() is None
    assert ("not kept in the cache directory" in caplog.text) == (why == "no folder")
    assert list(temporary_folder().rglob("kernels*.so"))
    start_again(monkeypatch, compiles=False)


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


@needs_kernels
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
    damage: Callable[[Path], Any],
    said: str,
    anew: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert build.built().handle is not None
    (made,) = libraries(anew)
    damage(made)
    with caplog.at_level(logging.WARNING, logger="cocoa_engine"):
        start_again(monkeypatch, compiles=True)
    (record,) = caplog.records
    assert said in record.message
    assert not made.stat().st_mode & 0o022
    start_again(monkeypatch, compiles=False)


@needs_kernels
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
    owner: int | None, said: str, anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = anew / build.FOLDER
    folder.mkdir(parents=True)
    if owner is None:
        folder.chmod(0o777)
    else:
        os.chown(folder, owner, owner)
    with caplog.at_level(logging.WARNING, logger="cocoa_engine"):
        start_again(monkeypatch, compiles=True)
    (record,) = caplog.records
    assert said in record.message
    assert not folder.stat().st_mode & 0o022
    assert bool(libraries(anew)) == (owner is None)
    assert bool(list(temporary_folder().glob("*.so"))) == (owner is not None)
    start_again(monkeypatch, compiles=False)


def forbid_execution(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """No file of these folders can be mapped to be run, as if they were mounted noexec."""
    opened, mapped = build._opened, mmap.mmap

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

    monkeypatch.setattr(build, "_opened", open_library)
    monkeypatch.setattr(build, "mmap", SimpleNamespace(**{**vars(mmap), "mmap": map_file}))


@needs_kernels
@pytest.mark.parametrize("noexec", ["temporary", "cache"])
def test_one_folder_may_forbid_execution(
    noexec: str, anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forbid_execution(monkeypatch, Path(tempfile.gettempdir()) if noexec == "temporary" else anew)
    with caplog.at_level(logging.WARNING, logger="cocoa_engine"):
        start_again(monkeypatch, compiles=True)
        start_again(monkeypatch, compiles=False)
    assert not caplog.records


@needs_kernels
@pytest.mark.parametrize("cache", ["noexec", "missing"])
def test_where_all_folders_forbid_execution_nothing_is_built(
    cache: str, anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if cache == "missing":
        anew.write_text("a file where the folder should be")
    forbid_execution(monkeypatch, anew, Path(tempfile.gettempdir()))
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("it cannot be loaded"))
    with caplog.at_level(logging.INFO, logger="cocoa_engine"):
        reason = trial.obstacle()
    assert reason is not None
    assert "mounted noexec" in reason
    assert f"set {CACHE_VARIABLE} to a folder elsewhere" in reason
    assert caplog.messages[-1].endswith(f"decoding is slower: {reason}")
    assert not list(Path(tempfile.gettempdir()).rglob("*.so"))


@needs_kernels
def test_without_any_folder_they_are_built_for_the_process(
    anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    anew.write_text("a file where the folder should be")
    temporary_folder().write_text("here too")
    with caplog.at_level(logging.INFO, logger="cocoa_engine"):
        assert trial.obstacle() is None
    assert "for this process alone" in caplog.text


@needs_kernels
@pytest.mark.parametrize("kept", [True, False])
def test_they_are_not_built_where_others_could_exchange_them(
    anew: Path, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder for temporary files that is open and not sticky: what is loaded is not built there."""
    Path(tempfile.gettempdir()).chmod(0o777)
    if not kept:
        anew.write_text("a file where the folder should be")
    used: list[Path] = []
    compile_in = build._compile
    monkeypatch.setattr(build, "_compile", lambda compiler, folder: used.append(folder) or compile_in(compiler, folder))
    reason = trial.obstacle()
    assert all(folder.is_relative_to(anew) for folder in used)
    if kept:
        assert (reason, len(used)) == (None, 1)
    else:
        assert "other users could exchange a library" in str(reason)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_trial_is_the_same_whatever_torch_s_defaults(anew: Path, dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            assert trial.obstacle() is None
    finally:
        torch.set_default_dtype(before)


def no_compiler(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(shutil, "which", lambda _: None)


def other_processor(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(platform, "machine", lambda: "riscv64")


def source(text: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    def spoil(patch: pytest.MonkeyPatch, folder: Path) -> None:
        (folder / "other.cpp").write_text(text)
        patch.setattr(build, "SOURCE", folder / "other.cpp")

    return spoil


BROKEN = "int main( { return 0; }\n"
OTHER_OPENMP = 'extern "C" void GOMP_not_there(); extern "C" void cocoa_linear() { GOMP_not_there(); }\n'


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(no_compiler, "install GCC", id="no compiler"),
        pytest.param(source(BROKEN), "could not compile", id="broken", marks=needs_kernels),
        pytest.param(other_processor, "Linux on riscv64", id="other processor", marks=needs_kernels),
        pytest.param(source(OTHER_OPENMP), "OpenMP", id="other OpenMP", marks=needs_kernels),
    ],
)
def test_without_kernels_torch_does_the_work(
    spoil: Callable[[pytest.MonkeyPatch, Path], None],
    said: str,
    anew: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = CocoaEngine(tiny_model("llama"), tiny_tokenizer(), runtime=Runtime(linears="stock"))
    expected = stock.generate([5, 6, 7], max_new_tokens=12)
    forget()
    spoil(monkeypatch, tmp_path)
    reason = trial.obstacle()
    assert reason is not None
    assert said in reason
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer(), runtime=Runtime(linears="native"))
    info = engine.info()
    assert info.linears == ("packed" if linears.can_pack() else "transposed")
    assert info.native_obstacle == reason
    assert engine.generate([5, 6, 7], max_new_tokens=12).token_ids == expected.token_ids


@needs_kernels
def test_a_compiler_may_say_anything(
    anew: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "my compiler"
    wrapper.write_text(f'#!/bin/sh\nprintf "\\351\\377" >&2\nexec "{compiler}" "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    assert trial.obstacle() is None


@needs_kernels
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


@needs_kernels
def test_a_model_in_bfloat16_says_the_same_by_kernels() -> None:
    """Up to a rounding of bfloat16: its first token is as probable."""
    model = tiny_model("llama").to(torch.bfloat16)
    firsts = [
        CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(linears=linear_backend)).score([5, 6, 7], [9, 40, 12])
        for linear_backend in ("native", "stock")
    ]
    kernels, stock = (scored.spans[0].token_log_probs for scored in firsts)
    assert kernels == pytest.approx(stock, abs=0.05)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor")
@needs_kernels
def test_x86_without_avx2_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build.PROCESSORS, "x86_64", "-march=x86-64")
    with pytest.raises(build._UnfitError, match="needs AVX2 or AVX-512"):
        build._compile(build._compiler(), tmp_path)


@needs_kernels
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_library_that_others_could_exchange_is_built_again(
    level: int, anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could write to its folder, to the cache directory, or to the folder above it."""
    monkeypatch.setenv(CACHE_VARIABLE, str(anew / "below"))
    assert build.built().handle is not None
    (made,) = libraries(anew / "below")
    place = made.parents[level]
    place.chmod(0o777)
    start_again(monkeypatch, compiles=True)
    assert place.stat().st_mode & 0o022 == (0o022 if level == 2 else 0)
    start_again(monkeypatch, compiles=False)


@needs_kernels
def test_what_was_checked_is_loaded(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that takes the place of the checked one before it is loaded is not."""
    assert build.built().handle is not None
    (made,) = libraries(anew)
    opened = build._opened

    def exchange(file: Any) -> Any:
        replace_by_another(made)
        return opened(file)

    monkeypatch.setattr(build, "_opened", exchange)
    start_again(monkeypatch, compiles=False)  # the other one has no kernels
    assert build.built().handle._name == str(made)


@needs_kernels
def test_an_exchange_while_it_is_checked_is_seen(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The opened file is another one than that whose owner and rights are looked at."""
    assert build.built().handle is not None
    (made,) = libraries(anew)
    good = made.read_bytes()

    def exchange(*paths: Path) -> bool:
        made.unlink()
        made.write_bytes(good)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(build, "is_private", exchange)
        assert build._kept(made) is None
