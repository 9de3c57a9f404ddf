"""A model in parts: shared by processes (tensor parallelism), or with layers on disk; and one with int8 weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from torchao import quantization
from transformers import TorchAoConfig

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, ModelLoadError, Runtime
from tests.helpers import tensor_parallel_process as process
from tests.helpers.alike import assert_alike
from tests.helpers.inside import hook_count
from tests.helpers.paths import ROOT
from tests.helpers.reference import FullForward, Reference, assert_same
from tests.helpers.tiny_models import NUM_LAYERS, save_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), chat=False, seed=1)


@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="needs torch.distributed with gloo"
)
def test_two_processes_decode_as_one(checkpoint: str, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, process.__file__, checkpoint, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        check=True,
        timeout=300,
    )
    alone = CocoaEngine.from_pretrained(checkpoint)
    expected = process.decoded(alone)
    costs = process.decoded(CocoaEngine.from_pretrained(checkpoint, runtime=Runtime(linears="stock")))  # as the parts
    assert any(span.kind == "risk_point" for span in expected[0].spans)
    for number in range(len(process.WAYS_TO_ASK)):
        first, second = (json.loads((tmp_path / f"{number}-{rank}.json").read_text()) for rank in (0, 1))
        assert first == second  # a sample without a seed too: the processes agree on one
        assert len(first["answers"]) == (1 if number else len(expected))
        for answer, one, cost in zip(first["answers"], expected, costs, strict=False):
            answer = Generation.model_validate(answer)
            assert_alike(answer, one)
            assert answer.usage == cost.usage
        assert first["halved"] == NUM_LAYERS * 7 + 2  # every linear layer, and the embeddings
        assert first["hooks"] == 0
        differing = {"forward", "linears", "native_obstacle", "backend_reason"}  # the lean pass reads whole weights
        whole = alone.info().model_dump(mode="json")
        assert {name for name in whole if whole[name] != first["info"][name]} <= differing


def test_tensor_parallelism_in_one_process_is_none(checkpoint: str) -> None:
    expected = CocoaEngine.from_pretrained(checkpoint).generate([5, 6], max_new_tokens=8)
    for options in process.WAYS_TO_ASK:
        engine = CocoaEngine.from_pretrained(checkpoint, **options)
        assert_alike(engine.generate([5, 6], max_new_tokens=8), expected)


def test_options_that_exclude_each_other(checkpoint: str) -> None:
    sizes = {"distributed_config": {"tp_size": 2}}
    for options, reason in (({"device_map": "cpu"}, "mutually exclusive"), ({"tp_plan": "auto"}, "not both")):
        with pytest.raises(ModelLoadError, match=reason):
            CocoaEngine.from_pretrained(checkpoint, **options, **sizes)


@pytest.mark.parametrize("on_disk", [("model.layers.1", "model.layers.3", "model.norm"), ("model.embed_tokens",)])
def test_some_layers_on_disk(checkpoint: str, tmp_path: Path, on_disk: tuple[str, ...]) -> None:
    parts = ("model.embed_tokens", *(f"model.layers.{n}" for n in range(NUM_LAYERS)), "model.norm", "lm_head")
    device_map: dict[str, str] = {part: "disk" if part in on_disk else "cpu" for part in parts}
    device_map["model.rotary_emb"] = "cpu"
    engine = CocoaEngine.from_pretrained(checkpoint, device_map=device_map, offload_folder=str(tmp_path))
    assert any(weight.device.type == "meta" for weight in engine.model.parameters())
    alone = CocoaEngine.from_pretrained(checkpoint)
    for prompt in process.PROMPTS:
        assert_alike(engine.generate(prompt, max_new_tokens=8), alone.generate(prompt, max_new_tokens=8))
    for scored in zip(*(each.score(process.PROMPTS[0], process.TEXTS) for each in (engine, alone)), strict=True):
        assert_alike(*scored)
    assert engine.info().device == "cpu"


# int8 weights (torchao), quantised while they are loaded or before they were saved.

PROMPT = [5, 6, 7, 100, 20]
CONFIG = CocoaConfig(max_new_tokens=16)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_int8_weights_decode_as_the_reference_does_on_them(architecture: str, tmp_path: Path) -> None:
    """Also those of a checkpoint saved quantised, which says in its config how: no option is needed."""

    def int8_weights(engine: CocoaEngine) -> int:
        linears = (module for module in engine.model.modules() if isinstance(module, torch.nn.Linear))
        return sum(isinstance(linear.weight, quantization.Int8Tensor) for linear in linears)

    folder = save_model(tmp_path / "whole", architecture, chat=False, seed=1)
    options = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    engine = CocoaEngine.from_pretrained(folder, quantization_config=options)
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

    for part in (engine.model, engine.tokenizer):
        part.save_pretrained(tmp_path / "quantised")
    again = CocoaEngine.from_pretrained(str(tmp_path / "quantised"))
    assert int8_weights(again) == int8_weights(engine)
    assert_alike(again.generate(PROMPT, config=CONFIG), answer)
