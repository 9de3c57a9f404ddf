"""Runs: what they write, that they go on where they were killed, and that they are not mixed."""

import json
import math
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import scipy.stats
from torch import Tensor
from typer.testing import Result

from cocoa_engine import METHODS, CocoaConfig, CocoaEngine, Runtime, Span
from cocoa_engine.errors import ConfigError, DataError, MissingExtraError
from cocoa_engine.methods.retrieval_heads import RetrievalHeads
from cocoa_integrations.evaluation import TASKS, Arm, evaluate, harness_task, load_samples, make_arms, metrics
from cocoa_integrations.evaluation.harness import new_run
from cocoa_integrations.evaluation.judge import judge_run
from cocoa_integrations.evaluation.tasks import Sample
from tests.helpers.alike import near
from tests.helpers.cocoa import Cocoa, assert_refused, press_ctrl_c, successful
from tests.helpers.eval_data import TRUTHFULQA, rows_of, write_truthfulqa
from tests.helpers.inside import Pass, record
from tests.helpers.judges import RuleJudge
from tests.helpers.processes import run
from tests.helpers.settings import SETTINGS
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

ARMS = [Arm("greedy"), Arm("cocoa-sig", "f_mlds", 2.5)]
MC = TASKS["truthfulqa_mc"]


def asked(row: dict[str, Any], samples: list[Sample]) -> tuple[Sample, Arm]:
    """The sample and the arm of a row."""
    return next(each for each in samples if each.id == row["id"]), Arm(row["method"], row["metric"], row["alpha"])


def assert_refused_run(message: str, *arguments: Any, error: type[Exception] = ConfigError, **options: Any) -> None:
    with pytest.raises(error, match=message):
        evaluate(*arguments, **options)


def not_loaded() -> CocoaEngine:
    raise AssertionError("nothing was left to do, yet the model was loaded")


def test_multiple_choice_is_the_engines_scores(engine: CocoaEngine, truthfulqa: Path, tmp_path: Path) -> None:
    samples = load_samples("truthfulqa_mc", truthfulqa)
    results = evaluate(engine, MC, samples, ARMS, tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert len(rows) == len(samples) * len(ARMS)
    for row in rows:
        sample, arm = asked(row, samples)
        expected = engine.score(sample.prompt, sample.choices, config=arm.config(CocoaConfig()))
        scores = [choice["score"] for choice in row["choices"]]
        assert scores == pytest.approx([one.spans[0].score for one in expected], abs=1e-3)
        assert [choice["text"] for choice in row["choices"]] == sample.choices
        n = len(sample.references)
        assert row["metrics"]["mc1"] == float(scores[0] > max(scores[n:]))
        assert row["metrics"]["mc2"] == pytest.approx(metrics.mc2(scores[:n], scores[n:]))
        (span,) = row["choices"][0]["spans"]
        assert Span.model_validate(span).score == scores[0]
    for arm, summary in zip(ARMS, results["arms"], strict=True):
        own = [row["metrics"]["mc2"] for row in rows if row["arm"] == str(arm)]
        assert summary["samples"] == len(own) == 3
        assert summary["metrics"]["mc2"]["mean"] == pytest.approx(sum(own) / 3)
        assert summary["metrics"]["mc2"]["standard_error"] == pytest.approx(scipy.stats.sem(own))
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results


@pytest.mark.slow
def test_arms_that_weigh_the_same_figures_share_the_passes(truthfulqa: Path, tmp_path: Path) -> None:
    samples = load_samples("truthfulqa_mc", truthfulqa)[:1]
    arms = make_arms(["greedy", "cocoa-sig", "dola"], ["f_mlds", "con_mlds"], [1.0, 6.0])
    assert len(arms) == 6
    model = tiny_model("llama", max_position_embeddings=4096)
    fresh = CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))
    passes = record(fresh)
    for number, some in enumerate((arms[:1], arms[-1:], arms)):
        evaluate(fresh, MC, samples, some, tmp_path / str(number))
        passes.append(Pass(True, []))
    ends = [n for n, each in enumerate(passes) if not each.widths]
    plain, dola, together = (end - start - 1 for start, end in pairwise([-1, *ends]))
    assert together == plain + dola
    for row in rows_of(tmp_path / "2"):
        sample, arm = asked(row, samples)
        expected = fresh.without_calibrator().score(sample.prompt, sample.choices, config=arm.config(CocoaConfig()))
        for choice, one in zip(row["choices"], expected, strict=True):
            (span,) = map(Span.model_validate, choice["spans"])
            assert choice["text"] == one.text
            assert (span.log_prob, span.score, span.risk) == pytest.approx(
                (one.spans[0].log_prob, one.spans[0].score, one.spans[0].risk), abs=1e-3
            )


def test_generation_is_the_engines(engine: CocoaEngine, data_files: dict[str, Path], tmp_path: Path) -> None:
    samples = load_samples("nq", data_files["nq"])
    config = CocoaConfig(max_new_tokens=10)
    results = evaluate(engine, TASKS["nq"], samples, ARMS, tmp_path / "out", config=config)
    for row in rows_of(tmp_path / "out"):
        sample, arm = asked(row, samples)
        expected = engine.generate(sample.prompt, config=arm.config(config).replace(stop=TASKS["nq"].until))
        assert row["answer"] == TASKS["nq"].answer(expected.text)
        assert "".join(span["text"] for span in row["spans"]) == expected.text
        assert row["metrics"]["em"] == metrics.exact_match(row["answer"], sample.references)
    assert [one["samples"] for one in results["arms"]] == [2, 2]
    judged = judge_run(tmp_path / "out", RuleJudge(rule=lambda _: '{"evaluation": "Correct"}'))  # which reads the run
    assert [(one["samples"], one["unjudged"]) for one in judged["arms"]] == [(2, 0)] * 2


def test_a_prompt_that_does_not_fit_is_cut(tmp_path: Path) -> None:
    """From the left, as the harness does."""
    engine = CocoaEngine(tiny_model("llama", max_position_embeddings=64), tiny_tokenizer())
    for task, room in (("nq", 8), ("truthfulqa_mc", 3)):
        prompt = "x y " * 200 + "one two three"
        sample = Sample(id="a", question="q", prompt=prompt, references=["ab"], incorrect=["cd"])
        config = CocoaConfig(max_new_tokens=8)
        evaluate(engine, TASKS[task], [sample], ARMS[:1], tmp_path / task, config=config)
        (row,) = rows_of(tmp_path / task)
        cut = engine.encode(sample.prompt)[-(64 - room) :]
        if task == "nq":
            expected = engine.generate(cut, config=config.replace(method="greedy", stop=TASKS["nq"].until))
            assert row["answer"] == TASKS["nq"].answer(expected.text)
        else:
            scored = engine.score(cut, " ab", method="greedy")
            assert row["choices"][0]["score"] == pytest.approx(scored.spans[0].score, abs=1e-3)


def test_a_torn_last_line_is_done_again(engine: CocoaEngine, truthfulqa: Path, tmp_path: Path) -> None:
    samples = load_samples("truthfulqa_mc", truthfulqa)
    results = evaluate(engine, MC, samples, ARMS, tmp_path / "out")
    whole = rows_of(tmp_path / "out")
    file = tmp_path / "out" / "samples.jsonl"
    written = file.read_bytes()
    for cut in (1, 40, 400):
        file.write_bytes(written[:-cut])
        (tmp_path / "out" / "results.json").unlink()
        added: list[int] = []
        again = evaluate(engine, MC, samples, ARMS, tmp_path / "out", advance=added.append)
        total, last = sum(len(sample.choices) for sample in samples), len(samples[-1].choices)
        assert (added[:2], sum(added)) == ([total, total - last], 2 * total)
        rows = rows_of(tmp_path / "out")
        assert [(row["arm"], row["id"]) for row in rows] == [(row["arm"], row["id"]) for row in whole]
        for now, then in zip(again["arms"], results["arms"], strict=True):
            assert now["metrics"]["mc2"]["mean"] == near(then["metrics"]["mc2"]["mean"])


@pytest.mark.parametrize("task", ["nq", "truthfulqa_mc"])
def test_a_run_goes_on_where_it_was_interrupted(
    engine: CocoaEngine, data_files: dict[str, Path], tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, out = load_samples(task, data_files[task]), tmp_path / "out"
    options: Any = {"config": CocoaConfig(max_new_tokens=4), "model": {"name": "m"}}

    with monkeypatch.context() as patch:
        press_ctrl_c(patch, harness_task, "run_arm", len(samples) + 2)
        patch.setattr("cocoa_integrations.evaluation.harness.PART", 1)
        with pytest.raises(KeyboardInterrupt):
            evaluate(engine, TASKS[task], samples, ARMS, out, **options)
    finished = (out / "samples.jsonl").read_bytes()
    assert [row["arm"] for row in rows_of(out)] == [*["greedy"] * len(samples), str(ARMS[1])]
    assert not (out / "results.json").exists()
    results = evaluate(engine, TASKS[task], samples, ARMS, out, **options)
    assert (out / "samples.jsonl").read_bytes().startswith(finished)  # what was done stays as it is
    assert [arm["samples"] for arm in results["arms"]] == [len(samples)] * 2
    assert results == evaluate(not_loaded, TASKS[task], samples, ARMS, out, **options)


def test_settings_are_not_mixed(engine: CocoaEngine, truthfulqa: Path, tmp_path: Path) -> None:
    samples, out = load_samples("truthfulqa_mc", truthfulqa), tmp_path / "out"
    evaluate(engine, MC, samples[:2], ARMS, out, limit=2)
    before = (out / "samples.jsonl").read_bytes()
    for changes, message in [
        ({"config": CocoaConfig(span_log_prob="mean")}, 'decoding.span_log_prob is "greedy_end" there, "mean" now'),
        ({"model": {"name": "another"}}, "model.name is"),
        ({"task": TASKS["truthfulqa_gen"]}, "task is"),
        ({"limit": 1, "samples": samples[:1]}, "limit is 2 there, 1 now"),
        ({"data": {"sha256": "0"}}, 'data is null there, {"sha256": "0"} now'),
        ({"samples": samples[1:3]}, "other samples"),
    ]:
        given: dict[str, Any] = {"task": MC, "samples": samples[:2], "arms": ARMS, "limit": 2, **changes}
        model = given.pop("model", None)
        loader = engine if model is None else not_loaded
        arguments = [given.pop(name) for name in ("task", "samples", "arms")]
        assert_refused_run(message, loader, *arguments, out, model=model, **given)
    assert (out / "samples.jsonl").read_bytes() == before
    # only more samples may be asked for
    more = evaluate(engine, MC, samples, ARMS, out, limit=None)
    assert [arm["samples"] for arm in more["arms"]] == [3, 3]
    assert set(before.splitlines()) < set((out / "samples.jsonl").read_bytes().splitlines())
    # and other arms, whose rows are added
    added: list[int] = []
    both = [*ARMS[:1], Arm("cocoa")]
    other = evaluate(engine, MC, samples, both, out, advance=added.append)
    assert sum(added[2:]) == sum(len(sample.choices) for sample in samples)
    assert [arm["method"] for arm in other["arms"]] == ["greedy", "cocoa"]
    assert len(rows_of(out)) == 9


def test_other_data_another_order_and_other_heads_are_refused(
    cocoa: Cocoa, engine: CocoaEngine, truthfulqa: Path, tmp_path: Path
) -> None:
    def command(*more: str) -> Result:
        return cocoa(
            "eval", "truthfulqa_mc", "--data", truthfulqa, "--out", tmp_path / "out", "--methods", "greedy", *more
        )

    successful(command("--shuffle", "3", "--limit", "1"))
    assert "data.shuffle is 3 there, null now" in command("--limit", "1").stderr
    write_truthfulqa(truthfulqa, [*TRUTHFULQA, ("Is it?", "Yes", "Yes", "No")])
    assert "data.sha256 is" in command("--limit", "1", "--shuffle", "3").stderr

    samples, file = load_samples("truthfulqa_mc", truthfulqa)[:1], tmp_path / "heads.json"
    found = RetrievalHeads.model_validate_json(Path(SETTINGS["decore_heads"]).read_text())
    config, arms, out = CocoaConfig(decore_heads=str(file)), [Arm("decore")], tmp_path / "decore"
    assert_refused_run("cannot be read", engine, MC, samples, arms, out, config=config)
    assert not out.exists()
    file.write_text(found.model_dump_json())
    evaluate(engine, MC, samples, arms, out, config=config)
    file.write_text(found.model_copy(update={"heads": found.heads[::-1]}).model_dump_json())
    assert_refused_run("decore_heads is", engine, MC, samples, arms, out, config=config)


def test_a_run_without_a_sample_claims_no_folder(truthfulqa: Path, tmp_path: Path) -> None:
    fails = Mock(side_effect=ConfigError("the model cannot be loaded"))
    samples = load_samples("truthfulqa_mc", truthfulqa)[:1]
    for name in ("wrong", "right"):  # other settings are not refused
        assert_refused_run("cannot be loaded", fails, MC, samples, ARMS, tmp_path / "out", model={"name": name})
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["model"] == {"name": "right"}


def test_foreign_folders_are_refused(engine: CocoaEngine, truthfulqa: Path, tmp_path: Path) -> None:
    samples = load_samples("truthfulqa_mc", truthfulqa)
    assert_refused_run(r"contains no run \(TruthfulQA.csv\)", engine, MC, samples, ARMS, tmp_path)
    (tmp_path / "file").write_text("")
    assert_refused_run("cannot be written", engine, MC, samples, ARMS, tmp_path / "file")
    out, some = tmp_path / "out", samples[:1]
    evaluate(engine, MC, some, ARMS[:1], out)
    file = out / "samples.jsonl"
    (row,) = file.read_text().splitlines()
    changes: list[dict[str, Any]] = [{"metrics": {}}, {"alpha": 2.5}, {"id": ["0"]}, {"answer": None}]
    changes.append({"metrics": {"mc1": None, "mc2": 0.0, "mc3": 0.0}})
    changed = [(json.dumps({**json.loads(row), **change}), "line 1: not a row") for change in changes]
    for text, message in [(f"{row}\nnot a row", "line 2: not a row"), (f"{row}\n{row}", "occurs twice"), *changed]:
        file.write_text(f"{text}\n")
        assert_refused_run(message, engine, MC, some, ARMS[:1], out, error=DataError)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cocoa_integrations.evaluation.harness import new_run\n"
        "with new_run(Path(sys.argv[1]), {'task': 'x'}): pass"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with new_run(tmp_path / "out", {"task": "x"}):
        assert "another process is using" in run(command).stderr
    with new_run(tmp_path / "out", {"task": "x"}):  # and it is given back
        pass


def test_arms() -> None:
    assert make_arms(["greedy", "cocoa"], ["f_mlds", "con_mlds"], [1.0, 2.5]) == [
        Arm("greedy"),
        Arm("cocoa", "f_mlds", 1.0),
        Arm("cocoa", "f_mlds", 2.5),
        Arm("cocoa", "con_mlds", 1.0),
        Arm("cocoa", "con_mlds", 2.5),
    ]
    assert len(make_arms(list(METHODS), ["f_mlds"], [1.0])) == len(METHODS)
    assert str(Arm("cocoa-sig", "con_mlds", 2.5)) == "cocoa-sig ConMLDS (α=2.5)"
    assert str(Arm("cocoa", "f_mlds", 6.0)) == "cocoa fMLDS (α=6)"
    assert str(Arm("cocoa", "f_mlds", 1.0000001)) == "cocoa fMLDS (α=1.0000001)"  # not that of 1
    for bad, message in [
        ((["dowsing"], ["f_mlds"], [1.0]), "unknown method 'dowsing'"),
        ((["cocoa"], ["g_mlds"], [1.0]), "metric"),
        ((["cocoa"], ["f_mlds"], [-1.0]), "alpha"),
        (([], ["f_mlds"], [1.0]), "at least one method"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_arms(*bad)


def test_command(cocoa: Cocoa, truthfulqa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "truthfulqa_mc-SmolLM2-135M-Instruct"  # a name of its own
    arguments = ("eval", "truthfulqa-mc", "--data", truthfulqa, "--methods", "greedy,cocoa,cocoa-sig")
    shown = successful(cocoa(*arguments, "--metric", "f_mlds,con_mlds", "--alpha", "1,2.5", "--limit", "2"))
    table = (out / "table.md").read_text()
    assert shown.stdout == table
    means, differences = table.split("Difference to Baseline (greedy)")
    for part in (means, differences):
        assert len([line for line in part.splitlines() if line.startswith("| CoCoA")]) == 8
    assert len(rows_of(out)) == 2 * 9
    expected = load_samples("truthfulqa_mc", truthfulqa, limit=2)
    assert [row["question"] for row in rows_of(out) if row["arm"] == "greedy"] == [one.question for one in expected]


def test_command_with_a_rival_method(
    cocoa: Cocoa, engine: CocoaEngine, data_files: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ("eval", "samsum", "--data", data_files["samsum"], "--out", out, "--methods", "diver", "--limit", "1")
    shown = successful(cocoa(*arguments, "--max-new-tokens", "8", "--diver-weight", "0.5"))
    assert [line for line in shown.stdout.splitlines() if line.startswith("| Diver |")]
    (row,) = rows_of(out)
    (sample,) = load_samples("samsum", data_files["samsum"], limit=1)
    config = CocoaConfig(method="diver", diver_weight=0.5, max_new_tokens=8, stop=TASKS["samsum"].until)
    expected = engine.generate(sample.prompt, config=config)
    assert expected.usage.risk_points
    assert row["arm"] == row["method"] == "diver"
    spans = [Span.model_validate(span) for span in row["spans"]]
    assert [span.token_ids for span in spans] == [span.token_ids for span in expected.spans]
    assert [span.score for span in spans] == pytest.approx([span.score for span in expected.spans], abs=1e-3)
    assert row["metrics"]["rouge_l"] == metrics.rouge_l(row["answer"], sample.references)


def test_a_token_that_was_forced_has_an_endless_margin(
    engine: CocoaEngine, data_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.model.generation_config, "forced_eos_token_id", engine.tokenizer.eos_token_id)
    samples = load_samples("samsum", data_files["samsum"])
    config = CocoaConfig(max_new_tokens=3)
    evaluate(engine, TASKS["samsum"], samples, ARMS, tmp_path / "out", config=config)
    for row in rows_of(tmp_path / "out"):
        margins = [margin for span in row["spans"] for margin in Span.model_validate(span).token_margins]
        assert margins[-1] == math.inf > max(margins[:-1])
    assert "Infinity]" not in (tmp_path / "out" / "samples.jsonl").read_text()  # but in quotes, as JSON has it not


def test_command_runs_code_only_when_allowed(
    cocoa: Cocoa, engine: CocoaEngine, data_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr("cocoa_integrations.evaluation.generated_code.confines", lambda: False)
    arguments = ("eval", "mbpp", "--data", data_files["mbpp"], "--out", out, "--methods", "greedy")
    assert_refused(cocoa(*arguments, "--max-new-tokens", "4"), "--confirm-run-unsafe-code", lines=1)
    assert not out.exists()
    # the model writes the solution, and the tests are run on it
    (sample,) = load_samples("mbpp", data_files["mbpp"])
    solution = engine.encode(f"{sample.references[0]}\n[/PYTHON]", add_special_tokens=False)
    prompt = engine.encode(sample.prompt)
    generate_batch = engine.generate_batch

    def writes(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, solution[ids.shape[1] - len(prompt)]] += 1000
        return scores

    monkeypatch.setattr(engine, "generate_batch", partial(generate_batch, logits_processor=[writes]))
    shown = successful(cocoa(*arguments, "--max-new-tokens", str(len(solution)), "--confirm-run-unsafe-code"))
    (row,) = rows_of(out)
    assert row["answer"] == sample.references[0]
    assert row["metrics"] == {"pass_at_1": 1.0}
    assert shown.stdout == (out / "table.md").read_text()
    assert "1.0000" in shown.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["truthfulqa_mcc"], "did you mean 'truthfulqa_mc'"),
        (["nq"], "question: Field required"),
        (["truthfulqa_mc", "--alpha", "x"], "alpha: 'x' is not a number"),
        (["truthfulqa_mc", "--methods", "dowsing"], "unknown method 'dowsing'"),
        (["truthfulqa_mc", "--paper-model", "GPT-2"], "unknown model of the paper for truthfulqa_mc 'GPT-2'"),
        (["truthfulqa_mc", "--gamma", "2"], "gamma"),
    ],
)
def test_command_with_bad_input(cocoa: Cocoa, truthfulqa: Path, tmp_path: Path, words: list[str], message: str) -> None:
    assert_refused(cocoa("eval", *words, "--data", truthfulqa, "--out", tmp_path / "out"), message, lines=1)
    assert not (tmp_path / "out").exists()


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_text("")
    for name in ("rouge_score", "pyarrow", "sklearn", *sys.modules):
        if name.partition(".")[0] in ("rouge_score", "pyarrow"):
            monkeypatch.setitem(sys.modules, name, None)
    metrics._rouge.cache_clear()
    for use in (
        lambda: metrics.rouge_l("a", ["a"]),
        lambda: load_samples("nq_swap", tmp_path / "a.parquet"),
    ):
        with pytest.raises(MissingExtraError, match=r"pip install 'cocoa-integrations\[eval\]'"):
            use()
