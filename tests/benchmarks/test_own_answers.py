"""The scores of own answers, and the fit that leaves a model out."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.own_answers import ANSWERS, NOT_FITTED, Answers, Asked, read, row_of, scores, table, write
from cocoa_engine import CocoaEngine
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers.of(read(ANSWERS))


def test_the_labels_of_a_model_do_not_reach_its_own_risks(answers: Answers) -> None:
    risks = answers.left_out()
    assert np.isfinite(risks).all()
    own = answers.models == answers.models[0]
    for changed in (own, answers.sets == NOT_FITTED):
        again = answers._replace(wrong=answers.wrong ^ changed).left_out()
        np.testing.assert_allclose(again[changed], risks[changed])
    assert not np.allclose(answers._replace(wrong=answers.wrong ^ own).left_out()[~own], risks[~own], atol=0.02)


def test_a_row_for_each_model_and_set(answers: Answers) -> None:
    head, _, *rows = table(answers)
    assert len(rows) == len({*zip(answers.models.tolist(), answers.sets.tolist(), strict=True)})
    assert {row.count("|") for row in rows} == {head.count("|")}


def test_answers_are_read_back(tmp_path: Path) -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    answer = engine.generate("w1 w2 w3", max_new_tokens=12)
    rows = [row_of("tiny", "short", Asked(str(number), "0", [], lambda text: False), answer) for number in range(3)]
    write(tmp_path / "answers.csv", rows[:2])
    write(tmp_path / "answers.csv", rows[2:])
    back = Answers.of(read(tmp_path / "answers.csv"))
    assert back.wrong.tolist() == [True] * 3
    for name, value in scores(answer).items():
        np.testing.assert_allclose(back.scores[name], value, rtol=1e-3)
