"""Which way branches are run on which architecture, and that every way gives the same results."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from cocoa_engine import CocoaEngine, Generation
from cocoa_engine.backends import Backend, choose
from cocoa_engine.backends.cache import SlotCache
from cocoa_engine.backends.copied_cache import CopiedCache
from cocoa_engine.backends.recompute import Recompute
from cocoa_engine.backends.shared_cache import SharedCache, SharedTree
from cocoa_engine.hidden_states import Wanted
from cocoa_engine.model import LanguageModel
from tests.tiny_models import ARCHITECTURES, RECURRENT, tiny_model, tiny_tokenizer

PROMPTS = [[5, 9, 40, 77, 12, 150, 3], [200, 201], list(range(30, 60))]
WANTED = Wanted(2, 4, "post_norm")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chosen_backend(architecture: str) -> None:
    expected = "copied_cache" if architecture in RECURRENT else "shared_cache"
    info = CocoaEngine(tiny_model(architecture), tiny_tokenizer()).info()
    assert info.backend == expected, info.backend_reason
    assert info.num_layers == 6
    assert info.middle_layers == (2, 4)


def test_a_slower_way_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("mamba")
    with caplog.at_level(logging.WARNING, logger="cocoa_engine"):
        for _ in range(2):
            CocoaEngine(model, tiny_tokenizer()).generate([5, 6], max_new_tokens=2)
    (record,) = caplog.records
    assert "copied_cache" in record.getMessage()


def test_alibi_positions_need_their_own_caches() -> None:
    assert choose(LanguageModel(tiny_model("falcon", alibi=True))).backend.name == "copied_cache"


def same(a: Generation, b: Generation) -> bool:
    return a.token_ids == b.token_ids and all(
        (x.kind, x.text, x.chosen) == (y.kind, y.text, y.chosen)
        and x.score == pytest.approx(y.score, abs=1e-3)
        and [c.token_ids for c in x.candidates] == [c.token_ids for c in y.candidates]
        for x, y in zip(a.spans, b.spans, strict=True)
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "qwen3_next"])
def test_all_ways_agree(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(architecture)
    engine = CocoaEngine(model, tiny_tokenizer())
    kinds: list[type[Backend]] = [CopiedCache, Recompute]
    if architecture not in RECURRENT:
        kinds.append(SharedCache)
    results = []
    for kind in kinds:
        monkeypatch.setitem(choose.__globals__["_chosen"], model, (kind, "set by the test"))
        results.append(
            [
                *engine.generate_batch(PROMPTS, max_new_tokens=24),
                *(engine.generate(prompt, max_new_tokens=24) for prompt in PROMPTS),
            ]
        )
    assert any(span.candidates for out in results[0] for span in out.spans)
    for first, second in pairwise(results):
        assert all(same(a, b) for a, b in zip(first, second, strict=True))


def test_a_bidirectional_model_that_does_not_say_so() -> None:
    from cocoa_engine import UnsupportedModelError

    model = tiny_model("llama")
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(UnsupportedModelError, match="both directions"):
        CocoaEngine(model, tiny_tokenizer()).generate([5, 6, 7])


def tree_of(backend: SharedCache, prompt: list[int], room: int = 16) -> SharedTree:
    (tree,) = backend.open([prompt], room, WANTED)
    backend.prefill(tree)
    assert isinstance(tree, SharedTree)
    return tree


def plain(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


def test_branches_see_the_prefix_and_themselves_only() -> None:
    model = tiny_model("llama")
    backend = SharedCache(LanguageModel(model))
    prompt = PROMPTS[0]
    tree = tree_of(backend, prompt)
    backend.step([(tree, [(10,), (11,), (12,)])])
    (output,) = backend.step([(tree, [(10, 20), (12, 22)])])  # the middle branch has ended
    for row, branch in zip(output.logits, [(10, 20), (12, 22)], strict=True):
        torch.testing.assert_close(row, plain(model, [*prompt, *branch]), atol=1e-4, rtol=1e-4)
    tree.commit((12, 22))
    (output,) = backend.step([(tree, [(30,)])])
    torch.testing.assert_close(output.logits[0], plain(model, [*prompt, 12, 22, 30]), atol=1e-4, rtol=1e-4)


def test_a_path_and_its_continuation_in_one_step() -> None:
    """A tip may follow a tip fed in the same pass."""
    model = tiny_model("llama")
    backend = SharedCache(LanguageModel(model))
    tree = tree_of(backend, PROMPTS[0])
    (output,) = backend.step([(tree, [(10,), (10, 20), (10, 20, 30)])])
    torch.testing.assert_close(output.logits[2], plain(model, [*PROMPTS[0], 10, 20, 30]), atol=1e-4, rtol=1e-4)


def test_the_prefix_is_never_copied() -> None:
    """Keys and values stay in the tensors that were allocated at the start."""
    model = tiny_model("llama")
    backend = SharedCache(LanguageModel(model))
    tree = tree_of(backend, PROMPTS[2])
    cache = tree.batch.cache
    addresses = [store.data_ptr() for store in cache._stores()]
    prefix = [store[:, :, : len(PROMPTS[2])].clone() for store in cache._stores()]
    for token in (10, 11, 12):
        backend.step([(tree, [(token,), (token + 1,)])])
        tree.commit((token + 1,))
    assert [store.data_ptr() for store in cache._stores()] == addresses
    for store, before in zip(cache._stores(), prefix, strict=True):
        assert torch.equal(store[:, :, : len(PROMPTS[2])], before)
    assert tree.used == tree.committed == len(PROMPTS[2]) + 3


def test_the_cache_is_allotted_once_for_what_can_be_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SlotCache] = []
    original = SlotCache.__init__

    def record(self: SlotCache, *arguments: int) -> None:
        original(self, *arguments)
        made.append(self)

    model = tiny_model("llama")
    engine = CocoaEngine(model, tiny_tokenizer())
    engine.info()
    monkeypatch.setattr(SlotCache, "__init__", record)
    engine.generate(PROMPTS[0], max_new_tokens=20, max_candidates=4, max_span_tokens=3)
    (cache,) = made
    assert cache.layers[0].keys.shape[2] == len(PROMPTS[0]) + 20 + 4 * 3 + 1


def test_no_hidden_states_of_the_prompt_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from cocoa_engine.backends import shared_cache

    captured = []
    original = shared_cache.capture

    def record(*arguments: object) -> object:
        captured.append(arguments)
        return original(*arguments)  # type: ignore[arg-type]

    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    engine.info()
    monkeypatch.setattr(shared_cache, "capture", record)
    out = engine.generate(PROMPTS[2], max_new_tokens=8)
    assert len(captured) == out.usage.forward_passes - 1


@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding", "gemma3_text", "gpt2"])
def test_a_long_prompt_is_fed_in_chunks(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cocoa_engine.backends import shared_cache

    model = tiny_model(architecture)
    engine = CocoaEngine(model, tiny_tokenizer())
    whole = engine.generate_batch(PROMPTS, max_new_tokens=12)
    monkeypatch.setattr(shared_cache, "PREFILL_CHUNK", 5)
    chunked = engine.generate_batch(PROMPTS, max_new_tokens=12)
    assert all(same(a, b) for a, b in zip(chunked, whole, strict=True))
    assert chunked[2].usage.forward_passes - whole[2].usage.forward_passes == len(PROMPTS[2]) // 5 - 1


def test_rows_of_a_batch_may_end_in_any_order() -> None:
    model = tiny_model("llama")
    backend = SharedCache(LanguageModel(model))
    trees = backend.open(PROMPTS, 8, WANTED)
    sequences = [list(prompt) for prompt in PROMPTS]
    for tree in trees:
        backend.prefill(tree)
    live = [0, 1, 2]
    for ending, token in ((None, 10), (0, 20), (1, 30), (None, 40)):
        if ending is not None:
            trees[ending].close()
            trees[ending].close()  # a second time does nothing
            live.remove(ending)
        outputs = backend.step([(trees[number], [(token,), (token + 1,)]) for number in live])
        for number, output in zip(live, outputs, strict=True):
            expected = plain(model, [*sequences[number], token + 1])
            torch.testing.assert_close(output.logits[1], expected, atol=1e-4, rtol=1e-4)
            trees[number].commit((token + 1,))
            sequences[number].append(token + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    engine = CocoaEngine(model, tiny_tokenizer())
    assert engine.info().backend == "shared_cache"
    for out in (*engine.generate_batch(PROMPTS, max_new_tokens=16), engine.generate(PROMPTS[0], max_new_tokens=16)):
        assert out.text == "".join(span.text for span in out.spans)
        assert all(0 <= span.f_mlds <= 2 for span in out.spans)


def test_layers_on_other_devices_and_offloaded_weights() -> None:
    """accelerate's hooks move inputs and weights; our captures and caches follow."""
    from accelerate import cpu_offload

    model = tiny_model("llama")
    expected = CocoaEngine(model, tiny_tokenizer()).generate(PROMPTS[0], max_new_tokens=12)
    offloaded = cpu_offload(tiny_model("llama"), torch.device("cpu"))
    assert CocoaEngine(offloaded, tiny_tokenizer()).generate(PROMPTS[0], max_new_tokens=12) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_gives_what_the_cpu_gives() -> None:
    expected = CocoaEngine(tiny_model("llama"), tiny_tokenizer()).generate_batch(PROMPTS, max_new_tokens=16)
    engine = CocoaEngine(tiny_model("llama").cuda(), tiny_tokenizer())
    actual = engine.generate_batch(PROMPTS, max_new_tokens=16)
    assert all(same(a, b) for a, b in zip(actual, expected, strict=True))
