"""GGUF files of each family: the model of the blocks is transformers' model with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ModelLoadError
from cocoa_engine.execution.native import trial
from cocoa_engine.model import gguf_model
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.loading import load_pretrained
from tests.helpers.family_gguf import FAMILIES, write_family

needs_kernels = pytest.mark.skipif(trial.obstacle() is not None, reason=f"no kernels: {trial.obstacle()}")
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
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    assert all(isinstance(parameter, BlockTensor) for parameter in matrices) == (kind != "F32")
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (tied or family == "gemma2")


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


KNOWN_TO_TRANSFORMERS: dict[str, dict[str, Any]] = {  # its reader leaves out the settings that these replace
    "mistral": {},
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


@pytest.mark.parametrize(("family", "layers", "expected"), [("gemma2", 46, 16), ("gemma3", 62, 16), ("gemma3", 3, 32)])
def test_the_scale_of_gemmas_scores(tmp_path: Path, family: str, layers: int, expected: int) -> None:
    """The file does not say it. In the largest models it is the width for each head."""
    write_family(tmp_path / "model.gguf", family, "F32", num_hidden_layers=layers)
    model: Any = gguf_model.load(GgufFile(tmp_path / "model.gguf"))
    assert model.config.query_pre_attn_scalar == expected
    assert model.model.layers[0].self_attn.scaling == expected**-0.5


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"keeps_blocks": lambda: False}])
def test_factors_by_length_that_would_be_lost_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    write_family(tmp_path / "model.gguf", "phi3-long", "Q8_0")
    with pytest.raises(ModelLoadError, match=r"scaled rotary embeddings.*on a CPU with the kernels"):
        load_pretrained(tmp_path / "model.gguf", **options)
