"""Prompts with a common prefix are encoded once, with the same answers."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import CocoaEngine, Generation, Runtime
from cocoa_engine.execution.backends import shared_cache
from cocoa_engine.execution.backends.shared_cache import SHORTEST, PrefixCache, common_length
from cocoa_engine.execution.forward.base import KeyValues, Segment
from cocoa_engine.model.language_model import CaptureSpec
from tests.helpers.alike import assert_alike, assert_all_alike
from tests.helpers.backends import close_to, plain
from tests.helpers.in_threads import join, start
from tests.helpers.inside import backend_inside, kept_prompts, open_sequences, prefixes_of, record, sequences_running
from tests.helpers.tiny_models import prompt as tokens
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

SYSTEM = tokens(0, 90)
PROMPTS = [[*SYSTEM, *tokens(seed, length)] for seed, length in ((1, 5), (2, 30), (3, 1), (4, 12))]
SETTINGS: dict[str, Any] = {"max_new_tokens": 10}


def engine_of(model: Any, megabytes: int = 256) -> CocoaEngine:
    return CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=megabytes))


def answer_of(engine: CocoaEngine, prompt: list[int], **settings: Any) -> Generation:
    """An answer, which is that of an engine without a cache."""
    settings = {**SETTINGS, **settings}
    answer = engine.generate(prompt, **settings)
    assert_alike(answer, engine_of(engine.model, 0).generate(prompt, **settings))
    return answer


def batch_of(engine: CocoaEngine, prompts: list[list[int]]) -> list[Generation]:
    batch = engine.generate_batch(prompts, **SETTINGS)
    assert_all_alike(batch, engine_of(engine.model, 0).generate_batch(prompts, **SETTINGS))
    return batch


def fed(engine: CocoaEngine) -> list[int]:
    """A list that fills with the number of tokens of each pass over a prompt."""
    prompts: list[int] = []
    record(engine, lambda segments, is_prompt: prompts.append(segments[0].width) if is_prompt else None)
    return prompts


# Through the engine.


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding", "gemma3_text", "gpt2", "falcon", "opt"])
def test_same_answers_with_and_without(architecture: str) -> None:
    """An answer is known to the next turn of a chat, but nothing is known of changed weights."""
    engine = engine_of(tiny_model(architecture))
    for number, prompt in enumerate([*PROMPTS, PROMPTS[0], PROMPTS[1][:100]]):
        answer = answer_of(engine, prompt)
        known = 0 if number == 0 else len(prompt) - 1 if number > 3 else len(SYSTEM)
        assert (answer.usage.cached_tokens, answer.usage.prompt_tokens) == (known, len(prompt))
    longer = [*prompt, *answer.token_ids, *tokens(9, 4)]
    assert answer_of(engine, longer).usage.cached_tokens == len(longer) - 4
    with torch.no_grad():
        engine.model.get_input_embeddings().weight.mul_(1.5)
    assert answer_of(engine, longer).usage.cached_tokens == 0


@pytest.mark.parametrize("megabytes", [256, 0])
def test_a_shared_beginning_is_encoded_once_also_when_prompts_start_together(megabytes: int) -> None:
    """Also where prompts are read by turns; but not without a cache."""
    engine = engine_of(tiny_model("llama"), megabytes)
    widths, shared = fed(engine), tokens(7, 320)
    batch = batch_of(engine, PROMPTS)
    known = [0, 90, 90, 90] if megabytes else [0] * 4
    assert [answer.usage.cached_tokens for answer in batch] == known
    assert widths == [len(prompt) - cached for prompt, cached in zip(PROMPTS, known, strict=True)]
    if not megabytes:
        assert answer_of(engine, PROMPTS[0]).usage.cached_tokens == prefixes_of(engine).nbytes == 0
        return
    engine.session.scheduler.prefill_chunk = 80
    widths.clear()
    batch = batch_of(engine, [[*shared, *tokens(20 + seed, 30)] for seed in range(3)])
    assert sum(widths) == len(shared) + 3 * 30
    assert max(widths) <= 80
    assert sum(answer.usage.cached_tokens for answer in batch) == 2 * len(shared)


def test_scored_texts_share_the_prompt_with_generations() -> None:
    engine, without = engine_of(tiny_model("llama")), engine_of(tiny_model("llama"), 0)
    widths, texts = fed(engine), [tokens(1, 4), tokens(2, 6)]
    assert_all_alike(engine.score(SYSTEM, texts), without.score(SYSTEM, texts))
    engine.generate(PROMPTS[0], **SETTINGS)
    assert_all_alike(engine.score(PROMPTS[0], texts), without.score(PROMPTS[0], texts))
    assert widths == [len(SYSTEM), 5, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "by"), [("llama", "hook"), ("gpt2", "hook"), ("llama", "adapter")])
def test_nothing_is_kept_where_others_have_a_say(architecture: str, by: str) -> None:
    """What a hook or an adapter that we do not know does may change from call to call; the model's own modules run."""
    model, strength = tiny_model(architecture), [1.5]
    engine = engine_of(model)
    answers = [engine.generate(PROMPTS[0], **SETTINGS)]
    forward = engine.info().forward
    assert forward == ("lean" if architecture == "llama" else "modules")

    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x[..., :16].sum(-1, keepdim=True) * strength[0]

    def steer(_module: Any, _inputs: Any, output: Any) -> Any:
        return output * strength[0] if isinstance(output, torch.Tensor) else (output[0] * strength[0], *output[1:])

    if by == "hook":
        layer = model.get_decoder().layers[2].mlp if architecture == "llama" else model.transformer.h[0]
        undo = layer.register_forward_hook(steer).remove
    else:
        attention = model.model.layers[0].self_attn
        undo = partial(setattr, attention, "k_proj", attention.k_proj)
        adapted = Adapted(attention.k_proj.in_features, attention.k_proj.out_features, bias=False)
        adapted.load_state_dict(attention.k_proj.state_dict())
        attention.k_proj = adapted
    for strength[0] in (1.5, 0.2):
        answers.append(answer_of(engine, PROMPTS[0]))
        assert answers[-1].usage.cached_tokens == 0
        assert engine.info().forward == "modules"
    undo()
    assert_alike(engine.generate(PROMPTS[0], **SETTINGS), answers[0])
    assert engine.info().forward == forward
    assert len({tuple(span.score for span in answer.spans) for answer in answers}) == 3


# What must never be kept or copied.


def test_a_prompt_that_was_fed_in_part_is_not_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "PREFILL_CHUNK", 70)
    engine = engine_of(tiny_model("llama"))
    passes: list[int] = []

    def interrupt(segments: Sequence[Segment], is_prompt: bool) -> None:
        passes.append(segments[0].width)
        if len(passes) == 2:
            raise KeyboardInterrupt

    record(engine, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[1], **SETTINGS)
    assert answer_of(engine, PROMPTS[1]).usage.cached_tokens == 70


def test_a_sequence_that_is_closed_meanwhile_is_not_copied_from() -> None:
    """The garbage collector may close an abandoned one in any line."""

    class Closing(list[int]):
        def __iter__(self) -> Iterator[int]:
            other.close()
            return super().__iter__()

    engine = engine_of(tiny_model("llama"))
    backend = backend_inside(engine)
    other, tree = (backend.open([prompt], 8, CaptureSpec(2, 4, "post_norm"))[0] for prompt in PROMPTS[:2])
    backend.prefill(other)
    other.token_ids = Closing(other.token_ids)
    logits = backend.prefill(tree)
    close_to(logits, plain(engine.model, PROMPTS[1]))
    assert open_sequences(engine) == 1


def test_an_abandoned_sequence_may_be_closed_while_another_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the garbage collector, in the thread that holds the locks: it does not wait for itself."""
    monkeypatch.setattr(shared_cache, "_USED", 2)  # every store is copied
    engine = engine_of(tiny_model("llama"))
    backend = backend_inside(engine)
    abandoned, tree = (backend.open([prompt], 8, CaptureSpec(2, 4, "post_norm"))[0] for prompt in PROMPTS[:2])
    for each in (abandoned, tree):
        backend.prefill(each)

    class Collected(KeyValues):
        def prefix(self, length: int) -> KeyValues:
            abandoned.close()
            return super().prefix(length)

    tree.store.__class__ = Collected
    outcome: list[Any] = []
    join([start(tree.close, outcome)])
    assert outcome == [None]
    assert len(kept_prompts(prefixes_of(engine))) == 2
    assert open_sequences(engine) == 0


def test_no_memory_for_a_copy_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny_model("llama"))
    engine.info()
    monkeypatch.setattr(KeyValues, "prefix", Mock(side_effect=torch.OutOfMemoryError("no memory")))
    monkeypatch.setattr(shared_cache, "_USED", 2)  # every store is copied
    batch_of(engine, PROMPTS)
    assert (sequences_running(engine), open_sequences(engine), prefixes_of(engine).nbytes) == (0, 0, 0)


# The cache by itself.


def store_of(token_ids: Sequence[int], capacity: int | None = None) -> KeyValues:
    """Keys and values that tell which tokens they are of: 8 bytes a slot and layer."""
    store = KeyValues(2, capacity or len(token_ids))
    marks = torch.tensor(list(token_ids), dtype=torch.float32)[None, :, None]  # [1, n, 1]
    for layer in range(2):
        store.write(layer, 0, marks + layer, -marks - layer)
    return store


def test_a_given_store_is_kept_as_it_is_unless_much_of_it_is_unused() -> None:
    cache = PrefixCache(2**20)
    for seed, capacity, as_it_is in ((1, 100, True), (2, 114, True), (3, 115, False), (4, 1000, False)):
        ids = tokens(seed, 100)
        store = store_of(ids, capacity)
        cache.keep(ids, store, handed_over=True)
        found = cache.longest(ids)
        assert found is not None
        assert (found[0] is store) == as_it_is
        assert found[0].capacity == (capacity if as_it_is else 100)
    bounded = PrefixCache(store_of(tokens(5, 100), 100).nbytes)
    bounded.keep(tokens(5, 100), store_of(tokens(5, 100), 110), handed_over=True)
    assert bounded.longest(tokens(5, 100)) is not None
    assert bounded.nbytes == bounded.max_bytes


def test_an_answers_store_is_given_to_the_cache_where_no_other_sequence_will_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_cache, "_USED", 0.5)  # this one has much room for branches, being short
    engine, prompt = CocoaEngine(tiny_model("llama"), tiny_tokenizer()), tokens(1, 200)
    copies = []
    copy = KeyValues.prefix
    monkeypatch.setattr(KeyValues, "prefix", lambda self, *sizes: copies.append(sizes) or copy(self, *sizes))
    first = engine.generate(prompt, max_new_tokens=8)
    assert copies == []
    again = engine.generate(prompt, max_new_tokens=8)
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens == 199
    monkeypatch.setattr(type(backend_inside(engine).forward), "pools_stores", True)
    other = tokens(2, 200)
    engine.generate(other, max_new_tokens=8)
    assert len(copies) == 1
    assert engine.generate(other, max_new_tokens=8).usage.cached_tokens == 199


def test_the_least_recently_used_goes_first_and_memory_stays_within_its_bound() -> None:
    size = store_of(tokens(0, 100)).nbytes
    cache = PrefixCache(3 * size + size // 2)
    kept = [tokens(seed, 100) for seed in range(1, 6)]
    for ids in kept[:3]:
        cache.keep(ids, store_of(ids))
    assert cache.longest(kept[0]) is not None  # now the least recently used is the second
    cache.keep(kept[3], store_of(kept[3], capacity=400))
    assert cache.nbytes == 3 * size
    assert [cache.longest(ids) is not None for ids in kept] == [True, False, True, True, False]
    big = tokens(7, 300)
    cache.keep(big, store_of(big))
    assert cache.longest(big) is not None
    assert cache.nbytes <= cache.max_bytes
    too_big = tokens(8, 400)
    cache.keep(too_big, store_of(too_big))
    assert cache.longest(too_big) is None
    short = tokens(9, SHORTEST - 1)
    cache.keep(short, store_of(short))
    assert [len(ids) for ids in kept_prompts(cache)] == [300]


_ids = st.lists(st.integers(0, 2), max_size=8)


@given(st.lists(_ids, max_size=6), _ids, st.integers(1, 40))
def test_the_cache_by_brute_force(sequences: list[list[int]], asked: list[int], slots: int) -> None:
    """Whatever is kept and asked for: within the bound, no entry begins another, the longest beginning is found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_cache, "SHORTEST", 1)
        cache = PrefixCache(slots * store_of([1]).nbytes)
        for ids in sequences:
            cache.keep(ids, store_of(ids))
        assert cache.nbytes <= cache.max_bytes
        entries = kept_prompts(cache)
        assert not any(a is not b and common_length(a, b) == len(a) for a in entries for b in entries)
        found = cache.longest(asked)
        best = max((common_length(ids, asked) for ids in entries), default=0)
        assert (0 if found is None else found[1]) == best
        if found is not None:
            assert found[0].read(0, best)[0][0, :, 0].tolist() == asked[:best]
