"""``--cache``: an interrupted measurement says what it kept, continues there, and gives what it would have given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime
from cocoa_engine.cli.app import app
from cocoa_engine.datasets import Question, read_labelled
from cocoa_engine.scoring.text_profile import Profiler
from cocoa_engine.studies import source_reference
from cocoa_engine.studies.claims import TokenValues
from cocoa_engine.studies.fitting.measured import request_prompt, span_risks
from cocoa_engine.studies.signal.kept_profile import KeptProfile, ProfileCache
from cocoa_engine.studies.signal.segments import force
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
    return CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(max_batch_size=2), model_name="tiny")


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


FEW = ["--draws", "20"]
FITS = ["--folds", "2", *FEW, "--max-new-tokens", "6"]
COMMANDS: dict[str, tuple[list[str], int]] = {
    "claims": (["claims", "--data", "{texts}", *FEW], 12),
    "signal": (["signal", "--data", "{texts}", *FEW, "--out", "{out}"], 12),
    "signal without source": (["signal", "--data", "{texts}", "--context-lift", *FEW, "--out", "{out}"], 24),
    "calibrate": (["calibrate", "--data", "{texts}", *FITS, "--out", "{out}/risk.json"], 12),
    "calibrate with a probe": (["calibrate", "--data", "{texts}", "--probe", *FITS, "--out", "{out}/risk.json"], 12),
    "calibrate on questions": (["calibrate", "--questions", "{questions}", *FITS, "--out", "{out}/risk.json"], 12),
    "alpha": (["alpha", "--data", "{texts}", "--max-new-tokens", "6", "--json"], 12),
    "threshold": (["threshold", "--prompts", "{questions}", "--max-new-tokens", "6", "--json"], 12),
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_command_continues_from_its_cache(
    cocoa: Callable[..., Result], data: dict[str, Path], steps: Steps, tmp_path: Path, name: str
) -> None:
    words, prompts = COMMANDS[name]
    folder = tmp_path / "cache"

    def run(*options: object, out: str = "out") -> tuple[Result, dict[str, str]]:
        target = tmp_path / out
        target.mkdir(exist_ok=True)
        places = {**data, "out": target}
        result = cocoa(*(word.format(**places) for word in words), *options)
        files = {
            file.name: file.read_text(encoding="utf-8").replace(str(target), "").replace(str(folder), "")
            for file in sorted(target.glob("*"))
            if file.suffix in (".json", ".md")
        }
        return result, files

    steps.until = 6
    stopped, files = run("--cache", folder)
    assert stopped.exit_code == 130
    assert files == {}
    (kept,) = folder.glob("*.jsonl")
    done = len(kept.read_text(encoding="utf-8").splitlines())
    assert done > 0
    assert f"{done} of" in stopped.stderr
    assert f"were done; they are kept in {kept}" in " ".join(stopped.stderr.split())
    with kept.open("a", encoding="utf-8") as file:
        file.write('{"answer": "cut o')
    steps.until = 10**6
    resumed, files = run("--cache", folder, out="resumed")
    assert resumed.exit_code == 0, resumed.stderr
    assert steps.prompts == prompts, "nothing is measured twice"
    again, same = run("--cache", folder, out="again")
    assert steps.prompts == prompts
    plain, expected = run(out="plain")
    assert steps.prompts == 2 * prompts
    assert (again.exit_code, plain.exit_code) == (0, 0)
    for found in (files, same):
        assert {key: _without_command(text) for key, text in found.items()} == {
            key: _without_command(text) for key, text in expected.items()
        }
    if not expected:
        assert resumed.stdout == again.stdout == plain.stdout
    other, _ = run("--cache", folder, "--gamma", "0.2", out="other")
    assert other.exit_code == 0
    assert len(list(folder.glob("*.jsonl"))) == 2
    kept.write_text("nothing of ours\n", encoding="utf-8")
    refused, _ = run("--cache", folder, out="refused")
    assert refused.exit_code == 2
    assert "did not write" in refused.stderr


def _without_command(text: str) -> str:
    """Without the line that repeats the command, whose files have other names."""
    return "\n".join(line for line in text.splitlines() if "cocoa " not in line)


@pytest.mark.usefixtures("undrawn")
def test_a_self_made_set_is_kept(
    cocoa: Callable[..., Result], steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(source_reference, "MAX_NEW_TOKENS", 4)  # the reference has a test of its own
    monkeypatch.setattr(source_reference, "MIN_SPANS", 5)
    folder, out = tmp_path / "cache", tmp_path / "risk.json"
    options = ["calibrate", "--self", "--prompts", "30", *FITS, "--level", "span", "--cache", folder, "--out", out]
    steps.until = 35  # among the texts with planted errors, which come last
    stopped = cocoa(*options)
    assert (stopped.exit_code, out.exists()) == (130, False)
    assert sorted(file.name.partition("-")[0] for file in folder.glob("*.jsonl")) == ["answers", "fed"]
    steps.until = 10**6
    assert cocoa(*options).exit_code == 0
    measured = steps.prompts
    written = out.read_text(encoding="utf-8")
    assert cocoa(*options, "--overwrite").exit_code == 0
    assert steps.prompts == measured
    assert out.read_text(encoding="utf-8") == written


def test_kept_answers_have_the_risks_of_fed_ones(engine: CocoaEngine, data: dict[str, Path], tmp_path: Path) -> None:
    """On the real model, with the heads and the features of its calibrator."""
    config, calibrator = engine.config, engine.calibrator_for(engine.config)
    assert calibrator is not None
    records = read_labelled(data["texts"])[:3]
    cache = ProfileCache(tmp_path, engine, config, chat=False)
    fed, kept = [list(force(engine, records, config, cache=cache)) for _ in range(2)]
    for one, other in zip(fed, kept, strict=True):
        assert not isinstance(one.profile, KeptProfile)
        assert isinstance(other.profile, KeptProfile)
        risks = span_risks(one, calibrator, config, engine.num_layers)
        assert risks == span_risks(other, calibrator, config, engine.num_layers)
        assert risks
        assert TokenValues.of(one, risks) == TokenValues.of(other, risks)


def test_other_conditions_have_other_files(tiny: CocoaEngine, tmp_path: Path) -> None:
    config = tiny.config

    def file(engine: CocoaEngine = tiny, config: CocoaConfig = config, **options: Any) -> Path:
        return ProfileCache(tmp_path, engine, config, **{"chat": False, **options}).file

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


def test_where_spans_end_is_not_kept(cocoa: Callable[..., Result], data: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused = cocoa("signal", "--data", data["texts"], "--boundaries", "--cache", tmp_path / "cache", "--out", out)
    assert refused.exit_code == 2
    assert "leave one of them out" in refused.stderr
