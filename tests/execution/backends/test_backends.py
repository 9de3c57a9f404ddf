"""Which way branches are run on which architecture, and that every way gives the same results.

Positions beyond the length that a model was trained on: every rope type of transformers, on every backend.
"""

import copy
import itertools
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.decoding.request import FREE_LEAVES
from cocoa_engine.errors import PromptError
from cocoa_engine.execution.backends import KINDS, Path, ReadBack, build, choose, shared_cache
from cocoa_engine.execution.backends.shared_cache import SPARE_SLOTS, SharedTree
from cocoa_engine.execution.backends.unshared import UnsharedTree
from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.forward.base import KeyValues
from cocoa_engine.execution.forward.linears import LinearBackend
from cocoa_engine.execution.native import operators
from cocoa_engine.model import gguf_model
from cocoa_engine.model.configs import Windows, context_window_of
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.language_model import CaptureSpec, FinalLayer, LanguageModel
from tests.helpers import in_threads
from tests.helpers.alike import assert_alike, assert_all_alike, near
from tests.helpers.backends import LINEAR_BACKENDS, PROMPTS, WANTED, close_to, made, opened, plain, shared, step
from tests.helpers.family_gguf import write_family
from tests.helpers.inside import backend_inside, record, use_backend
from tests.helpers.tiny_models import ARCHITECTURES, EOS, RECURRENT, tiny_model, tiny_tokenizer

LEAN = [
    *("llama", "mistral", "mistral-sliding", "phi3", "qwen2", "qwen3"),
    *("gemma2", "gemma3_text", "granite", "olmo2", "qwen3_moe"),
]
CAPPED = {"gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}}
COPIED = [*RECURRENT, "gpt_neo"]  # those whose cache cannot hold branches
FORWARDS = {**dict.fromkeys(LEAN, "lean"), "falcon": "masked_modules", **dict.fromkeys(COPIED, "plain")}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chosen_backend(architecture: str) -> None:
    expected = "copied_cache" if architecture in COPIED else "shared_cache"
    info = CocoaEngine(tiny_model(architecture), tiny_tokenizer()).info()
    assert info.backend == expected, info.backend_reason
    assert info.forward == FORWARDS.get(architecture, "modules"), info.backend_reason
    assert info.num_layers == 6
    assert info.middle_layers == (2, 4)


@pytest.mark.skipif("native" not in LINEAR_BACKENDS, reason="no kernels")
@pytest.mark.parametrize("linear_backend", ["native", "bfloat16", "transposed"])
@pytest.mark.parametrize("forward", ["auto", "modules"])
def test_kernels_attend_and_find_the_next_tokens_where_they_are_asked_for(
    forward: Any, linear_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: set[str] = set()
    for name in ("next_tokens", "attend"):
        run = partial(lambda name, run, *given, **options: calls.add(name) or run(*given, **options), name)
        monkeypatch.setattr(operators, name, partial(run, getattr(operators, name)))
    runtime = Runtime(linears=linear_backend, forward=forward)
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer(), runtime=runtime)
    for method in ("cocoa-sig", "dola"):
        calls.clear()
        engine.generate([5, 6, 7], method=method, max_new_tokens=4)
        # auto: layers attend in one call
        expected = {"next_tokens"} if forward == "auto" else {"next_tokens", "attend"}
        assert calls >= expected if linear_backend != "transposed" else not calls


def test_a_slower_way_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("mamba")
    for _ in range(2):
        CocoaEngine(model, tiny_tokenizer()).generate([5, 6], max_new_tokens=2)
        with torch.no_grad():
            next(model.parameters()).mul_(1)  # a training changes them, too
    (message,) = (each.getMessage() for each in caplog.records if each.name.startswith("cocoa_engine"))
    assert "copied_cache" in message


def test_alibi_positions_need_their_own_caches() -> None:
    assert choose(LanguageModel(tiny_model("falcon", alibi=True))).backend.name == "copied_cache"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*LEAN, "gpt2", "qwen3_next", "gpt_neo"])
def test_all_backends_agree(architecture: str) -> None:
    """GPT-Neo's own mask goes by the place in the cache, so branches in one cache would take each other's places."""
    model = tiny_model(architecture)
    backends = [("copied_cache", "stock"), ("recompute", "stock")]
    if architecture not in COPIED:
        backends.append(("masked_modules", "stock"))
    if architecture in LEAN:
        backends += [("lean", linears) for linears in LINEAR_BACKENDS]
    if architecture in (*LEAN, "gpt2"):  # whose modules have the same kinds of layers as those of three among them
        some = LINEAR_BACKENDS if architecture in ("llama", "qwen3_moe", "gpt2") else ["stock"]
        backends += [("modules", linears) for linears in some]
    boundaries, most = (["right", "left", "own", "fixed"], 24) if architecture == "gpt_neo" else (["right"], 8)
    results = []
    for kind, linears in backends:
        engine = use_backend(CocoaEngine(model, tiny_tokenizer()), made(model, kind, linears))
        results.append([engine.generate(PROMPTS[0], max_new_tokens=most)])
        for boundary in boundaries:
            results[-1] += engine.generate_batch(PROMPTS, max_new_tokens=most, span_boundary=boundary)
    assert any(span.candidates for out in results[0] for span in out.spans)
    for first, second in itertools.pairwise(results):
        assert_all_alike(first, second)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"window_size": 256}, "window_size"),
        ({"sliding_window": 8, "attention_window_size": 8}, "attention_window_size"),
        ({"attention_layers": ["global", "local"]}, "local"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ],
)
def test_windows_that_are_not_known(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(NotImplementedError, match=why):
        Windows(SimpleNamespace(**fields))


def blocks_of(tree: Any) -> list[torch.Tensor]:
    return [block for of_layer in tree.store.blocks for block in of_layer] if isinstance(tree, SharedTree) else []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        *(("llama", "lean"), ("mistral-sliding", "lean"), ("gemma3_text", "modules"), ("falcon", "masked_modules")),
        *((name, "copied_cache") for name in ("llama", "mamba", "qwen3_next")),
        ("gpt2", "recompute"),
    ],
)
def test_every_branch_can_be_dropped(architecture: str, kind: str) -> None:
    """As often as wanted; what the branches held is free again, and the prefix stays where it was allotted."""
    model, prompt = tiny_model(architecture), PROMPTS[2]
    backend = build(kind, LanguageModel(model), "stock")
    committed = list(prompt)
    (tree,) = backend.open([committed], 7, WANTED)
    tree.keep_committed = True
    backend.prefill(tree)
    before = [block.clone() for block in blocks_of(tree)]
    addresses = [block.data_ptr() for block in blocks_of(tree)]
    for token in (10, 20, 30):
        for paths in ([(token,)], [(token,), (token, 5), (7,), (token, 5, 6)]):
            (output,) = backend.step([(tree, paths)])
            for row, path in zip(output.logits, paths, strict=True):
                close_to(row, plain(model, [*committed, *path]))
            tree.commit(())
            assert tree.committed == len(committed)
            if isinstance(tree, UnsharedTree):
                assert list(tree.caches) == [()]
            if isinstance(tree, SharedTree):
                assert tree.used == tree.committed
        backend.step([(tree, [(token,), (token + 1,)])])
        tree.commit((token,))
        tree.commit(())
        committed.append(token)
    if isinstance(tree, SharedTree):
        assert tree.store.capacity == len(prompt) + 7
        assert len(addresses) == 6  # keys and values of a layer lie side by side
        assert [block.data_ptr() for block in blocks_of(tree)] == addresses
    for old, new in zip(before, blocks_of(tree), strict=True):
        assert torch.equal(old[..., : len(prompt), :], new[..., : len(prompt), :])
    tree.close()


def test_slots_are_allotted_once_and_hardly_more_than_greedy_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[KeyValues] = []
    original = KeyValues.__init__

    def record(self: KeyValues, *arguments: int) -> None:
        original(self, *arguments)
        if arguments[1]:
            made.append(self)

    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    engine.info()
    monkeypatch.setattr(KeyValues, "__init__", record)
    engine.generate(PROMPTS[0], max_new_tokens=20, max_candidates=4, max_span_tokens=3)  # its guesses take slots, too
    engine.generate(PROMPTS[0], max_new_tokens=20, max_candidates=100, max_span_tokens=3)
    assert [store.capacity - len(PROMPTS[0]) - 20 for store in made] == [FREE_LEAVES * 3, SPARE_SLOTS]


def test_more_slots_are_made_when_they_are_needed() -> None:
    backend = shared(tiny_model("qwen2"))
    tree = opened(backend, PROMPTS[0], reserve_tokens=1)
    step(backend, tree, (10,), (12,), (11,))
    step(backend, tree, (20,), (21,))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", LEAN)
def test_the_lean_pass_gives_the_modules_logits_and_states(architecture: str) -> None:
    model = tiny_model(architecture, **CAPPED.get(architecture, {}))
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):  # they are all alike in a new model
            weight.data += torch.rand_like(weight) - 0.5
    backends = shared(model, "lean"), shared(model, "modules")
    for window, final in itertools.product([(0, 2), (1, 3), (3, 6)], get_args(FinalLayer)):
        outputs = []
        for backend in backends:
            (tree,) = backend.open([PROMPTS[2]], 8, CaptureSpec(*window, final))
            first = backend.prefill(tree)
            outputs.append((first, *backend.step([(tree, [(10,), (11,), (11, 12)])])[0]))
            tree.close()
        for lean, modules in zip(*outputs, strict=True):
            close_to(lean, modules)


def write_through_data(model: PreTrainedModel) -> None:
    """As PEFT's merge does: the address stays, and torch counts no write."""
    generator = torch.Generator().manual_seed(3)
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        address, version = weight.data_ptr(), weight._version
        weight.data += torch.randn(weight.shape, generator=generator) * 0.5
        assert (weight.data_ptr(), weight._version) == (address, version)


@torch.no_grad()
def replace_weights(model: PreTrainedModel) -> None:
    model.model.layers[3].mlp.up_proj.weight.mul_(-2)
    model.model.layers[4].self_attn.q_proj.weight.data = model.model.layers[4].self_attn.q_proj.weight.data * 3
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(64, 32, bias=False)


def replace_forward(model: PreTrainedModel) -> None:
    linear = model.model.layers[3].mlp.down_proj
    linear.forward = lambda x: torch.nn.Linear.forward(linear, x) * 2


def add_pre_hook(model: PreTrainedModel) -> None:
    model.model.layers[3].mlp.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))


def add_hook_with_keywords(model: PreTrainedModel) -> None:
    layer = model.model.layers[3].mlp
    layer.register_forward_hook(lambda _module, _args, _kwargs, output: output * 2, with_kwargs=True)


def scale_experts(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.down_proj.data.mul_(-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "change"),
    [("llama", write_through_data), ("llama", replace_weights), ("qwen3_moe", scale_experts)],
)
@pytest.mark.parametrize("linears", [*LINEAR_BACKENDS, "bfloat16"])
@pytest.mark.parametrize("forward", ["auto", "modules"])
def test_changed_weights_are_noticed(
    forward: Any, linears: LinearBackend, architecture: str, change: Callable[[PreTrainedModel], None]
) -> None:
    """By the engine that answered before, its prefix cache too, and by a new one that would share packed copies."""
    model, prompt = tiny_model(architecture), [3 + number % 90 for number in range(100)]
    runtime = Runtime(forward=forward, linears=linears)
    engine = CocoaEngine(model, tiny_tokenizer(), runtime=runtime)
    before = engine.generate(prompt, max_new_tokens=8)
    change(model)
    fresh = CocoaEngine(copy.deepcopy(model), tiny_tokenizer(), runtime=runtime)
    expected = fresh.generate(prompt, max_new_tokens=8)
    assert [span.score for span in before.spans] != near([span.score for span in expected.spans])
    for again in (engine, CocoaEngine(model, tiny_tokenizer(), runtime=runtime)):
        answer = again.generate(prompt, max_new_tokens=8)
        assert_alike(answer, expected)
        assert answer.usage.cached_tokens == 0
        if (linears, architecture) != ("bfloat16", "qwen3_moe"):  # rounding may change which experts a router takes
            assert again.info().forward == ("lean" if forward == "auto" else "modules")


@pytest.mark.parametrize("change", [replace_forward, add_pre_hook, add_hook_with_keywords])
def test_hooks_and_replaced_passes_are_noticed(change: Callable[[PreTrainedModel], None]) -> None:
    model, prompt = tiny_model("llama"), [3 + number % 90 for number in range(100)]
    engine = CocoaEngine(model, tiny_tokenizer())
    before = engine.generate(prompt, max_new_tokens=8)
    change(model)
    answer = engine.generate(prompt, max_new_tokens=8)
    assert_alike(answer, CocoaEngine(copy.deepcopy(model), tiny_tokenizer()).generate(prompt, max_new_tokens=8))
    assert [span.score for span in answer.spans] != near([span.score for span in before.spans])
    assert (engine.info().forward, answer.usage.cached_tokens) == ("modules", 0)


def test_what_was_tried_on_other_weights_is_tried_again() -> None:
    """Where every logit is 0, any way would pass."""
    model = tiny_model("llama")
    output = model.get_output_embeddings().weight
    kept = output.detach().clone()
    output.data.zero_()
    assert "difference 0.0e+00" in choose(LanguageModel(model)).reason
    output.data.copy_(kept)
    assert "difference 0.0e+00" not in choose(LanguageModel(model)).reason


@pytest.mark.parametrize("linears", [linear_backend for linear_backend in LINEAR_BACKENDS if linear_backend != "stock"])
def test_unchanged_weights_are_packed_and_tried_once(linears: LinearBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    model, runtime = tiny_model("llama"), Runtime(linears=linears)
    engine = CocoaEngine(model, tiny_tokenizer(), runtime=runtime)
    engine.generate(PROMPTS[0], max_new_tokens=4)
    backend = backend_inside(engine)
    for name in ("forward.linears.FastLinear.__init__", "backends._try_all"):
        monkeypatch.setattr(f"cocoa_engine.execution.{name}", lambda *_: pytest.fail("this should be remembered"))
    engine.generate(PROMPTS[1], max_new_tokens=4)
    assert backend_inside(engine) is backend
    CocoaEngine(model, tiny_tokenizer(), runtime=runtime).generate(PROMPTS[0], max_new_tokens=4)


def test_half_precision_weights_are_used_where_asked_for() -> None:
    """A copy in bfloat16: near the model's own figures, and the model is as it was."""
    model = tiny_model("llama")
    engines = [CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(linears=each)) for each in ("auto", "bfloat16")]
    assert [engine.info().linears for engine in engines] == [LINEAR_BACKENDS[0], "bfloat16"]
    exact, near = (engine.score(PROMPTS[0], PROMPTS[2]).spans[0] for engine in engines)
    assert exact.token_log_probs == near.token_log_probs  # one pass over a text is the model's own
    exact, near = (engine.generate(PROMPTS[0], max_new_tokens=8, gamma=1).spans[0] for engine in engines)
    assert exact.token_log_probs != near.token_log_probs
    assert near.token_ids[0] == exact.token_ids[0]
    assert near.token_log_probs[0] == pytest.approx(exact.token_log_probs[0], abs=0.1)


def test_another_thread_gets_the_models_own_attention_meanwhile() -> None:
    """While a pass of ours runs through a model, a pass of somebody else's through it is what it always is."""
    model = tiny_model("gpt2")
    expected = plain(model, PROMPTS[0])
    during: list[torch.Tensor] = []

    def other() -> None:
        in_threads.join([in_threads.start(lambda: plain(model, PROMPTS[0]), during)])

    hook = model.transformer.h[1].register_forward_pre_hook(
        lambda *_: other() if threading.current_thread() is threading.main_thread() and not during else None
    )
    before = model.config._attn_implementation
    backend = shared(model, "modules")
    opened(backend, PROMPTS[0])
    hook.remove()
    torch.testing.assert_close(during[0], expected)
    assert model.config._attn_implementation == before
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding", "gemma3_text", "gpt2"])
def test_a_long_prompt_is_fed_in_chunks(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(architecture)
    engine = CocoaEngine(model, tiny_tokenizer())
    whole = engine.generate_batch(PROMPTS, max_new_tokens=12)
    monkeypatch.setattr(shared_cache, "PREFILL_CHUNK", 5)
    chunked = engine.generate_batch(PROMPTS, max_new_tokens=12)
    assert_all_alike(chunked, whole)
    assert chunked[2].usage.forward_passes - whole[2].usage.forward_passes == len(PROMPTS[2]) // 5 - 1


def test_chunks_shrink_where_their_masks_would_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))
    prompt = [*range(20, 120), 7]
    whole = engine.generate(prompt, max_new_tokens=4)
    passes = record(engine)
    monkeypatch.setattr(shared_cache, "PREFILL_CHUNK", 32)
    for cells in (1600, 1):
        passes.clear()
        monkeypatch.setattr(shared_cache, "MASK_CELLS", cells)
        assert_alike(engine.generate(prompt, max_new_tokens=4), whole)
        widths = [each.widths[0] for each in passes if each.is_prompt]
        ends = list(itertools.accumulate(widths))
        assert ends[-1] == len(prompt)
        if cells == 1:
            assert set(widths) == {1}  # not less, however many cells that are
        else:
            assert ends[0] == 32 > widths[1] > 1
            assert all(width * end <= cells for width, end in zip(widths, ends, strict=True))


def test_rows_of_a_batch_may_end_in_any_order() -> None:
    backend = shared(tiny_model("llama"))
    live = [opened(backend, prompt, 8) for prompt in PROMPTS]
    for ending, token in ((None, 10), (0, 20), (0, 30), (None, 40)):
        if ending is not None:
            tree = live.pop(ending)
            tree.close()
            tree.close()  # a second time does nothing
        outputs = backend.step([(tree, [(token,), (token + 1,)]) for tree in live])
        for tree, output in zip(live, outputs, strict=True):
            close_to(output.logits[1], plain(backend.model.model, [*tree.token_ids, token + 1]))
            tree.commit((token + 1,))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2"])
def test_half_precision(architecture: str, dtype: torch.dtype) -> None:
    model = tiny_model(architecture).to(dtype)
    engine = CocoaEngine(model, tiny_tokenizer())
    assert engine.info().backend == "shared_cache"
    for out in (*engine.generate_batch(PROMPTS, max_new_tokens=16), engine.generate(PROMPTS[0], max_new_tokens=16)):
        assert out.text == "".join(span.text for span in out.spans)
        assert out.token_ids == [token for span in out.spans for token in span.token_ids]
        for span in out.spans:
            assert 0 <= span.f_mlds <= 2
            assert 0 <= span.con_mlds <= 2
            assert span.score <= span.log_prob <= 0
    assert engine.model.dtype is dtype


@pytest.mark.parametrize("wrong", [False, True])
def test_a_deep_model_may_differ_by_its_own_rounding(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a wrong cache: here the keys of the branches are lost."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.2}
    model = tiny_model("llama", num_hidden_layers=24, **shape).bfloat16()
    if wrong:
        write = KeyValues.write
        monkeypatch.setattr(
            KeyValues, "write", lambda store, layer, start, keys, values: write(store, layer, start, keys * 0, values)
        )
    chosen = choose(LanguageModel(model), Runtime(linears="stock"))
    assert (chosen.backend.forward_name == "lean") is not wrong, chosen.reason


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static_lean", "lean", "modules", "masked_modules"])
@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding"])
def test_readings_are_long_paths(architecture: str, kind: str) -> None:
    """Also one after the other, from paths of different lengths, and gone after a commit."""
    backend = build(kind, LanguageModel(tiny_model(architecture)), "transposed")
    prompt, text = list(range(20, 32)), list(range(50, 74))
    (tree,) = backend.open([prompt], 8, WANTED)
    backend.prefill(tree)
    backend.step([(tree, [(10,), (11,), (11, 12)])])
    starts: list[Path] = [(), (10,), (11, 12)]
    pieces = [text[:7], text[7:20], text[20:]]
    read = [backend.step([(tree, [ReadBack(start, piece) for start in starts])])[0] for piece in pieces]
    fed_tokens = 3 + len(starts) * len(text)
    assert tree.fed_tokens == fed_tokens
    tree.commit((11, 12))
    (after,) = backend.step([(tree, [(13,)])])
    for number, start in enumerate(starts):
        (other,) = backend.open([[*prompt, *start]], 8, WANTED)
        backend.prefill(other)
        (expected,) = backend.step([(other, [tuple(text[:length]) for length in range(1, len(text) + 1)])])
        parts = zip(read, pieces, strict=True)
        found = torch.cat([one.logits[number * len(piece) :][: len(piece)] for one, piece in parts])
        close_to(found, expected.logits)
        if start == (11, 12):
            other.commit(())
            close_to(after.logits, backend.step([(other, [(13,)])])[0].logits)
        other.close()
    tree.close()


ORIGINAL, TOKENS = 32, 10
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
LLAMA_3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"original_max_position_embeddings": ORIGINAL, **LONG},
    "llama3": {**LLAMA_3, "factor": 8.0, "original_max_position_embeddings": ORIGINAL // 2},
    "proportional": {"factor": 4.0, "partial_rotary_factor": 0.5},
}
WINDOWS = {"longrope": ORIGINAL * 4, "llama3": ORIGINAL * 4}  # stated by the config, not by the factor


def scaled(kind: str, architecture: str = "llama") -> PreTrainedModel:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **ROPES[kind]}
    options = {"original_max_position_embeddings": ORIGINAL} if architecture == "phi3" else {}
    window = WINDOWS.get(kind, ORIGINAL)
    model = tiny_model(architecture, rope_parameters=rope, max_position_embeddings=window, **options)
    model.generation_config.min_new_tokens = TOKENS  # type: ignore[union-attr]
    return model


def whole(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """What a model that has seen no other sequence gives after these tokens, in one pass. It stays so."""
    logits = plain(copy.deepcopy(model), ids)
    logits[EOS] = -torch.inf  # no answer ends
    return logits.log_softmax(-1)


def test_the_window_counts_the_scaling_of_every_type_of_transformers() -> None:
    assert ROPES.keys() == ROPE_INIT_FUNCTIONS.keys()
    ids = [3 + number % 200 for number in range(ORIGINAL * 4 - 2)]
    for kind in ROPES:
        engine = CocoaEngine(scaled(kind), tiny_tokenizer())
        assert engine.context_window == ORIGINAL * 4
        assert len(engine.generate(ids, max_new_tokens=2, method="greedy").token_ids) == 2
        with pytest.raises(PromptError, match=str(ORIGINAL * 4)):
            engine.generate([*ids, 4, 5, 6], max_new_tokens=2)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA_3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("qwen2", {"rope_scaling": YARN}, 256),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 256),
        ("qwen2", {"rope_scaling": YARN, "max_position_embeddings": 256}, 256),
        ("qwen2", {"rope_scaling": {"type": "linear", "factor": 2}}, 128),
        ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 1.5}}, 96),
        ("qwen2", {"rope_scaling": None}, 64),
        ("qwen2", {"rope_scaling": {"type": "linear", "factor": 0.5}}, 64),
        ("llama", {"rope_scaling": {**LLAMA_3, "original_max_position_embeddings": 16}}, 64),
        ("gemma3_text", {"rope_parameters": GEMMA_3}, 64),
    ],
)
def test_windows_of_configs_as_they_are_published(architecture: str, fields: dict[str, Any], expected: int) -> None:
    config = AutoConfig.for_model(architecture, **{"max_position_embeddings": 64, **fields})
    assert context_window_of(config) == expected


def test_the_window_of_a_file_is_that_of_its_model(tmp_path: Any) -> None:
    for family in ("mistral", "gemma3", "phi3-long"):
        write_family(tmp_path / "model.gguf", family, "F32")
        file = GgufFile(tmp_path / "model.gguf")
        assert gguf_model.context_window(file) == context_window_of(gguf_model.load(file).config) == 128


CACHES = [kind for kind in KINDS if kind not in ("static_lean", "lean")]
BY_LENGTH = [("longrope", "llama"), ("longrope", "phi3"), ("dynamic", "llama")]


def answers(model: PreTrainedModel, kind: str, *prompts: list[int], linears: Any = "stock", **settings: Any) -> Any:
    engine = use_backend(CocoaEngine(model, tiny_tokenizer()), made(model, kind, linears))
    return engine.generate_batch(list(prompts), max_new_tokens=TOKENS, **settings)


def prompt(length: int, seed: int = 7) -> list[int]:
    return [3 + seed * number % 200 for number in range(length)]


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("kind", "architecture"), BY_LENGTH)
@pytest.mark.parametrize("start", [ORIGINAL - 4, ORIGINAL])
def test_answers_cross_the_length_of_training(cache: str, kind: str, architecture: str, start: int) -> None:
    """Each token is that of a full pass over all tokens before it, whatever the model has seen since it was loaded."""
    model, ids = scaled(kind, architecture), prompt(start)
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        model(torch.tensor([prompt(100)]))
    (found,) = answers(model, cache, ids, method="greedy")
    log_probs = [value for span in found.spans for value in span.token_log_probs]
    for token_id, log_prob in zip(found.token_ids, log_probs, strict=True):
        expected = whole(fresh, ids)
        assert token_id == int(expected.argmax())
        assert log_prob == pytest.approx(float(expected[token_id]), abs=1e-4)
        ids.append(token_id)
    assert len(ids) == start + TOKENS
    if (cache, kind, architecture) == ("modules", "longrope", "llama") and start < ORIGINAL:
        # then the keys and values hold again
        (never,) = answers(model, cache, prompt(ORIGINAL + 4), method="greedy")
        assert found.usage.forward_passes <= never.usage.forward_passes + 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cocoa-sig", "dola"])
@pytest.mark.parametrize(("kind", "architecture"), BY_LENGTH)
def test_branches_cross_it_too(kind: str, architecture: str, method: str) -> None:
    """Beside other sequences, with tokens fed ahead: spans, candidates and figures are those of whole sequences."""
    prompts = [prompt(ORIGINAL - 5), prompt(10, 11), prompt(ORIGINAL + 9, 13)]
    expected = answers(scaled(kind, architecture), "recompute", *prompts, method=method)
    ways = [
        *((cache, "stock") for cache in CACHES[:-1]),
        *([("modules", "native")] if trial.obstacle() is None else []),
    ]
    for cache, linears in ways:
        found = answers(scaled(kind, architecture), cache, *prompts, linears=linears, method=method)
        assert_all_alike(found, expected)


def test_prompts_that_begin_alike_share_nothing_of_another_length() -> None:
    model = scaled("longrope")
    engine = CocoaEngine(model, tiny_tokenizer())
    long, short = prompt(120), prompt(120)[: ORIGINAL - 1]
    for ids in (short, long, short, long):
        found = engine.generate(ids, max_new_tokens=1, method="greedy")
        assert found.spans[0].token_log_probs[0] == pytest.approx(float(whole(model, ids).max()), abs=1e-4)


def test_a_branch_that_is_kept_over_the_crossing_goes_on() -> None:
    """The cache that is opened afterwards does not hold its tokens, which were fed as whole sequences."""
    model, ids = scaled("longrope"), prompt(ORIGINAL)
    backend = made(model, "modules", "stock").backend
    (tree,) = backend.open([ids], TOKENS, WANTED)
    backend.prefill(tree)
    backend.step([(tree, [(5,), (6,), (6, 7)])])
    tree.commit((6,), keep_rest=True)
    (output,) = backend.step([(tree, [(7, 8), (9,), (9, 10)])])
    for logits, path in zip(output.logits, ([7, 8], [9], [9, 10]), strict=True):
        close_to(logits, plain(copy.deepcopy(model), [*ids, 6, *path]))
