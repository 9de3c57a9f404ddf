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
from typer.testing import Result

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_engine.cli import measured
from cocoa_engine.errors import ConfigError
from cocoa_engine.lab import heads as lab_heads
from cocoa_engine.lab.cache import AnswerCache, CacheFolder, _tokenizer_digest
from cocoa_engine.lab.data import read_labelled
from cocoa_engine.lab.forced import KeptProfile, ProfileCache, force
from cocoa_engine.lab.measured import labelled_features
from cocoa_engine.scoring.text_profile import Profiler
from tests.helpers.alike import near
from tests.helpers.cocoa import Cocoa
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

    def alpha(self, *options: object, stop: int = 10**6) -> Result:
        """``cocoa alpha`` on the texts, interrupted after some prompts more."""
        self.until = self.prompts + stop
        result = self.run("alpha", "--max-new-tokens", "6", "--data", self.data["texts"], *options)
        assert result.exit_code == (130 if stop < 12 else 0), result.stderr
        return result

    def folders(self) -> list[Path]:
        """Those of the unfinished commands."""
        return [each for each in self.unfinished.glob("*") if each.is_dir()]


@pytest.fixture
def commands(tiny_cocoa: Cocoa, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(tiny_cocoa, data, tmp_path, monkeypatch)


FITS = ["--folds", "2", "--draws", "20", "--max-new-tokens", "6"]
COMMANDS: dict[str, tuple[list[str], int]] = {
    "signal": (["signal", "--data", "{texts}", "--context-lift", "--draws", "20", "--out", "{out}"], 24),
    "calibrate": (["calibrate", "--data", "{texts}", "--probe", *FITS, "--out", "{out}/risk.json"], 12),
    "calibrate on questions": (["calibrate", "--questions", "{questions}", *FITS, "--out", "{out}/risk.json"], 12),
    "alpha": (["alpha", "--data", "{texts}", "--max-new-tokens", "6", "--json"], 12),
    "threshold": (["threshold", "--prompts", "{questions}", "--max-new-tokens", "6", "--json"], 12),
}


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_command_continues(commands: Commands, tmp_path: Path, name: str, cached: bool) -> None:
    words, prompts = COMMANDS[name]
    out, cache = tmp_path / "out", tmp_path / "cache"
    command = [word.format(**commands.data, out=out) for word in words] + (["--cache", str(cache)] if cached else [])

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
    block_engine: CocoaEngine, data: dict[str, Path], tmp_path: Path
) -> None:
    """On the real model, with the heads and the features of its calibrator."""
    config = block_engine.config
    records = read_labelled(data["texts"])[:3]
    cache = ProfileCache(CacheFolder(tmp_path), block_engine, config, chat=False)
    fed, kept = [list(force(block_engine, records, config, cache=cache)) for _ in range(2)]
    assert not any(isinstance(answer.profile, KeptProfile) for answer in fed)
    assert all(isinstance(answer.profile, KeptProfile) for answer in kept)
    measured, again = (labelled_features(answers, config, block_engine.num_layers) for answers in (fed, kept))
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
    commands: Commands, few_needles: list[int], tmp_path: Path, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "heads.json"
    command = ["heads", "--lengths", "16,32", "--prompts", "6", "--out", out, *given]
    hide, left = lab_heads._prompt, [3]

    def until_ctrl_c(*args: Any) -> list[int]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return hide(*args)

    with monkeypatch.context() as patched:
        patched.setattr(lab_heads, "_prompt", until_ctrl_c)
        stopped = commands.run(*command)
    assert stopped.exit_code == 130
    assert "needles: 3 of 10 were done; they are kept in" in stopped.stderr
    commands.until = 4
    stopped = commands.run(*command)
    assert (stopped.exit_code, out.exists()) == (130, False)
    assert "answering: 4 of 6 were done; they are kept in" in stopped.stderr
    commands.until = 10**6
    finished = commands.run(*command)
    assert finished.exit_code == 0, finished.stderr
    assert (len(few_needles), commands.prompts, commands.folders()) == (10, 6, [])
    found = out.read_text(encoding="utf-8")
    (kept,) = (tmp_path / "own" / "heads").glob("*.json")
    assert kept.read_text(encoding="utf-8") == found
    kept.unlink()
    again = commands.run(*command, "--overwrite")
    assert again.stdout == finished.stdout
    # prompts whose beginnings the engine remembers are read in other parts, and rounded otherwise
    assert json.loads(out.read_text(encoding="utf-8"))["reference"] == near(json.loads(found)["reference"])
    assert (len(few_needles), commands.prompts) == ((10, 6) if given else (20, 12))


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_calibrator_that_was_written_continues_with_its_reference(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_heads, "MIN_SPANS", 5)
    monkeypatch.setattr(lab_heads, "MAX_NEW_TOKENS", 6)
    out = tmp_path / "risk.json"
    command = ["calibrate", "--self", "--prompts", "30", *FITS, "--level", "span", "--out", out]
    assert commands.run(*command).exit_code == 0
    (kept,) = (tmp_path / "own" / "heads").glob("*.json")
    expected, total = json.loads(kept.read_text(encoding="utf-8"))["reference"], commands.prompts
    kept.unlink()
    out.unlink()
    commands.until = 2 * total - 20  # in the reference, which comes last
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
        commands.alpha(*options, stop=2)
    assert len(commands.folders()) == 2, "how the output is shown makes no difference"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    commands.alpha(stop=2)
    assert len(commands.folders()) == 3
    shutil.rmtree(commands.unfinished)
    monkeypatch.setattr(measured, "KEPT", 2)
    folders: list[Path] = []

    def interrupted(gamma: float) -> None:
        commands.alpha("--gamma", gamma, stop=2)
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
    assert "0 of 12 were done; they are lost" in commands.alpha(stop=0).stderr
    assert commands.folders() == []


@pytest.mark.slow
@pytest.mark.parametrize("why", ["a file", "held", "goes away"])
def test_without_a_folder_the_command_runs_all_the_same(
    commands: Commands, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = commands.alpha().stdout
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
        commands.alpha(stop=2)
        (folder,) = commands.folders()
        lock = FileLock(folder.with_suffix(measured.LOCK))
        lock.acquire(timeout=0)
    assert "2 of 12 were done; they are lost, and nothing was written" in commands.alpha(stop=2).stderr
    before, finished = commands.prompts, commands.alpha()
    assert (finished.stdout, finished.stderr, commands.prompts) == (expected, "", before + 12)
    if why == "held":
        lock.release()
        assert commands.folders() == [folder]
        assert "2 measurements" in commands.alpha().stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs rights of files")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_others_could_have_written_is_measured_again(commands: Commands, level: int) -> None:
    """Be it the cache directory, that of all commands or that of one, which others could write to."""
    commands.alpha(stop=4)
    (folder,) = commands.folders()
    [folder, folder.parent, folder.parent.parent][level].chmod(0o777)
    before = commands.prompts
    assert "continuing" not in commands.alpha().stderr
    assert commands.prompts == before + 12
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
            for use in (lambda: cache.get("one"), lambda: cache.add("two", {"value": 2})):  # noqa: B023
                with pytest.raises(ConfigError, match="cannot be used: No such file"):
                    use()
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
    for name in ("one", "two", "three"):
        assert opened(required=True).get(name) == {"value": name}
