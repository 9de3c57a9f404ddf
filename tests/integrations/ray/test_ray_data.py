"""``cocoa score --ray`` and ``cocoa eval --ray``: what one process writes, line for line. Replicas follow the load."""

import json
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pytest
from pyarrow import parquet

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime
from cocoa_engine.cli.score import score_rows
from cocoa_engine.errors import CocoaError, ConfigError
from cocoa_engine.model.load_options import LoadOptions
from cocoa_integrations.evaluation import TASKS, Arm, evaluate, load_samples
from tests.helpers.in_threads import join, start
from tests.helpers.ray_cluster import STARTS, STUCK, Deployed, eventually, served

pytest.importorskip("ray")

from cocoa_integrations.ray import jobs
from cocoa_integrations.ray.jobs import Pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(STUCK), pytest.mark.usefixtures("ray_cluster")]

HALVES = {"actors": 2, "num_cpus": 0.5}  # of a logical core: the replicas of other tests may have the others

UNCACHED = Runtime(prefix_cache_mb=0)
"""What an engine has read before decides how it rounds, and which actor gets which rows is a matter of time."""


@pytest.fixture
def load(tiny_folder: str) -> LoadOptions:
    return LoadOptions(model_name=tiny_folder, runtime=UNCACHED)


@pytest.fixture
def engine_here(tiny_folder: str) -> CocoaEngine:
    return CocoaEngine.from_pretrained(tiny_folder, runtime=UNCACHED)


def rows(count: int) -> list[str]:
    """Rows of which some cannot be scored, and one is no JSON."""
    lines = [json.dumps({"id": n, "prompt": f"Number {n} is", "text": f" the {n}th of {count}."}) for n in range(count)]
    lines[3] = json.dumps({"id": 3, "prompt": "Where is the text?"})
    lines[7] = "{no JSON"
    lines[9] = json.dumps({"id": 9, "prompt": "A lone \ud800", "text": " surrogate"})
    return lines


@pytest.fixture
def given(tmp_path: Path) -> Path:
    file = tmp_path / "given.jsonl"
    file.write_text("\n".join(rows(24)) + "\n", encoding="utf-8")
    return file


@pytest.fixture
def expected(engine_here: CocoaEngine, given: Path, tmp_path: Path) -> str:
    """What one process writes."""
    assert score_rows(engine_here, given, tmp_path / "expected.jsonl", CocoaConfig()) == (3, 24)
    return (tmp_path / "expected.jsonl").read_text(encoding="utf-8")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of pieces of work of each run."""
    numbers: list[int] = []
    run = Pool.run

    def counted(self: Pool, what: str, work: Sequence[Any], do: Any) -> Iterator[tuple[int, Any]]:
        numbers.append(len(work))
        return run(self, what, work, do)

    monkeypatch.setattr(Pool, "run", counted)
    return numbers


def test_rows_are_those_of_one_process_and_an_interrupted_run_is_resumed(
    load: LoadOptions, given: Path, expected: str, tmp_path: Path, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    append, written = jobs.append_lines, 0

    def interrupted(file: Path, values: list[dict[str, Any]]) -> None:
        nonlocal written
        written += 1
        append(file, values)
        if written == 10:  # the settings and nine rows
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "append_lines", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jobs.score(load, given, out, CocoaConfig(), **HALVES)
    partial = tmp_path / "out.jsonl.partial"
    with partial.open("a", encoding="utf-8") as file:
        file.write('{"number": 2')  # torn by the kill
    assert not out.exists()
    with pytest.raises(ConfigError, match=r"other settings \(settings\)"):
        jobs.score(load, given, out, CocoaConfig(alpha=1.0), **HALVES)
    assert jobs.score(load, given, out, CocoaConfig(), **HALVES) == (3, 24)
    assert out.read_text(encoding="utf-8") == expected
    assert counts == [24, 15]
    assert not partial.exists()


def test_an_actor_that_is_killed_is_replaced(
    load: LoadOptions, given: Path, tmp_path: Path, engine_here: CocoaEngine
) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text(given.read_text(encoding="utf-8") * 10, encoding="utf-8")
    out, result = tmp_path / "out.jsonl", []
    thread = start(lambda: jobs.score(load, many, out, CocoaConfig(), **HALVES), result)
    partial = tmp_path / "out.jsonl.partial"
    eventually(lambda: partial.exists() and partial.read_text(encoding="utf-8").count("\n") > 3)
    actors = [one for one in psutil.Process().children(recursive=True) if "MapWorker" in " ".join(one.cmdline())]
    actors[0].kill()
    assert not result
    thread.join(100)
    assert result == [(30, 240)]
    score_rows(engine_here, many, tmp_path / "expected.jsonl", CocoaConfig())
    assert out.read_text(encoding="utf-8") == (tmp_path / "expected.jsonl").read_text(encoding="utf-8")


def test_parquet_in_and_out(load: LoadOptions, engine_here: CocoaEngine, tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"prompt": "One", "text": " two", "id": 1}, {"prompt": "No text", "id": 2}])
    given = tmp_path / "given.parquet"
    parquet.write_table(table, given)
    here, there = tmp_path / "here.parquet", tmp_path / "there.parquet"
    assert score_rows(engine_here, given, here, CocoaConfig()) == (1, 2)
    assert jobs.score(load, given, there, CocoaConfig(), **HALVES) == (1, 2)
    scored, failed = parquet.read_table(there).to_pylist()
    assert parquet.read_table(here).to_pylist() == [scored, failed]
    assert (scored["id"], scored["error"], failed["risk"]) == (1, None, None)
    assert scored["risk"]["verdict"]
    assert failed["error"] == "row 2: text: Input should be a valid string (got None)"


def test_a_model_that_cannot_be_loaded_is_one_message(given: Path, tmp_path: Path) -> None:
    load = LoadOptions(model_name=str(tmp_path / "nothing-here"))
    with pytest.raises(CocoaError, match=r"^the actors could not do their work: [^\n]*nothing-here"):
        jobs.score(load, given, tmp_path / "out", CocoaConfig(), **HALVES)


@pytest.mark.parametrize("task", ["truthfulqa_gen", "truthfulqa_mc"])
def test_an_evaluation_is_that_of_one_process_and_is_resumed(
    task: str, load: LoadOptions, engine_here: CocoaEngine, truthfulqa: Path, tmp_path: Path, counts: list[int]
) -> None:
    samples = load_samples(task, truthfulqa)
    options: Any = {"config": CocoaConfig(max_new_tokens=6), "model": {"name": "tiny", "dtype": "auto"}}
    arms = [Arm("greedy"), Arm("cocoa-sig", "f_mlds", 2.5)]
    evaluate(engine_here, TASKS[task], samples, arms, tmp_path / "here", **options)
    there = tmp_path / "there"
    evaluate(lambda: Pool.of(load, **HALVES), TASKS[task], samples, arms, there, **options)
    for name in ("samples.jsonl", "results.json", "table.md"):
        assert (there / name).read_text(encoding="utf-8") == (tmp_path / "here" / name).read_text(encoding="utf-8")
    lines = (there / "samples.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (there / "samples.jsonl").write_text("".join([lines[-1], lines[0], lines[1][:20]]), encoding="utf-8")
    evaluate(Pool.of(load, **HALVES), TASKS[task], samples, arms, there, **options)
    resumed = (there / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert list(map(_without_usage, resumed)) == list(map(_without_usage, lines))  # the passes of a batch are shared
    assert len(counts) == (3 if TASKS[task].multiple_choice else 4)  # arms share the spans of choices


def _without_usage(line: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(line)
    return {name: row[name] for name in ("arm", "id", "sample", "answer", "metrics")}


CONVERSATIONS = [
    [{"role": "user", "content": f"Say {word}."}] for word in ("one", "two", "three", "four", "five", "six")
]
"""Several, since all calls of one go to the same replica."""


def ask(deployed: Deployed, number: int) -> str:
    response = deployed.post({"messages": CONVERSATIONS[number], "max_tokens": 60})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_the_load_decides_how_many_replicas_run(tiny_folder: str) -> None:
    delays = {"upscale_delay_s": 1, "downscale_delay_s": 2, "metrics_interval_s": 0.5, "health_check_period_s": 1}
    numbers = {"min_replicas": 1, "max_replicas": 2, "max_batch_size": 4, "target_ongoing_requests": 1}
    loading = {"runtime": {"draft_tokens": 0}}
    with served(model=tiny_folder, loading=loading, **numbers, **delays) as deployed:
        assert deployed.count == 1
        expected = [ask(deployed, number) for number in range(len(CONVERSATIONS))]
        assert len(set(expected)) > 1
        over = threading.Event()
        answers: list[tuple[int, str]] = []

        def load(number: int) -> None:
            while not over.is_set():
                answers.append((number, ask(deployed, number)))
                number = (number + 1) % len(CONVERSATIONS)

        threads = [start(partial(load, number)) for number in range(4)]
        try:
            eventually(lambda: deployed.count == 2, STARTS)
            eventually(lambda: list(map(bool, deployed.values("cocoa:request_success_total").values())) == [True] * 2)
        finally:
            over.set()
            join(threads)
        assert set(answers) == set(enumerate(expected))
        eventually(lambda: deployed.count == 1)
        assert ask(deployed, 0) == expected[0]
