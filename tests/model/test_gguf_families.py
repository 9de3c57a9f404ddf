"""GGUF files of each family: the model of the blocks is transformers' model with the same numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.errors import ModelLoadError
from cocoa_engine.execution.forward import trial
from cocoa_engine.model import gguf_model
from cocoa_engine.model.blocks import BLOCK_KINDS, BlockTensor
from cocoa_engine.model.experts import SeparateExperts
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.loading import load_pretrained
from tests.helpers.backends import made
from tests.helpers.family_gguf import FAMILIES, write_family
from tests.helpers.inside import use_backend
from tests.helpers.libraries import needs_kernels
from tests.helpers.tiny_models import sentencepiece_like_tokenizer

IDS = torch.randint(3, 300, (1, 20), generator=torch.Generator().manual_seed(0))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(("kind", "tied"), [("Q8_0", True), ("Q4_1", False), ("F32", False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_that_of_the_file(tmp_path: Path, family: str, kind: str, tied: bool) -> None:
    exact = write_family(tmp_path / "model.gguf", family, kind, tied=tied)
    file = GgufFile(tmp_path / "model.gguf")
    assert gguf_model.obstacle(file) is None
    model = gguf_model.load(file)
    expected = logits(exact)
    torch.testing.assert_close(logits(model), expected, atol=1e-4 * float(expected.std()), rtol=1e-4)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    matrices = [
        parameter for name, parameter in model.named_parameters() if parameter.dim() > 1 and "mlp.gate." not in name
    ]
    assert all(isinstance(parameter, BlockTensor) for parameter in matrices) == (kind != "F32")
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (tied or family == "gemma2")


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_decodes_from_blocks_as_from_float32(tmp_path: Path, family: str) -> None:
    exact = write_family(tmp_path / "model.gguf", family, "Q8_0")
    engine = CocoaEngine.from_pretrained(str(tmp_path / "model.gguf"))
    plain = CocoaEngine(exact, engine.tokenizer)
    assert isinstance(engine.model.get_input_embeddings().weight, BlockTensor)
    for method in ("cocoa-sig", "greedy"):
        found, expected = (
            each.generate("the inner heather", method=method, max_new_tokens=20) for each in (engine, plain)
        )
        assert found.token_ids == expected.token_ids
        assert [span.f_mlds for span in found.spans] == pytest.approx(
            [span.f_mlds for span in expected.spans], abs=1e-3
        )


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
        engine = use_backend(CocoaEngine(model, sentencepiece_like_tokenizer()), chosen)
        plain = CocoaEngine(exact, engine.tokenizer)
        found, wanted = (each.generate(IDS[0].tolist(), max_new_tokens=12) for each in (engine, plain))
        assert found.token_ids == wanted.token_ids
    torch.testing.assert_close(logits(model), expected, atol=1e-4 * float(expected.std()), rtol=1e-4)
    for layer, block in enumerate(model.model.layers):
        experts = block.mlp.experts
        parts = zip(("gate", "up", "down"), (experts.gate_proj, experts.up_proj, experts.down_proj), kinds, strict=True)
        for name, linears, kind in parts:
            assert linears.weight.kind == kind
            theirs = file.blocks(f"blk.{layer}.ffn_{name}_exps.weight")
            assert [linears.weight[expert].blocks.data_ptr() for expert in range(6)] == [
                theirs[expert].data_ptr() for expert in range(6)
            ]


@needs_kernels
def test_the_modules_run_experts_by_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = write_family(tmp_path / "model.gguf", "qwen3moe-mixed", "Q5_0")
    engine = CocoaEngine.from_pretrained(str(tmp_path / "model.gguf"), runtime=Runtime(forward="modules"))
    assert engine.info().forward == "modules"
    expected = CocoaEngine(exact, engine.tokenizer).generate("the inner heather", max_new_tokens=20)
    monkeypatch.setattr(SeparateExperts, "_run", None)
    found = engine.generate("the inner heather", max_new_tokens=20)
    assert found.token_ids == expected.token_ids
    assert [span.f_mlds for span in found.spans] == pytest.approx([span.f_mlds for span in expected.spans], abs=1e-3)


@pytest.mark.parametrize(
    ("add", "reason"),
    [
        (
            lambda writer: writer.add_tensor("blk.1.ffn_gate_up_exps.weight", np.zeros((6, 64, 64), dtype=np.float32)),
            "the tensor blk.1.ffn_gate_up_exps.weight",
        ),
        (
            lambda writer: writer.add_tensor("blk.1.exp_probs_b.bias", np.zeros(6, dtype=np.float32)),
            "the tensor blk.1.exp_probs_b.bias",
        ),
    ],
)
def test_unknown_experts_are_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, add: Any, reason: str
) -> None:
    architecture, settings, write = FAMILIES["qwen3moe"]
    assert write is not None
    also = (architecture, settings, lambda writer, config: (write(writer, config), add(writer))[0])
    monkeypatch.setitem(FAMILIES, "qwen3moe", also)
    write_family(tmp_path / "model.gguf", "qwen3moe", "Q8_0")
    assert gguf_model.obstacle(GgufFile(tmp_path / "model.gguf")) == reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 4}, r"blk.0.ffn_\w+.weight has the shape \[6, .*not \[4"),
        ({"moe_intermediate_size": 64}, r"ffn_\w+_exps.weight has the shape"),
    ],
)
def test_experts_that_the_metadata_does_not_describe_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int], message: str
) -> None:
    architecture, settings, write = FAMILIES["qwen3moe"]
    assert write is not None

    def wrong(writer: Any, config: Any) -> None:
        write(writer, SimpleNamespace(**{**vars(config), "num_experts": config.num_experts, **change}))

    monkeypatch.setitem(FAMILIES, "qwen3moe", (architecture, settings, wrong))
    write_family(tmp_path / "model.gguf", "qwen3moe", "Q8_0")
    with pytest.raises(ModelLoadError, match=message):
        gguf_model.load(GgufFile(tmp_path / "model.gguf"))


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


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unpacked_model_gives_the_same_logits(tmp_path: Path, family: str) -> None:
    write_family(tmp_path / "model.gguf", family, "Q8_0")
    blocks, unpacked = gguf_model.load(GgufFile(tmp_path / "model.gguf")), load_pretrained(tmp_path / "model.gguf")[0]
    assert {type(weight) for weight in unpacked.parameters()} == {torch.nn.Parameter}
    torch.testing.assert_close(logits(blocks), logits(unpacked), atol=1e-5, rtol=1e-4)
