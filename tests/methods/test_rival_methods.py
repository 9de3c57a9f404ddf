"""DoLa, DeCoRe and Diver: the engine's decode and scores are those of naive programs made from the formulas."""

import threading
from bisect import bisect_left
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime
from cocoa_engine.errors import ConfigError, PromptError, UnsupportedModelError
from cocoa_engine.lab import heads as lab_heads
from cocoa_engine.lab.heads import find_retrieval_heads, steadiness
from cocoa_engine.methods.dola import early_layers
from tests.helpers.alike import assert_alike, near
from tests.helpers.attention import attention_weights
from tests.helpers.backends import made
from tests.helpers.in_threads import join, start
from tests.helpers.inside import use_backend
from tests.helpers.prompts import PROMPTS
from tests.helpers.reference import FullForward, Reference, assert_same
from tests.helpers.rivals import RIVALS, config_of, heads_file, heads_of
from tests.helpers.rivals_reference import DecoreReference, DiverReference, DolaReference, MaskedForward
from tests.helpers.tiny_models import RECURRENT, VOCAB_SIZE, tiny_model, tiny_tokenizer

NEAR = 2e-4
"""Decisions nearer than this may fall either way in float32."""


@cache
def masked_passes(forward: FullForward) -> MaskedForward:
    return MaskedForward(forward.model, heads_of(forward.model))


def reference_of(method: str, forward: FullForward, tokenizer: Any, config: CocoaConfig) -> Reference:
    kind = {"dola": DolaReference, "decore": DecoreReference, "diver": DiverReference}[method]
    reference = kind(forward, tokenizer, config)
    if isinstance(reference, DecoreReference):
        reference.masked_forward = masked_passes(forward)
    return reference


def prompts(count: int, shortest: int = 3, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(20, VOCAB_SIZE, (shortest + 4 * n,), generator=generator).tolist() for n in range(count)]


@cache
def passes_of(architecture: str, tied: bool) -> FullForward:
    """Of a model that no test changes: many settings walk the same sequences."""
    return FullForward(tiny_model(architecture, seed=1, tie_word_embeddings=tied))


BOTH: list[dict[str, Any]] = [{}, {"final_layer": "pre_norm", "span_log_prob": "mean", "metric": "con_mlds"}]


SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    *((method, architecture, settings) for method in RIVALS for architecture in ("llama", "gpt2") for settings in BOTH),
    *((method, "llama", {**settings, "forward": "modules"}) for method in RIVALS for settings in BOTH),
    *((method, "qwen3", BOTH[1]) for method in RIVALS),
    ("diver", "mistral-sliding", {}),
    ("diver", "gemma3_text", {"forward": "modules"}),
    ("dola", "llama", {"dola_layers": "low"}),
    ("dola", "llama", {"tied": True, "dola_layers": "low"}),
    ("dola", "gpt2", {"dola_layers": "4"}),
    ("dola", "llama", {"tied": True, "dola_layers": "0,2,5"}),
    ("dola", "llama", {"dola_relative_top": 0.0}),
    ("dola", "gpt2", {"dola_relative_top": 0.01}),
    ("dola", "llama", {"tied": True, "dola_relative_top": 0.6}),
    ("dola", "gpt2", {"dola_layers": "low", "dola_relative_top": 0.4}),
    *(("diver", "llama", {"diver_weight": weight}) for weight in (0.0, 0.3, 2.0)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "architecture", "settings"), SETTINGS, ids=str)
def test_tiny_models_decode_and_score_as_the_formula_says(
    method: str, architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Alone, in batches, as streams and without guesses; settings change something. Diver reads back in pieces."""
    settings = {**settings}
    tied, forward = settings.pop("tied", False), settings.pop("forward", "auto")
    full, tokenizer = passes_of(architecture, tied), tiny_tokenizer()
    model = full.model
    engine, without_drafts = (
        CocoaEngine(model, tokenizer, runtime=Runtime(forward=forward, prefix_cache_mb=0, draft_tokens=count))
        for count in (4, 0)
    )
    default = config_of(method, model, tmp_path, max_new_tokens=8, max_span_tokens=4)
    config = default.replace(**settings)
    reference = reference_of(method, full, tokenizer, config)
    checked = others = 0
    *asked, longer = [[9], *prompts(5)]
    if long := method == "diver" and not settings:
        asked += prompts(1, 150, seed=7)
    answers = engine.generate_batch(asked, config=config)
    for prompt, answer in zip(asked, answers, strict=True):
        reference.foresee(prompt, answer)
        expected = reference.generate(prompt)
        if expected.margin > NEAR:
            assert_same(answer, expected)
            assert_alike(engine.generate(prompt, config=config), answer)
            checked += 1
            plain = engine.generate(prompt, config=default) if settings else answer
            apart = sum(span.score for span in answer.spans) - sum(span.score for span in plain.spans)
            others += answer.token_ids != plain.token_ids or abs(apart) > 0.01
    assert checked >= 2
    assert expected.margin > NEAR or not long
    assert others >= bool(settings)
    with engine.stream(asked[2], config=config) as stream:
        assert [span.token_ids for span in stream] == [span.token_ids for span in answers[2].spans]
    assert_alike(without_drafts.generate(asked[3], config=config), answers[3])
    for prompt in ([7], longer):  # also one of a single token, of which nothing is read beforehand
        for text, scored in zip(asked[1:4], engine.score(prompt, asked[1:4], config=config), strict=True):
            assert_same(scored, reference.score(prompt, text))
            assert_alike(engine.score(prompt, text, config=config), scored)


@pytest.fixture(scope="module")
def full(float32_engine: CocoaEngine) -> FullForward:
    return FullForward(float32_engine.model)


@pytest.mark.parametrize("method", RIVALS)
def test_the_real_model_decodes_as_the_formula_says(
    float32_engine: CocoaEngine, full: FullForward, method: str, tmp_path: Path
) -> None:
    config = config_of(method, float32_engine.model, tmp_path, max_new_tokens=4, max_candidates=3, max_span_tokens=3)
    reference = reference_of(method, full, float32_engine.tokenizer, config)
    prompt = float32_engine.encode(PROMPTS["story"])
    given = float32_engine.encode(" a small town in the north.", add_special_tokens=False)
    assert_same(float32_engine.score(prompt, given, config=config), reference.score(prompt, given))
    for name in ("story", "question"):
        prompt = float32_engine.encode(PROMPTS[name])
        answer = float32_engine.generate(prompt, config=config)
        reference.foresee(prompt, answer)
        expected = reference.generate(prompt)
        if expected.margin > NEAR:
            assert_same(answer, expected)
            return
    pytest.fail("each prompt has a decision that rounding may turn")


def test_layers_of_dola() -> None:
    assert early_layers("high", 30, True) == tuple(range(15, 30, 2))
    assert early_layers("low", 30, True) == tuple(range(2, 15, 2))
    assert early_layers("low", 32, False) == tuple(range(0, 16, 2))
    assert early_layers("high", 80, False) == tuple(range(60, 80, 2))
    assert early_layers("low", 80, False) == tuple(range(0, 20, 2))
    assert early_layers("5,3,3", 8, True) == (3, 5)
    with pytest.raises(ValueError, match="0 to 7"):
        early_layers("8", 8, True)


def test_bad_settings(engine: CocoaEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path))  # without heads that somebody has ranked
    tiny = CocoaEngine(tiny_model("gpt2"), tiny_tokenizer())
    with pytest.raises(ConfigError, match="cocoa heads"):
        tiny.generate("Hello", method="decore")
    (tmp_path / "bad.json").write_text("{}")
    outside = Path(heads_file(tmp_path, tiny.model, [(0, 3)]))
    outside.write_text(outside.read_text().replace('"head":3', '"head":9'))
    for file, message in (
        (tmp_path / "none.json", "cannot be read"),
        (tmp_path / "bad.json", "not a file of `cocoa heads`"),
        (outside, "a head is outside"),
        (heads_file(tmp_path, tiny_model("llama", num_hidden_layers=4)), "4 layers of 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.generate("Hello", method="decore", decore_heads=str(file))
    for settings in ({"method": "dola", "dola_layers": "16,99"}, {"dola_layers": "top"}):
        with pytest.raises(ConfigError, match="dola_layers"):
            engine.generate("Hello", **settings)
    assert CocoaConfig(dola_layers=(16, 18)).dola_layers == "16,18"  # type: ignore[arg-type]
    assert engine.context_window is not None
    with pytest.raises(PromptError, match="reads it twice"):
        engine.generate([5] * (engine.context_window // 2), method="diver")
    with pytest.raises(PromptError, match="reads twice"):
        tiny.score([5] * 256, [6], method="diver")


def copied(
    engine: CocoaEngine, prompt: list[int], answer: list[int], sentences: list[str]
) -> list[tuple[float, torch.Tensor]]:
    """The share of each sentence's tokens that the model predicts, and what each head copies of them, ``[L, heads]``.

    1 / n for each of n tokens that is predicted where the head attends to most to the same token of the sentence in the
    prompt, by the attention weights of plain transformers.
    """

    def tokens_of(sentence: str, token_ids: list[int]) -> range:
        beginnings, rests = range(len(token_ids) + 1), range(len(token_ids))
        end = bisect_left(beginnings, True, key=lambda n: sentence in engine.decode(token_ids[:n]))
        return range(bisect_left(rests, True, key=lambda n: sentence not in engine.decode(token_ids[n:end])) - 1, end)

    token_ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        best = engine.model(token_ids).logits[0].argmax(-1).tolist()
    attentions = attention_weights(engine.model, token_ids[0].tolist())
    found = []
    for sentence in sentences:
        source, target = tokens_of(sentence, prompt), tokens_of(sentence, answer)
        scores, predicted = torch.zeros(len(attentions), attentions[0].shape[1], dtype=torch.float64), 0
        for number in target:
            before = len(prompt) + number - 1
            if best[before] == answer[number]:
                predicted += 1
                for layer, weights in enumerate(attentions):
                    for head, place in enumerate(weights[0, :, before].argmax(-1).tolist()):
                        scores[layer, head] += (place in source and prompt[place] == answer[number]) / len(target)
        found.append((predicted / len(target), scores))
    return found


def test_heads_score_what_they_copy(float32_engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts that the model does not recall do not count."""
    monkeypatch.setattr(lab_heads, "ROUNDS", 1)
    prompt, answer, sentences = lab_heads._asked(float32_engine, lab_heads.passages(), 64)
    assert len({*sentences}) == lab_heads.NEEDLES
    expected = copied(float32_engine, prompt, answer, sentences)
    least = sorted(share for share, _ in expected)[1] + 1e-6
    monkeypatch.setattr(lab_heads, "RECALLED", least)
    counted = [scores for share, scores in expected if share > least]
    found = find_retrieval_heads(float32_engine, lengths=(64,))
    assert found.samples == len(counted) >= 2
    mean = sum(counted) / len(counted)
    assert float(mean.max()) > 0.3
    for head in found.heads:
        assert head.score == near(float(mean[head.layer, head.head])), head


def test_heads_are_the_same_however_the_model_is_run(
    float32_engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the model's own attention, which is observed where it is called."""
    monkeypatch.setattr(lab_heads, "ROUNDS", 1)
    scores = []
    for kind in (None, "masked_modules", "copied_cache", "recompute"):
        engine = CocoaEngine(float32_engine.model, float32_engine.tokenizer)
        if kind is not None:
            use_backend(engine, made(float32_engine.model, kind, "stock"))
        assert engine.session.backend.masks_heads == (kind is None)
        heads = find_retrieval_heads(engine, lengths=(8,)).heads
        scores.append({(head.layer, head.head): head.score for head in heads})
        assert scores[-1] == near(scores[0])
    assert max(scores[0].values()) > 0.1


@pytest.mark.slow
def test_heads_are_found_while_others_use_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_heads, "ROUNDS", 1)
    monkeypatch.setattr(lab_heads, "RECALLED", -1.0)
    model = tiny_model("llama", max_position_embeddings=4096)
    usual = model.config._attn_implementation
    engine = CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))
    use_backend(engine, made(model, "copied_cache", "stock"))
    ended = threading.Event()

    def decode() -> None:
        while not ended.is_set():
            engine.generate([5, 6, 7], max_new_tokens=4)

    threads = [start(decode) for _ in range(2)]
    found = [find_retrieval_heads(engine, lengths=(16,)) for _ in range(2)]
    ended.set()
    join(threads)
    assert found[0] == found[1]
    assert model.config._attn_implementation == usual


def test_scores_of_heads_are_means_over_the_facts_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than half of a fact's tokens must be predicted. The search ends once the best heads are steady."""
    engine = CocoaEngine(tiny_model("llama", max_position_embeddings=4096), tiny_tokenizer())
    random = torch.Generator().manual_seed(0)
    scores = torch.rand(lab_heads.ROUNDS, 2, 6, 4, dtype=torch.float64, generator=random)
    shares, steady = [0.51, 0.5], [0.9, 0.0, lab_heads.STEADY]
    rounds = ({"facts": [*zip(shares, of_round.tolist(), strict=True)]} for of_round in scores)
    monkeypatch.setattr(lab_heads, "_copied", lambda *_: next(rounds))
    monkeypatch.setattr(lab_heads, "steadiness", lambda _: steady.pop(0))
    done: list[int] = []
    found = find_retrieval_heads(engine, (32,), done.append)
    assert done == [32] * 3
    assert found.samples == 3
    mean = scores[:3, 0].mean(dim=0)
    assert {(head.layer, head.head): head.score for head in found.heads} == {
        (layer, head): pytest.approx(float(mean[layer, head])) for layer in range(6) for head in range(4)
    }
    assert [head.score for head in found.heads] == sorted((head.score for head in found.heads), reverse=True)
    shares[0] = 0.5
    rounds = ({"facts": [*zip(shares, of_round.tolist(), strict=True)]} for of_round in scores)
    with pytest.raises(UnsupportedModelError, match=f"recalled none of {lab_heads.ROUNDS * 5} facts"):
        find_retrieval_heads(engine, lengths=(32,))


def test_texts_that_do_not_fit_are_refused_before_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_heads, "_copied", None)
    engine = CocoaEngine(tiny_model("llama", max_position_embeddings=4096), tiny_tokenizer())
    with pytest.raises(PromptError, match=r"^prompt \(\d{4} tokens\).* window of 4096\. Give shorter --lengths"):
        find_retrieval_heads(engine, lengths=(8, 40_960))


HALVES = arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 30)), elements=st.floats(0, 1, width=16))


@given(HALVES, st.integers(1, 25), st.randoms())
def test_steadiness(half: Any, count: int, random: Any) -> None:
    """It is 1 for halves with the same means, and does not depend on the order of heads or the unit of scores."""
    alike = np.repeat(half, 2, axis=0)
    best = np.sort(half.mean(axis=0))[::-1][:count].sum()
    assert steadiness(alike, count) == (pytest.approx(1) if best else 0)
    order = [*range(half.shape[1])]
    random.shuffle(order)
    distinct = half.copy()  # no ties, so that the choice of the best does not depend on the order
    distinct += np.random.default_rng(0).random(half.shape) / 100
    value = steadiness(distinct, count)
    assert 0 <= value <= 1
    assert steadiness(distinct[:, order], count) == pytest.approx(value)
    assert steadiness(distinct * 8, count) == pytest.approx(value)


@given(st.integers(0, 1000))
def test_more_samples_make_the_best_heads_steady(seed: int) -> None:
    """Of 300 heads, 20 copy half of each sentence and the others a tenth; noise hides that in few samples."""
    random = np.random.default_rng(seed)
    rates = np.where(np.arange(300) < 20, 0.5, 0.1)
    scores = (random.random((400, 300)) < rates).astype(float)
    assert steadiness(scores[:4]) < lab_heads.STEADY < steadiness(scores)
    noise = (random.random((30, 300)) < 0.1).astype(float)
    assert steadiness(noise) < lab_heads.STEADY


@pytest.mark.parametrize("method", ["dola", "decore"])
def test_processors_choose_and_do_not_score(method: str, tmp_path: Path) -> None:
    """Also where they leave none of the plausible tokens, and where they write into what they are given."""
    model, allowed = tiny_model("llama", seed=4), [40, 41]

    def forbid_others(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = scores[:, allowed].clone()
        scores[:] = -torch.inf
        scores[:, allowed] = kept + 1000
        return scores

    engine = CocoaEngine(model, tiny_tokenizer())
    config = config_of(method, model, tmp_path, max_new_tokens=6, dola_relative_top=1.0)
    answer = engine.generate(prompts(1)[0], config=config, logits_processor=[forbid_others])
    assert set(answer.token_ids) <= {*allowed}
    assert all(abs(span.score) < 500 for span in answer.spans)
    scored = engine.score(prompts(1)[0], answer.token_ids, config=config)
    assert sum(span.score for span in answer.spans) == pytest.approx(scored.spans[0].score, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", RIVALS)
def test_a_caller_in_inference_mode(method: str, tmp_path: Path) -> None:
    model = tiny_model("llama", seed=5)
    engine = CocoaEngine(model, tiny_tokenizer())
    config = config_of(method, model, tmp_path, max_new_tokens=8, max_span_tokens=4)
    long = [*prompts(1)[0]] * 30
    expected = CocoaEngine(model, tiny_tokenizer()).generate(long, config=config)
    with torch.inference_mode():
        for _ in range(2):  # the second time with the prompt's keys and values from the first
            assert_alike(engine.generate(long, config=config), expected)


DECORE = {"method": "decore"}
DOLA = {"method": "dola", "max_new_tokens": 2, "repetition_penalty": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("opt", {**DOLA, "dola_layers": "2", "final_layer": "pre_norm"}, "width 32"),
        *((architecture, {"method": "diver"}, "share one cache") for architecture in RECURRENT),
        ("qwen3_next", DECORE, "masks attention heads"),
        ("mamba", DECORE, "no attention heads"),
    ],
)
def test_models_that_a_method_does_not_fit(
    architecture: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """DoLa runs on any whose width is that of its output layer."""
    width = {"word_embed_proj_dim": 16} if architecture == "opt" else {}
    model = tiny_model(architecture, **width)
    if settings is DECORE:
        settings = {**DECORE, "decore_heads": heads_file(tmp_path, tiny_model("llama"))}
    engine = CocoaEngine(model, tiny_tokenizer())
    with pytest.raises(UnsupportedModelError, match=message):
        engine.generate(prompts(1)[0], **settings)
    if architecture in RECURRENT:
        for each in (engine, CocoaEngine(model.to(torch.bfloat16), tiny_tokenizer())):
            assert len(each.generate(prompts(2)[1], **DOLA, dola_layers="0,1").token_ids) in (1, 2)
    if architecture == "mamba":
        with pytest.raises(UnsupportedModelError, match="has code of its own"):
            find_retrieval_heads(engine, lengths=(32,))
