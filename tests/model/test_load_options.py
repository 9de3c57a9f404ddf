"""Loading options are declared once: Python, the command line and every adapter have the same names and defaults."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("lm_eval")

from cocoa_engine import CocoaEngine
from cocoa_engine.cli.app import app
from cocoa_engine.cli.options import LoadOptions as CommandOptions
from cocoa_engine.errors import ModelLoadError
from cocoa_engine.model import loading
from cocoa_engine.model.load_options import (
    LoadOptions,
    changed_options,
    default_of,
    loading_arguments,
)
from cocoa_engine.model.loading import load_pretrained
from cocoa_integrations.langchain import ChatCocoa
from cocoa_integrations.langchain import CocoaLLM as LangChainLLM
from cocoa_integrations.llama_index import CocoaLLM as LlamaIndexLLM
from cocoa_integrations.lm_eval import CocoaLM


@pytest.fixture(params=[True, False], ids=["gpu", "no gpu"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether torch says that there is a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)  # does not count: it has no float64
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    return bool(request.param)


@pytest.fixture
def loads(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each load, which returns the engine of this run."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda **arguments: calls.append(arguments) or engine)
    return calls


def test_the_options_are_the_parameters_of_from_pretrained() -> None:
    parameters = inspect.signature(CocoaEngine.from_pretrained).parameters
    assert LoadOptions.model_fields.keys() == parameters.keys() - {"config", "more_model_kwargs"}
    assert loading_arguments(LoadOptions()).keys() == LoadOptions.model_fields.keys()


@pytest.mark.parametrize("load", [CocoaEngine.from_pretrained, load_pretrained])
def test_the_defaults_of_parameters_are_the_declared_ones(load: Callable[..., object]) -> None:
    parameters = inspect.signature(load).parameters
    for name in LoadOptions.model_fields.keys() & parameters.keys():
        assert (parameters[name].default or None) == (default_of(name) or None), name  # None: an empty mapping


def test_the_command_line_and_adapters_have_every_option() -> None:
    own = {"model_name", "tokenizer_name", "calibrator"}  # --model, --tokenizer and --calibrator
    parts = {"runtime", "model_kwargs", "tokenizer_kwargs"}  # --forward, --revision, and nothing of the last
    others = {field.name for field in dataclasses.fields(CommandOptions)}
    assert LoadOptions.model_fields.keys() - own - parts <= others
    for model in (ChatCocoa, LangChainLLM, LlamaIndexLLM):
        for name, declared in LoadOptions.model_fields.items():
            field = model.model_fields[name]
            assert field.description == declared.description
            assert field.get_default(call_default_factory=True) == declared.get_default(call_default_factory=True)


def test_the_engine_loads_to_the_gpu_if_there_is_one(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    places = []

    def refuse(name: str, *, options: dict[str, Any], **_: object) -> None:
        places.append(options["device_map"])
        raise ModelLoadError("nothing is loaded here")

    monkeypatch.setattr(loading, "_load", refuse)
    auto = "auto" if gpu else None
    expected: list[tuple[dict[str, Any], Any]] = [
        *(({"device_map": place}, place) for place in (None, "cpu", "cuda:0", {"": 0})),
        *(({**options, "tp_plan": None}, auto) for options in ({}, {"device_map": "auto"})),
        *(({"device_map": "auto", **options}, None) for options in ({"tp_plan": "auto"}, {"distributed_config": {}})),
        ({}, auto),
    ]
    for options, _ in expected:
        with pytest.raises(ModelLoadError, match="nothing is loaded"):
            CocoaEngine.from_pretrained("a", **options)
    assert places == [place for _, place in expected]


@pytest.mark.parametrize("device_map", ["auto", None, "cpu", "cuda:1"])
def test_every_adapter_and_the_command_line_load_to_the_same_device(
    gpu: bool, device_map: str | None, loads: list[dict[str, Any]]
) -> None:
    options: dict[str, Any] = {} if device_map == "auto" else {"device_map": device_map}
    ChatCocoa(model="a", **options).load()
    LangChainLLM(model="b", **options).load()
    LlamaIndexLLM(model_name="c", **options)
    CocoaLM("d", **options)
    if not options:
        assert CliRunner().invoke(app, ["info", "e"], prog_name="cocoa").exit_code == 0
    assert [load["model_name"] for load in loads] == ["a", "b", "c", "d"] + ([] if options else ["e"])
    assert {load["device_map"] for load in loads} == {(("auto" if gpu else None) if not options else device_map)}


def test_changed_options_are_those_with_an_effect() -> None:
    assert changed_options(LoadOptions()) == []
    assert changed_options({"device_map": None, "dtype": "auto", "model_kwargs": {}}) == []
    assert changed_options({"device_map": "cpu", "dtype": torch.float16}) == ["dtype", "device_map"]
    assert changed_options(LoadOptions(allow_pickle=True, model_name="a")) == ["model_name", "allow_pickle"]
