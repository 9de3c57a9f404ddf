"""``cocoa bench``. What it finds is the machine's business: no test asserts a time."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from cocoa_engine import CocoaEngine, Generation
from tests.helpers.cocoa import Cocoa
from tests.helpers.reasoning_models import PLAIN
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def engine() -> CocoaEngine:
    """Random weights: only times are measured."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = PLAIN
    return CocoaEngine(tiny_model("llama"), tokenizer, model_name="tiny")


TINY = ["--tokens", "4", "--rounds", "2", "--prompt", "Name a river.", "--prompt", "Who wrote Dune?"]
DECODERS = ["HF generate, greedy", "greedy", "cocoa-sig"]


def test_json_has_every_figure(cocoa: Cocoa) -> None:
    result = cocoa("bench", *TINY, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["tokens"], record["prompts"], record["rounds"], record["base"]) == (4, 2, 2, DECODERS[0])
    assert record["model"] == "tiny"
    assert record["machine"]["torch"]
    assert list(record["decoders"]) == DECODERS
    for name, decoder in record["decoders"].items():
        assert len(decoder["seconds_per_token"]) == 2
        assert all(seconds > 0 for seconds in decoder["seconds_per_token"])
        assert decoder["ratio"]["lowest"] <= decoder["ratio"]["median"] <= decoder["ratio"]["highest"]
        assert bool(decoder["per_kept_token"]) == (name != DECODERS[0])
    assert record["decoders"][DECODERS[0]]["ratio"] == {"median": 1, "lowest": 1, "highest": 1}
    assert record["decoders"]["greedy"]["per_kept_token"]["risk_points"] == 0


def test_table_and_line(cocoa: Cocoa, loads: list[tuple[str | None, object]]) -> None:
    result = cocoa("bench", "some/model", *TINY, "--no-color")
    assert result.exit_code == 0, result.output
    assert [model for model, _ in loads] == ["some/model"]
    title, headings, *rows = result.stdout.splitlines()
    assert title.strip() == "Per kept token, median (prompts: 2, new tokens: 4, rounds: 2)"
    assert headings.split()[:4] == ["decoder", "ms", "ratio", "lowest-highest"]
    assert [row[:20].strip() for row in rows[:3]] == DECODERS
    assert "torch" in " ".join(rows[3:])
    assert max(map(len, result.stdout.splitlines())) <= 80


WARM_UP, ROUND = 2, 4  # answers of the engine: of two methods, to one prompt and to two


@pytest.mark.parametrize(("answer", "options"), [(3, ["--json"]), (3, ["--no-color"]), (0, [])])
def test_ctrl_c_keeps_the_finished_rounds(
    cocoa: Cocoa, monkeypatch: pytest.MonkeyPatch, answer: int, options: list[str]
) -> None:
    """It is pressed in one of the answers after the first round, or in its last one."""
    generate, answers = CocoaEngine.generate, itertools.count(1)

    def until_ctrl_c(engine: CocoaEngine, *arguments: Any, **options: Any) -> Generation:
        if next(answers) == WARM_UP + ROUND + answer:
            raise KeyboardInterrupt
        return generate(engine, *arguments, **options)

    monkeypatch.setattr(CocoaEngine, "generate", until_ctrl_c)
    result = cocoa("bench", *TINY, *options)
    words = "1 of 2 rounds were finished; the output is of these" if answer else "no round was finished"
    assert (result.exit_code, result.stderr) == (130, f"cocoa: {words}\ncocoa: interrupted\n")
    if options == ["--json"]:
        record = json.loads(result.stdout)
        assert record["rounds"] == 2
        assert {len(one["seconds_per_token"]) for one in record["decoders"].values()} == {1}
    elif answer:
        title, _, *rows = result.stdout.splitlines()
        assert title.strip().endswith("rounds: 1 of 2, incomplete)")
        assert [row[:20].strip() for row in rows[:3]] == DECODERS
    else:
        assert result.stdout == ""


def test_other_methods(cocoa: Cocoa) -> None:
    result = cocoa("bench", *TINY, "--methods", "dola, greedy", "--dola-layers", "low", "--json")
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["decoders"]) == [DECODERS[0], "dola", "greedy"]
