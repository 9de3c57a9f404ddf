"""Mixtures of experts by the lean pass: it gives what the model's modules give, and reads each expert once."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.execution.forward import linears
from cocoa_engine.execution.forward.lean import Lean, Mixture, Mlp, lean_obstacle
from cocoa_engine.execution.forward.linears import FastLinear, LinearBackend, can_pack, choose_linear_backend
from cocoa_engine.execution.forward.static import StaticLean
from cocoa_engine.model.language_model import LanguageModel
from tests.helpers.backends import LINEAR_BACKENDS, PROMPTS, same
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer


def block_of(model: Any, layer: int = 0) -> Any:
    return model.model.layers[layer].mlp


@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 2e-2, id="bfloat16")]
)
@pytest.mark.parametrize("rows", [1, 2, 9, 70])
def test_the_mixture_is_that_of_the_modules(
    backend: LinearBackend, dtype: torch.dtype, tolerance: float, rows: int
) -> None:
    if backend == "packed" and not can_pack(dtype):
        pytest.skip("oneDNN cannot pack it here")
    for norm in (True, False):
        model = tiny_model("qwen3_moe", norm_topk_prob=norm).to(dtype)
        mixture = Lean(LanguageModel(model), backend).layers[0].mlp
        assert isinstance(mixture, Mixture)
        x = torch.randn(rows, 32, dtype=dtype)
        with torch.no_grad():
            found, expected = mixture(x), block_of(model)(x[None])[0]
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, atol=tolerance * float(expected.std()), rtol=tolerance)


def test_each_expert_runs_once_on_all_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_moe")
    mixture: Any = Lean(LanguageModel(model), "stock").layers[0].mlp
    read: Counter[int] = Counter()
    call = FastLinear.__call__
    monkeypatch.setattr(
        FastLinear, "__call__", lambda linear, x: read.update([linear.weights[0].data_ptr()]) or call(linear, x)
    )
    x = torch.randn(40, 32)
    with torch.no_grad():
        chosen = mixture.router(x)[2].unique().tolist()
        mixture(x)
    assert len(chosen) > 2
    stacks = (block_of(model).experts.gate_up_proj, block_of(model).experts.down_proj)
    assert read == {stack[number].data_ptr(): 1 for stack in stacks for number in chosen}  # and they are not copies


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dense"),
    [
        ({"mlp_only_layers": []}, []),
        ({"mlp_only_layers": [0, 4]}, [0, 4]),
        ({"mlp_only_layers": [5], "decoder_sparse_step": 2}, [0, 2, 4, 5]),
        ({"mlp_only_layers": [], "num_experts_per_tok": 5, "norm_topk_prob": False}, []),
        ({"mlp_only_layers": [], "num_experts_per_tok": 1, "use_sliding_window": True, "sliding_window": 8}, []),
    ],
)
def test_the_engine_decodes_and_scores_as_with_the_modules(options: dict[str, Any], dense: list[int]) -> None:
    model = tiny_model("qwen3_moe", **options)
    layers = Lean(LanguageModel(model), "stock").layers
    assert [number for number, layer in enumerate(layers) if isinstance(layer.mlp, Mlp)] == dense
    results = []
    for forward in ("auto", "modules"):
        engine = CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(forward=forward))
        answers = [*engine.generate_batch(PROMPTS, max_new_tokens=12), engine.generate(PROMPTS[2], max_new_tokens=12)]
        scores = engine.score(PROMPTS[0], [tuple(PROMPTS[1]), tuple(PROMPTS[2])])
        assert engine.info().forward == ("lean" if forward == "auto" else "modules"), engine.info().backend_reason
        results.append((answers, scores))
    (answers, scores), (expected, expected_scores) = results
    assert any(span.candidates for answer in answers for span in answer.spans)
    assert all(same(a, b) for a, b in zip(answers, expected, strict=True))
    for one, other in zip(scores, expected_scores, strict=True):
        assert one.spans[0].log_prob == pytest.approx(other.spans[0].log_prob, abs=1e-3)
        assert [span.f_mlds for span in one.spans] == pytest.approx([span.f_mlds for span in other.spans], abs=1e-3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda experts: setattr(experts, "gate_up_proj", nn.Parameter(torch.ones(5, 32, 32))), "another layout"),
        (lambda experts: setattr(experts, "is_transposed", True), "another layout"),
        (lambda experts: setattr(experts, "_is_expert_parallel", True), "several processes share its experts"),
        (lambda experts: parametrize.register_parametrization(experts, "down_proj", nn.Identity()), "are adapted"),
    ],
)
def test_other_experts_are_left_to_the_modules(change: Any, reason: str) -> None:
    model = tiny_model("qwen3_moe")
    assert lean_obstacle(LanguageModel(model)) is None
    change(block_of(model, 3).experts)
    assert reason in str(lean_obstacle(LanguageModel(model)))


def test_experts_count_where_a_copy_of_the_weights_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_moe").to(torch.bfloat16)
    size = sum(weight.nbytes for weight in linears._linear_weights(model))
    assert size > 3 * sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear)) / 2
    memory = type("Memory", (), {"available": 4 * size})
    monkeypatch.setattr(linears, "native_obstacle", lambda _: "not here")
    monkeypatch.setattr(linears, "can_pack", lambda _: True)
    monkeypatch.setattr(linears.psutil, "virtual_memory", lambda: memory)
    assert choose_linear_backend(model, "auto") == "transposed"
    memory.available += 1000
    assert choose_linear_backend(model, "auto") == "packed"


def test_static_steps_refuse_them() -> None:
    """Which experts run is known on the host only, so that no graph can hold the step."""
    with pytest.raises(NotImplementedError, match="mixture of experts"):
        StaticLean(LanguageModel(tiny_model("qwen3_moe")), "stock")
