"""The attention on each passage equals what eager attention weights say, beside the source attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Runtime, passage_attention
from cocoa_engine.errors import ConfigError
from cocoa_engine.execution.backends import Backend, TokenTree
from cocoa_engine.execution.backends.shared_cache import SharedCache
from cocoa_engine.execution.forward.source_attention import SourceProbe, of_segments
from cocoa_engine.model.prompts import Passages
from tests.helpers.alike import near
from tests.helpers.backends import PROMPTS, made
from tests.helpers.inside import use_backend
from tests.helpers.libraries import needs_kernels
from tests.helpers.rivals import heads_file, heads_of
from tests.helpers.tiny_models import ARCHITECTURES, tiny_model, tiny_tokenizer

PROMPT = PROMPTS[2]
RANGES = (range(1, 6), range(8, 8), range(4, 12), range(12, 27), range(20, 25))


def config_of(model: PreTrainedModel, folder: Path) -> CocoaConfig:
    size = model.config.num_hidden_layers, model.config.num_attention_heads
    return CocoaConfig(decore_heads=heads_file(folder, *size, heads_of(model)), max_new_tokens=12, gamma=0.2)


def eager(model: PreTrainedModel, prompt: list[int], answer: list[int], ranges: tuple[range, ...]) -> torch.Tensor:
    """The mean mass of the heads on each range, for each token of the answer: ``[tokens, ranges]``."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = model(torch.tensor([[*prompt, *answer]]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(usual)
    by_head = torch.stack([weights[layer][0, head, len(prompt) :] for layer, head in heads_of(model)])
    return torch.stack([by_head[..., one.start : one.stop].sum(-1).mean(dim=0) for one in ranges], dim=-1)


def check(model: PreTrainedModel, prompt: list[int], answer: Generation, ranges: tuple[range, ...]) -> None:
    expected = eager(model, prompt, answer.token_ids, ranges)
    start = 0
    for span in answer.spans:
        end = start + len(span.token_ids)
        assert span.passage_attention == near(expected[start:end].mean(dim=0).tolist())
        if span.chosen is not None and len(span.candidates[span.chosen].token_ids) == len(span.token_ids):
            assert span.candidates[span.chosen].passage_attention == span.passage_attention
        start = end


KINDS = [
    pytest.param("lean", "native", marks=needs_kernels),
    pytest.param("static_lean", "stock", marks=pytest.mark.slow),
    pytest.param("lean", "transposed", marks=pytest.mark.slow),
    pytest.param("modules", "stock", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "linear_backend"), KINDS)
def test_every_backend_measures_the_passages(kind: str, linear_backend: str, tmp_path: Path) -> None:
    model = tiny_model("mistral-sliding" if kind == "static_lean" else "llama")
    engine = use_backend(
        CocoaEngine(model, tiny_tokenizer(), config=config_of(model, tmp_path)),
        made(model, kind, linear_backend),  # type: ignore[arg-type]
    )
    alone = engine.generate(PROMPT, source=Passages(RANGES))
    assert any(span.candidates for span in alone.spans)
    check(model, PROMPT, alone, RANGES)
    # sequences of one batch have other passages, or none
    few, none, many = engine.generate_batch(
        PROMPTS, source=[Passages((range(1, 3), range(2, 7))), None, Passages(RANGES)]
    )
    check(model, PROMPTS[0], few, (range(1, 3), range(2, 7)))
    assert all(span.passage_attention == [] and span.source_attention is not None for span in none.spans)
    check(model, PROMPTS[2], many, RANGES)
    # source attention keeps its definition
    plain = engine.generate(PROMPT)
    assert [span.source_attention for span in alone.spans] == near([span.source_attention for span in plain.spans])
    assert all(span.passage_attention == [] for span in plain.spans)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt2", "mistral-sliding"])
def test_architectures(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    engine = CocoaEngine(model, tiny_tokenizer(), config=config_of(model, tmp_path))
    check(model, PROMPT, engine.generate(PROMPT, source=Passages(RANGES)), RANGES)


def test_given_texts_streams_chats_and_texts(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }}\n{% endfor %}"
    engine = CocoaEngine(model, tokenizer, config=config_of(model, tmp_path))
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


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_an_answer_is_measured_alike_with_and_without_the_prefix_cache(architecture: str) -> None:
    """While it is written, and when it is fed again, in tokens and in attention."""
    prompt = [3 + 7 * number % 200 for number in range(90)]
    source = Passages((range(5, 40), range(50, 80)))
    measured: list[Generation] = []
    for cache in (0, 64):
        engine = CocoaEngine(tiny_model(architecture), tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=cache))
        measured += [engine.generate(prompt, source=source, max_new_tokens=8, gamma=0.2) for _ in range(2)]
        shares = isinstance(engine.session.backend, SharedCache)
        assert [bool(one.usage.cached_tokens) for one in measured[-2:]] == [False, bool(cache) and shares]
        with counted(engine.session.backend) as opened:
            again = passage_attention(engine, measured[-1], prompt, source)
        assert again == [near(span.passage_attention) for span in measured[-1].spans]
        assert [tree.cached_tokens for tree in opened] == ([len(prompt) - 1 if cache else 0] if shares else [])
    first, *others = measured
    for other in others:
        assert other.token_ids == first.token_ids
        for span, same in zip(other.spans, first.spans, strict=True):
            assert span.passage_attention == near(same.passage_attention)


@contextmanager
def counted(backend: Backend) -> Iterator[list[TokenTree]]:
    """The sequences that a backend opens."""
    opened: list[TokenTree] = []
    with pytest.MonkeyPatch.context() as patch:
        method = backend.open
        patch.setattr(backend, "open", lambda *args: opened.extend(trees := method(*args)) or trees)
        yield opened


def test_without_known_heads_it_is_that_of_heads_spread_over_the_layers() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    answer = engine.generate(PROMPT, max_new_tokens=4, source=Passages(RANGES))
    assert answer.source_heads == "spread"
    for span in answer.spans:
        assert len(span.passage_attention) == len(RANGES)
        assert span.source_attention is not None
        assert 0 < max(span.passage_attention) <= span.source_attention


def test_segments_without_passages_get_zeros() -> None:
    torch.manual_seed(0)
    probe, bare = SourceProbe([(0, 1)], range(1, 5), [range(1, 3)]), SourceProbe([(0, 1)], range(1, 5))
    for each, width in ((probe, 2), (bare, 3)):
        each.take(0, torch.rand(1, width, 10), 0)
    found, own = of_segments([(bare, 3), (None, 1), (probe, 2)]), probe.means()
    assert found is not None
    assert own is not None
    assert found.shape == (6, 2)
    assert found[:4, 1].abs().max() == found[3].abs().max() == 0 < found[:3, 0].min()
    assert torch.equal(found[4:], own)
    assert of_segments([(None, 3)]) is None
