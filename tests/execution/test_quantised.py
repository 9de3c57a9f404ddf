"""Models whose linear layers hold int8 weights (torchao), quantised while they are loaded or before they were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TorchAoConfig

from cocoa_engine import CocoaConfig, CocoaEngine
from tests.helpers.alike import assert_alike
from tests.helpers.hooks import hook_count
from tests.helpers.reference import FullForward, Reference, assert_same
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 100, 20]
CONFIG = CocoaConfig(max_new_tokens=16)


@pytest.fixture(scope="module", autouse=True)
def quantization() -> Any:
    """torchao's, which takes seconds to import."""
    return pytest.importorskip("torchao.quantization")


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in full precision."""
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param, seed=1).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return Path(path)


def int8_weights(engine: CocoaEngine) -> int:
    from torchao.quantization import Int8Tensor

    linears = (module for module in engine.model.modules() if isinstance(module, torch.nn.Linear))
    return sum(isinstance(linear.weight, Int8Tensor) for linear in linears)


def quantised(folder: Path) -> CocoaEngine:
    from torchao.quantization import Int8WeightOnlyConfig

    options = TorchAoConfig(Int8WeightOnlyConfig())
    return CocoaEngine.from_pretrained(str(folder), quantization_config=options)


def test_decodes_as_the_reference_does_on_the_same_weights(folder: Path) -> None:
    engine = quantised(folder)
    assert int8_weights(engine) == 6 * 7  # every linear layer but the output
    answer, together = engine.generate(PROMPT, config=CONFIG), engine.generate_batch([PROMPT, [9, 8]], config=CONFIG)
    scored = engine.score(PROMPT, answer.token_ids)
    assert hook_count(engine.model) == 0

    reference = Reference(FullForward(engine.model), engine.tokenizer, CONFIG)
    expected = reference.generate(PROMPT)
    assert expected.risk_points
    assert expected.margin > 1e-4
    assert_same(answer, expected)
    assert_same(together[0], expected)
    assert_same(scored, reference.score(PROMPT, answer.token_ids))
    assert (engine.info().backend, engine.info().dtype) == ("shared_cache", "float32")


def test_a_checkpoint_saved_quantised(folder: Path, tmp_path: Path) -> None:
    """It says in its config how it was quantised; no option is needed."""
    engine = quantised(folder)
    engine.model.save_pretrained(tmp_path)
    engine.tokenizer.save_pretrained(tmp_path)
    again = CocoaEngine.from_pretrained(str(tmp_path))
    assert int8_weights(again) == int8_weights(engine) > 0
    assert_alike(again.generate(PROMPT, config=CONFIG), engine.generate(PROMPT, config=CONFIG))
