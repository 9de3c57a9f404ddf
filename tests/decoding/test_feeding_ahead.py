"""Tokens fed ahead (guesses by prompt lookup, a leading branch's continuation) change what it costs, nothing else."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Runtime
from cocoa_engine.decoding import task
from cocoa_engine.decoding.request import FREE_LEAVES
from cocoa_engine.decoding.speculation import Guess, PromptLookup
from cocoa_engine.execution.backends.shared_cache import SharedCache
from tests.helpers.alike import assert_alike, assert_all_alike
from tests.helpers.inside import record, steps
from tests.helpers.prompts import chat
from tests.helpers.tiny_models import VOCAB_SIZE, engine_of, prompt, tiny_model, tiny_tokenizer

BOUNDARIES = ["right", "left", "own", "fixed"]

AS_IT_IS = SharedCache.cost_of_a_row


@pytest.fixture(autouse=True)
def every_guess_is_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are unlikely to save a pass: nothing may depend on it."""
    monkeypatch.setattr(SharedCache, "cost_of_a_row", 0.0)


def repetitive(architecture: str = "llama", seed: int = 0) -> Any:
    """A model whose next token depends mostly on the last one. It repeats itself, so guesses are often right."""
    model = tiny_model(architecture, seed=seed)
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)
    return model


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(call: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(task, "FREE_LEAVES", 1)
            return call()

    return run


def sees(seen: list[list[int]]) -> Callable[..., torch.Tensor]:
    """A processor whose work depends on what it has seen, as a grammar's state does."""

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        return scores.index_fill(1, torch.tensor([7 * len(seen) % VOCAB_SIZE]), -torch.inf)

    return process


def ends_at(token_ids: Sequence[int], seen: list[list[int]]) -> Callable[..., bool]:
    return lambda input_ids, scores: seen.append(input_ids[0].tolist()) or seen[-1][-1] in token_ids


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "candidate spans": {"method": "cocoa", "metric": "con_mlds", "gamma": 0.1, "max_candidates": 4},
    **{rule: {"span_log_prob": rule} for rule in ("mean", "common_length", "gnmt")},
    **{rule: {"span_log_prob": rule, "stop": ("a", "er")} for rule in ("end_mean", "greedy_end")},
    "sampled": {"temperature": 3.0, "seed": 5, "gamma": 0.1},
    "stop texts": {"stop": ("a", "er", "}", "日", "\\x07"), "gamma": 0.2},
    "processor": {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.1)]},
}
GREEDY: dict[str, dict[str, Any]] = {
    "greedy": {"method": "greedy"},
    "drawn token by token": {"method": "sample", "temperature": 0.3, "seed": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "boundary"), [*itertools.product(CASES, BOUNDARIES), *((case, "right") for case in GREEDY)]
)
def test_same_answers(case: str, boundary: str, one_by_one: Any) -> None:
    model = repetitive()
    settings: dict[str, Any] = {"max_new_tokens": 40, "span_boundary": boundary, **(CASES | GREEDY)[case]}
    if "span_log_prob" in settings:
        settings |= {"gamma": 0.1, "max_span_tokens": 5}
    ahead, none = engine_of(model, draft_tokens=5), engine_of(model, draft_tokens=0)
    saved = 0
    for seed in range(4):
        expected = one_by_one(lambda seed=seed: none.generate(prompt(seed), **settings))
        actual = ahead.generate(prompt(seed), **settings)
        assert_alike(actual, expected)
        assert actual.usage.forward_passes <= expected.usage.forward_passes
        saved += expected.usage.forward_passes - actual.usage.forward_passes
    assert saved > 0 or case not in ("plain", *GREEDY)  # elsewhere branches may take all the room


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["mistral-sliding", "qwen3", "gemma3_text", "gpt2", "falcon"])
@pytest.mark.parametrize("boundary", ["right", "own"])
def test_same_answers_on_other_models(architecture: str, boundary: str, one_by_one: Any) -> None:
    ahead, none = (engine_of(tiny_model(architecture), draft_tokens=count) for count in (6, 0))
    prompts = [prompt(seed) * 2 for seed in range(3)]
    settings: dict[str, Any] = {"max_new_tokens": 24, "span_boundary": boundary, "gamma": 0.15}
    expected = one_by_one(lambda: none.generate_batch(prompts, **settings))
    assert_all_alike(ahead.generate_batch(prompts, **settings), expected)
    assert_all_alike([ahead.generate(each, **settings) for each in prompts], expected)


@pytest.mark.slow
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_an_end_inside_of_a_guess(boundary: str, one_by_one: Any) -> None:
    """The model circles; then one of the circle's tokens is made an end, a stop text or met by a criterion."""
    model = repetitive()
    settings: dict[str, Any] = {"max_new_tokens": 32, "span_boundary": boundary, "gamma": 0.2}
    circle = engine_of(model, draft_tokens=5).generate(prompt(1), **settings).token_ids
    seen = [*prompt(1), *circle]  # in the prompt now: guessed from the first token on

    def same(*options: dict[str, Any]) -> None:
        plain, ahead = options * 2 if len(options) == 1 else options
        expected = one_by_one(lambda: engine_of(model, draft_tokens=0).generate(seen, **settings, **plain))
        assert_alike(engine_of(model, draft_tokens=5).generate(seen, **settings, **ahead), expected)

    for last in sorted(set(circle))[:6]:
        model.generation_config.eos_token_id = [0, last]
        same({})
        model.generation_config.eos_token_id = 0
        seen_by: list[list[list[int]]] = [[], []]
        same(*({"stopping_criteria": ends_at([last], each)} for each in seen_by))
        assert seen_by[0] == seen_by[1] != []
        if stop := tiny_tokenizer().decode([last]).strip("�"):
            same({"stop": (stop,)})


@pytest.mark.slow
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_nothing_is_fed_beyond_the_last_branches(boundary: str, max_new_tokens: int, one_by_one: Any) -> None:
    engine = engine_of(repetitive(), draft_tokens=8)
    seen = [*prompt(2), *engine.generate(prompt(2), max_new_tokens=24).token_ids]
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "span_boundary": boundary, "gamma": 0.15}
    expected = one_by_one(lambda: engine_of(engine.model, draft_tokens=0).generate(seen, **settings))
    places: list[int] = []
    record(engine, lambda segments, _: places.extend(place for segment in segments for place in segment.positions))
    assert_alike(engine.generate(seen, **settings), expected)
    assert max(places) < len(seen) + max_new_tokens - 1 + engine.config.max_span_tokens
    places.clear()
    engine.generate(seen, **{**settings, "method": "greedy"})
    assert max(places) < len(seen) + max_new_tokens


def test_a_processor_sees_each_prefix_once_in_order_and_no_guess() -> None:
    """Greedy: exactly the answer's own prefixes."""
    engine = engine_of(repetitive(), draft_tokens=6)
    prefixes: list[list[int]] = []
    answer = engine.generate(prompt(3), method="greedy", max_new_tokens=30, logits_processor=sees(prefixes))
    assert prefixes == [[*prompt(3), *answer.token_ids[:length]] for length in range(len(answer.token_ids))]
    assert answer.usage.fed_tokens > len(answer.token_ids) > answer.usage.forward_passes - 1


@pytest.mark.slow
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_processors_and_criteria_are_asked_the_same(boundary: Any, one_by_one: Any) -> None:
    """Also where branches grow: the same questions in the same order, so a state they keep is the same."""
    model = repetitive()
    asked: list[Any] = []

    def generate(draft_tokens: int) -> Generation:
        config = CocoaConfig(max_new_tokens=30, gamma=0.1, span_boundary=boundary)
        asked.append(([], []))
        callables = {"logits_processor": sees(asked[-1][0]), "stopping_criteria": ends_at([], asked[-1][1])}
        answer = engine_of(model, draft_tokens=draft_tokens).generate(prompt(4), config=config, **callables)
        beginnings = [[*prompt(4), *answer.token_ids[: n + 1]] for n in range(len(answer.token_ids))]
        assert asked[-1][1] == beginnings  # criteria are not asked of candidates that are dropped
        return answer

    expected, actual = one_by_one(lambda: generate(0)), generate(6)
    assert_alike(actual, expected)
    assert asked[0] == asked[1]
    assert actual.usage.fed_tokens > expected.usage.fed_tokens
    assert actual.usage.risk_points > 1


def test_an_answer_over_a_context_takes_fewer_passes_than_tokens(
    engine: CocoaEngine, one_by_one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedCache, "cost_of_a_row", AS_IT_IS)
    text = "The council of Ashford voted on Monday to repair the old stone bridge before the winter floods come."
    question = chat(f"Repeat this sentence word for word: {text}")
    settings: dict[str, Any] = {"max_new_tokens": 24, "max_candidates": 4, "max_span_tokens": 8}
    answer = engine.generate(question, **settings)
    none = CocoaEngine(engine.model, engine.tokenizer, runtime=Runtime(draft_tokens=0))
    assert_alike(answer, one_by_one(lambda: none.generate(question, **settings)))
    assert answer.usage.forward_passes - 1 < 0.7 * len(answer.token_ids)


def test_nothing_is_guessed_after_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token is fed for its hidden states alone, whatever made it the last."""
    model = repetitive()
    last = engine_of(model, draft_tokens=5).generate(prompt(1), method="greedy", max_new_tokens=30).token_ids[9]
    asked: list[tuple[int, ...]] = []
    guess = PromptLookup.guess
    monkeypatch.setattr(PromptLookup, "guess", lambda *given: asked.append(tuple(given[1])) or guess(*given))
    answer = engine_of(model, draft_tokens=5).generate(
        prompt(1), method="greedy", max_new_tokens=30, stopping_criteria=ends_at([last], [])
    )
    assert answer.finish_reason == "stop"
    assert (answer.token_ids[0],) in asked
    assert (last,) not in asked


def test_a_pass_feeds_no_more_than_has_room() -> None:
    engine = engine_of(repetitive(), draft_tokens=30)
    settings: dict[str, Any] = {"max_new_tokens": 30, "max_candidates": 2}
    passes = record(engine)
    engine.generate(prompt(1), **settings)
    assert max(sum(widths) for widths in steps(passes)) == FREE_LEAVES
    passes.clear()
    engine.generate_batch([prompt(seed) for seed in range(3)], **settings)
    crowded = [widths for widths in steps(passes) if len(widths) == 3]
    assert max(sum(widths) for widths in crowded) <= 3 * (FREE_LEAVES // 3)
    passes.clear()
    engine_of(engine.model, draft_tokens=0).generate(prompt(1), method="greedy", max_new_tokens=30)
    assert {tuple(widths) for widths in steps(passes)} <= {(1,)}


def test_a_bad_guess_that_is_nan_is_nobodys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits after a guess are looked at only if the decode comes to it."""
    model, settings = repetitive(), {"max_new_tokens": 12, "method": "greedy"}
    expected = engine_of(model, draft_tokens=0).generate(prompt(1), **settings)

    def spoil(_module: Any, _inputs: Any, logits: torch.Tensor) -> None:
        logits[..., 1:, :] = torch.nan

    monkeypatch.setattr(PromptLookup, "guess", lambda *_: Guess((25,), 3))
    model.lm_head.register_forward_hook(spoil)
    answer = engine_of(model, draft_tokens=4).generate(prompt(1), **settings)
    assert answer.usage.fed_tokens > len(answer.token_ids)
    assert_alike(answer, expected)


_ids = st.lists(st.integers(0, 3), max_size=30)


def brute_force(ids: Sequence[int], path: Sequence[int], count: int) -> Guess:
    """What followed the last 3, else 2, else 1 tokens when they came before for the last time, within ``ids``.

    Where ``ids`` end before the guess is complete, the tokens guessed so far are looked up in turn.
    """
    text = [*ids, *path]
    for size in (3, 2, 1):
        for start in range(len(ids) - size - 1, -1, -1):
            if count and len(text) >= size and list(ids[start : start + size]) == text[-size:]:
                found = tuple(ids[start + size : start + size + count])
                more, matched = brute_force(ids, [*path, *found], count - len(found))
                return Guess(found + more if matched >= size else found, size)
    return Guess((), 0)


@given(_ids, st.lists(st.integers(0, 3), max_size=5), st.integers(0, 6), st.integers(1, 6))
def test_guesses_by_brute_force(ids: list[int], path: list[int], count: int, most: int) -> None:
    expected = brute_force(ids, path, min(count, most))
    assert PromptLookup(ids, most).guess(path, count) == expected
