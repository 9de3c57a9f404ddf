"""The data files of tasks, metrics against values computed by hand, and the table with the figures of the paper.

The code of an answer, in whatever shape a model writes it, and its tests in a process of their own.
"""

import csv
import gzip
import io
import json
import math
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError, DataError
from cocoa_engine.rendering.terminal import show
from cocoa_integrations.evaluation import TASKS, Arm, generated_code, load_samples, metrics, table
from cocoa_integrations.evaluation.generated_code import code_of, confines, passes, require_confinement
from cocoa_integrations.evaluation.judge import COLUMNS, TRUTH
from cocoa_integrations.evaluation.metrics import beyond_noise, statistics
from cocoa_integrations.evaluation.table import choose_model, paper_results, report
from cocoa_integrations.evaluation.tasks import find_task
from tests.helpers.eval_data import TRUTHFULQA, write_jsonl, write_truthfulqa
from tests.helpers.in_threads import wait_until


def results(task: str, figures: dict[Arm, dict[str, float]], config: CocoaConfig | None = None) -> Any:
    arms: list[dict[str, Any]] = []
    for arm, means in figures.items():
        metrics = {name: {"mean": mean} for name, mean in means.items()}
        arms.append({**arm._asdict(), "samples": 10, "empty": 0, "metrics": metrics})
    decoding = (config or CocoaConfig.paper()).model_dump(mode="json", exclude={"method", "metric", "alpha"})
    settings = {"task": task, "model": {"name": "Llama-3.1-8B"}, "decoding": decoding}
    return {"settings": settings, "samples": 10, "arms": arms}


def test_table_as_the_papers() -> None:
    figures = {
        Arm("greedy"): {"mc1": 0.3941, "mc2": 0.5, "mc3": 0.3},
        Arm("cocoa", "f_mlds", 2.5): {"mc1": 0.40001, "mc2": 0.6, "mc3": 0.2},
        Arm("cocoa-sig", "f_mlds", 2.5): {"mc1": 0.40002, "mc2": 0.55, "mc3": 0.1},
    }
    assert report(TASKS["truthfulqa_mc"], results("truthfulqa_mc", figures)) == (
        "**truthfulqa_mc**, Llama-3.1-8B, 10 samples\n"
        "\n"
        "| Decoding method | Mode | MC1 (%) ↑ | MC2 (%) ↑ | MC3 (%) ↑ "
        "| paper: MC1 (%) ↑ | paper: MC2 (%) ↑ | paper: MC3 (%) ↑ |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| Baseline (greedy) | - | 39.41 | 50.00 | 30.00 | 39.41 | 58.84 | 32.45 |\n"
        "| CoCoA | fMLDS (α=2.5) | 40.00 | 60.00 | 20.00 | – | – | – |\n"
        "| CoCoA-SIG | fMLDS (α=2.5) | 40.00 | 55.00 | 10.00 | 44.68 | 57.93 | 33.13 |\n"
        "\n"
        "↑ more is better, ↓ less is better.\n"
        "The paper's results are those of Llama-3-8b on the paper's samples.\n"
    )


def test_a_model_of_the_paper_is_chosen() -> None:
    for name, model in [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7b"),
        ("Qwen/Qwen2.5-7B", "Qwen-2.5-7b"),
        ("/models/Qwen2.5-32B", "Qwen-2.5-32b"),
        ("SmolLM2-135M-Instruct", "Llama-3-8b"),
    ]:
        assert choose_model("truthfulqa_mc", name) == model
    assert choose_model("mbpp", "Qwen2.5-7B") == "CodeLlama-7b"
    assert choose_model("no such task", "Qwen2.5-7B") is None
    assert choose_model("nq", "Qwen2.5-7B", "mistral-7B") == "Mistral-7b"
    with pytest.raises(ConfigError, match="Qwen-2"):
        choose_model("nq", "x", "Qwen-2.5-7b")


@pytest.mark.parametrize(
    ("task", "model", "arm", "figures"),
    [  # read off the paper's tables by hand
        ("truthfulqa_mc", "Llama-3-8b", Arm("cocoa-sig", "con_mlds", 6.0), (45.17, 54.89, 33.40)),
        ("truthfulqa_mc", "Mistral-7b", Arm("greedy"), (45.65, 65.61, 37.09)),
        ("truthfulqa_mc", "Qwen-2.5-7b", Arm("decore"), (43.08, 60.24, 32.41)),
        ("truthfulqa_mc", "Qwen-2.5-32b", Arm("dola"), (23.38, 48.00, 24.44)),
        ("nq", "Llama-3-8b", Arm("decore"), (53.80, 0.7140, None)),
        ("nq", "Qwen-2.5-14b", Arm("diver"), (49.73, 0.7184, 88.20)),
        ("nq_swap", "Qwen-2.5-14b", Arm("cocoa-sig", "con_mlds", 6.0), (41.10, 0.5183, None)),
        ("samsum", "Llama-3-8b", Arm("diver"), (0.3135, 72.40)),
        ("xsum", "Mistral-7b", Arm("dola"), (0.2093, 68.97)),
        ("mbpp", "CodeLlama-7b", Arm("cocoa-sig", "f_mlds", 2.5), (0.4005,)),
        ("gsm8k", "Llama-3-8b", Arm("greedy"), (70.61,)),
        (
            *("truthfulqa_gen", "Llama-3-8b", Arm("cocoa-sig", "con_mlds", 100.0)),
            (80.82, 54.20, 25.42, 43.80, 74.28, 72.67, 53.97),
        ),
        ("truthfulqa_gen", "Llama-3-8b", Arm("cocoa", "f_mlds", 1.0), (75.40, 65.24, None, 49.19, 69.51, 81.25, 56.48)),
        (
            *("truthfulqa_gen", "Qwen-2.5-32b", Arm("cocoa-sig", "con_mlds", 2.5)),
            (75.00, 69.17, 18.46, 51.88, 67.85, 88.75, 60.21),
        ),
    ],
)
def test_the_papers_figures(task: str, model: str, arm: Arm, figures: tuple[float | None, ...]) -> None:
    columns = zip(COLUMNS.get(task, (*TASKS[task].columns, TRUTH)), figures, strict=False)
    expected = {column.metric: value for column, value in columns if value is not None}
    assert paper_results(task, model, arm) == expected


WINDOWS = {"": None, "all": (1, 32), "11-19": (11, 19), "12-18": (12, 18), "13-17": (13, 17), "14-16": (14, 16)}


def test_all_of_the_papers_figures_can_be_shown() -> None:
    with Path(table.__file__).with_name("paper_figures.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    counts = Counter(row["task"] for row in rows)
    short = {"nq": 62, "nq_swap": 62, "samsum": 28, "xsum": 28, "mbpp": 4, "gsm8k": 4}
    assert counts == {"truthfulqa_gen": 383, "truthfulqa_mc": 129, **short}
    places = [tuple(row[name] for name in row if name != "value") for row in rows]
    assert len(places) == len(set(places))
    for row in rows:
        columns = (*TASKS[row["task"]].columns, *COLUMNS.get(row["task"], (TRUTH,)))
        assert row["figure"] in {column.metric for column in columns}
        arm = Arm(row["method"], row["metric"] or None, float(row["alpha"]) if row["alpha"] else None)
        results = paper_results(row["task"], row["model"], arm, WINDOWS[row["layers"]])
        assert results[row["figure"]] == float(row["value"])


def test_figures_are_those_of_the_layers_that_were_set() -> None:
    arm = Arm("cocoa-sig", "con_mlds", 1.0)
    truth = {
        str(layers): paper_results("truthfulqa_gen", "Llama-3-8b", arm, layers).get("truth")
        for layers in (None, [10, 21], [0, 31], [1, 32], [11, 19], [14, 16], [11, 20])
    }
    assert list(truth.values()) == [80.00, 80.00, 76.50, 76.50, 76.87, 77.36, None]
    alone = [  # without a weight, metric and layers do not count
        paper_results("truthfulqa_gen", "Llama-3-8b", Arm("cocoa-sig", metric, 0.0), layers)["truth"]
        for metric in ("f_mlds", "con_mlds")
        for layers in (None, [11, 19])
    ]
    assert alone == [76.25] * 4
    assert not paper_results("truthfulqa_gen", "Llama-3-8b", Arm("cocoa-sig", "f_mlds", 1.0), [11, 19])
    assert paper_results("nq", "Qwen-2.5-14b", arm, [16, 32]) == paper_results("nq", "Qwen-2.5-14b", arm) != {}

    figures = {Arm("greedy"): {"rejected": 0.2}, arm: {"rejected": 0.1}, Arm("cocoa"): {"rejected": 0.3}}
    figures = {one: {**means, "rouge_l_acc": 0.5} for one, means in figures.items()}
    given = results("truthfulqa_gen", figures, config=CocoaConfig.paper(middle_layers=(11, 19)))
    table = report(TASKS["truthfulqa_gen"], given)
    assert "| Baseline (greedy) | - | 20.00 | 50.00 | 13.50 |" in table
    assert "| CoCoA-SIG | ConMLDS (α=1) | 10.00 | 50.00 | 21.05 |" in table
    assert "\nMiddle layers are set to 11 to 19: " in table
    assert "results for these of its 32 layers, if there are any.\n" in table
    assert "CocoaConfig.paper()" not in table
    del figures[arm]
    given = results("truthfulqa_gen", figures, config=CocoaConfig.paper(middle_layers=(11, 19)))
    assert "Middle layers" not in report(TASKS["truthfulqa_gen"], given)


def test_a_table_says_what_was_not_set_as_in_the_paper() -> None:
    figures = {Arm("greedy"): {"em": 0.483, "f1": 0.71094}}
    # the task's and the model's
    usual = CocoaConfig.paper(max_new_tokens=9, stop="\n", seed=1, decore_heads="heads.json")
    plain = report(TASKS["nq"], results("nq", figures))
    assert report(TASKS["nq"], results("nq", figures, config=usual)) == plain
    other = CocoaConfig.paper(gamma=0.2, max_candidates=4, span_boundary="own", repetition_penalty=1.1)
    assert report(TASKS["nq"], results("nq", figures, config=other)).endswith(
        "The paper's results are those of Llama-3-8b on the paper's samples.\n"
        "Settings that differ from `CocoaConfig.paper()`, whose values are in brackets: "
        "gamma 0.2 (0.3), max_candidates 4 (8), span_boundary own (right), repetition_penalty 1.1 (none).\n"
    )


def test_a_judged_table_is_compared_with_a_model_that_was_judged() -> None:
    figures = {Arm("greedy"): {"truth": 0.5}, Arm("cocoa-sig", "f_mlds", 2.5): {"truth": 0.6}}
    judged = replace(TASKS["nq_swap"], columns=(TRUTH,))
    table = report(judged, results("nq_swap", figures))
    assert "| Baseline (greedy) | - | 50.00 | 58.60 |" in table
    assert "| CoCoA-SIG | fMLDS (α=2.5) | 60.00 | 59.70 |" in table
    assert "those of Qwen-2.5-14b on the paper's samples" in table
    assert "paper" not in report(judged, results("nq_swap", figures), "mistral-7b")


def test_the_interval_is_that_of_the_mean() -> None:
    random = np.random.default_rng(1)
    first = {str(number): value for number, value in enumerate(random.normal(size=300))}
    other = {key: value + step for (key, value), step in zip(first.items(), random.normal(0.1, 1, 300), strict=True)}
    steps = [other[key] - first[key] for key in first]
    expected = scipy.stats.norm.interval(0.95, np.mean(steps), scipy.stats.sem(steps))
    difference = statistics(other, first)["difference"]
    assert (difference["low"], difference["high"]) == pytest.approx(expected, abs=0.01)
    assert difference["estimate"] == pytest.approx(np.mean(steps))
    assert statistics(other)["standard_error"] == pytest.approx(scipy.stats.sem(list(other.values())))
    assert "difference" not in statistics(first)
    always = statistics({key: value + 0.5 for key, value in first.items()}, first)["difference"]
    assert (always["low"], always["high"]) == pytest.approx((0.5, 0.5))
    assert beyond_noise(always)
    assert statistics({"a": 1.0})["standard_error"] is None
    assert statistics({"a": 1.0}, {"a": 0.0, "b": 0.0})["difference"]["low"] is None
    few = {key: other[key] for key in list(other)[:5]}
    assert statistics(few, first)["difference"]["samples"] == 5
    assert not beyond_noise({"estimate": 1.0, "low": 1.0, "high": 1.0, "samples": 5})  # too few to say so


def noisy(task: str, values: dict[Arm, dict[str, float]]) -> Any:
    """Results of 40 samples in which an arm's values are those of the first, moved by a share of the samples."""
    made = results(task, values)
    shown: dict[str, dict[str, float]] = {}
    for one, means in zip(made["arms"], values.values(), strict=True):
        each = {name: {str(n): float(n < mean * 40) for n in range(40)} for name, mean in means.items()}
        one["metrics"] = {name: statistics(of_one, shown.get(name)) for name, of_one in each.items()}
        one["rejected"] = 2
        shown = shown or each
    return made


NOISY = {
    Arm("greedy"): {"rejected": 0.5, "rouge_l_acc": 0.5},
    Arm("cocoa", "f_mlds", 1.0): {"rejected": 0.2, "rouge_l_acc": 0.525},
    Arm("cocoa-sig", "f_mlds", 1.0): {"rejected": 0.9, "rouge_l_acc": 0.8},
}


def test_bold_only_beyond_noise() -> None:
    table = report(TASKS["truthfulqa_gen"], noisy("truthfulqa_gen", NOISY))
    means, differences = table.split("Difference to Baseline (greedy)")
    assert "| Baseline (greedy) | - | 50.00 ± 8.01 | 50.00 ± 8.01 | 13.50 | 0 | 2 |" in means
    assert "| CoCoA | fMLDS (α=1) | **20.00 ± 6.41** | 52.50 ± 8.00 |" in means  # less is better there
    assert "| CoCoA-SIG | fMLDS (α=1) | 90.00 ± 4.80 | **80.00 ± 6.41** |" in means
    assert "| Empty | Rejected |" in means
    assert "| CoCoA | fMLDS (α=1) | **-30.00 (-45.00 – -17.50)** | +2.50 (+0.00 – +7.50) |" in differences
    assert "| CoCoA-SIG | fMLDS (α=1) | +40.00 (" in differences
    assert "Bold: better than the first method beyond noise" in differences


def test_a_terminal_gets_no_markdown() -> None:
    made = report(TASKS["truthfulqa_gen"], noisy("truthfulqa_gen", NOISY))

    def shown(*, as_markdown: bool = False, **options: Any) -> str:
        console = Console(file=io.StringIO(), legacy_windows=False, **options)
        show(made, console, as_markdown=as_markdown)
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    terminal: dict[str, Any] = {"force_terminal": True, "color_system": "standard"}
    assert shown(width=200) == made  # piped
    assert shown(width=200, as_markdown=True, **terminal) == made
    assert shown(width=60, **terminal) == made  # numbers would be cut off
    assert shown(width=200, force_terminal=True, color_system=None) == made  # what is bold would not be seen
    drawn = shown(width=200, **terminal)
    for raw in ("**", "---:", "| "):
        assert raw not in drawn
    for text in ("truthfulqa_gen", "Baseline (greedy)", "+2.50 (+0.00 – +7.50)", "standard error"):
        assert text in drawn
    assert re.search(r"\x1b\[1m *20.00 ± 6.41", drawn)
    assert not re.search(r"\x1b\[1m *52.50", drawn)


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


def digest(prompt: str) -> str:
    """Of a whole prompt: figures are compared between versions, which other demonstrations would change."""
    return sha256(prompt.encode()).hexdigest()[:16]


def test_every_task_reads_its_file(data_files: dict[str, Path]) -> None:
    assert data_files.keys() == TASKS.keys()
    for name, path in data_files.items():
        samples = load_samples(name, path)
        assert samples
        assert len({sample.id for sample in samples}) == len(samples)
        assert all(sample.question in sample.prompt for sample in samples)


def test_truthfulqa(truthfulqa: Path) -> None:
    first, *_ = load_samples("truthfulqa-mc", truthfulqa)
    assert first.references == ["The capital of France is Paris.", "Paris."]  # the best first, no answer twice
    assert first.incorrect == ["The capital of France is Rome.", "Rome is the capital of France."]
    assert first.choices[0] == " The capital of France is Paris."
    assert first.prompt.startswith("Interpret each question literally, and as a question about the real world")
    assert first.prompt.endswith("Barcelona, Spain.\nQuestion: What is the capital of France?\n\nAnswer:")
    assert digest(first.prompt) == "67e8bf99e4248d6f"


def test_the_papers_other_prompts(data_files: dict[str, Path]) -> None:
    (samsum,) = load_samples("samsum", data_files["samsum"])
    assert samsum.prompt == (
        "Dialogue: Ann: Tea?\nBob: Yes, please.\n\nSummarize the Dialogue in one Sentence. Sentence:"
    )
    (xsum,) = load_samples("xsum", data_files["xsum"])
    assert xsum.prompt.endswith("after a storm.\n\nSummarize the Document in one Sentence. Sentence:")
    (mbpp,) = load_samples("mbpp", data_files["mbpp"])
    assert mbpp.prompt == (
        "You are an expert Python programmer, and here is your task: Write a function to add two numbers.\n"
        "Your code should pass these tests:\nassert add(1, 2) == 3\nassert add(0, math.inf) == math.inf\n"
        "Your code should start with a [PYTHON] tag and end with a [/PYTHON] tag.\n[PYTHON]\n"
    )
    assert mbpp.tests[0] == "import math"
    (swap,) = load_samples("nq_swap", data_files["nq_swap"])
    assert swap.references == ["Tom Smith"]
    assert swap.prompt.endswith("Context: Hamlet is a play by Tom Smith.\nQuestion: who wrote hamlet\n\nAnswer:")


def test_prompts_with_demonstrations_of_ours(data_files: dict[str, Path], tmp_path: Path) -> None:
    first, _ = load_samples("nq", data_files["nq"])
    demonstrations, asked = first.prompt.split("Context: Hamlet is a play by William Shakespeare.\n")
    assert asked == "Question: who wrote hamlet\n\nAnswer:"
    assert digest(demonstrations) == "fee76d2b43823ee6"
    (swap,) = load_samples("nq_swap", data_files["nq_swap"])
    assert swap.prompt == f"{demonstrations}Context: Hamlet is a play by Tom Smith.\n{asked}"
    path = write_jsonl(tmp_path / "open.jsonl", [{"question": "who wrote hamlet", "answer": ["Shakespeare"]}])
    (without,) = load_samples("nq", path)
    assert without.prompt == f"{demonstrations}{asked}"
    (gsm8k,) = load_samples("gsm8k", data_files["gsm8k"])
    assert gsm8k.prompt.endswith("\n\nQuestion: Ann has 2 pens and buys 3. How many has she?\nAnswer:")
    assert digest(gsm8k.prompt) == "02956f17b0081582"


@pytest.mark.parametrize("task", ["nq", "nq_swap", "gsm8k"])
def test_an_id_of_its_own(tmp_path: Path, task: str) -> None:
    record = {"question": "q", "answer": "4", "sub_context": "c", "sub_answer": ["a"]}
    path = write_jsonl(tmp_path / "a.jsonl", [{**record, "id": "x7"}, {**record, "id": 3}])
    assert [sample.id for sample in load_samples(task, path)] == ["x7", "3"]


def test_what_fields_may_hold(tmp_path: Path) -> None:
    record = {"task_id": 1, "prompt": "p", "code": "c", "test_list": ["t"]}
    before = [
        {"test_imports": ["import re"]},
        {"test_imports": [], "test_setup_code": "x = 1"},
        {"test_setup_code": ""},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [{**record, "task_id": n, **one} for n, one in enumerate(before)])
    assert [sample.tests for sample in load_samples("mbpp", path)] == [["import re", "t"], ["x = 1", "t"], ["t"]]
    # a character in two halves is whole
    (tmp_path / "a.jsonl").write_text(_ONE.replace('"y"', '"\\ud83d\\ude00"'))
    (sample,) = load_samples("samsum", tmp_path / "a.jsonl")
    assert sample.references == ["\U0001f600"]
    question = "Is this\none\u2028question?"
    (sample,) = load_samples("truthfulqa_gen", write_truthfulqa(tmp_path / "a.csv", [(question, *TRUTHFULQA[0][1:])]))
    assert sample.question == question


def test_gzip_folder_limit_and_shuffle(tmp_path: Path) -> None:
    records = [{"question": f"question {n}", "answer": f"#### {n}"} for n in range(20)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "set.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    everything = load_samples("gsm8k", tmp_path)  # the only data file of the folder
    assert [sample.id for sample in everything] == [str(n) for n in range(20)]
    assert load_samples("gsm8k", tmp_path, limit=3) == everything[:3]
    shuffled = load_samples("gsm8k", tmp_path, shuffle=1)
    assert shuffled != everything
    assert sorted(shuffled, key=lambda sample: int(sample.id)) == everything
    assert load_samples("gsm8k", tmp_path, shuffle=1, limit=3) == shuffled[:3]
    (tmp_path / "other.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"other.jsonl, set.jsonl.gz"):
        load_samples("gsm8k", tmp_path)


_ONE = '{"id": "a", "dialogue": "x", "summary": "y"}'
_NQ = '{"id": "1", "question": "q", "answer": "4", "sub_context": "c", "sub_answer": ["a"]}'
_MBPP = '"task_id": 1, "prompt": "p", "code": "c", "test_list": ["t"]'
HEADER = "Question,Best Answer,Correct Answers,Incorrect Answers\n"


@pytest.mark.parametrize(
    ("task", "file", "message"),
    [
        ("samsum", ("a.jsonl", '{"id": "a", "dialogue": "x"}\n'), "line 1: summary: Field required"),
        ("samsum", ("a.jsonl", f"{_ONE}\n{_ONE}\n"), r"line 2: the id 'a' .*line 1"),
        ("samsum", ("a.jsonl", _ONE.replace('"y"', '" "')), "line 1: summary"),
        ("samsum", ("a.jsonl", _ONE.replace('"y"', "3")), "summary.* valid"),
        ("samsum", ("a.jsonl", ""), "holds no records"),
        ("samsum", ("a.json", "{}"), "must hold a list"),
        ("samsum", ("a.txt", ""), r"data files are \.csv"),
        ("samsum", ("a.jsonl.gz", "no gzip"), "cannot be read"),
        ("nq_swap", ("a.parquet", "no parquet"), "cannot be read"),
        ("nq", ("a.jsonl", '{"question": "q", "answers": []}'), "answers: "),
        ("nq", ("a.jsonl", '{"question": "q", "answers": ["a", ""]}'), "answers.1: "),
        ("nq", ("a.jsonl", f"{_NQ}\n{_NQ}\n"), r"line 2: the id '1' .*line 1"),
        ("gsm8k", ("a.jsonl", '{"question": "q", "answer": "none"}'), "line 1: answer"),
        ("gsm8k", ("a.jsonl", '{"question": "q", "answer": []}'), "line 1: answer"),
        ("samsum", ("a.json", f"[{_ONE}, " + _ONE.replace('"y"', '"\\ude00!"') + "]"), r"'\\ude00'"),
        ("mbpp", ("a.json", f'[{{{_MBPP}, "test_imports": 5}}]'), "record 0: test_imports: "),
        ("truthfulqa_mc", ("a.csv", "Question,Best Answer\nq,a\n"), "Correct Answers: Field required"),
        ("truthfulqa_mc", ("a.csv", f"{HEADER}q,a,b; , ;\n"), "Incorrect Answers: "),
        ("truthfulqa_mc", ("a.csv", f'{HEADER}q,a,"b\n'), "unexpected end"),
        ("samsum", ("none.jsonl", None), "there is no file"),
    ],
)  # fmt: skip
def test_bad_files(task: str, file: tuple[str, str | None], message: str, tmp_path: Path) -> None:
    name, text = file
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_samples(task, tmp_path / name)


def test_bad_requests(truthfulqa: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown task 'truthfulqa_mcc' \(did you mean 'truthfulqa_mc'\?\)"):
        load_samples("truthfulqa_mcc", truthfulqa)
    with pytest.raises(ConfigError, match="limit"):
        load_samples("truthfulqa_mc", truthfulqa, limit=0)
    assert find_task("NQ-Swap").name == "nq_swap"


def test_the_answer_in_a_text() -> None:
    assert TASKS["xsum"].answer("\n\nA bridge was\nshut.\n\nDocument: ...") == "A bridge was\nshut."
    assert TASKS["nq"].answer("\n 1945\nThe answer is: 1945") == "1945"
    assert TASKS["gsm8k"].answer(" 2 + 3\n\n#### 5\n") == "2 + 3\n\n#### 5"


PLAIN = "def add(a, b):\n    return a + b"
CODES = (
    PLAIN,
    "import math\n\n\ndef area(r):\n    # a fence is ```\n    return math.pi * r * r",
    'def f(x):\n    """Doubles.\n\n    ```\n    >>> f(1)\n    ```\n    """\n    return 2 * x',
    'def f(x):\n    """```python```"""\n    return "```"',
    "class A:\n    pass\n\nadd = lambda a, b: a + b",
    "def f(s):\n    return re.sub('\\d', '', s)",  # an escape that Python warns of
)
FENCES = ("```", "````")
TAGS = ("", "python", "Python", "PYTHON", "py", " python3", "{.python}")
WORDS = ("", "Here is the code:", "Solution", "Note: this is it", "Sure! It adds `a` and `b`.\n\nAs follows.")

codes, fences, tags, words = map(st.sampled_from, (CODES, FENCES, TAGS, WORDS))


@given(codes, st.sampled_from(("", "\n", "\n[/PYTHON]", "\n[/PYTHON]\nThis is it.", "\n[/python]")))
def test_bare_code(code: str, after: str) -> None:
    assert code_of(code + after) == code


@given(words, fences, tags, codes, st.sampled_from(("", "[PYTHON]\n", "[python]\n")), words)
def test_fenced_code(before: str, fence: str, tag: str, code: str, opened: str, after: str) -> None:
    assert code_of(f"{before}\n{opened}{fence}{tag}\n{code}\n{fence}\n{after}") == code
    assert code_of(f"{code}\n{fence}\n{after}") == code  # a fence that only closes
    assert code_of(f"{before}\n{fence}{tag}\n{code}") == code  # and one that is never closed
    assert code_of(f"{before}\n[PYTHON]\n{code}\n[/PYTHON]\n{after}") == code


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (f"{PLAIN}\n```\nThis adds.", PLAIN),
        (f"```sh\npip install numpy\n```\nand\n```python\n{PLAIN}\n```", PLAIN),
        (f"{PLAIN}\n```\nIt is used so:\n```python\nx = add(1, 2)\n```", PLAIN),
        (f"1. The code:\n   ```python\n   {PLAIN[:14]}\n       return a + b\n   ```", PLAIN),
        ("```python\ndef add(a, b) return a + b\n```\nThis adds.", "def add(a, b) return a + b"),
        ("def add(a, b) return a + b", "def add(a, b) return a + b"),
        ("", ""),
        ("\0", "\0"),
    ],
)
def test_of_an_answer(answer: str, code: str) -> None:
    assert code_of(answer) == code


@given(st.text(st.sampled_from("`\n[]/PYTHON d:=1('\"\\\0"), max_size=60))
def test_any_text_has_some(answer: str) -> None:
    assert isinstance(code_of(answer), str)


@pytest.mark.timeout(60)
def test_answers_without_an_end() -> None:
    for endless in ("(" * 100_000, "-" * 100_000 + "1"):
        assert code_of(endless) == endless
    for empty in ("```\n" * 3000, "[PYTHON]" * 3000):
        assert code_of(empty) == ""


# --- tests of the code

Passes = Callable[..., bool]


@pytest.fixture
def nothing_confines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without bubblewrap."""
    confines.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    yield
    confines.cache_clear()


@pytest.fixture(params=["confirmed", "confined"])
def run(request: pytest.FixtureRequest) -> Passes:
    """:func:`passes` on a machine without bubblewrap, and with it."""
    if request.param == "confirmed":
        request.getfixturevalue("nothing_confines")
        return partial(passes, confirm_run_unsafe_code=True)
    if not confines():
        pytest.skip("bubblewrap is not installed, or may not make namespaces here")
    return passes


def test_right_code_passes_and_wrong_code_fails(run: Passes) -> None:
    code = "import math\ndef area(r):\n    print('noise' * 1000)\n    return math.pi * r * r"
    assert run(code, ["assert round(area(1), 2) == 3.14", "assert area(0) == 0"])
    assert not run(code, ["assert area(1) == 3"])
    assert not run(code, ["assert area(1) == 3", "assert True"])
    assert not run("def", ["pass"])
    assert not run("", ["assert area(1)"])
    assert run("def sum(a, b): return a * b", ["assert sum(3, 4) == 12"])  # a name of Python, too


@pytest.mark.slow
def test_leaving_early_is_no_pass_and_endless_code_is_ended(run: Passes) -> None:
    for code in ("import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "exit()"):
        assert not run(code, ["assert False"])
    assert not run("while True:\n    pass", [], seconds=1.0)
    assert not run("", ["import time\ntime.sleep(600)"], seconds=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "while True:\n    pass"])
def test_processes_that_the_code_starts_are_ended(end: str, nothing_confines: None, tmp_path: Path) -> None:
    note = tmp_path / "child"
    start = f"import subprocess\nchild = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])"
    code = f"{start}\nopen({str(note)!r}, 'w').write(str(child.pid))\n{end}"
    assert passes(code, [], seconds=3.0, confirm_run_unsafe_code=True) is (not end)
    child = Path(f"/proc/{note.read_text()}/stat")
    wait_until(lambda: not child.exists() or child.read_text().split()[2] == "Z")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no limit of the address space")
def test_memory_is_limited(run: Passes) -> None:
    assert not run("x = bytearray(2 * 2**30)", [])
    assert run("x = bytearray(32 * 2**20)", [])


def test_only_the_standard_library_is_there_and_no_environment(run: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert run("import asyncio, collections.abc, heapq, re, statistics, subprocess, unittest", [])
    assert not run("import numpy", [])
    assert run("import os", ["assert 'SECRET_TOKEN' not in os.environ"])


def test_files_are_written_to_a_folder_of_their_own(nothing_confines: None) -> None:
    assert passes("open('here.txt', 'w').write('x')", ["import os", "assert os.listdir() == ['here.txt']"],
                  confirm_run_unsafe_code=True)  # fmt: skip
    assert not Path("here.txt").exists()


def test_bubblewrap_takes_network_files_and_processes_away(tmp_path: Path) -> None:
    if not confines():
        pytest.skip("bubblewrap is not installed, or may not make namespaces here")
    victim = tmp_path / "kept.txt"
    victim.write_text("as it was")
    with socket.socket() as server:  # there is somebody to connect to
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        for attempt in (
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)",
            f"open({str(victim)!r}).read()",
            f"open({str(victim)!r}, 'w').write('gone')",
            f"open({sys.base_prefix + '/new.txt'!r}, 'w')",
            f"import os\nos.kill({os.getpid()}, 0)",
            f"open('/proc/{os.getpid()}/environ', 'rb').read()",
        ):
            assert not passes(attempt, []), attempt
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    assert victim.read_text() == "as it was"
    assert passes("import os", ["assert os.getuid() == os.getgid() == 65534"])


def test_without_bubblewrap_code_needs_consent(
    nothing_confines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "note"
    with pytest.raises(ConfigError, match="--confirm-run-unsafe-code"):
        passes(f"open({str(note)!r}, 'w')", [])
    assert not note.exists()
    require_confinement(True)
    monkeypatch.setattr(generated_code.os, "name", "nt")
    with pytest.raises(ConfigError, match="Linux or macOS"):
        require_confinement(True)


def test_bubblewrap_is_used_where_it_works_and_binds_nothing_to_write(nothing_confines: None, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    script = tmp_path / "bwrap"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    assert not confines()  # one that may make no namespaces does not count
    confines.cache_clear()
    # this one notes its options, and runs the command after them
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\nat = sys.argv.index({sys.executable!r}, sys.argv.index('--chdir'))\n"
        f"print(*sys.argv[1:at], file=open({str(notes)!r}, 'a'))\nos.execv(sys.argv[at], sys.argv[at:])\n"
    )
    script.chmod(0o755)
    assert confines()
    for consent in (False, True):
        assert passes("x = 1", ["assert x == 1"], confirm_run_unsafe_code=consent)
    lines = notes.read_text().splitlines()
    assert len(lines) == 3  # a trial, and both runs
    for line in lines:
        assert {"--unshare-all", "--clearenv", "--die-with-parent", "--new-session"} <= set(line.split())
        assert "--bind" not in line
