"""Matrices in GGUF blocks, and checkpoints quantised to them while they are read."""

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from cocoa_engine import CocoaEngine, ConfigError, ModelLoadError, Runtime, UnsupportedModelError
from cocoa_engine.model import experts
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.loading import load_pretrained
from cocoa_engine.model.quantised_weights import quantised
from cocoa_engine.model.weight_identity import sampled
from tests.helpers.family_gguf import write_family
from tests.helpers.libraries import needs_kernels
from tests.helpers.processes import python
from tests.helpers.tiny_models import ARCHITECTURES, tiny_model, tiny_tokenizer

IDS = torch.randint(3, 300, (1, 20), generator=torch.Generator().manual_seed(0))


def unpacked(weight: BlockTensor) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(weight.blocks.numpy(), GGMLQuantizationType[weight.kind]))


KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16")


def random_blocks(kind: str, rows: int, columns: int) -> tuple[BlockTensor, torch.Tensor]:
    numbers = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    packed = quants.quantize(numbers, GGMLQuantizationType[kind])
    weight = BlockTensor(torch.from_numpy(packed.view(np.uint8).reshape(rows, -1).copy()), kind)
    return weight, unpacked(weight)


@pytest.mark.parametrize("kind", KINDS)
def test_modules_compute_what_the_float32_matrix_gives(kind: str) -> None:
    weight, exact = random_blocks(kind, 1100, 64)
    layer = nn.Linear(64, 1100)
    embedding = nn.Embedding(1100, 64)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    embedding.weight = layer.weight
    x, ids = torch.randn(2, 3, 64), torch.tensor([[0, 1099], [5, 5]])

    assert (weight.shape, weight.dtype, layer.weight.kind) == ((1100, 64), torch.float32, kind)
    assert torch.allclose(layer(x), F.linear(x, exact, layer.bias), atol=1e-5)
    assert torch.equal(embedding(ids), exact[ids])
    assert torch.equal(weight.dequantized(), exact)
    assert torch.equal(weight.rows(torch.tensor([3])), exact[[3]])


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_matrices_are_taken_apart_without_a_copy(kind: str) -> None:
    matrix, exact = random_blocks(kind, 12, 64)
    weight, exact = BlockTensor(matrix.blocks.view(3, 4, -1), kind), exact.view(3, 4, 64)
    assert (weight.shape, weight.dim()) == ((3, 4, 64), 3)
    assert torch.equal(weight.dequantized(), exact)
    assert torch.equal(weight.rows(torch.tensor([0, 11, 5])), exact.view(12, 64)[[0, 11, 5]])
    assert torch.equal(sampled(weight), sampled(exact))
    parameter = nn.Parameter(weight, requires_grad=False)
    for number in (1, torch.tensor(1), -2):
        matrix = parameter[number]
        assert isinstance(matrix, BlockTensor)
        assert matrix.blocks.data_ptr() == weight.blocks[1].data_ptr()
        assert torch.equal(matrix.dequantized(), exact[1])
    assert torch.equal(weight[:, 2], exact[:, 2])
    assert torch.equal(weight[1, 2], exact[1, 2])
    x = torch.randn(5, 64)
    assert torch.allclose(F.linear(x, parameter[2]), F.linear(x, exact[2]), atol=1e-5)


def test_other_operations_unpack_and_broken_blocks_are_refused() -> None:
    weight, exact = random_blocks("Q8_0", 8, 32)
    for result, expected in ((weight + 1, exact + 1), (weight.T, exact.T), (weight[2:4], exact[2:4])):
        assert type(result) is torch.Tensor
        assert torch.equal(result, expected)
    assert torch.equal(weight.to(torch.bfloat16), exact.to(torch.bfloat16))
    assert weight.sum().item() == exact.sum().item()
    with pytest.raises(ValueError, match="whole Q4_0 blocks"):
        BlockTensor(torch.zeros(2, 17, dtype=torch.uint8), "Q4_0")


def test_copies_keep_the_blocks_apart() -> None:
    weight, exact = random_blocks("Q4_0", 8, 64)
    layer = nn.Linear(64, 8, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).float()):
        assert isinstance(other.weight, BlockTensor)
        assert isinstance(other.weight, nn.Parameter)
        assert other.weight.blocks.data_ptr() != weight.blocks.data_ptr()
        assert torch.equal(other.weight.dequantized(), exact)
    detached = layer.weight.detach()
    assert isinstance(detached, BlockTensor)
    assert detached.blocks is weight.blocks
    assert isinstance(layer.to("cpu").weight, BlockTensor)
    assert type(layer.to(torch.bfloat16).weight) is nn.Parameter


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def save(model: Any, folder: Path, change: Change | None = None, **options: Any) -> Path:
    """A folder with a model and a tokenizer. What is stored in one file may be changed."""
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)
    if change is not None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


def load(folder: Path, weights: Any) -> Any:
    return load_pretrained(folder, weights=weights, dtype="float32", keeps_blocks=lambda: True)[0]


def place_of(exact: Any, name: str) -> torch.Tensor:
    """Where a plain model of transformers has a weight of the model of blocks."""
    path, _, part = name.removesuffix(".weight").rpartition(".")
    if not path.endswith(".experts"):
        return exact.get_parameter(name).detach()
    module = exact.get_submodule(path)
    if part == "down_proj":
        return module.down_proj.detach()
    return module.gate_up_proj.detach().chunk(2, dim=1)[("gate_proj", "up_proj").index(part)]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_which_matrices_take_four_bits(tmp_path: Path) -> None:
    """Rows in whole blocks of 256; the embeddings and the output layer keep eight bits."""
    model = tiny_model("llama", hidden_size=256, intermediate_size=96, head_dim=64)
    save(model, tmp_path)
    read = load(tmp_path, "q4_k")
    layer = read.model.layers[0]
    linears = (layer.self_attn.q_proj, layer.mlp.up_proj, layer.mlp.down_proj, read.lm_head, read.model.embed_tokens)
    assert [module.weight.kind for module in linears] == ["Q4_K", "Q4_K", "Q8_0", "Q8_0", "Q8_0"]
    before, after = layer.mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight
    assert float((unpacked(before) - after).square().mean().sqrt() / after.std()) < 0.08
    save(tiny_model("llama", hidden_size=48, intermediate_size=64, head_dim=12), tmp_path)
    layer = load(tmp_path, "q8_0").model.layers[0]
    assert not isinstance(layer.mlp.up_proj.weight, BlockTensor)  # rows of no whole blocks
    assert isinstance(layer.mlp.down_proj.weight, BlockTensor)


def test_the_blocks_of_experts(tmp_path: Path) -> None:
    save(tiny_model("qwen3_moe", hidden_size=256, moe_intermediate_size=96), tmp_path)
    block = load(tmp_path, "q4_k").model.layers[0].mlp
    assert [weight.kind for weight in block.experts.parameters()] == ["Q4_K", "Q4_K", "Q8_0"]
    assert type(block.gate.weight) is nn.Parameter  # the router stays float32
    model = tiny_model("qwen3_moe", moe_intermediate_size=48)
    save(model, tmp_path)
    read: Any = load(tmp_path, "q8_0").model.layers[0].mlp.experts
    assert torch.equal(read.down_proj.weight, model.model.layers[0].mlp.experts.down_proj)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"experts.3.up_proj.weight": None}, UnsupportedModelError, r"lacks .*experts\.up_proj\.weight of expert 3"),
        ({"experts.5.up_proj.weight": torch.ones(32, 32)}, ModelLoadError, "of an expert that the config does not"),
        ({"experts.1.up_proj.weight": torch.ones(16, 32)}, ModelLoadError, r"expert 1 has the shape \[16, 32\], not"),
        ({"experts.1.up_proj.weight": torch.full((32, 32), torch.nan)}, ModelLoadError, "expert 1 has numbers that"),
    ],
)
def test_experts_that_do_not_fit_are_told(
    tmp_path: Path, change: dict[str, torch.Tensor | None], error: type[Exception], message: str
) -> None:
    changed = {f"model.layers.2.mlp.{name}": weight for name, weight in change.items()}
    save(
        tiny_model("qwen3_moe"),
        tmp_path,
        lambda weights: {name: weight for name, weight in {**weights, **changed}.items() if weight is not None},
    )
    with pytest.raises(error, match=message):
        load(tmp_path, "q8_0")


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "qwen3_moe"])
def test_the_engine_decodes_from_the_blocks(tmp_path: Path, architecture: str) -> None:
    save(tiny_model(architecture), tmp_path)
    engine = CocoaEngine.from_pretrained(str(tmp_path), runtime=Runtime(weights="q8_0"))
    exact = tiny_model(architecture)
    for name, parameter in engine.model.named_parameters():
        if isinstance(parameter, BlockTensor):
            place_of(exact, name).copy_(unpacked(parameter))
    plain = CocoaEngine(exact, engine.tokenizer)
    for method in ("cocoa-sig", "greedy"):
        ids = [each.generate([5, 6, 7], method=method, max_new_tokens=16).token_ids for each in (engine, plain)]
        assert ids[0] == ids[1]


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.lists(st.just(0.0) | st.floats(-1e-6, 1e-6) | st.floats(-100, 100, width=32), min_size=256, max_size=256))
def test_four_bits_are_as_close_as_their_steps(numbers: list[float]) -> None:
    """No number is further off than a step of its group of 32, and the steps are those of the group's range."""
    weight = torch.tensor(numbers, dtype=torch.float32)[None]
    found = unpacked(quantised(weight, "Q4_K"))
    groups = weight.view(8, 32)
    span = groups.amax(1).clamp(min=0) - groups.amin(1).clamp(max=0)
    coarse = span.max() / 63  # scales and minimums have six bits for all groups together
    assert ((found.view(8, 32) - groups).abs() <= (span / 7 + coarse)[:, None] + 1e-6).all()


def test_four_bits_are_closer_than_those_of_the_package() -> None:
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    ours = unpacked(quantised(weight, "Q4_K"))
    plain = quants.dequantize(quants.quantize(weight.numpy(), GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1)
    assert (ours - weight).square().mean() < 0.9 * (torch.from_numpy(plain) - weight).square().mean()
    weight[1, 3] = torch.inf
    assert torch.equal(quantised(weight, "Q8_0"), weight)  # numbers that are not finite stay


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path / "model")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "bfloat16"}, "needs dtype 'auto' or 'float32', and no device_map"),
        ({"device_map": "cuda:0"}, "needs dtype 'auto' or 'float32', and no device_map"),
        ({"trust_remote_code": True}, "cannot be combined with trust_remote_code"),
        ({"attn_implementation": "eager"}, "cannot be combined with attn_implementation"),
        ({"keeps_blocks": lambda: False}, "needs the CPU kernels"),
    ]
    for options, message in refused:
        with pytest.raises(ConfigError, match=f"weights='q8_0' {message}"):
            load_pretrained(folder, weights="q8_0", **{"keeps_blocks": lambda: True, **options})
    with pytest.raises(ConfigError, match="applies to from_pretrained, not to a model that is loaded"):
        CocoaEngine(tiny_model("llama"), tiny_tokenizer(), runtime=Runtime(weights="q4_k"))
    write_family(tmp_path / "model.gguf", "olmo2", "Q8_0")
    with pytest.raises(ConfigError, match="a GGUF file keeps the blocks that it has"):
        load_pretrained(tmp_path / "model.gguf", weights="q8_0", keeps_blocks=lambda: True)
    with pytest.raises(ConfigError, match="as in a mixture of experts"):
        load(save(tiny_model("qwen3_next"), tmp_path / "experts"), "q8_0")


def test_incomplete_checkpoints_and_tensors_that_the_model_does_not_have_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "\x1b[31m" + "strange" * 1000
    save(tiny_model("llama"), tmp_path, lambda weights: {**weights, name: torch.ones(1)})
    load(tmp_path, "q8_0")
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path} has 1 tensors that the model does not have, such as ␛[31mstrange")
    assert len(message) < 1000
    save(tiny_model("llama"), tmp_path, without("model.norm.weight"))
    with pytest.raises(UnsupportedModelError, match=r"it lacks model\.norm\.weight"):
        load(tmp_path, "q8_0")


EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def without(*names: str) -> Change:
    return lambda weights: {name: weight for name, weight in weights.items() if name not in names}


def head(weight: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda weights: weights | {HEAD: weight(weights[EMBEDDINGS])}


def unprefixed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): weight for name, weight in weights.items()}


ATTENTION = "model.layers.0.self_attn"
LAYOUTS: dict[str, tuple[bool, Change]] = {
    "tied, no head": (True, without(HEAD)),
    "tied, head equal": (True, head(torch.clone)),
    "tied, head of its own": (True, head(lambda weight: weight.roll(1, 0) * 1.5)),
    "tied, head only": (True, lambda weights: without(EMBEDDINGS)(head(torch.clone)(weights))),
    "own head": (False, head(lambda weight: weight.roll(1, 0) * 1.5)),
    "own head, equal": (False, head(torch.clone)),
    "own head, absent": (False, without(HEAD)),
    "own head, no embeddings": (False, without(EMBEDDINGS)),
    "no prefix": (False, unprefixed),
    "no prefix, tied": (True, lambda weights: unprefixed(without(HEAD)(weights))),
    "frequencies in the file": (False, lambda weights: weights | {f"{ATTENTION}.rotary_emb.inv_freq": torch.ones(4)}),
    "half precision": (False, lambda weights: {name: weight.half() for name, weight in weights.items()}),
}


def assert_same(folder: Path) -> None:
    """The model in blocks is the stored one with the numbers of the blocks, its head and embeddings tied as there."""
    try:
        exact = load(folder, "stored")
    except UnsupportedModelError:
        with pytest.raises(UnsupportedModelError, match="not a complete causal language model"):
            load(folder, "q8_0")
        return
    model = load(folder, "q8_0")
    assert (model.dtype, model.training) == (torch.float32, False)
    assert model.generation_config == exact.generation_config
    ends = [each.get_output_embeddings().weight is each.get_input_embeddings().weight for each in (model, exact)]
    assert ends[0] == ends[1]
    linears = [module for module in model.modules() if type(module) in (nn.Linear, experts.ExpertLinears)]
    assert all(isinstance(linear.weight, BlockTensor) == (linear.weight.shape[-1] % 32 == 0) for linear in linears)
    for name, parameter in model.named_parameters():
        place, is_packed = place_of(exact, name), isinstance(parameter, BlockTensor)
        own = unpacked(parameter) if is_packed else parameter.detach()
        torch.testing.assert_close(own, place, atol=0.01 * float(place.abs().max()) if is_packed else 0, rtol=0)
        place.copy_(own)
    torch.testing.assert_close(logits(model), logits(exact), atol=1e-4 * float(logits(exact).std()), rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_heads_and_embeddings_are_those_of_the_file(tmp_path: Path, layout: str, architecture: str) -> None:
    tied, change = LAYOUTS[layout]
    model = tiny_model(architecture, tie_word_embeddings=False)
    model.config.tie_word_embeddings = tied
    assert_same(save(model, tmp_path, change))


@pytest.mark.parametrize("biased", [["attention_bias"], ["mlp_bias"], ["attention_bias", "mlp_bias"]])
def test_biases(tmp_path: Path, biased: list[str]) -> None:
    model = tiny_model("llama", **dict.fromkeys(biased, True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    assert_same(save(model, tmp_path))
    model.config.attention_bias = model.config.mlp_bias = False  # the file has biases that the config does not speak of
    assert_same(save(model, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture(tmp_path: Path, architecture: str) -> None:
    """Fused matrices, norms with biases and offsets, shards: equal, or refused before."""
    model = tiny_model(architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.1
    folder = save(model.to(torch.bfloat16), tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    try:
        load(folder, "q8_0")
    except ConfigError:  # transformers converts its weights while loading
        return
    assert_same(folder)


PEAKS = """
import pathlib, re
from transformers import LlamaConfig
from cocoa_engine.model import quantised_weights

def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])

for folder in {folders}:
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what there is now
    before = memory("VmRSS")
    model = quantised_weights.load(folder, LlamaConfig.from_pretrained(folder), "q8_0", {{}})
    print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_float32_model_is_never_in_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    model = tiny_model("llama", **sizes, num_key_value_heads=8, head_dim=64).to(torch.bfloat16)
    large = save(model, tmp_path / "large", max_shard_size="10MB")
    small = save(tiny_model("llama", num_hidden_layers=3), tmp_path / "small")
    numbers = sum(parameter.numel() for parameter in model.parameters())
    _, peak = map(int, python(PEAKS.format(folders=[str(small), str(large)])).split())  # the first imports the rest
    assert numbers / 2 < 1024 * peak < 2 * numbers  # blocks take one byte for each, float32 four
