"""GGUF files whose weights stay in their blocks: the same model and tokens as the unpacked file gives."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.errors import ModelLoadError
from cocoa_engine.model import gguf_model, gguf_tokenizer
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.embedded import find_embedded_file
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.loading import load_pretrained, read_context_window
from tests.helpers.libraries import needs_kernels
from tests.helpers.small_gguf import TOKENS, write
from tests.helpers.tiny_gguf import write_tiny_gguf

ARCHITECTURES = ("llama", "qwen2", "qwen3")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("kind", "tied"), [("Q8_0", True), ("Q4_1", False), ("F16", True), ("F32", False)])
def test_the_model_is_that_of_the_file(tmp_path: Path, architecture: str, kind: str, tied: bool) -> None:
    with torch.no_grad():
        exact = write(tmp_path / "model.gguf", architecture, kind, tied=tied)
    file = GgufFile(tmp_path / "model.gguf")
    assert gguf_model.obstacle(file) is None
    model = gguf_model.load(file)
    ids = torch.tensor([[5, 9, 200, 3, 17]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, exact(ids).logits, atol=1e-5, rtol=1e-4)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert not model.training
    kept = {type(parameter) for parameter in model.parameters() if parameter.dim() == 2}
    assert kept == {torch.nn.Parameter if kind == "F32" else BlockTensor}
    assert model.generation_config.eos_token_id == [2, 3]
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


@needs_kernels
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("forward", ["auto", "modules"])
def test_the_engine_decodes_from_blocks_as_from_float32(tmp_path: Path, architecture: str, forward: str) -> None:
    with torch.no_grad():
        exact = write(tmp_path / "model.gguf", architecture, "Q5_1")
    runtime = Runtime(forward=forward)
    engine = CocoaEngine.from_pretrained(str(tmp_path / "model.gguf"), runtime=runtime)
    plain = CocoaEngine(exact, engine.tokenizer, runtime=runtime)
    assert isinstance(engine.model.get_input_embeddings().weight, BlockTensor)
    for method in ("cocoa-sig", "greedy"):
        found, expected = (each.generate("he 12 he", method=method, max_new_tokens=20) for each in (engine, plain))
        assert found.token_ids == expected.token_ids
        assert [span.f_mlds for span in found.spans] == pytest.approx(
            [span.f_mlds for span in expected.spans], abs=1e-3
        )
    assert read_context_window(tmp_path / "model.gguf") == 128


def test_an_explicit_dtype_unpacks(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf")
    for options in ({"dtype": "float32", "keeps_blocks": lambda: True}, {"keeps_blocks": lambda: False}):
        model, _, _ = load_pretrained(tmp_path / "model.gguf", **options)
        assert not any(isinstance(parameter, BlockTensor) for parameter in model.parameters())


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
    with pytest.raises(ModelLoadError, match=r"one of 3 parts .*options ask for it.*llama-gguf-split --merge"):
        CocoaEngine.from_pretrained(folder, dtype="float32")
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


def test_scaled_positions_are_read(tmp_path: Path) -> None:
    path, factors = tmp_path / "model.gguf", torch.linspace(1, 8, 8)
    with torch.no_grad():
        plain = write(path, "llama", "Q8_0").model.rotary_emb.inv_freq
        write(path, "llama", "Q8_0", factors=factors)
        by_frequency = gguf_model.load(GgufFile(path)).model.rotary_emb.inv_freq
        write(path, "llama", "Q8_0", scaling="linear")
        linear = gguf_model.load(GgufFile(path)).model.rotary_emb.inv_freq
    torch.testing.assert_close(by_frequency, plain / factors)
    torch.testing.assert_close(linear, plain / 4)


def test_what_transformers_cannot_read_stays_in_blocks_on_a_machine_with_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch.no_grad():
        write(tmp_path / "scaled.gguf", "llama", "Q8_0", scaling="linear")
    model, _, _ = load_pretrained(tmp_path / "scaled.gguf", keeps_blocks=lambda: True)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight.data, BlockTensor)


def test_special_and_added_tokens(tmp_path: Path) -> None:
    with torch.no_grad():
        write(tmp_path / "model.gguf", "qwen2", "Q8_0", pre="llama-bpe")
    tokenizer = gguf_tokenizer.load(GgufFile(tmp_path / "model.gguf"))
    assert tokenizer("he<added>12<|turn|>")["input_ids"] == [1, TOKENS.index("he"), 4, TOKENS.index("12"), 3]
    assert tokenizer.decode([1, TOKENS.index("he"), 4, 3], skip_special_tokens=True) == "he<added>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.fixture(scope="module")
def read_tokenizer() -> PreTrainedTokenizerBase:
    file = find_embedded_file()
    if file is None:
        pytest.skip("the embedded model is not installed")
    return gguf_tokenizer.load(GgufFile(file.path))


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.text() | st.text(alphabet="ab 12.\n\t'é日🙂<|im_start|>"))
def test_the_embedded_files_tokens(read_tokenizer: PreTrainedTokenizerBase, engine: CocoaEngine, text: str) -> None:
    assert read_tokenizer(text)["input_ids"] == engine.tokenizer(text)["input_ids"]


@pytest.mark.parametrize("kept", [0, 3, 4, 12, 40, 400, 2_000, 20_000])
def test_truncated_files_are_told(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match=r"damaged|cannot read|not a GGUF file"):
        GgufFile(path)


def test_other_versions_and_byte_orders_are_told(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for version in (struct.pack("<I", 1), struct.pack(">I", 3)):
        path.write_bytes(b"GGUF" + version + bytes(64))
        with pytest.raises(ModelLoadError, match="version"):
            GgufFile(path)
