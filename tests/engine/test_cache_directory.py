"""The cache directory: what another user could have written to it, or could exchange in it, is not used."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cocoa_engine.errors import OutputError
from cocoa_engine.files import CACHE_VARIABLE, cache_directory, is_private, private_folder, temporary_folder
from cocoa_engine.methods import retrieval_heads
from cocoa_engine.methods.retrieval_heads import RetrievalHeads, keep, spread_heads_of
from cocoa_engine.model import gguf_tokenizer, weight_identity
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.model.loading import load_pretrained
from tests.helpers.family_gguf import write_tiny_gguf
from tests.helpers.processes import forked, limited
from tests.helpers.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs owners and rights of files")
as_root = pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can give a file away")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "above" / "cache"
    folder.parent.mkdir()
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    monkeypatch.setattr(gguf_tokenizer, "FOLDER", "gguf")
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "/home/u/.cache/cocoa-engine"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/cocoa-engine"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/home/u/.cache/cocoa-engine"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/u/Library/Caches/cocoa-engine"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/cocoa-engine"),
        ("win32", {}, "/home/u/AppData/Local/cocoa-engine"),
        ("linux", {"COCOA_CACHE_DIR": "~/own", "XDG_CACHE_HOME": "/x"}, "/home/u/own"),
        ("linux", {"COCOA_CACHE_DIR": "~nobody-of-that-name/cache"}, str(temporary_folder())),
    ],
)
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str) -> None:
    for name in ("COCOA_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/u", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_directory() == Path(expected)


@pytest.mark.parametrize("level", range(5))
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o757])
def test_every_folder_on_the_way_counts(tmp_path: Path, level: int, mode: int) -> None:
    """A sticky one may be written to by others: they cannot exchange there what is not theirs."""
    way = [tmp_path / "/".join("abcde"[:depth]) for depth in range(1, 6)]
    way[-1].mkdir(parents=True)
    file = way[-1] / "file"
    file.touch()
    assert is_private(file)
    assert is_private(way[-1])
    for open_mode in (0o666, 0o664, 0o646):
        file.chmod(open_mode)
        assert not is_private(file)
        assert not is_private(tmp_path, file)
    file.chmod(0o644)
    way[level].chmod(mode)
    assert is_private(file) == (mode == 0o1777)
    assert is_private(way[-1]) == (mode == 0o1777 and level != 4)  # there, others can add files


@as_root
def test_another_user_s_file_folder_or_link_is_not_private(tmp_path: Path) -> None:
    target, link = tmp_path / "folder", tmp_path / "link"
    target.mkdir()
    (target / "file").touch()
    link.symlink_to(target)
    assert is_private(link / "file")
    os.chown(link, 12345, 12345, follow_symlinks=False)
    assert not is_private(link / "file")
    assert is_private(target / "file")
    os.chown(target / "file", 12345, 12345)
    assert not is_private(target / "file")
    os.chown(target, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        private_folder(target / "new")


def test_links_that_others_can_exchange_are_not_followed(tmp_path: Path) -> None:
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    for folder in (shared, mine):
        folder.mkdir()
    (mine / "file").touch()
    (shared / "second").symlink_to(mine)
    (tmp_path / "first").symlink_to(shared / "second")
    assert is_private(tmp_path / "first" / "file")
    shared.chmod(0o777)
    assert not is_private(tmp_path / "first" / "file")
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="symbolic links"):
        is_private(tmp_path / "circle")


def test_folders_are_closed_to_others_from_the_cache_directory_on(cache: Path, caplog: Any) -> None:
    before = os.umask(0)
    try:
        assert private_folder(cache / "a" / "b") == cache / "a" / "b"
    finally:
        os.umask(before)
    assert not caplog.records
    for each in (cache, cache / "a"):
        each.chmod(0o777)
    private_folder(cache / "a" / "b")
    assert is_private(cache, cache / "a", cache / "a" / "b")
    assert [record.getMessage().split()[5] for record in caplog.records] == [f"{cache};", f"{cache / 'a'};"]
    cache.parent.chmod(0o777)  # not ours to change
    with pytest.raises(PermissionError, match=f"other users can write to {cache.parent}, on the way to"):
        private_folder(cache / "a" / "b")
    assert cache.parent.stat().st_mode & 0o777 == 0o777
    cache.parent.chmod(0o755)
    cache.chmod(0o1777)  # a sticky one stays as it is
    assert is_private(private_folder(cache / "a"))
    assert cache.stat().st_mode & 0o7777 == 0o1777


Kept = tuple[Path, Callable[[], Any]]
"""A file of the cache, and what reads it; that returns `None` where it is not used."""


def note(_: Path) -> Kept:
    model = tiny_model("llama")
    weight_identity.will_note(model, "weights", "kernels")
    weight_identity.note(model, "equal")
    return only(weight_identity.FOLDER, "*"), lambda: weight_identity.noted("weights", "kernels")


def heads(_: Path) -> Kept:
    model = LanguageModel(tiny_model("llama"))
    spread = spread_heads_of(model)
    assert spread is not None
    found = spread.model_copy(update={"model_name": "kept"})

    def read() -> RetrievalHeads | None:
        known = retrieval_heads.heads_of_model(None, model)
        return known if known is not None and known.model_name == "kept" else None

    return keep(found, model), read


def tokenizer(file: Path) -> Kept:
    gguf_tokenizer.load(GgufFile(file))
    kept = only("gguf", "tokenizer-*")

    def read() -> str | None:
        with mock.patch.object(gguf_tokenizer, "make", wraps=gguf_tokenizer.make) as make:
            gguf_tokenizer.load(GgufFile(file))
        return None if make.called else "read"

    return kept, read


def only(folder: str, pattern: str) -> Path:
    (found,) = (each for each in (cache_directory() / folder).glob(pattern) if not each.name.endswith(".lock"))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keep", [note, heads, tokenizer])
def test_what_others_could_have_written_or_exchanged_is_not_used(
    keep: Callable[[Path], Kept], cache: Path, file: Path
) -> None:
    """Whether they could write to the file, or to any folder from its own to the one above the cache directory."""
    kept, read = keep(file)
    assert read() is not None
    for place in (kept, *(each for each in kept.parents if each.is_relative_to(cache.parent))):
        mode = place.stat().st_mode
        place.chmod(mode | 0o002)
        assert read() is None, place
        place.chmod(mode)
        assert read() is not None


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
ELSEWHERE = "~nobody-of-that-name/cache"
REFUSED = pytest.param("/proc/cocoa", marks=needs_proc)  # root too, and not for its rights, as in a read-only system


@pytest.mark.parametrize("place", ["above is open", pytest.param("another user's", marks=as_root), ELSEWHERE, REFUSED])
def test_models_load_whatever_the_cache_directory_is(
    place: str, cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Without a home, the tokenizer is kept with temporary files; where nobody can keep it, it is made each time."""
    monkeypatch.setattr(tempfile, "tempdir", str(file.parent))
    if place == "above is open":
        cache.parent.chmod(0o777)
    elif place == "another user's":
        cache.mkdir()
        os.chown(cache, 12345, 12345)
    else:
        monkeypatch.setenv(CACHE_VARIABLE, place)
    for _ in range(2):
        assert load_pretrained(file)[1].encode("hello")
    is_elsewhere = place == ELSEWHERE
    assert (file.parent / f"cocoa-engine-{os.geteuid()}" / "gguf").exists() == is_elsewhere
    assert ("is not kept, and is made again at each start" in caplog.text) == (not is_elsewhere)


@pytest.mark.slow
@as_root
def test_another_user_loads_below_an_open_folder_of_root(cache: Path, file: Path) -> None:
    """As in a container whose volume has the mode 0777: for the other user, nothing there is theirs to close."""
    cache.parent.chmod(0o777)
    cache.mkdir()
    cache.chmod(0o777)

    def other_user() -> None:
        folder = Path(tempfile.mkdtemp())
        os.chown(folder, 12345, 12345)
        model = shutil.copy(file, folder)
        load_pretrained(model)  # the files of libraries may be readable by root alone
        os.setgid(12345)
        os.setuid(12345)
        assert load_pretrained(model)[1].encode("hello")

    assert forked(other_user) == [0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [0, 100, 3000])
@pytest.mark.parametrize("options", [{"keeps_blocks": lambda: True}, {"dtype": "float32"}])
def test_models_load_without_the_cache_on_a_full_disk(
    size: int, options: dict[str, Any], cache: Path, file: Path, caplog: Any
) -> None:
    with limited(size):
        model, tokenizer, _ = load_pretrained(file, **options)
    assert model.config.num_hidden_layers == 3
    assert tokenizer.encode("hello")
    assert "is not kept, and is made again at each start" in caplog.text
    assert "File too large" in caplog.text


def test_small_files_on_a_full_disk(cache: Path) -> None:
    """Nothing is noted; heads, which the user asked for, are an error."""
    model = tiny_model("llama")
    with limited(0):
        weight_identity.will_note(model, "weights", "kernels")
        weight_identity.note(model, "equal")
        with pytest.raises(OutputError, match="cannot be written: File too large"):
            keep(spread_heads_of(LanguageModel(model)), LanguageModel(model))  # type: ignore[arg-type]
    assert weight_identity.noted("weights", "kernels") is None
    assert not [each for each in cache.rglob("*") if each.is_file() and ".lock" not in each.name]
