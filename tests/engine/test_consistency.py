"""``engine.consistency``: sampled answers to a prompt, and how far an answer agrees with them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cocoa_engine import CocoaConfig, CocoaEngine, Consistency
from cocoa_engine.consistency import compare
from cocoa_engine.errors import ConfigError, PromptError
from cocoa_engine.text_matching import content_words, support, token_f1
from tests.helpers.alike import assert_alike
from tests.helpers.engines import engine_of, prompt
from tests.helpers.forward_passes import record
from tests.helpers.made_up_answers import generation
from tests.helpers.structured import engine_for_schemas
from tests.helpers.tiny_models import tiny_model

SHORT: dict[str, Any] = {"max_new_tokens": 6, "seed": 5}


@pytest.fixture(scope="module")
def tiny() -> CocoaEngine:
    return engine_of(tiny_model("llama"))


def test_samples_are_those_of_their_seeds_and_share_their_passes(tiny: CocoaEngine) -> None:
    passes = record(tiny)
    found = tiny.consistency(prompt(1), "any text", 4, temperature=1.3, top_p=0.9, **SHORT)
    assert max(len(each.widths) for each in passes) == 4
    for number, sample in enumerate(found.samples):
        config = CocoaConfig(method="sample", temperature=1.3, top_p=0.9, max_new_tokens=6, seed=5 + number)
        assert_alike(sample, tiny.generate(prompt(1), config=config))
    assert len({sample.text for sample in found.samples}) > 1
    assert found.answer == "any text"
    assert found.generation is None


def test_the_answer_is_generated_with_the_settings_if_none_is_given(tiny: CocoaEngine) -> None:
    found = tiny.consistency(prompt(1), n=2, method="cocoa", max_risk=None, **SHORT)
    expected = tiny.generate(prompt(1), method="cocoa", **SHORT)
    assert found.generation is not None
    assert_alike(found.generation, expected)
    assert found.answer == expected.text
    again = tiny.consistency(prompt(1), expected, 2, **SHORT)
    assert (again.generation, again.agreement) == (expected, found.agreement)
    assert Consistency.model_validate_json(found.model_dump_json()) == found


def test_samples_that_are_nearly_greedy_agree(tiny: CocoaEngine) -> None:
    for answer, agreement in ((None, 1.0), ("nothing of that", 0.0)):
        found = tiny.consistency(prompt(1), answer, 3, temperature=1e-6, method="greedy", **SHORT)
        assert (found.agreement, found.f1, found.matches) == (agreement, agreement, [agreement] * 3)


def test_a_comparison_of_the_user(tiny: CocoaEngine) -> None:
    texts: list[tuple[str, str]] = []

    def half(sample: str, answer: str) -> float:
        texts.append((sample, answer))
        return len(texts) / 4

    found = tiny.consistency(prompt(1), "answer", 2, match=half, **SHORT)
    assert found.matches == [0.25, 0.5]
    assert found.agreement == 0.375
    assert texts == [(sample.text, "answer") for sample in found.samples]
    for wrong in (1.5, -1, "yes", None, math.nan):
        with pytest.raises(ConfigError, match=r"match must return a bool or a number in \[0, 1\]"):
            tiny.consistency(prompt(1), "answer", 1, match=lambda *_: wrong, **SHORT)  # noqa: B023


def test_messages_are_a_prompt_and_processors_apply_to_the_answer_and_the_samples() -> None:
    engine, messages = engine_for_schemas(), [{"role": "user", "content": "Hello"}]
    found = engine.consistency(messages, n=2, **SHORT)
    assert found == engine.consistency(engine.encode_chat(messages), n=2, **SHORT)
    grammar = engine.constrain(regex="yes|no")
    found = engine.consistency(prompt(1), n=4, temperature=5.0, logits_processor=grammar, **SHORT)
    assert {found.answer, *(sample.text for sample in found.samples)} == {"yes", "no"}
    assert found.agreement == sum(sample.text == found.answer for sample in found.samples) / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"n": count}, "n must be a whole number from 1 to 10000") for count in (0, 10_001, 10**5000, True, 2.5)),
        ({"temperature": 0}, "all samples are alike"),
        ({"top_k": 1}, "all samples are alike"),
        ({"temperature": -1}, "temperature"),
        ({"gama": 1}, "unknown setting 'gama'"),
    ],
)
def test_refused_before_any_work(options: dict[str, Any], message: str, tiny: CocoaEngine) -> None:
    passes = record(tiny)
    with pytest.raises(ConfigError, match=message):
        tiny.consistency(prompt(1), **options)
    with pytest.raises(PromptError):
        tiny.consistency("")
    assert not passes


F1 = {
    ("The Eiffel Tower.", "eiffel tower"): 1.0,
    ("in 1889", "It was built in 1889"): 2 * 2 / (2 + 5),
    ("Paris Paris", "Paris"): 2 / 3,
    ("Rome", "Paris"): 0.0,
    ("", "the"): 1.0,
    ("", "Rome"): 0.0,
}


def test_f1_of_words_and_support_by_the_share_of_samples_that_contain_them() -> None:
    for (one, other), f1 in F1.items():
        assert token_f1(one, other) == token_f1(other, one) == pytest.approx(f1)
    assert content_words("In 1889 the Eiffel Tower was new to us, the tower!") == ["in", "1889", "eiffel", "tower"]
    samples = ["The tower of 1889.", "Eiffel built a tower", "Who knows?"]
    assert support("the Tower", samples) == 2 / 3
    assert support("Eiffel, 1889", samples) == 1 / 3
    assert support("it is so", samples) is None
    found = compare("The Tower.", [generation((text, 0.5)) for text in samples[:2]])
    assert found.support("Eiffel tower") == 0.75


def test_the_claims_that_the_samples_do_not_support() -> None:
    answer = generation(("Frank Herbert", 0.4), (" wrote it in ", 0.1), ("1950", 0.6), (".", 0.9))
    samples = [generation((text, 0.1)) for text in ("Frank Herbert, in 1965.", "Herbert wrote Dune in 1965.", "1950?")]
    found = compare(answer, samples)
    checks = {check.text: check.reasons for check in found.check_these()}
    assert list(checks) == [check.text for check in answer.check_these()]
    disagreed = {text for text, reasons in checks.items() if "samples disagree" in reasons}
    assert disagreed == {text for text in checks if (found.support(text) or 0) < 0.5} != set()
    assert "1950" in disagreed
    assert "Frank Herbert" not in disagreed
    assert len(found.check_these(1)) == 1
    with pytest.raises(ConfigError, match="given as a text"):
        compare("Frank Herbert", samples).check_these()
