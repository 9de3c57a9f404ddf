"""Source attention, and that on each passage, equal what eager attention weights say, in every backend.

Mixtures of experts by the lean pass: it gives what the model's modules give, and reads each expert once.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Runtime, passage_attention
from cocoa_engine.errors import ConfigError
from cocoa_engine.execution.backends.shared_cache import SharedCache
from cocoa_engine.execution.forward import linears, trial
from cocoa_engine.execution.forward.attention import attend
from cocoa_engine.execution.forward.base import KeyValues, Segment
from cocoa_engine.execution.forward.lean import Lean, Mixture, Mlp, lean_obstacle
from cocoa_engine.execution.forward.linears import FastLinear, LinearBackend, can_pack, choose_linear_backend
from cocoa_engine.execution.forward.source_attention import SourceProbe, observer
from cocoa_engine.execution.forward.static import StaticLean
from cocoa_engine.methods.retrieval_heads import source_heads
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.model.prompts import Passages
from tests.helpers.alike import assert_all_alike, near
from tests.helpers.attention import attention_weights, source_attention
from tests.helpers.backends import LINEAR_BACKENDS, PROMPTS, made
from tests.helpers.in_threads import join, start
from tests.helpers.inside import opened_trees, use_backend
from tests.helpers.libraries import needs_kernels
from tests.helpers.rivals import heads_file, heads_of
from tests.helpers.tiny_models import ARCHITECTURES, tiny_model, tiny_tokenizer

SEEN = ["llama", "mistral-sliding", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "gpt2"]
PROMPT = PROMPTS[2]
RANGES = (range(1, 6), range(8, 8), range(4, 12), range(12, 27), range(20, 25))


def engine_on(model: PreTrainedModel, folder: Path, kind: str | None = None, linears: Any = "stock") -> CocoaEngine:
    config = CocoaConfig(decore_heads=heads_file(folder, model), max_new_tokens=12, gamma=0.2)
    engine = CocoaEngine(model, tiny_tokenizer(), config=config)
    return engine if kind is None else use_backend(engine, made(model, kind, linears))


def eager(model: PreTrainedModel, prompt: list[int], answer: list[int], ranges: Sequence[range]) -> torch.Tensor:
    """The mean mass of the heads on each range, for each token of the answer: ``[tokens, ranges]``."""
    weights = attention_weights(model, [*prompt, *answer])
    by_head = torch.stack([weights[layer][0, head, len(prompt) :] for layer, head in heads_of(model)])
    return torch.stack([by_head[..., one.start : one.stop].sum(-1).mean(dim=0) for one in ranges], dim=-1)


def check(model: PreTrainedModel, prompt: list[int], answer: Generation, ranges: Sequence[range] = ()) -> None:
    """Tokens, spans and chosen candidates have the masses of the weights on the prompt and on the ranges."""
    usual = model.config._attn_implementation
    expected = eager(model, prompt, answer.token_ids, (range(1, len(prompt)), *ranges))
    assert source_attention(answer) == near(expected[:, 0].tolist())
    assert float(expected[:, 0].min()) >= 0  # 0 where a window has left the prompt
    start = 0
    for span in answer.spans:
        end = start + len(span.token_ids)
        assert span.source_attention == near(float(expected[start:end, 0].mean()))
        assert span.passage_attention == near(expected[start:end, 1:].mean(dim=0).tolist())
        if span.chosen is not None and (kept := span.candidates[span.chosen]).token_ids == span.token_ids:
            assert (kept.source_attention, kept.passage_attention) == (span.source_attention, span.passage_attention)
        start = end
    assert model.config._attn_implementation == usual


OWN_ATTENTION = ["llama", "mistral-sliding", "gemma2", "gemma3_text"]
WAYS = [
    *(("mistral-sliding", kind, name) for kind in ("static_lean", "lean", "modules") for name in LINEAR_BACKENDS),
    # a cache of a sliding layer has dropped the first keys of the longer prompts
    *((name, kind, "stock") for kind in ("masked_modules", "copied_cache", "recompute") for name in OWN_ATTENTION),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kind", "linears"), [*((name, None, "stock") for name in SEEN), *WAYS])
def test_it_is_the_mass_of_the_attention_weights(
    architecture: str, kind: str | None, linears: Any, tmp_path: Path
) -> None:
    """Of answers and of given texts, in every backend; sequences of one batch have other passages, or none."""
    model = tiny_model(architecture)
    engine = engine_on(model, tmp_path, kind, linears)
    ranges: list[tuple[range, ...]] = [(range(1, 3), range(2, 7)), (), RANGES]
    sources = [Passages(each) if each else None for each in ranges]
    for prompt, answer, own in zip(PROMPTS, engine.generate_batch(PROMPTS, source=sources), ranges, strict=True):
        check(model, prompt, answer, own)
    alone, plain = engine.generate(PROMPT, source=Passages(RANGES)), engine.generate(PROMPT)
    assert any(span.candidates for span in plain.spans)
    check(model, PROMPT, alone, RANGES)
    check(model, PROMPT, plain)
    # source attention keeps its definition
    assert source_attention(alone) == near(source_attention(plain))
    text = [9, 40, 77, 12, 150, 3, 200]
    for scored in (engine.score(PROMPT, text), *engine.score(PROMPT, [text, text[:3]])):
        check(model, PROMPT, scored)


@pytest.mark.parametrize("method", ["greedy", "decore", "dola", "diver"])
def test_other_methods(method: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    answer = engine_on(model, tmp_path).generate(PROMPT, method=method)
    if method in ("greedy", "diver"):
        check(model, PROMPT, answer)
        return
    # the prompt's last token is fed as a step, and is not in the source
    expected, found = eager(model, PROMPT, answer.token_ids, [range(1, len(PROMPT))]), source_attention(answer)
    assert all(value <= more + 1e-4 for value, more in zip(found, expected[:, 0].tolist(), strict=True))


def test_heads_that_are_divided_among_processes_are_not_measured(tmp_path: Path) -> None:
    model = tiny_model("llama")
    file = engine_on(model, tmp_path).config.decore_heads
    assert source_heads(file, LanguageModel(model)) == tuple(heads_of(model))
    model.lm_head.weight.device_mesh = object()
    assert source_heads(file, LanguageModel(model)) == ()


@needs_kernels
def test_methods_that_read_the_prompt_back_share_passes_with_others(tmp_path: Path) -> None:
    engine = engine_on(tiny_model("llama"), tmp_path, "lean", "native")
    alone = engine.generate(PROMPT)
    other = start(lambda: [engine.generate(PROMPTS[0], method="diver") for _ in range(3)])
    beside = [engine.generate(PROMPT) for _ in range(3)]
    join([other])
    for answer in beside:
        assert source_attention(answer) == near(source_attention(alone))
        assert all(len(span.token_source_attention) == len(span.token_ids) for span in answer.spans)


def test_given_texts_streams_chats_and_texts(tmp_path: Path) -> None:
    engine = engine_on(tiny_model("llama"), tmp_path)
    engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }}\n{% endfor %}"
    source = ["the rain is near", "where is the sea"]
    prompt = f"{source[0]}; {source[1]}; answering:\n"
    ids = engine.encode(prompt)
    answer = engine.generate(prompt, source=source)
    places = [(prompt.index(text), prompt.index(text) + len(text)) for text in source]
    inside = engine.generate(prompt, source=places)
    chat = engine.chat([{"role": "user", "content": f"\n{prompt}  "}], source=[*source])
    with engine.stream(ids, source=source) as stream:
        streamed = list(stream)
    with engine.stream_chat([{"role": "user", "content": prompt}], source=places) as stream:
        streamed_chat = list(stream)
    found = [span.passage_attention for span in answer.spans]
    assert all(len(one) == 2 and min(one) > 0 for one in found)
    for spans in (inside.spans, chat.spans, streamed, streamed_chat):
        assert [span.passage_attention for span in spans] == [near(one) for one in found]
    whole = engine.score(prompt, answer.token_ids, source=source).spans[0]
    (among, _) = engine.score(prompt, [answer.token_ids, [9, 40]], source=source)
    tokens = [len(span.token_ids) for span in answer.spans]
    mean = [sum(n * one[p] for n, one in zip(tokens, found, strict=True)) / sum(tokens) for p in range(2)]
    assert whole.passage_attention == near(mean)
    assert among.spans[0].passage_attention == near(mean)
    with pytest.raises(ConfigError, match="is not in the prompt"):
        engine.generate(prompt, source=["the snow"])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_an_answer_is_measured_alike_with_and_without_the_prefix_cache(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [3 + 7 * number % 200 for number in range(90)]
    source = Passages((range(5, 40), range(50, 80)))
    measured: list[Generation] = []
    for cache in (0, 64):
        engine = CocoaEngine(tiny_model(architecture), tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=cache))
        measured += [engine.generate(prompt, source=source, max_new_tokens=8, gamma=0.2) for _ in range(2)]
        shares = isinstance(engine.session.backend, SharedCache)
        assert [bool(one.usage.cached_tokens) for one in measured[-2:]] == [False, bool(cache) and shares]
        opened = opened_trees(engine, monkeypatch)
        again = passage_attention(engine, measured[-1], prompt, source)
        assert again == [near(span.passage_attention) for span in measured[-1].spans]
        assert [tree.cached_tokens for tree in opened] == ([len(prompt) - 1 if cache else 0] if shares else [])
    first, *others = measured
    for other in others:
        assert other.token_ids == first.token_ids
        for span, of_first in zip(other.spans, first.spans, strict=True):
            assert span.passage_attention == near(of_first.passage_attention)


def observe(probe: SourceProbe, length: int, layer: int, query: Any, keys: Any, **options: Any) -> Any:
    module: Any = SimpleNamespace(layer_idx=layer)
    mask = options.pop("mask", None)
    observer(probe, 2, length)(lambda *_, **__: None, module, query, keys, keys, mask, **options)
    return probe.means()


def test_layers_of_a_model_may_lie_on_several_devices() -> None:
    """The mask of a layer has its dtype."""
    probe = SourceProbe([(0, 0), (1, 0)], range(1, 4))
    for layer, dtype in enumerate((torch.float32, torch.bfloat16)):
        found = observe(probe, 6, layer, torch.randn(1, 4, 6, 8, dtype=dtype), torch.randn(1, 2, 6, 8, dtype=dtype))
    assert found.shape == (2, 1)
    assert found.isfinite().all()


def test_masks_sinks_and_dropped_keys() -> None:
    """The cache of the layer has dropped the first 3 of 13 keys; the mask of each head is its own."""
    torch.manual_seed(0)
    query, keys, sinks = torch.randn(4, 2, 8), torch.randn(2, 10, 8), torch.randn(4)
    sees = torch.rand(4, 2, 10) < 0.7
    sees[..., 0] = True
    biases = torch.randn(4, 2, 10)
    seen = torch.where(sees, 0.0, -torch.inf)
    for mask, bias, added in ((sees, None, seen), (biases, None, biases), (sees, biases, seen + biases)):
        probe = SourceProbe([(0, 0), (0, 3), (0, 7), (1, 0)], range(1, 6), [range(2), range(4, 6)])
        options = {"scaling": 0.4, "s_aux": sinks, "mask": mask[None]}
        options |= {} if bias is None else {"position_bias": bias[None]}
        found = observe(probe, 13, 0, query[None], keys[None], **options)
        masses = []
        for head in (0, 3):  # there is no head 7, and no layer 1
            scores = query[head] @ keys[head // 2].T * 0.4 + added[head]
            weights = torch.cat([scores, sinks[head].expand(2, 1)], dim=-1).softmax(-1)
            masses.append(torch.stack([weights[:, :3].sum(-1), torch.zeros(2), weights[:, 1:3].sum(-1)]))
        torch.testing.assert_close(found, torch.stack(masses).mean(dim=0).T)


def test_a_prompt_of_one_token_has_no_source(tmp_path: Path) -> None:
    engine = engine_on(tiny_model("llama"), tmp_path)
    short, long = engine.generate_batch([[5], PROMPT])
    assert source_attention(short) == source_attention(engine.generate([5])) == []
    assert source_attention(engine.score([5], [6, 7])) == []
    assert source_attention(long) == near(source_attention(engine.generate(PROMPT)))


# Attention over a sequence's slots is the plain formula over the slots that each token may see.

NATIVE = [False] if trial.obstacle() else [False, True]


def formula(segment: Segment, query: torch.Tensor, seen: list[list[int]], scale: float) -> torch.Tensor:
    keys, values = segment.store.read(0, segment.end)
    groups = query.shape[0] // keys.shape[0]
    rows = []
    for token, slots in enumerate(seen):
        heads = []
        for head in range(query.shape[0]):
            scores = keys[head // groups, slots] @ query[head, token] * scale
            heads.append(scores.softmax(0) @ values[head // groups, slots])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.slow
@given(st.data())
def test_attention_is_the_formula(data: st.DataObject) -> None:
    pick, seed = data.draw, data.draw(st.integers(0, 1000))
    kv_heads, groups = pick(st.sampled_from([1, 2, 3])), pick(st.sampled_from([1, 3]))
    committed, window = pick(st.integers(1, 90)), pick(st.sampled_from([None, 1, 7, 40]))
    branches = pick(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(seed)
    own, positions, slot = [], [], committed
    for depth in branches:
        chain: list[int] = []
        for step in range(depth):
            chain = [*chain, slot]
            own.append(chain)
            positions.append(committed + step)
            slot += 1
    width = len(own)
    store = KeyValues(1, slot + seed % 3)  # with and without slots to spare
    keys, values = torch.randn(2, kv_heads, slot, 8, generator=generator)
    store.write(0, 0, keys, values)
    alone = branches == [1]
    chains = None if alone else [(chain[:-1], 1) for chain in own]
    tail_positions = [] if alone else positions
    segment = Segment(store, committed, [0] * width, positions, committed, chains=chains, tail_positions=tail_positions)
    query = torch.randn(kv_heads * groups, width, 8, generator=generator)
    place = {**{slot: slot for slot in range(committed)}, **{committed + n: at for n, at in enumerate(positions)}}
    seen = [
        [slot for slot in (*range(committed), *chain) if window is None or at - place[slot] < window]
        for chain, at in zip(own, positions, strict=True)
    ]
    for native in NATIVE:
        out = attend(segment, 0, query, scale=0.3, window=window, native=native)
        torch.testing.assert_close(out, formula(segment, query, seen, 0.3), atol=1e-5, rtol=1e-5)


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
    assert_all_alike(answers, expected)
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
