"""Every layout of a checkpoint: in blocks, the model is that of the same file as transformers loads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cocoa_engine.errors import ConfigError, UnsupportedModelError
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.loading import load_pretrained
from tests.helpers.tiny_models import ARCHITECTURES, tiny_model, tiny_tokenizer

IDS = torch.tensor([[5, 9, 40, 77, 12, 150, 3, 9]])
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def without(*names: str) -> Change:
    return lambda weights: {name: weight for name, weight in weights.items() if name not in names}


def head(weight: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda weights: weights | {HEAD: weight(weights[EMBEDDINGS])}


def renamed(change: Callable[[str], str]) -> Change:
    return lambda weights: {change(name): weight for name, weight in weights.items()}


ATTENTION = "model.layers.0.self_attn"
WITHOUT_PREFIX = renamed(lambda name: name.removeprefix("model."))
LAYOUTS: dict[str, tuple[bool, Change]] = {
    "tied, no head": (True, without(HEAD)),
    "tied, head equal": (True, head(torch.clone)),
    "tied, head of its own": (True, head(lambda weight: weight.roll(1, 0) * 1.5)),
    "tied, head only": (True, lambda weights: without(EMBEDDINGS)(head(torch.clone)(weights))),
    "own head": (False, head(lambda weight: weight.roll(1, 0) * 1.5)),
    "own head, equal": (False, head(torch.clone)),
    "own head, absent": (False, without(HEAD)),
    "own head, no embeddings": (False, without(EMBEDDINGS)),
    "no prefix": (False, lambda weights: WITHOUT_PREFIX(weights)),
    "no prefix, tied": (
        True,
        lambda weights: renamed(lambda name: name.removeprefix("model."))(without(HEAD)(weights)),
    ),
    "frequencies in the file": (
        False,
        lambda weights: weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    ),
    "half precision": (False, lambda weights: {name: weight.half() for name, weight in weights.items()}),
}


def saved(folder: Path, model: Any, change: Change = lambda weights: weights, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        if not options:
            save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


def loaded(folder: Path, weights: Any) -> Any:
    return load_pretrained(folder, weights=weights, dtype="float32", keeps_blocks=lambda: True)[0]


def assert_same(folder: Path) -> None:
    """The model in blocks is the stored one with the numbers of the blocks, its head and embeddings tied as there."""
    try:
        exact = loaded(folder, "stored")
    except UnsupportedModelError:
        with pytest.raises(UnsupportedModelError, match="not a complete causal language model"):
            loaded(folder, "q8_0")
        return
    model = loaded(folder, "q8_0")
    ends = [each.get_output_embeddings().weight is each.get_input_embeddings().weight for each in (model, exact)]
    assert ends[0] == ends[1]
    names = dict(exact.named_parameters())
    assert dict(model.named_parameters()).keys() == names.keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = parameter.dequantized() if isinstance(parameter, BlockTensor) else parameter
            torch.testing.assert_close(own, names[name], atol=0.02 * float(names[name].abs().max()), rtol=0)
            names[name].copy_(own)
        expected = exact(IDS).logits
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-4 * float(expected.std()), rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_heads_and_embeddings_are_those_of_the_file(tmp_path: Path, layout: str, architecture: str) -> None:
    tied, change = LAYOUTS[layout]
    model = tiny_model(architecture, tie_word_embeddings=False)
    model.config.tie_word_embeddings = tied
    assert_same(saved(tmp_path, model, change))


@pytest.mark.parametrize(
    "options", [{"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}]
)
def test_biases(tmp_path: Path, options: dict[str, bool]) -> None:
    model = tiny_model("llama", **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    assert_same(saved(tmp_path, model))
    model.config.attention_bias = model.config.mlp_bias = False  # the file has biases that the config does not speak of
    assert_same(saved(tmp_path, model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", sorted({*ARCHITECTURES} - {"qwen3_moe"})
)  # its experts have names of their own
def test_every_architecture(tmp_path: Path, architecture: str) -> None:
    """Fused matrices, norms with biases and offsets, shards: equal, or refused before."""
    model = tiny_model(architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.1
    folder = saved(tmp_path, model, max_shard_size="40KB")
    try:
        loaded(folder, "q8_0")
    except ConfigError:  # transformers converts its weights while loading
        return
    assert_same(folder)
