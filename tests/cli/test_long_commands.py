"""Commands that take long say how far they are, and continue after an interruption where they were.

An interrupted measurement says what it kept, and gives what it would have given: with ``--cache`` for good, without it
until the same command has ended. Progress is lines on stderr, or one bar for all stages where that is a terminal.
"""

import io
import itertools
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import Result

from cocoa_engine import CocoaConfig, CocoaEngine, Span, SpanStream
from cocoa_engine.cli import measured, output
from cocoa_engine.cli.output import Progress, Stage, can_redraw, live
from cocoa_engine.errors import ConfigError, ModelLoadError
from cocoa_engine.execution.backends import shared_cache
from cocoa_engine.lab import heads as lab_heads
from cocoa_engine.lab.cache import AnswerCache, CacheFolder, _tokenizer_digest
from cocoa_engine.lab.data import read_labelled
from cocoa_engine.lab.measured import force, labelled_features, probe_layers
from cocoa_engine.scoring.text_profile import Profiler
from tests.helpers.alike import near
from tests.helpers.cocoa import Cocoa, successful
from tests.helpers.in_threads import wait_until
from tests.helpers.rivals import heads_file
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("divided_once")


class Commands:
    """Runs commands in a cache directory of their own, counts the prompts they measure, and interrupts them."""

    def __init__(self, cocoa: Cocoa, data: dict[str, Path], folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.run, self.data, self.prompts, self.until = cocoa, data, 0, 10**6
        self.unfinished = folder / "own" / "unfinished"
        patch.setenv("COCOA_CACHE_DIR", str(folder / "own"))
        patch.setattr(measured, "FOLDER", "unfinished")
        patch.chdir(folder)
        for owner, name in ((Profiler, "__call__"), (CocoaEngine, "generate_batch")):
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, measure: Callable[..., Any]) -> Callable[..., Any]:
        def counted(owner: Any, prompts: Any, *args: Any, **options: Any) -> Any:
            if self.prompts >= self.until:
                raise KeyboardInterrupt
            self.prompts += len(prompts) if "config" in options else 1
            return measure(owner, prompts, *args, **options)

        return counted

    def threshold(self, *options: object, stop: int = 10**6) -> Result:
        """``cocoa threshold`` on the questions, interrupted after some prompts more."""
        self.until = self.prompts + stop
        result = self.run("threshold", "--max-new-tokens", "6", "--prompts", self.data["questions"], *options)
        assert result.exit_code == (130 if stop < 12 else 0), result.stderr
        return result

    def folders(self) -> list[Path]:
        """Those of the unfinished commands."""
        return [each for each in self.unfinished.glob("*") if each.is_dir()]


@pytest.fixture
def commands(tiny_cocoa: Cocoa, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(tiny_cocoa, data, tmp_path, monkeypatch)


FITS = ["--folds", "2", "--draws", "20", "--max-new-tokens", "6"]
COMMANDS: dict[str, list[str]] = {
    "signal": ["signal", "--data", "{texts}", "--draws", "20", "--out", "{out}"],
    "calibrate": ["calibrate", "--data", "{texts}", "--probe", *FITS, "--out", "{out}/risk.json"],
    "calibrate on questions": ["calibrate", "--questions", "{questions}", *FITS, "--out", "{out}/risk.json"],
    "threshold": ["threshold", "--prompts", "{questions}", "--max-new-tokens", "6", "--json"],
    "calibrate on both": ["calibrate", "--data", "{texts}", "--questions", "{questions}", *FITS, "--out", "{out}"],
    "calibrate itself": ["calibrate", "--self", "--prompts", "10", *FITS, "--out", "{out}.json"],
    "heads": ["heads", "--lengths", "16,32", "--prompts", "6"],
    "compare": ["compare", "Who?", "--raw", "--max-new-tokens", "6"],
    "bench": ["bench", "--tokens", "4", "--rounds", "2", "--json"],
    "score": ["score", "--rows", "{rows}", "--out", "{out}.jsonl"],
    "eval": ["eval", "gsm8k", "--data", "{tasks}", "--max-new-tokens", "6", "--out", "{out}"],
}
PROMPTS = {"signal": 12, "calibrate": 12, "calibrate on questions": 12, "threshold": 12}
"""Those that each command measures which continues after an interruption."""


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", PROMPTS)
def test_an_interrupted_command_continues(commands: Commands, tmp_path: Path, name: str, cached: bool) -> None:
    prompts = PROMPTS[name]
    out, cache = tmp_path / "out", tmp_path / "cache"
    command = [word.format(**commands.data, out=out) for word in COMMANDS[name]] + (
        ["--cache", str(cache)] if cached else []
    )

    def written() -> dict[str, str]:
        files = [file for file in out.glob("*") if file.suffix in (".json", ".md")]
        return {file.name: file.read_text(encoding="utf-8") for file in files}

    commands.until = 6
    stopped = commands.run(*command)
    assert (stopped.exit_code, list(out.glob("*"))) == (130, [])
    (folder,) = [cache] if cached else commands.folders()
    (file,) = folder.glob("*.jsonl")
    assert f"{len(file.read_text(encoding='utf-8').splitlines())} of" in stopped.stderr
    again = "" if cached else "; give the same command again to continue"
    assert f"; they are kept in {folder}{again}" in stopped.stderr
    with file.open("a", encoding="utf-8") as lines:
        lines.write('{"answer": "cut o')
    commands.until = 10**6
    resumed, files = commands.run(*command), written()
    assert resumed.exit_code == 0, resumed.stderr
    assert ("continuing an interrupted command" in resumed.stderr) != cached
    assert commands.prompts == prompts, "nothing is measured twice"
    assert commands.folders() == []
    shutil.rmtree(out, ignore_errors=True)
    whole = commands.run(*command)
    assert (whole.stdout, written()) == (resumed.stdout, files)
    assert commands.prompts == (1 if cached else 2) * prompts


def test_kept_answers_have_the_features_of_fed_ones(
    block_engine: CocoaEngine, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the real model, with the heads, the features and the states of its calibrator."""
    config = block_engine.config
    records = read_labelled(data["texts"])[:3]
    folder, layers = CacheFolder(tmp_path), probe_layers(block_engine.num_layers)
    fed = list(force(block_engine, records, config, layers=layers, cache=folder))
    with monkeypatch.context() as patch:
        patch.setattr(Profiler, "__call__", None)
        kept = list(force(block_engine, records, config, layers=layers, cache=folder))
    measured, again = (labelled_features(answers, config, block_engine.num_layers) for answers in (fed, kept))
    for level, items in measured.items():
        assert items.features.tolist() == again[level].features.tolist()
    assert measured["span"].labels.any()
    assert measured["span"].states.tolist() == again["span"].states.tolist()
    states = [[answer.profile.text_states.tolist() for answer in answers] for answers in (fed, kept)]
    assert states[0] == states[1]


def test_other_conditions_have_other_files(tiny: CocoaEngine, tmp_path: Path) -> None:
    config = tiny.config

    numbers = itertools.count()

    def file(engine: CocoaEngine = tiny, config: CocoaConfig = config, **options: Any) -> str:
        folder = CacheFolder(tmp_path / f"{next(numbers)}")
        assert list(force(engine, [], config, cache=folder, **options)) == []
        (made,) = folder.path.iterdir()
        return made.name

    other_template = tiny_tokenizer()
    other_template.chat_template = "{{ messages[0].content }}"
    other_tokens = tiny_tokenizer()
    other_tokens.add_tokens(["house"])
    heads = heads_file(tmp_path, tiny.model, [(1, 2)])
    files = [
        file(),
        file(chat=True),
        file(layers=[2]),
        file(config=config.replace(gamma=0.2)),
        file(config=config.replace(max_candidates=3)),
        file(config=config.replace(decore_heads=heads)),
        file(CocoaEngine(tiny.model, other_template, model_name="tiny")),
        file(CocoaEngine(tiny.model, other_tokens, model_name="tiny")),
        file(CocoaEngine(tiny.model, tiny.tokenizer, model_name="other")),
        file(CocoaEngine(tiny_model("llama", seed=7, max_position_embeddings=2048), tiny.tokenizer, model_name="tiny")),
    ]
    assert len(set(files)) == len(files)
    assert file() == files[0] == file(config=config.replace(alpha=1.0, max_new_tokens=3))


@pytest.mark.slow
@pytest.mark.parametrize("given", [[], ["--cache", "cache"]])
@pytest.mark.usefixtures("few_needles")
def test_heads_continue(commands: Commands, tmp_path: Path, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "heads.json"
    command = [*COMMANDS["heads"], "--out", out, *given]
    copied, texts = lab_heads._copied, list[Any]()

    def until_ctrl_c(engine: Any, text: Any) -> Any:
        texts.append(text)
        if len(texts) == 4:
            raise KeyboardInterrupt
        return copied(engine, text)

    monkeypatch.setattr(lab_heads, "_copied", until_ctrl_c)
    stopped = commands.run(*command)
    assert stopped.exit_code == 130
    assert "reading texts: 64 of 96 were done; they are kept in" in stopped.stderr
    commands.until = 4
    stopped = commands.run(*command)
    assert (stopped.exit_code, out.exists()) == (130, False)
    assert "answering: 4 of 6 were done; they are kept in" in stopped.stderr
    commands.until = 10
    stopped = commands.run(*command)
    assert (stopped.exit_code, out.exists()) == (130, False)
    assert "asking: 4 of 12 were done; they are kept in" in stopped.stderr
    commands.until = 10**6
    finished = successful(commands.run(*command))
    assert (len(texts), commands.prompts, commands.folders()) == (1 + 4, 6 + 12, [])
    found = out.read_text(encoding="utf-8")
    (kept,) = (tmp_path / "own" / "heads").glob("*.json")
    assert kept.read_text(encoding="utf-8") == found
    kept.unlink()
    again = commands.run(*command, "--overwrite")
    assert again.stdout == finished.stdout
    # prompts whose beginnings the engine remembers are read in other parts, and rounded otherwise
    assert json.loads(out.read_text(encoding="utf-8"))["reference"] == near(json.loads(found)["reference"])
    assert (len(texts), commands.prompts) == ((1 + 4, 18) if given else (1 + 8, 36))


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn", "few_needles")
def test_a_calibrator_that_was_written_continues_with_its_reference(commands: Commands, tmp_path: Path) -> None:
    out = tmp_path / "risk.json"
    command = [*COMMANDS["calibrate itself"][:-1], out]
    assert commands.run(*command).exit_code == 0
    (kept,) = (tmp_path / "own" / "heads").glob("*.json")
    expected, total = json.loads(kept.read_text(encoding="utf-8"))["reference"], commands.prompts
    kept.unlink()
    out.unlink()
    commands.until = 2 * total - 2  # in the reference, which comes last
    stopped = commands.run(*command)
    assert (stopped.exit_code, out.exists()) == (130, True)
    assert "give the same command with --overwrite to continue" in stopped.stderr
    commands.until = 10**6
    assert commands.run(*command, "--overwrite").exit_code == 0
    assert commands.prompts == 2 * total, "nothing is measured twice"
    # prompts whose beginnings the engine remembers are read in other parts, and rounded otherwise
    assert json.loads(kept.read_text(encoding="utf-8"))["reference"] == near(expected)
    assert commands.folders() == []


@pytest.mark.slow
def test_other_options_are_another_command_and_only_the_latest_are_kept(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ([], ["--gamma", "0.2"], ["--json"], ["--no-color"]):
        commands.threshold(*options, stop=2)
    assert len(commands.folders()) == 2, "how the output is shown makes no difference"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    commands.threshold(stop=2)
    assert len(commands.folders()) == 3
    shutil.rmtree(commands.unfinished)
    monkeypatch.setattr(measured, "KEPT", 2)
    folders: list[Path] = []

    def interrupted(gamma: float) -> None:
        commands.threshold("--gamma", gamma, stop=2)
        folders.extend(each for each in commands.folders() if each not in folders)

    for number, gamma in enumerate((0.1, 0.2, 0.4)):
        interrupted(gamma)
        os.utime(folders[number], (number, number))
    assert sorted(commands.folders()) == sorted(folders[1:])
    with FileLock(folders[1].with_suffix(measured.LOCK)):  # as another process has it
        interrupted(0.5)
        assert sorted(commands.folders()) == sorted(folders[1:])
    interrupted(0.6)
    assert sorted(commands.folders()) == sorted(folders[3:])


def test_nothing_is_left_of_a_command_that_measured_nothing(commands: Commands) -> None:
    stopped = commands.threshold(stop=0)
    assert "0 of 12 were done; there is no output\n" in stopped.stderr
    assert stopped.stdout == ""
    assert commands.folders() == []


@pytest.mark.slow
@pytest.mark.parametrize("why", ["a file", "held", "goes away"])
def test_without_a_folder_the_command_runs_all_the_same(
    commands: Commands, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = commands.threshold().stdout
    if why == "a file":
        shutil.rmtree(tmp_path / "own")
        (tmp_path / "own").touch()
    elif why == "goes away":
        generate_batch = CocoaEngine.generate_batch

        def cleaned(engine: CocoaEngine, prompts: Any, **options: Any) -> Any:
            shutil.rmtree(commands.unfinished, ignore_errors=True)
            return generate_batch(engine, prompts, **options)

        monkeypatch.setattr(CocoaEngine, "generate_batch", cleaned)
    else:
        commands.threshold(stop=2)
        (folder,) = commands.folders()
        lock = FileLock(folder.with_suffix(measured.LOCK))
        lock.acquire(timeout=0)
    stopped = commands.threshold("--json", stop=2)
    assert "2 of 12 were done; the output is of these\n" in stopped.stderr
    assert json.loads(stopped.stdout)["answers"] == 2
    before, finished = commands.prompts, commands.threshold()
    assert (finished.stdout, finished.stderr, commands.prompts) == (expected, "", before + 12)
    if why == "held":
        lock.release()
        assert commands.folders() == [folder]
        assert "2 measurements" in commands.threshold().stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs rights of files")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_others_could_have_written_is_measured_again(commands: Commands, level: int) -> None:
    """Be it the cache directory, that of all commands or that of one, which others could write to."""
    commands.threshold(stop=4)
    (folder,) = commands.folders()
    [folder, folder.parent, folder.parent.parent][level].chmod(0o777)
    before = commands.prompts
    assert "continuing" not in commands.threshold().stderr
    assert commands.prompts == before + 12
    assert not any(each.exists() and each.stat().st_mode & 0o022 for each in (folder, *folder.parents[:2]))


def test_tokens_may_be_bytes() -> None:
    """As those of tokenizers that are written in Python around tiktoken."""

    def digest(*tokens: bytes) -> str:
        return _tokenizer_digest(SimpleNamespace(get_vocab=lambda: {token: at for at, token in enumerate(tokens)}))

    one, same, other = digest(b"a", b"b"), digest(b"a", b"b"), digest(b"b", b"a")
    assert one == same != other


def opened(tiny: CocoaEngine, folder: Path, *, required: bool) -> tuple[CacheFolder, AnswerCache]:
    kept_in = CacheFolder(folder, required)
    return kept_in, AnswerCache(kept_in, "answers", tiny, tiny.config, {})


def test_a_cache_that_was_asked_for_must_work_and_another_is_done_without(tiny: CocoaEngine, tmp_path: Path) -> None:
    for required in (True, False):
        folder, cache = opened(tiny, tmp_path / "cache", required=required)
        cache.add("one", {"value": 1})
        shutil.rmtree(folder.path)
        if required:
            for use in (lambda: cache.get("one"), lambda: cache.add("two", {"value": 2})):  # noqa: B023
                with pytest.raises(ConfigError, match="cannot be used: No such file"):
                    use()
        else:
            assert cache.get("one") is None
            cache.add("two", {"value": 2})
            assert folder.error is not None


def test_a_damaged_line_is_refused_or_measured_again_with_all_after_it(tiny: CocoaEngine, tmp_path: Path) -> None:
    names = ("one", "two", "three")
    _, cache = opened(tiny, tmp_path, required=True)
    for name in names:
        cache.add(name, {"value": name})
    first, _, third = cache.file.read_bytes().splitlines(keepends=True)
    cache.file.write_bytes(first + bytes(40) + b"\n" + third)  # as a power failure leaves it
    with pytest.raises(ConfigError, match="did not write"):
        opened(tiny, tmp_path, required=True)
    _, again = opened(tiny, tmp_path, required=False)
    missing = [name for name in names if again.get(name) is None]
    assert missing == ["two", "three"]
    for name in missing:
        again.add(name, {"value": name})
    _, mended = opened(tiny, tmp_path, required=True)
    assert [mended.get(name) for name in names] == [{"value": name} for name in names]


LINE = re.compile(r"(\d[\d,]* of \d[\d,]* [a-z][a-z0-9 ]*|[a-z].*), (\d+ h )?\d+ (s|min) (left|so far)")
"""A line after the name of the command."""


def test_the_time_left_is_that_of_this_stage_and_the_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: clock[0])
    progress = Progress("heads")
    progress.plan({"needles": 90, "answering": 60})
    with progress.stage("needles", "needles", 90) as stage:
        clock[0] += 30
        assert progress.describe() == "0 of 90 needles, 30 s so far"
        clock[0] += 30
        stage.advance(30)  # two seconds each
        assert progress.describe() == "30 of 90 needles, 4 min left"
        stage.advance(30)  # from a cache, in no time
        assert progress.describe() == "60 of 90 needles, 3 min left"
        clock[0] += 60
        assert progress.describe() == "60 of 90 needles, 2 min left"
    assert progress.fraction() == 0.6
    with progress.stage("answering", "prompts", 60) as stage:
        assert progress.describe() == "0 of 60 prompts, 2 min left"  # as fast as the stage before
        clock[0] += 60
        assert progress.describe() == "0 of 60 prompts, 60 s left"
        clock[0] += 5340
        assert progress.describe() == "0 of 60 prompts, 1 h 30 min so far"
        stage.advance(30)
        assert progress.describe() == "30 of 60 prompts, 1 h 30 min left"
        assert progress.fraction() == 0.8
    assert progress.fraction() == 1.0
    words = {119.4: "119 s", 119.6: "2 min", 3569: "59 min", 3571: "1 h 0 min", 10**6: "277 h 47 min"}
    assert {seconds: output._duration(seconds) for seconds in words} == words


STAGES = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), min_size=1, max_size=6)


@given(STAGES, st.data())
def test_the_bar_never_goes_back(stages: list[tuple[int, bool, bool]], data: st.DataObject) -> None:
    """Whatever is planned, counted and nested, and whatever totals turn out to be."""
    progress, seen = Progress("ask"), [0.0]
    progress.plan({str(number): share for number, (share, _, _) in enumerate(stages) if share})

    def look() -> None:
        seen.append(progress.fraction() or 0.0)

    for number, (_, counts, nests) in enumerate(stages):
        total = data.draw(st.integers(1, 4)) if counts else 0
        with progress.stage(str(number), "steps", total) as stage:
            look()
            if nests:
                with progress.stage("inside", "parts", 2) as inside:
                    inside.advance()
                    look()
            for _ in range(total):
                stage.advance()
                look()
    if len(seen) > 1 and any(share for share, _, _ in stages):
        assert seen == sorted(seen)
        assert progress.fraction() == pytest.approx(1.0)


STOPPED = SimpleNamespace(monotonic=lambda: 0.0)
"""A clock: on a busy machine, the first line comes after seconds."""


def test_a_line_comes_while_one_step_hangs(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "time", STOPPED)
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.01)
    said: list[str] = []

    def listened() -> bool:
        said.append(capfd.readouterr().err)
        return "".join(said).count("\n") >= 3

    with Progress("heads").stage("loading \x1b[31mmodel"):
        wait_until(listened)
    assert "".join(said).splitlines()[:3] == ["heads: loading ␛[31mmodel, 0 s so far"] * 3
    threads = [thread.name for thread in threading.enumerate()]
    assert "cocoa-progress" not in threads


def test_a_closed_stderr_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.01)
    stream = (tmp_path / "stderr").open("w")
    monkeypatch.setattr(sys, "stderr", stream)
    describe = Mock(return_value="0 s")
    monkeypatch.setattr(output, "_duration", describe)
    with Progress("ask").stage("loading"):
        stream.close()
        before = describe.call_count
        wait_until(lambda: describe.call_count >= before + 3)


# --- commands


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a command takes long enough for a line."""
    advance = Stage.advance

    def slow(stage: Stage, count: int = 1) -> None:
        time.sleep(0.015)
        advance(stage, count)

    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.01)
    monkeypatch.setattr(Stage, "advance", slow)


@pytest.fixture
def cocoa(tiny_cocoa: Cocoa, few_needles: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cocoa:
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    return tiny_cocoa


LOADING = {name: COMMANDS[name] for name in ("heads", "score", "eval")}
LOADING |= {"ask": ["ask", "Who?"], "chat": ["chat"], "serve": ["serve", "--port", "0"]}


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn", "divided_once", "slow_steps")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_long_command_prints_lines(cocoa: Cocoa, data: dict[str, Path], tmp_path: Path, name: str) -> None:
    command = [word.format(**data, out=tmp_path / "out") for word in COMMANDS[name]]
    result = cocoa(*command)
    if name != "calibrate on both":  # the tiny model's answers may all be wrong
        assert result.exit_code == 0, result.output
    said = [line for line in result.stderr.splitlines() if line.startswith(f"{command[0]}: ")]
    assert [line for line in said if not LINE.fullmatch(line.partition(": ")[2])] == []
    assert any(re.search(r": [\d,]+ of [\d,]+ ", line) for line in said)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", result.stderr)
    assert " left" not in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADING)
def test_loading_prints_lines(
    cocoa: Cocoa, data: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    def slow(*_: object, **__: object) -> CocoaEngine:
        time.sleep(0.2)
        raise ModelLoadError("it is damaged")

    monkeypatch.setattr(output, "time", STOPPED)
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.01)
    monkeypatch.setattr(CocoaEngine, "from_pretrained", slow)
    command = [word.format(**data, out=tmp_path / "out") for word in LOADING[name]]
    result = cocoa(*command)
    assert f"{command[0]}: loading the embedded model (slower the first time), 0 s so far\n" in result.stderr
    assert result.stderr.endswith("it is damaged\n")
    assert result.exit_code == 2


def test_a_long_answer_and_a_long_prompt_print_lines(cocoa: Cocoa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.01)
    monkeypatch.setattr(shared_cache, "PREFILL_CHUNK", 4)
    span = SpanStream.__next__

    def slow(stream: SpanStream) -> Span:
        time.sleep(0.05)
        return span(stream)

    monkeypatch.setattr(SpanStream, "__next__", slow)
    result = cocoa("ask", "--raw", "a b c d e f g h " * 60, "--max-new-tokens", "64")
    said = result.stderr.splitlines()
    assert any(re.fullmatch(r"ask: [\d,]+ of [\d,]+ tokens of the prompt, .*", line) for line in said)
    assert any(re.fullmatch(r"ask: answering, \d+ s so far", line) for line in said)


@pytest.mark.slow
@pytest.mark.usefixtures("cocoa", "slow_steps")
@pytest.mark.parametrize("color", [True, False])
def test_a_terminal_gets_one_bar_that_is_gone_at_the_end(terminal: Callable[..., tuple[str, str]], color: bool) -> None:
    shown, printed = terminal(*COMMANDS["heads"], **({} if color else {"NO_COLOR": "1"}))
    assert re.search(r"━.* of 96 tokens, ", shown)
    assert re.search(r"━.* of 6 prompts, ", shown)
    assert "heads: " not in shown
    assert shown.rindex("\x1b[2K") > shown.rindex("━")  # erased
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    assert bool(re.search(r"\x1b\[[\d;]*3[1-8]", shown)) == color
    assert "\x1b" not in printed
    assert "written to" in printed.lower()


@pytest.mark.parametrize("drawn", [lambda console: Progress("ask").stage("answering"), live])
def test_the_cursor_is_visible_if_the_process_is_killed(
    drawn: Callable[[Console], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    console = Console(file=stream, force_terminal=True, legacy_windows=False, _environ={"TERM": "xterm-256color"})
    monkeypatch.setattr(output, "progress_console", lambda: console)
    assert can_redraw(console)
    assert not can_redraw(Console(file=stream, force_terminal=True, _environ={"TERM": "dumb"}))
    with drawn(console):
        shown = stream.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


@pytest.mark.parametrize(
    ("number", "code", "suffix"), [(signal.SIGINT, 130, "jsonl"), (signal.SIGTERM, 143, "parquet")]
)
def test_a_signal_keeps_the_rows_so_far_and_the_file_is_replaced_when_all_are_scored(
    cocoa: Cocoa, data: dict[str, Path], monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, suffix: str
) -> None:
    """If the command does not take the signal, the test fails."""

    def not_taken(number: int, frame: object) -> None:
        pytest.fail("SIGTERM would end the process")

    calls, score, out = itertools.count(1), CocoaEngine.score, Path(f"out.{suffix}")
    out.write_text("kept")

    def called(*args: object, **options: object) -> object:
        if next(calls) == 2:
            signal.raise_signal(number)
        return score(*args, **options)

    monkeypatch.setattr(CocoaEngine, "score", called)
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: not_taken}
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}  # type: ignore[arg-type]
    result = cocoa("score", "--rows", data["rows"], "--out", out)
    for each, handler in before.items():
        signal.signal(each, handler)
    assert result.exit_code == code
    incomplete = Path(f"{out}.incomplete").resolve()
    assert result.stderr == f"cocoa: 1 rows are kept in {incomplete}\ncocoa: interrupted\n"
    (row,) = incomplete.read_text().splitlines()
    assert "risk" in json.loads(row)
    assert out.read_text() == "kept"
    assert [file.name for file in Path().iterdir() if file.name.startswith(".out")] == []
    result = successful(cocoa("score", "--rows", data["rows"], "--out", out))
    assert f"{out} is replaced" in result.stderr.replace("\n", " ")
    assert out.read_bytes() != b"kept"


@pytest.mark.parametrize("values", [(1, "1"), ([1, "1"], None), ({}, None), (2**70, 1), ("\ud800", "")])
def test_rows_that_parquet_cannot_hold_are_kept_as_json(cocoa: Cocoa, values: tuple[object, object]) -> None:
    rows = [{"prompt": "a", "text": "b", "id": value} for value in values]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = cocoa("score", "--rows", "rows.jsonl", "--out", "out.parquet")
    assert result.exit_code == 2
    kept = Path("out.parquet.incomplete").resolve()
    assert f"the rows are kept as JSON lines in {kept}" in result.stderr.replace("\n", " ")
    assert [json.loads(line)["id"] for line in kept.read_text().splitlines()] == [*values]
    assert not Path("out.parquet").exists()


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), max_size=200), st.integers(10, 200))
def test_the_bar_is_one_line_whatever_the_stage_is_called(name: str, width: int) -> None:
    progress = Progress("ask")
    for one in (name, "loading the embedded model (slower the first time)"):
        with progress.stage(one):
            console = Console(width=width)
            with console.capture() as captured:
                console.print(progress._drawn(console))
        assert len(captured.get().splitlines()) == 1
        assert "s so far" in captured.get() or width < 40
