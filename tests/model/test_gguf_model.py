"""GGUF files whose weights stay in their blocks: the same model and tokens as the unpacked file gives."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.errors import ConfigError, ModelLoadError
from cocoa_engine.model import gguf_tokenizer
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.loading import load_pretrained
from tests.helpers.alike import same_tokenizer
from tests.helpers.libraries import needs_kernels
from tests.helpers.small_gguf import SPECIAL, TOKENS, write
from tests.helpers.tiny_gguf import write_tiny_gguf

UNPACKED: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"weights": "float32"},
    {"dtype": "bfloat16"},
    {"keeps_blocks": lambda: False},
    {"attn_implementation": "eager"},
    {"device_map": {"": "cpu"}},
    {"rms_norm_eps": 0.5},
]


@pytest.mark.parametrize("options", UNPACKED)
def test_options_that_unpack(tmp_path: Path, options: dict[str, Any]) -> None:
    with torch.no_grad():
        exact: Any = write(tmp_path / "model.gguf", "llama", "Q8_0", factors=torch.linspace(1, 8, 8))
    model, tokenizer, name = load_pretrained(tmp_path / "model.gguf", **{"keeps_blocks": lambda: True, **options})
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
    assert model.dtype == (torch.bfloat16 if "bfloat16" in options.values() else torch.float32)
    assert not model.training
    assert name == model.name_or_path == tokenizer.name_or_path == str(tmp_path / "model.gguf")
    for path, weight in exact.named_parameters():
        torch.testing.assert_close(model.get_parameter(path), weight.to(model.dtype))
    torch.testing.assert_close(
        model.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq / torch.linspace(1, 8, 8)
    )
    assert model.config.rms_norm_eps == options.get("rms_norm_eps", 1e-6)
    assert model.config._attn_implementation == options.get("attn_implementation", "sdpa")
    assert model.generation_config.eos_token_id == [2, 3]
    model.save_pretrained(tmp_path / "saved")  # an ordinary model
    assert (tmp_path / "saved" / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="unknown option 'alhpa'"):
        load_pretrained(tmp_path / "model.gguf", alhpa=1.0, **options)


def test_a_tokenizer_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """It is found by the content of the file, wherever that is, and made again where it is damaged."""
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_tokenizer, "FOLDER", "gguf")
    monkeypatch.setattr(gguf_tokenizer, "KEPT", 2)
    tokenizer_cache = tmp_path / "cache" / "gguf"
    made: list[GgufFile] = []
    make = gguf_tokenizer.make
    monkeypatch.setattr(gguf_tokenizer, "make", lambda file: made.append(file) or make(file))
    with torch.no_grad():
        write(tmp_path / "model.gguf", "qwen2", "Q8_0", template="{{ messages }}")
    shutil.copy(tmp_path / "model.gguf", tmp_path / "copy.gguf")
    tokenizers = [gguf_tokenizer.load(GgufFile(tmp_path / name)) for name in ("model.gguf", "model.gguf", "copy.gguf")]
    assert len(made) == 1
    assert all(same_tokenizer(tokenizers[0], tokenizer) for tokenizer in tokenizers[1:])
    assert tokenizers[2].name_or_path == str(tmp_path / "copy.gguf")
    (kept,) = tokenizer_cache.iterdir()
    whole = kept.read_bytes()
    for text in (b"", b"{}", whole[: len(whole) // 2]):
        kept.write_bytes(text)
        assert same_tokenizer(gguf_tokenizer.load(GgufFile(tmp_path / "model.gguf")), tokenizers[0])
        assert kept.read_bytes() == whole
    assert len(made) == 4
    for special in ("<b>", "<c>"):
        tokens = {**SPECIAL, special: 3}
        del tokens["<added>"]
        write(tmp_path / "other.gguf", "qwen2", "Q8_0", special=tokens)
        other = gguf_tokenizer.load(GgufFile(tmp_path / "other.gguf"))
        assert other.convert_tokens_to_ids(special) == 4
    assert len(list(tokenizer_cache.iterdir())) == 2
    assert not kept.exists()
    shutil.rmtree(tokenizer_cache)
    tokenizer_cache.touch()
    assert same_tokenizer(gguf_tokenizer.load(GgufFile(tmp_path / "model.gguf")), tokenizers[0])
    assert "is not kept, and is made again at each start" in caplog.text


@needs_kernels
def test_a_model_in_parts(tmp_path: Path) -> None:
    prompt = "12 he"
    write(tmp_path / "whole.gguf", "llama", "Q8_0")
    expected = CocoaEngine.from_pretrained(tmp_path / "whole.gguf").generate(prompt, max_new_tokens=8)
    folder = tmp_path / "parts"
    folder.mkdir()
    write(folder / "small.gguf", "llama", "Q8_0", tensors_in_part=10)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"small-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for name in (folder, folder / names[0], folder / names[2]):
        found = CocoaEngine.from_pretrained(name).generate(prompt, max_new_tokens=8)
        assert (found.token_ids, found.spans) == (expected.token_ids, expected.spans)
    unpacked = CocoaEngine.from_pretrained(folder, runtime=Runtime(weights="float32"))
    assert unpacked.generate(prompt, max_new_tokens=8).token_ids == expected.token_ids
    (folder / names[0]).rename(tmp_path / "first.gguf")
    with pytest.raises(ModelLoadError, match="is one of 3 parts of a model; give them the names that they had"):
        CocoaEngine.from_pretrained(tmp_path / "first.gguf")
    (tmp_path / "first.gguf").rename(folder / names[0])
    write(folder / "other.gguf", "llama", "Q8_0", tensors_in_part=15)
    (folder / "other-00002-of-00002.gguf").replace(folder / names[2])
    with pytest.raises(ModelLoadError, match="do not belong together"):
        CocoaEngine.from_pretrained(folder / names[0])
    (folder / names[2]).unlink()
    with pytest.raises(ModelLoadError, match=f"cannot read .*{names[2]}"):
        CocoaEngine.from_pretrained(folder / names[0])


@torch.no_grad()
def test_special_and_added_tokens(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "qwen2", "Q8_0", pre="llama-bpe")
    tokenizer = gguf_tokenizer.load(GgufFile(tmp_path / "model.gguf"))
    assert tokenizer("he<added>12<|turn|>")["input_ids"] == [1, TOKENS.index("he"), 4, TOKENS.index("12"), 3]
    assert tokenizer.decode([1, TOKENS.index("he"), 4, 3], skip_special_tokens=True) == "he<added>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_files_that_are_none_or_of_another_version_are_told(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    data = path.read_bytes()
    for size in (0, 3, 4, 12, 40, 400, 2_000, 20_000):
        path.write_bytes(data[:size])
        with pytest.raises(ModelLoadError, match=r"damaged|cannot read|not a GGUF file"):
            GgufFile(path)
    for version in (struct.pack("<I", 1), struct.pack(">I", 3)):
        path.write_bytes(b"GGUF" + version + bytes(64))
        with pytest.raises(ModelLoadError, match="version"):
            GgufFile(path)
