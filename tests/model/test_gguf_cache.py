"""What is kept of GGUF files: it is made once, is found by content, and is made again when it is damaged."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedTokenizerBase

from cocoa_engine import CocoaEngine, ModelLoadError
from cocoa_engine.model import gguf_cache, gguf_tokenizer, loading
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.loading import load_pretrained
from tests.helpers.alike import same_tokenizer
from tests.helpers.libraries import needs_kernels
from tests.helpers.small_gguf import write
from tests.helpers.tiny_gguf import write_tiny_gguf

reads_its_tokenizers = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.6"), reason="transformers reads a saved tokenizer otherwise"
)
TEXTS = ("he lo", "Grüße, 世界! 12345", "<s>he</s>", "")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in which new files count as old enough."""
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_cache, "FOLDER", "gguf")
    monkeypatch.setattr(gguf_cache, "YOUNG", 0.0)
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file whose weights stay in their blocks."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A file that transformers unpacks."""
    with torch.no_grad():
        write(tmp_path / "other.gguf", "llama", "Q8_0", norms="F16")
    return tmp_path / "other.gguf"


class Calls:
    """Counts the calls of functions that read or convert a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.names: list[str] = []

    def watch(self, owner: Any, name: str, when: Callable[..., bool] = lambda *args, **options: True) -> None:
        own = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if when(*args, **options):
                self.names.append(name)
            return own(*args, **options)

        self._patch.setattr(owner, name, watched)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What turns a file into a tokenizer and into weights, and what reads the whole file."""
    found = Calls(monkeypatch)
    found.watch(gguf_tokenizer, "make")
    found.watch(GgufFile, "digest")
    found.watch(loading, "_load_weights", lambda name, options: "gguf_file" in options)
    found.watch(loading, "_read_config", lambda name, options: "gguf_file" in options)
    return found


def assert_alike(one: PreTrainedTokenizerBase, two: PreTrainedTokenizerBase) -> None:
    assert same_tokenizer(one, two)
    for text in TEXTS:
        assert one(text)["input_ids"] == two(text)["input_ids"]
        assert one.decode(one(text)["input_ids"]) == two.decode(two(text)["input_ids"])


def in_blocks(file: Path) -> tuple[Any, Any]:
    model, tokenizer, _ = load_pretrained(file, keeps_blocks=lambda: True)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight.data, BlockTensor)
    return model, tokenizer


def unpacked(file: Path, **options: Any) -> tuple[Any, Any]:
    model, tokenizer, name = load_pretrained(file, **options)
    assert name == str(file)
    return model, tokenizer


def test_the_tokenizer_is_made_once(file: Path, calls: Calls, tmp_path: Path) -> None:
    expected = gguf_tokenizer.load(GgufFile(file))
    calls.names.clear()
    _, first = in_blocks(file)
    assert calls.names == ["make"]
    _, second = in_blocks(file)
    assert calls.names == ["make"]
    for tokenizer in (first, second):
        assert_alike(tokenizer, expected)
        assert tokenizer.name_or_path == str(file)
    shutil.copy(file, tmp_path / "elsewhere.gguf")
    _, third = in_blocks(tmp_path / "elsewhere.gguf")
    assert calls.names == ["make"]
    assert third.name_or_path == str(tmp_path / "elsewhere.gguf")


@needs_kernels
def test_a_second_engine_decodes_alike(file: Path, calls: Calls) -> None:
    answers = [CocoaEngine.from_pretrained(file).generate("he lo", max_new_tokens=8) for _ in range(2)]
    assert calls.names == ["make"]
    assert answers[0].token_ids == answers[1].token_ids


def test_other_metadata_at_the_same_place_is_noticed(file: Path, calls: Calls) -> None:
    _, first = in_blocks(file)
    before = file.stat()
    data = file.read_bytes()
    at = data.index(b"lo", data.index(b"tokenizer.ggml.tokens"))
    changed = data[:at] + b"ol" + data[at + 2 :]
    file.write_bytes(changed.replace(b"l o", b"o l", 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    _, second = in_blocks(file)
    assert calls.names == ["make", "make"]
    assert first.tokenize("lo ol") != second.tokenize("lo ol")


def _shorten(path: Path) -> None:
    with path.open("r+b") as opened:
        opened.truncate(path.stat().st_size // 2)


def _spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = [_shorten, _spoil, Path.unlink, lambda path: path.chmod(0o666)]
DAMAGE_IDS = ["shortened", "changed", "missing", "writable by all"]


@pytest.mark.parametrize("damage", DAMAGE, ids=DAMAGE_IDS)
@pytest.mark.parametrize("part", ["tokenizer.json", "special_tokens.json"])
def test_a_broken_tokenizer_is_made_again(
    file: Path, calls: Calls, folder: Path, damage: Callable[[Path], None], part: str
) -> None:
    _, first = in_blocks(file)
    (kept,) = folder.glob(f"tokenizer-*/{part}")
    damage(kept)
    _, second = in_blocks(file)
    assert calls.names == ["make", "make"]
    assert_alike(first, second)
    in_blocks(file)
    assert calls.names == ["make", "make"]


def test_without_a_cache_it_is_made_each_time(file: Path, other: Path, calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    tokenizers = [in_blocks(file)[1] for _ in range(2)]
    assert calls.names == ["make", "make"]
    assert_alike(*tokenizers)
    calls.names.clear()
    models = [unpacked(other)[0] for _ in range(2)]
    assert calls.names.count("_load_weights") == 2
    assert models[0].state_dict().keys() == models[1].state_dict().keys()


@pytest.mark.skipif(os.name != "posix" or os.getuid() == 0, reason="root may write everywhere")
def test_a_cache_that_is_read_only_is_read(file: Path, other: Path, calls: Calls, folder: Path) -> None:
    in_blocks(file), unpacked(other)
    calls.names.clear()
    folder.chmod(0o500)
    try:
        in_blocks(file), unpacked(other)
    finally:
        folder.chmod(0o700)
    assert calls.names == []


def test_a_kept_folder_is_read_without_a_lock(
    file: Path, other: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a read-only cache allows, also for root."""
    in_blocks(file), unpacked(other)
    calls.names.clear()

    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError("read-only")

    for name in ("mkdir", "touch", "write_text", "write_bytes", "rename", "replace"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(os, "utime", refuse)
    in_blocks(file), unpacked(other)
    assert calls.names == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_a_file_is_unpacked_once(
    other: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, dtype: str, tmp_path: Path
) -> None:
    with monkeypatch.context() as direct:
        direct.setattr(loading, "_is_plain_unpacking", lambda options: False)
        expected, its_tokenizer = unpacked(other, dtype=dtype)
    calls.names.clear()
    first = unpacked(other, dtype=dtype)
    assert calls.names == ["digest", "_read_config", "_load_weights"]
    second = unpacked(other, dtype=dtype)
    assert calls.names == ["digest", "_read_config", "_load_weights"]
    for model, tokenizer in (first, second):
        assert type(model) is type(expected)
        assert model.dtype == expected.dtype
        assert model.state_dict().keys() == expected.state_dict().keys()
        for name, weight in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], weight)
        marks = ("quantization_config", "architectures")
        configs = [{k: v for k, v in each.config.to_dict().items() if k not in marks} for each in (model, expected)]
        assert configs[0] == configs[1]
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
        assert model.name_or_path == model.config.name_or_path == str(other.parent)
        assert tokenizer.name_or_path == str(other)
        assert_alike(tokenizer, its_tokenizer)
        model.save_pretrained(tmp_path / "saved")  # an ordinary model
    shutil.copy(other, tmp_path / "elsewhere.gguf")
    unpacked(tmp_path / "elsewhere.gguf", dtype=dtype)
    assert calls.names == ["digest", "_read_config", "_load_weights", "digest"]


def test_other_weights_at_the_same_place_are_noticed(other: Path, calls: Calls) -> None:
    first, _ = unpacked(other)
    before = other.stat()
    _spoil(other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert other.stat().st_size == before.st_size
    second, _ = unpacked(other)
    assert calls.names.count("_load_weights") == 2
    differences = [
        name for name, weight in first.state_dict().items() if not torch.equal(weight, second.state_dict()[name])
    ]
    assert differences


def test_a_file_that_may_still_change_is_read_each_time(
    other: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_cache, "YOUNG", 3600.0)
    digests = [gguf_cache.content_digest(GgufFile(other)) for _ in range(2)]
    assert digests[0] == digests[1]
    assert calls.names == ["digest", "digest"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"state": [1], "sha256": "0"}', b"\xff", b"[" * 100_000])
def test_a_broken_note_of_the_content_is_not_used(other: Path, calls: Calls, folder: Path, content: bytes) -> None:
    digest = gguf_cache.content_digest(GgufFile(other))
    (note,) = folder.glob("digest-*.json")
    note.write_bytes(content)
    assert gguf_cache.content_digest(GgufFile(other)) == digest
    note.write_text(json.dumps({**json.loads(note.read_text()), "sha256": "0" * 64}))
    note.chmod(0o666)  # anyone could have written it
    assert gguf_cache.content_digest(GgufFile(other)) == digest
    assert calls.names == ["digest"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE, ids=DAMAGE_IDS)
@pytest.mark.parametrize("part", ["model.safetensors", "config.json"])
def test_a_broken_checkpoint_is_made_again(
    other: Path, calls: Calls, folder: Path, damage: Callable[[Path], None], part: str
) -> None:
    first, _ = unpacked(other)
    (kept,) = folder.glob(f"unpacked-*/{part}")
    weights = {name: weight.clone() for name, weight in first.state_dict().items()}  # the file is mapped
    del first
    damage(kept)
    second, _ = unpacked(other)
    assert calls.names.count("_load_weights") == 2
    for name, weight in weights.items():
        assert torch.equal(weight, second.state_dict()[name])


def test_options_that_change_the_model_are_not_kept(other: Path, folder: Path) -> None:
    model, _ = unpacked(other, model_kwargs={"rms_norm_eps": 0.5})
    assert model.config.rms_norm_eps == 0.5
    assert not list(folder.glob("unpacked-*"))


def test_options_apply_to_what_was_kept(other: Path, calls: Calls) -> None:
    for _ in range(2):
        model, tokenizer = unpacked(
            other, model_kwargs={"attn_implementation": "eager"}, tokenizer_kwargs={"padding_side": "left"}
        )
        assert model.config._attn_implementation == "eager"
        assert tokenizer.padding_side == "left"
    assert calls.names.count("_load_weights") == 1


def test_a_disk_with_little_space_keeps_nothing(
    other: Path, calls: Calls, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))
    with caplog.at_level("INFO"):
        unpacked(other)
    assert "more than half of the free space" in caplog.text
    assert calls.names.count("_load_weights") == 1
    assert not [path for path in folder.glob("unpacked-*") if path.is_dir()]


@reads_its_tokenizers
def test_a_file_with_another_tokenizer(other: Path, calls: Calls, tmp_path: Path) -> None:
    unpacked(other)[1].save_pretrained(tmp_path / "tokenizer")
    calls.names.clear()
    model, tokenizer = unpacked(other, tokenizer_name=tmp_path / "tokenizer")
    assert tokenizer.name_or_path == str(tmp_path / "tokenizer")
    assert model.name_or_path == str(other.parent)
    assert calls.names == []


def test_a_damaged_file_is_told_as_before(other: Path) -> None:
    data = other.read_bytes()
    other.write_bytes(data.replace(b"llama.attention.head_count\x04", b"llama.attention.head_kount\x04"))
    with pytest.raises(ModelLoadError):
        unpacked(other)


def test_old_folders_are_removed(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gguf_cache, "KEPT", {"tokenizer": 2, "unpacked": 1})

    def others(number: int) -> Path:
        path = tmp_path / f"{number}.gguf"
        data = file.read_bytes()
        at = data.index(b"lo", data.index(b"tokenizer.ggml.tokens"))
        path.write_bytes(
            data[:at] + b"%02d" % number + data[at + 2 :].replace(b"l o", b"%d %d" % divmod(number, 10), 1)
        )
        return path

    def kept() -> set[str]:
        return {path.name for path in folder.glob("tokenizer-*") if path.is_dir()}

    in_blocks(others(10))
    (first,) = kept()
    in_blocks(others(21))
    (second,) = kept() - {first}
    time.sleep(0.02)
    in_blocks(others(10))  # used last
    time.sleep(0.02)
    in_blocks(others(32))
    assert first in kept()
    assert second not in kept()
    assert len(kept()) == 2


def test_versions_are_part_of_the_place(file: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = GgufFile(other)
    assert transformers.__version__ in gguf_cache.unpacked_folder(opened, "auto").name
    assert gguf_cache.unpacked_folder(opened, "auto") != gguf_cache.unpacked_folder(opened, torch.bfloat16)
