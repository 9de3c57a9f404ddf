"""``cocoa threshold``: what a threshold would stop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_engine.cli.prompting import require_chat
from cocoa_engine.errors import ConfigError, DataError
from cocoa_engine.lab import stopping
from cocoa_engine.lab.stopping import SHARES, Answer, Count, by_default, measure, read_own_prompts, suggested
from tests.helpers.alike import near
from tests.helpers.cocoa import Cocoa, assert_refused

MEASURED = [
    {"text": "Paris.", "spans": [{"text": "Paris", "risk": 0.2}, {"text": ".", "risk": 0.1}], "answers": ["Paris"]},
    {"text": "Rome.", "spans": [{"text": "Rome.", "risk": 0.6}], "answers": ["Madrid"], "answer_risk": 0.9},
    {"text": "Oslo", "spans": [{"text": "Oslo", "risk": 0.7}, {"text": " ", "risk": 0.9}], "answers": ["Oslo"]},
    {"answer": "Bonn", "references": ["Berlin"], "spans": [{"text": "Bonn", "risk": 0.4}], "answer_risk": 0.4},
    {"text": "Lima", "spans": [{"text": "Lima", "risk": "NaN"}]},
]


def written(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_answers_that_were_measured_before(tiny_cocoa: Cocoa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_model(*_: object, **__: object) -> CocoaEngine:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(CocoaEngine, "from_pretrained", no_model)
    file = written(tmp_path / "answers.jsonl", MEASURED)
    result = tiny_cocoa("threshold", "--prompts", file, "--at", "0.5", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["answers"] == 5
    (row,) = found["span"]
    assert row["answers"] == {"number": 3, "of": 5}  # one has a risk that is not a number
    assert row["spans"] == {"number": 3, "of": 6}  # without white space
    assert row["right_stopped"] == {"number": 1, "of": 2}
    assert row["wrong_passed"] == {"number": 1, "of": 2}
    (row,) = found["answer"]
    assert (row["answers"], row["wrong_passed"]) == ({"number": 1, "of": 2}, {"number": 1, "of": 2})
    shown = " ".join(tiny_cocoa("threshold", "--prompts", file, "--at", "0.5").stdout.split())
    assert "60% (3 of 5)" in shown
    assert "2 of 4 answers with a known answer are wrong" in shown


def test_prompts_are_answered(tiny_cocoa: Cocoa, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"question": f"Who is {name}?", "answer": "nobody"} for name in "abc"]
    file = written(tmp_path / "prompts.jsonl", [*rows, {"prompt": "Hello"}])
    result = tiny_cocoa("threshold", "--prompts", file, "--max-new-tokens", "4", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["answers"] == 4
    assert found["answer"] == []
    for row, share in zip(found["span"], SHARES, strict=False):
        assert row["answers"]["number"] <= share * 4
        assert row["wrong_passed"]["of"] == 3
    (tmp_path / "prompts.txt").write_text("Hello\n\nGood day\n")
    shown = tiny_cocoa("threshold", "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "4").stdout
    assert "2 answers" in shown
    assert "right" not in shown


def test_the_first_row_is_the_default(tiny_cocoa: Cocoa, tmp_path: Path) -> None:
    rows = [{**row, "threshold": 0.6, "answer_threshold": 0.5 + number / 10} for number, row in enumerate(MEASURED[:4])]
    for row in rows:
        row["spans"] = [{**span, "flagged": span["risk"] >= 0.6} for span in row["spans"]]  # type: ignore[attr-defined]
    file = written(tmp_path / "answers.jsonl", rows)
    found = json.loads(tiny_cocoa("threshold", "--prompts", file, "--at", "0.3", "--json").stdout)["default"]
    assert found["span"]["threshold"] == 0.6
    assert found["span"]["answers"] == {"number": 2, "of": 4}
    assert found["span"]["spans"] == {"number": 2, "of": 5}
    assert found["span"]["right_stopped"] == {"number": 1, "of": 2}
    assert found["answer"]["threshold"] is None  # the answers have different ones
    assert found["answer"]["answers"] == {"number": 1, "of": 2}
    shown = tiny_cocoa("threshold", "--prompts", file, "--at", "0.3").stdout
    assert "default 0.6000" in shown
    assert "compares the risk of whole answers with the default" in " ".join(shown.split())
    without = json.loads(tiny_cocoa("threshold", "--prompts", written(tmp_path / "a.jsonl", MEASURED), "--json").stdout)
    assert without["default"] == {"span": None, "answer": None}


def test_an_unmeasured_risk_is_not_flagged_and_a_risk_that_is_no_number_is(tmp_path: Path) -> None:
    missing = {"text": "a", "risk": None, "flagged": False, "risk_source": "source_attention"}
    spans = [missing, {"text": "b", "risk": "NaN", "flagged": False}, {"text": "c", "risk": 0.1, "flagged": False}]
    rows: list[dict[str, object]] = [{"text": "abc", "spans": spans, "threshold": 0.5}]
    (line,) = read_own_prompts(written(tmp_path / "a.jsonl", rows))
    assert line.measured is not None
    assert line.measured.flagged == (True, False)
    (row, _) = by_default([line.measured])
    assert row is not None
    assert (row.answers, row.spans) == (Count(1, 1), Count(1, 2))


def test_the_context_of_a_line_is_the_source_and_a_system_message_comes_first(
    engine: CocoaEngine, tmp_path: Path
) -> None:
    rows: list[dict[str, object]] = [
        {"question": "When was it built?", "context": "The lighthouse was built in 1874."},
        {"prompt": "Hello"},
    ]
    prompts = read_own_prompts(written(tmp_path / "prompts.jsonl", rows))
    config = CocoaConfig(max_new_tokens=6)
    for system, before in ((None, []), ("Be brief.", [{"role": "system", "content": "Be brief."}])):
        found = list(measure(engine, prompts, config, system=system))
        for one, answer in zip(prompts, found, strict=True):
            chat = [*before, {"role": "user", "content": one.request}]
            source = None if one.context is None else [one.context]
            expected = engine.chat(chat, config=config, source=source)
            assert answer.whole == near(expected.answer_risk)
            assert answer.whole_threshold == expected.answer_threshold
            assert answer.spans == near([span.risk for span in expected.spans if span.text.strip()])
    with pytest.raises(ConfigError, match="--system"):
        require_chat("Be brief.", raw=True)
    # the risks of lines with and without a context are of one kind; the embedded calibrator does not apply
    config = CocoaConfig(max_new_tokens=4, method="greedy")
    for asked, kind in ((prompts, "token_probability"), (prompts[:1], "source_attention")):
        assert {answer.risk_source for answer in measure(engine, asked, config)} == {kind}


def test_an_interrupted_command_shows_the_answers_so_far(
    tiny_cocoa: Cocoa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[int] = []
    generate_batch = CocoaEngine.generate_batch

    def until_ctrl_c(engine: CocoaEngine, prompts: Any, **options: Any) -> Any:
        if answered:
            raise KeyboardInterrupt
        answered.append(len(prompts))
        return generate_batch(engine, prompts, **options)

    monkeypatch.setattr(CocoaEngine, "generate_batch", until_ctrl_c)
    (tmp_path / "prompts.txt").write_text("\n".join(f"Hello {number}" for number in range(200)))
    result = tiny_cocoa("threshold", "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "1", "--json")
    assert result.exit_code == 130
    assert 0 < json.loads(result.stdout)["answers"] == answered[0] < 200
    assert f"{answered[0]} of 200 were done; the output is of these" in " ".join(result.stderr.split())
    nothing = tiny_cocoa("threshold", "--prompts", str(tmp_path / "prompts.txt"), "--json")
    assert (nothing.exit_code, nothing.stdout) == (130, "")
    assert "there is no output" in nothing.stderr


def test_a_context_that_the_model_reads_otherwise_is_no_source(
    engine: CocoaEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, object]] = [{"question": "When?", "context": "Cafe\u0301, built in 1874."}]
    prompts = read_own_prompts(written(tmp_path / "prompts.jsonl", rows))
    decode = engine.decode
    monkeypatch.setattr(engine, "decode", lambda ids: decode(ids).replace("e\u0301", "\u00e9"))  # as Qwen normalises
    (answer,) = measure(engine, prompts, CocoaConfig(max_new_tokens=4, method="greedy"))
    assert answer.risk_source == "token_probability"


def test_suggested_thresholds_stop_at_most_their_share() -> None:
    risks = [number / 100 + 0.000_01 for number in range(100)]
    for threshold, share in zip(suggested(risks), SHARES, strict=True):
        assert share - 0.011 <= sum(risk >= threshold for risk in risks) / 100 <= share
    assert suggested([math.inf] * 4) == []
    assert suggested([]) == []
    answer = Answer(())
    assert stopping.by_span([answer], [0.5])[0].answers == Count(0, 1)
    assert stopping.by_answer([answer], [0.5]) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "line 1: a line has a prompt"),
        ('{"prompt": " "}', "empty"),
        ('{"prompt": "a", "answer": 3}', "answer: "),
        ('{"text": "a", "spans": [{}]}', "spans.0.risk: Field required"),
        ('{"spans": [{"risk": 0.5}], "answers": ["a"]}', "line 1: the spans of an answer need its text"),
        ('{"text": "a", "spans": [{"risk": "high"}]}', "spans.0.risk.*high"),
        (f'{{"text": "a", "spans": [{{"risk": {10**400}}}]}}', "spans.0.risk"),
        ('{"text": "a", "spans": [], "threshold": "NaN"}', "threshold.*finite"),
        ("", "has no prompts"),
    ],
)
def test_bad_files(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(DataError, match=words):
        read_own_prompts(tmp_path / "bad.jsonl")


def test_the_source_of_the_risk_decides_what_thresholds_are_possible(tiny_cocoa: Cocoa, tmp_path: Path) -> None:
    source = {"risk_source": "token_probability"}
    own = [{**row, **source} for row in MEASURED]
    file = written(tmp_path / "own.jsonl", own)
    found = json.loads(tiny_cocoa("threshold", "--prompts", file, "--json").stdout)
    assert found["risk_source"] == "token_probability"
    assert all(0 <= row["threshold"] <= 1 for row in found["span"])
    assert "how unsure the model was" in tiny_cocoa("threshold", "--prompts", file).stdout
    assert_refused(tiny_cocoa("threshold", "--prompts", file, "--at", "1.2"), "thresholds in [0, 1]")
    mixed = written(tmp_path / "mixed.jsonl", [*own, {**MEASURED[0], "risk_source": "f_mlds"}])
    assert "different sources" in tiny_cocoa("threshold", "--prompts", mixed).stderr
    assert_refused(tiny_cocoa("threshold", "--prompts", file, "--at", "0.5,high"), "--at takes numbers")
    (tmp_path / "prompts.txt").write_text("Hello\n")
    asked = ["threshold", "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "4", "--at", "1.2", "--json"]
    assert "thresholds in [0, 1]" in " ".join(tiny_cocoa(*asked).stderr.split())
    raw = tiny_cocoa(*asked, "--risk", "f_mlds")
    assert raw.exit_code == 0, raw.output
    assert json.loads(raw.stdout)["risk_source"] == "f_mlds"
