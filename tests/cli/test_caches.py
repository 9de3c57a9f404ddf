"""An interrupted measurement says what it kept, continues there, and gives what it would have given.

With ``--cache`` that is for good, without it until the same command has ended.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from typer.testing import CliRunner, Result

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime
from cocoa_engine.cli import unfinished
from cocoa_engine.cli.app import app
from cocoa_engine.errors import ConfigError
from cocoa_engine.lab import heads as lab_heads
from cocoa_engine.lab.cache import AnswerCache, CacheFolder, _tokenizer_digest
from cocoa_engine.lab.data import Question, read_labelled
from cocoa_engine.lab.forced import KeptProfile, ProfileCache, force
from cocoa_engine.lab.measured import labelled_features, request_prompt
from cocoa_engine.scoring.text_profile import Profiler
from tests.helpers.alike import near
from tests.helpers.rivals import heads_file
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("divided_once")

WORDS = ("red", "blue", "old", "new", "big", "cold", "wet", "dry", "soft", "loud", "dark", "pale")


class Steps:
    """Counts what is measured, and interrupts after some of it.

    Attributes:
        prompts: the prompts that texts were fed after, or that were answered.
        until: the number of prompts after which Ctrl-C is pressed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts, self.until = 0, 10**6
        for owner, name in ((Profiler, "__call__"), (CocoaEngine, "generate_batch")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, measure: Callable[..., Any]) -> Callable[..., Any]:
        def counted(owner: Any, prompts: Any, *args: Any, **options: Any) -> Any:
            if self.prompts >= self.until:
                raise KeyboardInterrupt
            self.prompts += len(prompts) if "config" in options else 1
            return measure(owner, prompts, *args, **options)

        return counted


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


@pytest.fixture(scope="module")
def tiny() -> CocoaEngine:
    """Answers two prompts at a time."""
    model = tiny_model("llama", seed=6, max_position_embeddings=2048)
    engine = CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(max_batch_size=2), model_name="tiny")
    engine.generate("Hello", max_new_tokens=1)  # the kernels are loaded before tests choose another cache directory
    return engine


@pytest.fixture
def cocoa(tiny: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs ``cocoa`` on a tiny model."""
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **__: tiny)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(app, list(map(str, args)), prog_name="cocoa")


@pytest.fixture
def data(tiny: CocoaEngine, tmp_path: Path) -> dict[str, Path]:
    """Files of each kind that the commands read. The known answer to every other question is what the model says."""
    texts, questions = [], []
    for number, word in enumerate(WORDS):
        other = WORDS[number - 1]
        source, text = f"A {word} house.", f"It is {word} and {other}."
        prompt = f"Text: {source} Summary:"
        row = {"prompt": prompt, "text": text, "spans": [[text.index(other), len(text)]], "source": source}
        texts += [{"id": f"{number}a", **row}, {"id": f"{number}b", **row, "text": f"It is {word}.", "spans": []}]
        question = Question(f"Is it {word}?", None, (), "")
        said = tiny.generate(request_prompt(tiny, question.request), max_new_tokens=6).text
        questions.append({"question": question.text, "answers": [said if number % 2 else "zebra"]})
    files = {name: tmp_path / f"{name}.jsonl" for name in ("texts", "questions")}
    for name, rows in (("texts", texts), ("questions", questions)):
        files[name].write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return files


FITS = ["--folds", "2", "--draws", "20", "--max-new-tokens", "6"]
COMMANDS: dict[str, tuple[list[str], int]] = {
    "signal": (["signal", "--data", "{texts}", "--context-lift", "--draws", "20", "--out", "{out}"], 24),
    "calibrate": (["calibrate", "--data", "{texts}", "--probe", *FITS, "--out", "{out}/risk.json"], 12),
    "calibrate on questions": (["calibrate", "--questions", "{questions}", *FITS, "--out", "{out}/risk.json"], 12),
    "alpha": (["alpha", "--data", "{texts}", "--max-new-tokens", "6", "--json"], 12),
    "threshold": (["threshold", "--prompts", "{questions}", "--max-new-tokens", "6", "--json"], 12),
}


@pytest.fixture
def unfinished_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the unfinished commands in a cache directory of the test. It does not exist yet."""
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(unfinished, "FOLDER", "unfinished")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own" / "unfinished"


def commands_in(folder: Path) -> list[Path]:
    return [each for each in folder.glob("*") if each.is_dir()]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_command_continues(
    cocoa: Callable[..., Result],
    data: dict[str, Path],
    steps: Steps,
    tmp_path: Path,
    unfinished_folder: Path,
    name: str,
    cached: bool,
) -> None:
    words, prompts = COMMANDS[name]
    out, cache = tmp_path / "out", tmp_path / "cache"
    command = [*(word.format(**data, out=out) for word in words), *(["--cache", str(cache)] if cached else [])]

    def written() -> dict[str, str]:
        files = [file for file in out.glob("*") if file.suffix in (".json", ".md")]
        return {file.name: file.read_text(encoding="utf-8") for file in files}

    steps.until = 6
    stopped = cocoa(*command)
    assert (stopped.exit_code, written()) == (130, {})
    (folder,) = [cache] if cached else commands_in(unfinished_folder)
    (file,) = folder.glob("*.jsonl")
    done = len(file.read_text(encoding="utf-8").splitlines())
    assert f"{done} of" in stopped.stderr
    again = "" if cached else "; give the same command again to continue"
    assert f"; they are kept in {folder}{again}" in stopped.stderr
    with file.open("a", encoding="utf-8") as lines:
        lines.write('{"answer": "cut o')
    steps.until = 10**6
    resumed, files = cocoa(*command), written()
    assert resumed.exit_code == 0, resumed.stderr
    assert ("continuing an interrupted command" in resumed.stderr) != cached
    assert steps.prompts == prompts, "nothing is measured twice"
    assert commands_in(unfinished_folder) == []
    shutil.rmtree(out, ignore_errors=True)
    whole = cocoa(*command)
    assert (whole.stdout, written()) == (resumed.stdout, files)
    assert steps.prompts == (1 if cached else 2) * prompts


def test_kept_answers_have_the_features_of_fed_ones(engine: CocoaEngine, data: dict[str, Path], tmp_path: Path) -> None:
    """On the real model, with the heads and the features of its calibrator."""
    config = engine.config
    records = read_labelled(data["texts"])[:3]
    cache = ProfileCache(CacheFolder(tmp_path), engine, config, chat=False)
    fed, kept = [list(force(engine, records, config, cache=cache)) for _ in range(2)]
    assert not any(isinstance(answer.profile, KeptProfile) for answer in fed)
    assert all(isinstance(answer.profile, KeptProfile) for answer in kept)
    measured, again = (labelled_features(answers, config, engine.num_layers) for answers in (fed, kept))
    for level, items in measured.items():
        assert items.features.tolist() == again[level].features.tolist()
    assert measured["span"].labels.any()


def test_other_conditions_have_other_files(tiny: CocoaEngine, tmp_path: Path) -> None:
    config = tiny.config

    def file(engine: CocoaEngine = tiny, config: CocoaConfig = config, **options: Any) -> Path:
        return ProfileCache(CacheFolder(tmp_path), engine, config, **{"chat": False, **options}).file

    other_template = tiny_tokenizer()
    other_template.chat_template = "{{ messages[0].content }}"
    other_tokens = tiny_tokenizer()
    other_tokens.add_tokens(["house"])
    heads = heads_file(tmp_path, tiny.num_layers, 4, [(1, 2)])
    files = [
        file(),
        file(chat=True),
        file(without_source=True),
        file(layer=2),
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


# --- without --cache


@pytest.fixture
def few_needles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two depths of one needle, which count though the model recalls nothing. Lists the runs that were measured."""
    measured: list[int] = []
    answered = lab_heads._answered

    def counted(engine: Any, prompt: list[int], needle: str) -> Any:
        measured.append(len(prompt))
        return answered(engine, prompt, needle)

    monkeypatch.setattr(lab_heads, "_answered", counted)
    monkeypatch.setattr(lab_heads, "NEEDLES", lab_heads.NEEDLES[:1])
    monkeypatch.setattr(lab_heads, "RECALLED", -1.0)
    monkeypatch.setattr(lab_heads, "MIN_SPANS", 5)
    return measured


@pytest.mark.slow
@pytest.mark.parametrize("given", [[], ["--cache", "cache"]])
def test_heads_continue(
    cocoa: Callable[..., Result],
    steps: Steps,
    few_needles: list[int],
    tmp_path: Path,
    unfinished_folder: Path,
    given: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "heads.json"
    command = ["heads", "--lengths", "16,32", "--prompts", "6", "--out", out, *given]
    hide = lab_heads._prompt
    left = [3]

    def until_ctrl_c(*args: Any) -> list[int]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return hide(*args)

    with monkeypatch.context() as patched:
        patched.setattr(lab_heads, "_prompt", until_ctrl_c)
        stopped = cocoa(*command)
    assert stopped.exit_code == 130
    assert "needles: 3 of 10 were done; they are kept in" in stopped.stderr
    steps.until = 4
    stopped = cocoa(*command)
    assert (stopped.exit_code, out.exists()) == (130, False)
    assert "answering: 4 of 6 were done; they are kept in" in stopped.stderr
    steps.until = 10**6
    finished = cocoa(*command)
    assert finished.exit_code == 0, finished.stderr
    assert len(few_needles) == 10
    assert steps.prompts == 6
    assert commands_in(unfinished_folder) == []
    found = out.read_text(encoding="utf-8")
    (kept,) = (tmp_path / "own" / "heads").glob("*.json")
    assert kept.read_text(encoding="utf-8") == found
    kept.unlink()
    again = cocoa(*command, "--overwrite")
    assert again.stdout == finished.stdout
    # prompts whose beginnings the engine remembers are read in other parts, and rounded otherwise
    assert json.loads(out.read_text(encoding="utf-8"))["reference"] == near(json.loads(found)["reference"])
    assert (len(few_needles), steps.prompts) == ((10, 6) if given else (20, 12))


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_calibrator_that_was_written_continues_with_its_reference(
    cocoa: Callable[..., Result], steps: Steps, tmp_path: Path, unfinished_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_heads, "MIN_SPANS", 5)
    monkeypatch.setattr(lab_heads, "MAX_NEW_TOKENS", 6)
    out = tmp_path / "risk.json"
    command = ["calibrate", "--self", "--prompts", "30", *FITS, "--level", "span", "--out", out]
    assert cocoa(*command).exit_code == 0
    (kept,) = (tmp_path / "own" / "heads").glob("*.json")
    expected, total = json.loads(kept.read_text(encoding="utf-8"))["reference"], steps.prompts
    kept.unlink()
    out.unlink()
    steps.until = 2 * total - 20  # in the reference, which comes last
    stopped = cocoa(*command)
    assert (stopped.exit_code, out.exists()) == (130, True)
    assert "give the same command with --overwrite to continue" in stopped.stderr
    steps.until = 10**6
    assert cocoa(*command, "--overwrite").exit_code == 0
    assert steps.prompts == 2 * total, "nothing is measured twice"
    # prompts whose beginnings the engine remembers are read in other parts, and rounded otherwise
    assert json.loads(kept.read_text(encoding="utf-8"))["reference"] == near(expected)
    assert commands_in(unfinished_folder) == []


ALPHA = ["alpha", "--max-new-tokens", "6", "--data"]


@pytest.mark.slow
def test_other_options_are_another_command(
    cocoa: Callable[..., Result],
    data: dict[str, Path],
    steps: Steps,
    tmp_path: Path,
    unfinished_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps.until = 2
    for options in ([], ["--gamma", "0.2"], ["--json"], ["--no-color"]):
        steps.prompts = 0
        assert cocoa(*ALPHA, data["texts"], *options).exit_code == 130
    assert len(commands_in(unfinished_folder)) == 2, "how the output is shown makes no difference"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    steps.prompts = 0
    assert cocoa(*ALPHA, data["texts"]).exit_code == 130
    assert len(commands_in(unfinished_folder)) == 3


@pytest.mark.slow
def test_only_the_latest_commands_are_kept(
    cocoa: Callable[..., Result],
    data: dict[str, Path],
    steps: Steps,
    unfinished_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unfinished, "KEPT", 2)
    steps.until = 2
    folders: list[Path] = []

    def interrupted(gamma: float) -> None:
        steps.prompts = 0
        assert cocoa(*ALPHA, data["texts"], "--gamma", gamma).exit_code == 130
        folders.extend(each for each in commands_in(unfinished_folder) if each not in folders)

    for number, gamma in enumerate((0.1, 0.2, 0.4)):
        interrupted(gamma)
        os.utime(folders[number], (number, number))
    assert sorted(commands_in(unfinished_folder)) == sorted(folders[1:])
    with FileLock(folders[1].with_suffix(unfinished.LOCK)):  # as another process has it
        interrupted(0.5)
        assert sorted(commands_in(unfinished_folder)) == sorted(folders[1:])
    interrupted(0.6)
    assert sorted(commands_in(unfinished_folder)) == sorted(folders[3:])


def test_nothing_is_left_of_a_command_that_measured_nothing(
    cocoa: Callable[..., Result], data: dict[str, Path], steps: Steps, unfinished_folder: Path
) -> None:
    steps.until = 0
    stopped = cocoa(*ALPHA, data["texts"])
    assert stopped.exit_code == 130
    assert "0 of 12 were done; they are lost" in stopped.stderr
    assert commands_in(unfinished_folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("why", ["a file", "held", "goes away"])
def test_without_a_folder_the_command_runs_all_the_same(
    cocoa: Callable[..., Result],
    data: dict[str, Path],
    steps: Steps,
    tmp_path: Path,
    unfinished_folder: Path,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = cocoa(*ALPHA, data["texts"]).stdout
    steps.until = 14
    if why == "a file":
        shutil.rmtree(tmp_path / "own")
        (tmp_path / "own").touch()
    elif why == "goes away":
        generate_batch = CocoaEngine.generate_batch

        def cleaned(engine: CocoaEngine, prompts: Any, **options: Any) -> Any:
            shutil.rmtree(unfinished_folder, ignore_errors=True)
            return generate_batch(engine, prompts, **options)

        monkeypatch.setattr(CocoaEngine, "generate_batch", cleaned)
    else:
        assert cocoa(*ALPHA, data["texts"]).exit_code == 130
        steps.until += 2
        (folder,) = commands_in(unfinished_folder)
        lock = FileLock(folder.with_suffix(unfinished.LOCK))
        lock.acquire(timeout=0)
    stopped = cocoa(*ALPHA, data["texts"])
    assert stopped.exit_code == 130
    assert "2 of 12 were done; they are lost, and nothing was written" in stopped.stderr
    steps.until = 10**6
    before = steps.prompts
    finished = cocoa(*ALPHA, data["texts"])
    assert (finished.exit_code, finished.stdout, finished.stderr) == (0, expected, "")
    assert steps.prompts == before + 12
    if why == "held":
        lock.release()
        assert commands_in(unfinished_folder) == [folder]
        assert "2 measurements" in cocoa(*ALPHA, data["texts"]).stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs rights of files")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_others_could_have_written_is_measured_again(
    cocoa: Callable[..., Result], data: dict[str, Path], steps: Steps, unfinished_folder: Path, level: int
) -> None:
    """Be it the cache directory, that of all commands or that of one, which others could write to."""
    steps.until = 4
    assert cocoa(*ALPHA, data["texts"]).exit_code == 130
    (folder,) = commands_in(unfinished_folder)
    opened = [folder, folder.parent, folder.parent.parent][level]
    opened.chmod(0o777)
    steps.until, before = 10**6, steps.prompts
    finished = cocoa(*ALPHA, data["texts"])
    assert finished.exit_code == 0
    assert "continuing" not in finished.stderr
    assert steps.prompts == before + 12
    assert not any(each.exists() and each.stat().st_mode & 0o022 for each in (folder, *folder.parents[:2]))


def test_tokens_may_be_bytes() -> None:
    """As those of tokenizers that are written in Python around tiktoken."""

    class Tokenizer:
        def __init__(self, *tokens: bytes) -> None:
            self.tokens = tokens

        def get_vocab(self) -> dict[bytes, int]:
            return {token: number for number, token in enumerate(self.tokens)}

    one, same, other = map(_tokenizer_digest, (Tokenizer(b"a", b"b"), Tokenizer(b"a", b"b"), Tokenizer(b"b", b"a")))
    assert one == same != other


def test_a_cache_that_was_asked_for_must_work(tiny: CocoaEngine, tmp_path: Path) -> None:
    folders = CacheFolder(tmp_path / "asked"), CacheFolder(tmp_path / "own", required=False)
    for folder in folders:
        cache = AnswerCache(folder, "answers", tiny, tiny.config, {})
        cache.add("one", {"value": 1})
        shutil.rmtree(folder.path)
        if folder.required:
            with pytest.raises(ConfigError, match="cannot be used: No such file"):
                cache.get("one")
            with pytest.raises(ConfigError, match="cannot be used: No such file"):
                cache.add("two", {"value": 2})
        else:
            assert cache.get("one") is None
            cache.add("two", {"value": 2})
            assert folder.error is not None


def test_a_damaged_line_is_refused_or_measured_again_with_all_after_it(tiny: CocoaEngine, tmp_path: Path) -> None:
    def opened(*, required: bool) -> AnswerCache:
        return AnswerCache(CacheFolder(tmp_path, required), "answers", tiny, tiny.config, {})

    cache = opened(required=True)
    for name in ("one", "two", "three"):
        cache.add(name, {"value": name})
    first, _, third = cache.file.read_bytes().splitlines(keepends=True)
    cache.file.write_bytes(first + bytes(40) + b"\n" + third)  # as a power failure leaves it
    with pytest.raises(ConfigError, match="did not write"):
        opened(required=True)
    again = opened(required=False)
    measured: list[str] = []
    for name in ("one", "two", "three"):
        assert again.get_or_measure(name, lambda name=name: measured.append(name) or {"value": name}) == {"value": name}
    assert measured == ["two", "three"]
    assert [opened(required=True).get(name) for name in ("one", "two", "three")] == [
        {"value": "one"},
        {"value": "two"},
        {"value": "three"},
    ]
