"""The model of every adapter is named by ``model`` or by ``model_name``, which are one option."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine.errors import UnsupportedFeatureError
from cocoa_integrations.langchain import ChatCocoa
from cocoa_integrations.langchain import CocoaLLM as LangChainLLM
from cocoa_integrations.llama_index import CocoaLLM
from tests.helpers.model_folders import save_model

HERE = [ChatCocoa, LangChainLLM, CocoaLLM]
ADAPTERS = [*HERE, *(partial(kind, base_url="http://127.0.0.1:9/v1") for kind in HERE)]
NAMES = ("model", "model_name")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("make", ADAPTERS)
@pytest.mark.parametrize("form", [str, Path])
@pytest.mark.parametrize("names", [("model",), ("model_name",), NAMES])
def test_both_names(make: Any, names: tuple[str, ...], form: Callable[[str], Any], folder: str) -> None:
    adapter = make(**{name: form(folder) for name in names})
    assert (adapter.model, adapter.model_name) == (folder, folder)


@pytest.mark.parametrize("make", ADAPTERS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_name_is_refused(make: Any, name: str, folder: str) -> None:
    for value in (3, b"model", ["model"], object()):
        with pytest.raises(ConfigError, match=f"{name} takes a Hub id, a folder or a GGUF file"):
            make(**{name: value})
    with pytest.raises(ConfigError, match=f"^{name} is empty"):
        make(**{name: ""})
    with pytest.raises(ConfigError, match="model and model_name are the same option, given as model="):
        make(**{**dict.fromkeys(NAMES, folder), name: Path("elsewhere")})


@pytest.mark.parametrize("make", HERE)
def test_what_is_no_address_is_refused_and_an_address_excludes_an_engine(make: Any) -> None:
    for address in ("", " ", "localhost:8000", "http://", "ftp://host/v1"):
        with pytest.raises(ConfigError, match=r"^base_url takes the address of a server, such as http://"):
            make(base_url=address)
    with pytest.raises(ConfigError, match="base_url= is given, so dtype would have no effect"):
        make(base_url="http://a/v1", dtype="bfloat16")
    with pytest.raises(UnsupportedFeatureError, match="needs the engine"):
        make(base_url="http://a/v1").load()


@pytest.mark.parametrize("make", HERE)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_beside_an_engine_is_refused_as_it_was_given(make: Any, name: str, engine: CocoaEngine) -> None:
    message = f"^engine= is given, so {name} would have no effect"
    with pytest.raises(ConfigError, match=message):
        make(engine=engine, **{name: "elsewhere"})
    adapter = make(engine=engine)
    with pytest.raises(ConfigError, match=message):
        setattr(adapter, name, "elsewhere")


@pytest.mark.parametrize("make", HERE)
@pytest.mark.parametrize("name", NAMES)
def test_names_are_set_copied_and_written(make: Any, name: str, folder: str, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=8)
    adapter = make(**{name: folder})
    copy = adapter.model_copy(update={name: other})
    assert (copy.model, copy.model_name, adapter.model) == (other, other, folder)
    assert copy.load().model_name == other
    setattr(adapter, name, Path(other))
    assert (adapter.model, adapter.model_name) == (other, other)
    assert adapter.load().model_name == other
    again = pickle.loads(pickle.dumps(adapter))  # our own
    assert (again.model, again.model_name) == (other, other)
    if make is CocoaLLM:
        written = adapter.to_dict()
        assert CocoaLLM.from_dict(written).metadata.model_name == other
        del written["model_name"]
        assert CocoaLLM.from_dict({**written, name: folder}).metadata.model_name == folder


def test_a_loaded_model_is_no_name(folder: str) -> None:
    """LlamaIndex's HuggingFaceLLM takes it as ``model``, and the name beside it is a label."""
    loaded = CocoaEngine.from_pretrained(folder)
    llm = CocoaLLM(model=loaded.model, tokenizer=loaded.tokenizer, model_name="label")
    assert (llm.model, llm.metadata.model_name) == ("label", "label")
    with pytest.raises(ConfigError, match="pass engine=CocoaEngine"):
        ChatCocoa(model=loaded.model)
