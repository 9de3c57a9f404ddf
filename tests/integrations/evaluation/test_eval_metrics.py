"""The metrics against values computed by hand."""

from __future__ import annotations

import math

import pytest

from cocoa_integrations.evaluation import metrics


@pytest.mark.parametrize(
    ("answer", "references", "em", "f1"),
    [
        ("The  Eiffel Tower!", ["eiffel tower"], 1.0, 1.0),
        ("a cat", ["the dog", "cat"], 1.0, 1.0),
        ("Tom Smith wrote it", ["Tom Smith"], 0.0, 2 * 2 / (4 + 2)),
        ("red red blue", ["red green"], 0.0, 2 * 1 / (3 + 2)),
        ("paris", ["rome"], 0.0, 0.0),
        ("", ["rome"], 0.0, 0.0),
        ("the", ["an"], 1.0, 1.0),  # both are nothing, once articles are dropped
        ("well-known", ["wellknown"], 1.0, 1.0),  # SQuAD drops punctuation without a space in its place
    ],
)
def test_squad(answer: str, references: list[str], em: float, f1: float) -> None:
    assert metrics.exact_match(answer, references) == em
    assert metrics.f1(answer, references) == pytest.approx(f1)


def test_rouge_l_is_the_longest_common_subsequence() -> None:
    # "the cat ... mat" of 6 and of 5 words: 4 in common; F = 2 * (4/5 * 4/6) / (4/5 + 4/6)
    value = metrics.rouge_l("the cat lay on mat", ["the cat sat on the mat"])
    assert value == pytest.approx(2 * (4 / 5) * (4 / 6) / (4 / 5 + 4 / 6))
    assert metrics.rouge_l("the cat lay on mat", ["no", "the cat sat on the mat"]) == pytest.approx(value)
    assert metrics.rouge_l("", ["no"]) == 0.0


def test_multiple_choice() -> None:
    correct, incorrect = [math.log(0.2), math.log(0.4)], [math.log(0.3), math.log(0.1)]
    assert metrics.mc1(correct[0], incorrect) == 0.0
    assert metrics.mc1(correct[1], incorrect) == 1.0
    assert metrics.mc1(math.log(0.3), incorrect) == 0.0  # a tie is not above
    assert metrics.mc2(correct, incorrect) == pytest.approx(0.6)
    assert metrics.mc3(correct, incorrect) == 0.5
    # and nothing underflows
    assert metrics.mc2([-2000.0], [-2000.0, -2000.0 + math.log(2)]) == pytest.approx(0.25)
    assert metrics.mc2([-5000.0], [-1.0]) == 0.0


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("2 + 3 = 5\n#### 5", 5.0),
        ("so 1,234.50 dollars.", 1234.5),
        ("#### 1,000 and 7 more", 1000.0),
        ("It is -3", -3.0),
        ("first 4, then 6.", 6.0),
        ("####", None),
        ("2 apples ####", 2.0),
        ("none", None),
        ("$42.", 42.0),
    ],
)
def test_last_number(answer: str, found: float | None) -> None:
    assert metrics.last_number(answer) == found


def test_same_number_and_rejected() -> None:
    assert metrics.same_number("that makes 18.00 in all", "9 * 2 = 18\n#### 18") == 1.0
    assert metrics.same_number("that makes 17", "#### 18") == 0.0
    assert metrics.same_number("no idea", "#### 18") == 0.0
    assert metrics.rejected(" I have no comment.") == 1.0
    assert metrics.rejected("Paris. I have no comment.") == 0.0
