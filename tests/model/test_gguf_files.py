"""What the name of a GGUF file means, at every door."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cocoa_engine import CocoaEngine, ModelLoadError
from cocoa_engine.cli.app import app
from cocoa_engine.execution.forward import trial
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.checkpoint_files import locate
from cocoa_engine.model.loading import read_context_window
from cocoa_integrations.langchain import CocoaLLM
from tests.helpers.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="module")
def answer(file: Path) -> str:
    """The answer of the model named in transformers' way."""
    engine = CocoaEngine.from_pretrained(file.parent, model_kwargs={"gguf_file": file.name})
    return engine.generate("he", max_new_tokens=6).text


def test_a_file_or_a_folder_with_one_file_is_the_model(file: Path, answer: str) -> None:
    for name in (str(file), file.parent):
        engine = CocoaEngine.from_pretrained(name)
        assert engine.generate("he", max_new_tokens=6).text == answer
        assert engine.model.dtype == torch.float32
        assert read_context_window(file) == 128
    assert CocoaLLM(model_name=str(file), max_tokens=6).invoke("he") == answer
    command = ["ask", "he", "--raw", "--model", str(file), "--tokenizer", str(file), "--max-new-tokens", "6"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["text"] == answer


def test_file_in_a_repository_of_the_hub() -> None:
    assert locate("owner/model/small-q8_0.gguf") == ("owner/model", "small-q8_0.gguf")
    assert locate("owner/model/below/small.gguf") == ("owner/model", "below/small.gguf")
    assert locate("owner/model") == ("owner/model", None)
    with pytest.raises(ModelLoadError, match="owner/model"):  # the tests have no hub
        CocoaEngine.from_pretrained("owner/model/small-q8_0.gguf")


@pytest.mark.parametrize("below", ["", "quantised/"])
def test_file_in_the_cache_of_the_hub(file: Path, answer: str, tmp_path: Path, below: str) -> None:
    """A download of before: the weights stay in the blocks of the cached file, of the revision that is asked for."""
    repository = tmp_path / "models--owner--model"
    for reference, commit in (("main", "1" * 40), ("old", "2" * 40)):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / reference).write_text(commit)
        (repository / "snapshots" / commit / below).mkdir(parents=True)
    target = Path(f"snapshots/{'1' * 40}") / below / "small.gguf"
    (repository / target).symlink_to(file)
    name = f"owner/model/{below}small.gguf"
    engine = CocoaEngine.from_pretrained(name, cache_dir=str(tmp_path), local_files_only=True)
    assert engine.generate("he", max_new_tokens=6).text == answer
    if trial.obstacle() is None:
        assert any(isinstance(parameter, BlockTensor) for parameter in engine.model.parameters())
    assert engine.info().model_name == name
    assert read_context_window(name, model_kwargs={"cache_dir": str(tmp_path)}) == 128
    for options in ({"revision": "old"}, {"revision": "none"}):
        with pytest.raises(ModelLoadError, match="neither a local folder nor in the Hub's cache"):
            CocoaEngine.from_pretrained(name, cache_dir=str(tmp_path), local_files_only=True, **options)


@pytest.mark.parametrize("name", ["no.gguf", "./a/b/no.gguf", "/a/b/no.gguf", "tests/model/no.gguf", "~/a/b/no.gguf"])
def test_file_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no file .*no\.gguf; name a GGUF file, or one in a repository"):
        CocoaEngine.from_pretrained(name)


def test_folder_with_several_files_or_other_weights(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    named = re.escape(f"has 2 GGUF files (a.gguf, b.gguf); name one, such as {tmp_path / 'a.gguf'}")
    with pytest.raises(ModelLoadError, match=named):
        CocoaEngine.from_pretrained(tmp_path)
    (tmp_path / "config.json").touch()
    assert locate(str(tmp_path)) == (str(tmp_path), None)


def test_part_of_a_model(tmp_path: Path) -> None:
    for number in (2, 1):
        part = tmp_path / f"small-0000{number}-of-00002.gguf"
        part.touch()
        for name in (part, tmp_path) if number == 1 else (part,):
            assert locate(str(name))[1] == "small-00001-of-00002.gguf"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelLoadError, match="has 3 GGUF files"):
        locate(str(tmp_path))
    in_a_repository = locate("owner/model/small-00002-of-00002.gguf")
    assert in_a_repository == ("owner/model", "small-00001-of-00002.gguf")
