"""GGUF files of each family: the model of the blocks is transformers' model with the same numbers."""

import re
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.errors import CocoaError, ModelLoadError, UnsupportedModelError
from cocoa_engine.execution.forward import trial
from cocoa_engine.model import gguf_families, gguf_model, loading
from cocoa_engine.model.blocks import BLOCK_KINDS, BlockTensor, q5_0_of
from cocoa_engine.model.experts import SeparateExperts
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.loading import load_pretrained
from tests.helpers.backends import made
from tests.helpers.family_gguf import BYTE_LEVEL, FAMILIES, UNPACKED, write_family
from tests.helpers.inside import use_backend
from tests.helpers.libraries import needs_kernels
from tests.helpers.tiny_models import pieces_tokenizer

IDS = torch.randint(3, 260, (1, 20), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def assert_same_answers(engine: CocoaEngine, exact: Any, prompt: Any, methods: Sequence[str] = ("cocoa-sig",)) -> None:
    exact.generation_config.eos_token_id = engine.model.generation_config.eos_token_id
    plain = CocoaEngine(exact, engine.tokenizer, runtime=engine.session.runtime)
    for method in methods:
        answer, expected = (each.generate(prompt, method=method, max_new_tokens=20) for each in (engine, plain))
        assert answer.token_ids == expected.token_ids
        figures = [[span.f_mlds for span in generation.spans] for generation in (answer, expected)]
        assert figures[0] == pytest.approx(figures[1], abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "tied"), [("Q8_0", True), ("Q4_1", False), ("F16", True), ("F32", False)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_that_of_the_file(tmp_path: Path, family: str, kind: str, tied: bool) -> None:
    exact = write_family(tmp_path / "model.gguf", family, kind, tied=tied)
    file = GgufFile(tmp_path / "model.gguf")
    assert gguf_model.obstacle(file) is None
    model = gguf_model.load(file)
    expected = logits(exact)
    torch.testing.assert_close(logits(model), expected, atol=1e-4 * float(expected.std()), rtol=1e-4)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert not model.training
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not any(part in name for part in (".gate.", "router", "conv1d", "bias"))
    ]
    assert all(isinstance(parameter, BlockTensor) for parameter in matrices) == (kind != "F32")
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (tied or family == "gemma2")
    if family in BYTE_LEVEL:
        assert model.generation_config.eos_token_id == [2, 3]
    if kind == "Q8_0":
        unpacked = load_pretrained(file.path)[0]
        assert {type(weight) for weight in unpacked.parameters()} == {torch.nn.Parameter}
        torch.testing.assert_close(logits(model), logits(unpacked), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", UNPACKED)
def test_transformers_unpacks_other_families(tmp_path: Path, family: str, tied: bool) -> None:
    exact = write_family(tmp_path / "model.gguf", family, "Q8_0", tied=tied)
    torch.testing.assert_close(logits(load_pretrained(str(tmp_path / "model.gguf"))[0]), logits(exact))


def test_every_architecture_that_is_read_was_compared() -> None:
    ours, theirs = ({MODEL_ARCH_NAMES[of] for of, *_ in table.values()} for table in (FAMILIES, UNPACKED))
    assert (ours, theirs) == (set(gguf_families.FAMILIES), set(gguf_families.UNPACKED))


@pytest.mark.parametrize("name", sorted(set(MODEL_ARCH_NAMES.values()) - {*gguf_families.FAMILIES, "llama"}))
def test_no_architecture_is_read_as_another_one(tmp_path: Path, name: str) -> None:
    """A file with the tensors of a Llama under the name of every other architecture is refused in one sentence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_family(tmp_path / "model.gguf", "llama", "F32", metadata={"general.architecture": name})
    with pytest.raises(CocoaError, match=r"model\.gguf|complete") as caught:
        load_pretrained(str(tmp_path / "model.gguf"))
    assert "\n" not in str(caught.value)
    if name not in gguf_families.UNPACKED:
        assert re.search(rf"{name}' are not read; use the model's checkpoint \(safetensors\).*qwen3", str(caught.value))


@pytest.mark.parametrize("tensor", ["attn_output.bias", "attn_q_norm.weight", "attn_sinks.weight", "new.weight"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "stablelm", "starcoder2", "qwen35"])
def test_no_tensor_is_left_out(tmp_path: Path, family: str, tensor: str) -> None:
    """transformers ignores those that it does not know."""
    more = {f"blk.0.{tensor}": torch.ones(64)}
    if family == "starcoder2" and tensor == "attn_output.bias":
        return  # it has that
    write_family(tmp_path / "model.gguf", family, "F32", tensors=more)
    with pytest.raises(ModelLoadError, match=r"would be ignored|has no tensor for|does not speak of"):
        load_pretrained(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(("family", "kind"), [("gpt_oss", "MXFP4"), ("granitehybrid", "MXFP4"), ("granitemoe", "Q5_0")])
def test_experts_of_other_types(tmp_path: Path, family: str, kind: str) -> None:
    exact = write_family(tmp_path / "model.gguf", family, "Q8_0", experts=[kind])
    packed = load_pretrained(tmp_path / "model.gguf", keeps_blocks=lambda: True)[0]
    unpacked = load_pretrained(tmp_path / "model.gguf")[0]
    kinds = {weight.kind for weight in packed.parameters() if isinstance(weight, BlockTensor)}
    assert kinds == {"Q8_0", "Q5_0"}
    for model in (packed, unpacked):
        torch.testing.assert_close(logits(model), logits(exact), atol=1e-4, rtol=1e-4)


@given(st.binary(min_size=34, max_size=34).map(lambda data: bytes([100 + data[0] % 40]) + data[1:]))
def test_mxfp4_blocks_are_exact_in_q5_0(data: bytes) -> None:
    """With scales that float16 has, which are those of weights."""
    blocks = np.frombuffer(data[:17], dtype=np.uint8)[None]
    made = q5_0_of(torch.from_numpy(blocks.copy())).numpy()
    theirs, ours = (dequantize(each, of) for each, of in ((blocks, Type.MXFP4), (made, Type.Q5_0)))
    np.testing.assert_allclose(ours, theirs, atol=12 * 2.0**-25, rtol=0)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("width"), ModelLoadError, "has to unpack it, which says: 'width' is missing"),
        (UnsupportedModelError("1 layer"), UnsupportedModelError, "^1 layer$"),  # an error of our own keeps its class
    ],
)
def test_a_file_whose_config_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], message: str
) -> None:
    write_family(tmp_path / "model.gguf", "lfm2", "Q8_0")
    monkeypatch.setattr(loading, "read_config", Mock(side_effect=error))
    with pytest.raises(kind, match=message):
        load_pretrained(str(tmp_path / "model.gguf"))


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("family", "forward"), [*product(FAMILIES, ["auto"]), *product(BYTE_LEVEL, ["modules"])])
def test_the_engine_decodes_from_blocks_as_from_float32(tmp_path: Path, family: str, forward: str) -> None:
    exact = write_family(tmp_path / "model.gguf", family, "Q8_0")
    engine = CocoaEngine.from_pretrained(str(tmp_path / "model.gguf"), runtime=Runtime(forward=forward))
    assert isinstance(engine.model.get_input_embeddings().weight, BlockTensor)
    assert_same_answers(engine, exact, "he 12 inner", ("cocoa-sig", "greedy"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCK_KINDS)), ids=BLOCK_KINDS)
def test_experts_of_every_type_are_read_where_they_are(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [BLOCK_KINDS[(number + step) % len(BLOCK_KINDS)] for step in range(3)]
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    exact = write_family(tmp_path / "model.gguf", "qwen3moe", "Q8_0", experts=kinds, **sizes)
    file = GgufFile(tmp_path / "model.gguf")
    assert gguf_model.obstacle(file) is None
    expected = logits(exact)
    monkeypatch.setattr(BlockTensor, "dequantized", None)  # nothing may unpack a whole matrix
    model: Any = gguf_model.load(file)
    for forward in ("modules", "lean"):
        if forward == "lean" and trial.obstacle() is not None:
            continue
        chosen = made(model, forward, "stock" if trial.obstacle() else "native")
        engine = use_backend(CocoaEngine(model, pieces_tokenizer()), chosen)
        assert_same_answers(engine, exact, IDS[0].tolist())
    torch.testing.assert_close(logits(model), expected, atol=1e-4 * float(expected.std()), rtol=1e-4)
    for layer, block in enumerate(model.model.layers):
        experts = block.mlp.experts
        for name, kind in zip(("gate", "up", "down"), kinds, strict=True):
            weight = experts.get_submodule(f"{name}_proj").weight
            assert weight.kind == kind
            theirs = file.blocks(f"blk.{layer}.ffn_{name}_exps.weight")
            assert all(weight[expert].blocks.data_ptr() == theirs[expert].data_ptr() for expert in range(6))


@needs_kernels
def test_the_modules_run_experts_by_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = write_family(tmp_path / "model.gguf", "qwen3moe-mixed", "Q5_0")
    engine = CocoaEngine.from_pretrained(str(tmp_path / "model.gguf"), runtime=Runtime(forward="modules"))
    assert engine.info().forward == "modules"
    monkeypatch.setattr(SeparateExperts, "_run", None)
    assert_same_answers(engine, exact, "the inner heather")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_count": 4}, r"blk.0.ffn_\w+.weight has the shape \[6, .*not \[4"),
        ({"expert_feed_forward_length": 64}, r"ffn_\w+_exps.weight has the shape"),
        ({}, "the tensor blk.1.exp_probs_b.bias"),
    ],
)
def test_experts_that_are_not_known_or_that_the_metadata_does_not_describe(
    tmp_path: Path, change: dict[str, int], message: str
) -> None:
    """Those that are not known are left to transformers."""
    more = {} if change else {"blk.1.exp_probs_b.bias": torch.zeros(6)}
    metadata = {f"qwen3moe.{key}": value for key, value in change.items()}
    write_family(tmp_path / "model.gguf", "qwen3moe", "Q8_0", metadata=metadata, tensors=more)
    file = GgufFile(tmp_path / "model.gguf")
    if not change:
        assert gguf_model.obstacle(file) == message
        return
    with pytest.raises(ModelLoadError, match=message):
        gguf_model.load(file)


KNOWN_TO_TRANSFORMERS: dict[str, dict[str, Any]] = {  # its reader leaves out the settings that these replace
    "mistral": {},
    "qwen3moe": {"moe_intermediate_size": 768},
    "phi3": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {
        "query_pre_attn_scalar": 256,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", KNOWN_TO_TRANSFORMERS)
def test_transformers_reads_the_same_from_the_file(tmp_path: Path, family: str) -> None:
    write_family(tmp_path / "model.gguf", family, "F32", **KNOWN_TO_TRANSFORMERS[family])
    model: Any = gguf_model.load(GgufFile(tmp_path / "model.gguf"))
    if family.startswith("gemma"):
        for layer in model.model.layers:
            layer.self_attn.scaling = 256**-0.5  # it takes every head to be 256 wide
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", attn_implementation="eager")
    torch.testing.assert_close(logits(model), logits(theirs), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers", "expected"), [("gemma2", 46, 16), ("gemma3", 62, 16), ("gemma3", 3, 32)])
def test_the_scale_of_gemmas_scores(tmp_path: Path, family: str, layers: int, expected: int) -> None:
    """The file does not say it. In the largest models it is the width for each head."""
    write_family(tmp_path / "model.gguf", family, "F32", num_hidden_layers=layers)
    model: Any = gguf_model.load(GgufFile(tmp_path / "model.gguf"))
    assert model.config.query_pre_attn_scalar == expected
    assert model.model.layers[0].self_attn.scaling == expected**-0.5
