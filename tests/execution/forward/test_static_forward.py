"""Steps of fixed shape give what the lean pass and plain forward passes give, however padded, pooled or replayed."""

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.execution.backends import Path, build
from cocoa_engine.execution.backends.shared_cache import SharedCache, SharedTree
from cocoa_engine.execution.forward import static
from cocoa_engine.execution.forward.linears import FastLinear
from cocoa_engine.execution.forward.static import StaticLean, StaticStore
from cocoa_engine.model.language_model import CaptureSpec, FinalLayer, LanguageModel
from tests.helpers.alike import assert_alike, assert_all_alike
from tests.helpers.backends import PROMPTS, close_to, made, opened, plain, shared, step
from tests.helpers.in_threads import together
from tests.helpers.inside import use_backend
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

FAMILY = ["llama", "qwen3", "mistral-sliding", "qwen2", "phi3", "granite", "olmo2"]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "GRAIN", 16)


backend_of = partial(shared, kind="static_lean")


def steps_of(tree: SharedTree) -> list[tuple[int, int]]:
    assert isinstance(tree.store, StaticStore)
    return sorted({(shape.width, shape.span) for shape in tree.store.steps})


def forward_of(backend: SharedCache) -> StaticLean:
    assert isinstance(backend.forward, StaticLean)
    return backend.forward


@pytest.mark.slow
@pytest.mark.parametrize("final", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("architecture", FAMILY)
def test_a_tree_gives_the_lean_pass_and_the_plain_one(architecture: str, final: FinalLayer) -> None:
    model = tiny_model(architecture)
    backends = shared(model, "static_lean"), shared(model, "lean")
    for width in (1, 2, 4, 7):
        first: list[Path] = [(10 + number,) for number in range(width)]
        second: list[Path] = [(*path, 100) for path in first if path != (11,)]
        outputs: list[list[Tensor]] = []
        for backend in backends:
            tree = opened(backend, PROMPTS[0], capture=CaptureSpec(2, 6, final))
            said = [*backend.step([(tree, first)])[0][:2], *backend.step([(tree, second)])[0][:2]]
            tree.commit(second[-1])
            outputs.append([*said, *backend.step([(tree, [(150,), (151,)])])[0][:2]])
            if backend is backends[0]:
                assert max(steps_of(tree))[0] == (4 if width <= 4 else 8)
            tree.close()
        for actual, expected in zip(*outputs, strict=True):
            close_to(actual, expected)
        close_to(outputs[0][4][1], plain(model, [*PROMPTS[0], *second[-1], 151]))


@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding"])
def test_a_tip_and_its_continuation_in_one_step(architecture: str) -> None:
    backend = backend_of(tiny_model(architecture))
    tree = opened(backend, PROMPTS[0])
    (output,) = backend.step([(tree, [(10,), (10, 20), (11,), (10, 20, 30)])])
    close_to(output.logits[3], plain(backend.model.model, [*PROMPTS[0], 10, 20, 30]))
    assert steps_of(tree) == [(4, 16)]
    tree.commit((10,), keep_rest=True)
    step(backend, tree, (20, 30, 40))


def test_wider_and_deeper_than_the_largest_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(tiny_model("llama"))
    tree = opened(backend, PROMPTS[0], reserve_tokens=80)
    step(backend, tree, *[(token,) for token in range(10, 43)])
    assert steps_of(tree) == []
    monkeypatch.setattr(static, "DEPTHS", (2,))
    for depth in range(1, 5):
        path = tuple(range(60, 60 + depth))
        (output,) = backend.step([(tree, [path])])
        close_to(output.logits[0], plain(backend.model.model, [*PROMPTS[0], 42, *path]))
    assert steps_of(tree) == [(1, 16)]


def test_a_batch_of_sequences_then_each_alone() -> None:
    """Batches run the lean pass over the same slots that single steps write to."""
    backend = backend_of(tiny_model("llama"))
    trees = [opened(backend, prompt) for prompt in PROMPTS]
    for token in range(40, 52, 2):
        if token % 4:
            for tree in trees:
                step(backend, tree, (token,), (token + 1,))
            continue
        outputs = backend.step([(tree, [(token,), (token + 1,)]) for tree in trees])
        for tree, output in zip(trees, outputs, strict=True):
            close_to(output.logits[1], plain(backend.model.model, [*tree.token_ids, token + 1]))
            tree.commit((token + 1,))
    assert all(steps_of(tree) for tree in trees)


def test_results_outlive_the_steps_that_follow() -> None:
    """Two sequences in turn: neither changes what the other was told."""
    backend = backend_of(tiny_model("llama"))
    trees = [opened(backend, PROMPTS[0]), opened(backend, PROMPTS[1])]
    outputs = [backend.step([(tree, [(10,), (11,)])])[0] for tree in trees]
    kept = [(output.logits.clone(), output.hidden.clone()) for output in outputs]
    backend.step([(trees[0], [(10, 12), (11, 13)])])
    for output, (logits, hidden) in zip(outputs, kept, strict=True):
        assert torch.equal(output.logits, logits)
        assert torch.equal(output.hidden, hidden)


def test_a_store_and_its_steps_serve_the_next_sequence() -> None:
    backend = backend_of(tiny_model("llama"))
    tree = opened(backend, PROMPTS[2])
    step(backend, tree, (10,), (11,))
    store = tree.store
    assert isinstance(store, StaticStore)
    assert store.data is not None
    store.data[:, :, :, 40:] = torch.nan  # what a broken model leaves behind
    tree.close()
    tree.close()
    made = list(store.steps.values())
    assert made
    again = opened(backend, PROMPTS[0])
    assert again.store is store
    assert not store.data[:, :, :, len(PROMPTS[0]) :].any()  # nothing of the former sequence
    step(backend, again, (10,), (11,))
    assert opened(backend, PROMPTS[0]).store is not store
    assert all(step in store.steps.values() for step in made)


def test_the_pool_is_bounded_and_gives_the_store_that_fits_best(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = forward_of(backend_of(tiny_model("llama")))
    stores = [forward.new_store(capacity) for capacity in (30, 100, 60, 20, 90)]
    assert [store.capacity for store in stores] == [32, 112, 64, 32, 96]
    for store in stores:
        forward.release(store)
        forward.release(store)
    assert forward.new_store(200) not in stores
    assert [stores.index(forward.new_store(size)) for size in (33, 10, 10, 10)] == [2, 3, 4, 1]
    assert forward.new_store(10) not in stores  # the one used longest ago is gone
    # large stores are not hoarded
    stores = [forward.new_store(32) for _ in range(3)]
    monkeypatch.setattr(static, "MAX_IDLE_BYTES", stores[0].nbytes - 1)
    for store in stores:
        forward.release(store)
    assert forward.new_store(32) is stores[2]
    assert forward.new_store(32) not in stores


def test_a_store_keeps_a_bounded_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "MAX_STEPS", 3)
    backend = backend_of(tiny_model("llama"))
    tree = opened(backend, PROMPTS[0])
    for width in (1, 4, 8, 16, 1):
        step(backend, tree, *[(token,) for token in range(10, 10 + width)])
        tree.close()
        tree = opened(backend, PROMPTS[0])
    assert [width for width, _ in steps_of(tree)] == [1, 8, 16]


def test_a_store_that_grew_goes_on_without_steps() -> None:
    backend = backend_of(tiny_model("llama"))
    tree = opened(backend, PROMPTS[0], reserve_tokens=2)  # 16 slots
    for token in range(20, 32):
        step(backend, tree, (token,), (token + 1,))
    store = tree.store
    assert isinstance(store, StaticStore)
    assert (store.data, store.steps) == (None, {})
    tree.close()
    assert forward_of(backend).new_store(16) is not store


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILY)
@pytest.mark.parametrize("boundary", ["right", "own"])
def test_whole_generations(architecture: str, boundary: str) -> None:
    model, settings = tiny_model(architecture), {"max_new_tokens": 20, "span_boundary": boundary}
    results = []
    for kind in ("lean", "static_lean"):
        engine = use_backend(CocoaEngine(model, tiny_tokenizer()), made(model, kind, "transposed"))
        results.append(engine.generate_batch(PROMPTS, **settings))
        for method in ("cocoa-sig", "greedy") if boundary == "right" else ("cocoa-sig",):
            results[-1] += [engine.generate(prompt, method=method, **settings) for prompt in PROMPTS]
        assert engine.info().forward == kind
    assert any(span.candidates for out in results[0] for span in out.spans)
    assert_all_alike(*results)


def test_prefixes_of_other_sequences_are_copied_into_pooled_stores() -> None:
    backend = build("static_lean", LanguageModel(tiny_model("llama")), "transposed", 2**20)
    assert isinstance(backend, SharedCache)
    prompt = [3 + number % 200 for number in range(100)]
    opened(backend, prompt).close()
    tree = opened(backend, [*prompt, 7, 8])
    assert tree.cached_tokens == len(prompt)
    step(backend, tree, (10,), (11,))
    assert steps_of(tree)


def test_steps_of_other_weights_and_under_inference_mode() -> None:
    """Changed weights make new steps; the pool keeps no model alive."""
    model = tiny_model("llama")
    for _ in range(2):
        backend = backend_of(model)
        with torch.inference_mode():
            tree = opened(backend, PROMPTS[0])
            backend.step([(tree, [(10,), (11,)])])
            tree.commit((11,))
        step(backend, tree, (12,))
        tree.close()
        with torch.no_grad():
            model.model.layers[2].mlp.up_proj.weight.mul_(-2)
    alive = weakref.ref(model)
    del model, backend, tree
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    backends = [shared(model, kind) for kind in ("static_lean", "lean")]
    outputs = [backend.step([(opened(backend, PROMPTS[0]), [(10,), (11,)])])[0] for backend in backends]
    for actual, expected in zip(*(output[:2] for output in outputs), strict=True):
        assert actual.dtype == torch.float32
        assert float((actual - expected).abs().max()) < 0.05 * float(expected.std())


@pytest.mark.parametrize("architecture", FAMILY)
def test_a_step_could_be_captured(architecture: str) -> None:
    """It asks nothing of the device, has no size that depends on data, and makes nothing of the host's values."""
    names: set[str] = set()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(function._schema.name)
            return function(*args, **(kwargs or {}))

    backend = backend_of(tiny_model(architecture))
    tree = opened(backend, PROMPTS[0])
    backend.step([(tree, [(10,), (11,)])])
    assert isinstance(tree.store, StaticStore)
    (step,) = tree.store.steps.values()
    with torch.no_grad(), Operators():
        step.run(forward_of(backend))
    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "item", "equal")
    assert names.isdisjoint(f"aten::{name}" for name in forbidden)
    assert "aten::index_copy_" in names


@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_that_write_their_part_of_one_result(bias: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, size, bias=bias) for size in (8, 4, 12)]
    linear = FastLinear([layer.weight for layer in layers], [layer.bias for layer in layers], "stock")
    x = torch.randn(3, 16)
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    assert not linear.in_place  # on a CPU they are joined
    linear.in_place = True
    with torch.no_grad():
        actual = linear(x)
    close_to(actual, expected)
    assert actual.is_contiguous()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the capture succeeds")
def test_a_capture_that_fails_is_logged_once_and_changes_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    backend = backend_of(tiny_model("llama"))
    forward_of(backend).captures = True  # which a machine without a GPU cannot
    for _ in range(2):
        tree = opened(backend, PROMPTS[0])
        for token in (10, 11):
            step(backend, tree, (token,), (token + 1,))
        assert backend.forward_name == "lean"
        tree.close()
    (record,) = caplog.records
    assert "CUDA graphs" in record.getMessage()


@pytest.fixture
def cuda_model(small_spans: None) -> Iterator[PreTrainedModel]:
    yield tiny_model("llama").cuda()
    torch.cuda.synchronize()


@GPU
class TestOnAGpu:
    """Real graphs."""

    def test_graphs_are_chosen_and_can_be_turned_off(self, cuda_model: PreTrainedModel) -> None:
        """In threads, too. Graphs give what the CPU gives."""
        on = CocoaEngine(cuda_model, tiny_tokenizer())
        off = CocoaEngine(cuda_model, tiny_tokenizer(), runtime=Runtime(cuda_graphs=False))
        assert on.info().forward == "static_lean", on.info().backend_reason
        assert off.info().forward == "lean"
        expected = off.generate_batch(PROMPTS, max_new_tokens=40)
        alone = partial(on.generate, max_new_tokens=40)
        for answers in (
            [alone(prompt) for prompt in PROMPTS],
            together([partial(alone, prompt) for prompt in PROMPTS]),
            on.generate_batch(PROMPTS, max_new_tokens=40),
            [off.generate(prompt, max_new_tokens=40) for prompt in PROMPTS],
        ):
            assert_all_alike(answers, expected)
        on_cpu = CocoaEngine(tiny_model("llama"), tiny_tokenizer()).generate_batch(PROMPTS, max_new_tokens=16)
        assert_all_alike(on.generate_batch(PROMPTS, max_new_tokens=16), on_cpu)
        assert on.info().forward == "static_lean"

    @pytest.mark.parametrize("architecture", FAMILY)
    def test_replays_give_the_plain_pass(self, architecture: str) -> None:
        model = tiny_model(architecture).cuda()
        backend = build("static_lean", LanguageModel(model), "stock")
        assert isinstance(backend, SharedCache)
        for prompt in (PROMPTS[2], PROMPTS[0]):  # the second time in the same store, with its graphs
            tree = opened(backend, prompt, reserve_tokens=60)
            text = list(prompt)
            for token in range(20, 60):
                paths = [(token + number,) for number in range(1 + token % 9)]
                (output,) = backend.step([(tree, paths)])
                with torch.no_grad():
                    ids = torch.tensor([[*text, *paths[-1]]], device="cuda")
                    torch.testing.assert_close(output.logits[-1], model(ids).logits[0, -1], atol=1e-3, rtol=1e-3)
                tree.commit(paths[-1])
                text += paths[-1]
            assert isinstance(tree.store, StaticStore)
            assert tree.store.steps
            assert all(step.graph is not None for step in tree.store.steps.values())
            tree.close()

    def test_a_capture_that_fails_falls_back(
        self, cuda_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A word from the device to the host, which no capture allows."""
        run = static.Step.run
        expected = CocoaEngine(cuda_model, tiny_tokenizer(), runtime=Runtime(cuda_graphs=False)).generate(PROMPTS[0])
        monkeypatch.setattr(static.Step, "run", lambda step, lean: run(step, lean) or step.logits.sum().item())
        engine = CocoaEngine(cuda_model, tiny_tokenizer())
        for _ in range(2):
            assert_alike(engine.generate(PROMPTS[0]), expected)
        (record,) = caplog.records
        assert "CUDA graphs" in record.getMessage()
        assert engine.info().forward == "lean"

    def test_all_graphs_may_go_and_new_ones_come(self, cuda_model: PreTrainedModel) -> None:
        backend = build("static_lean", LanguageModel(cuda_model), "stock")
        assert isinstance(backend, SharedCache)
        for _ in range(2):
            tree = opened(backend, PROMPTS[0])
            (output,) = backend.step([(tree, [(10,), (11,)])])
            assert output.logits.isfinite().all()
            del tree
            forward_of(backend).drop_idle()
            gc.collect()
        assert backend.forward_name == "static_lean"
