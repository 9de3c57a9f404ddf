"""An LLM after its construction: options set later, copies, pickles, shared weights."""

from __future__ import annotations

import asyncio
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.errors import ConfigError, UnsupportedFeatureError
from cocoa_integrations.llama_index import CocoaLLM
from tests.helpers.model_folders import counted_loads, save_calibrator, save_model
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

PROMPT = "Once upon a time"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save_model(tmp_path / "model")


@pytest.fixture
def other_folder(tmp_path: Path) -> str:
    return save_model(tmp_path / "other", seed=9, chat=False, max_position_embeddings=256)


@pytest.fixture
def calibrator(folder: str, tmp_path: Path) -> str:
    return save_calibrator(tmp_path / "risk.json", folder)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return counted_loads(monkeypatch)


def report(llm: CocoaLLM) -> dict[str, Any]:
    answer: dict[str, Any] = llm.complete(PROMPT).additional_kwargs["cocoa_risk"]
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("method", ["complete", "stream_complete", "acomplete", "astream_complete"])
def test_a_model_set_later_answers_the_next_call(method: str, folder: str, other_folder: str, loads: list[str]) -> None:
    llm = CocoaLLM(model_name=folder, max_new_tokens=8)
    llm.model_name = other_folder

    async def awaited() -> Any:
        answer = await getattr(llm, method)(PROMPT)
        return [chunk async for chunk in answer][-1] if "stream" in method else answer

    if method.startswith("a"):
        answer = asyncio.run(awaited())
    else:
        answer = list(getattr(llm, method)(PROMPT))[-1] if "stream" in method else getattr(llm, method)(PROMPT)
    assert answer.raw["model_name"] == other_folder
    assert answer.text == CocoaLLM(model_name=other_folder, max_new_tokens=8).complete(PROMPT).text
    assert loads == [folder, other_folder]


def test_what_follows_from_the_model_changes_with_it(folder: str, other_folder: str) -> None:
    llm = CocoaLLM(model_name=folder)
    asked = CocoaLLM(model_name=folder, context_window=400, is_chat_model=True)
    assert (llm.metadata.context_window, llm.metadata.is_chat_model) == (512, True)
    for each in (llm, asked):
        each.model_name = other_folder  # no chat template
    assert (llm.metadata.context_window, llm.metadata.is_chat_model) == (256, False)
    assert llm.metadata.is_function_calling_model is False
    assert (asked.metadata.context_window, asked.metadata.is_chat_model) == (256, True)  # cut, as at construction
    llm.context_window = 100
    llm.model_name = folder
    assert (llm.metadata.context_window, llm.metadata.is_chat_model) == (100, True)
    assert llm.metadata.model_name == folder


def test_every_loading_option_set_later_reaches_the_engine(folder: str, other_folder: str) -> None:
    llm = CocoaLLM(model_name=folder)
    llm.runtime = {"max_batch_size": 3}  # type: ignore[assignment]
    assert llm.runtime == Runtime(max_batch_size=3) == llm.engine.runtime
    llm.dtype = "bfloat16"
    assert str(llm.engine.model.dtype) == "torch.bfloat16"
    llm.model_kwargs = {"attn_implementation": "eager"}
    assert llm.engine.model.config._attn_implementation == "eager"
    llm.tokenizer_name = other_folder
    assert llm.engine.tokenizer.name_or_path == other_folder
    llm.tokenizer_kwargs = {"bos_token": "<pad>"}
    assert llm.engine.tokenizer.bos_token == "<pad>"
    llm.max_tokens = 3
    assert llm.max_new_tokens == llm.max_tokens == llm.metadata.num_output == 3


def test_nonsense_is_refused_when_it_is_set(folder: str, engine: CocoaEngine) -> None:
    llm = CocoaLLM(model_name=folder)
    for name, value in (("runtime", {"max_batch_size": 0}), ("calibrator", 3), ("model_kwargs", "fast")):
        with pytest.raises(ConfigError, match="max_batch_size" if name == "runtime" else name):
            setattr(llm, name, value)
    given = CocoaLLM(engine=engine)
    for name, value in (("calibrator", "embedded"), ("model_name", "a"), ("dtype", "float16")):
        with pytest.raises(ConfigError, match=f"engine= is given, so {name} would have no effect"):
            setattr(given, name, value)
    given.model_name = engine.model_name  # as it is
    around = CocoaLLM(model=tiny_model("llama"), tokenizer=tiny_tokenizer(), max_new_tokens=2)
    with pytest.raises(ConfigError, match="model= is given, so dtype would have no effect"):
        around.dtype = "float16"
    with pytest.raises(ConfigError, match="tokenizer= is given, so tokenizer_kwargs would have no effect"):
        around.tokenizer_kwargs = {"use_fast": False}


def test_a_given_model_takes_a_calibrator_and_a_label_later(tmp_path: Path) -> None:
    model = tiny_model("llama")
    llm = CocoaLLM(model=model, tokenizer=tiny_tokenizer(), model_name="mine", max_new_tokens=3)
    llm.calibrator = save_calibrator(tmp_path / "risk.json", "mine")
    assert report(llm)["calibrated"] is True
    llm.calibrator = None
    llm.model_name = "yours"
    assert llm.complete(PROMPT).raw["model_name"] == "yours"  # type: ignore[index]
    assert llm.engine.model is model


def test_llms_of_one_model_share_it(folder: str, calibrator: str, loads: list[str]) -> None:
    first, same = CocoaLLM(model_name=folder), CocoaLLM(model_name=folder, alpha=1.0)
    calibrated, batched = CocoaLLM(model_name=folder, calibrator=calibrator), CocoaLLM(model_name=folder, runtime={})
    assert loads == [folder]
    assert first.engine is same.engine
    assert calibrated.engine.session is first.engine.session
    assert batched.engine.model is first.engine.model
    own = CocoaLLM(model_name=folder, tokenizer=tiny_tokenizer())
    assert own.engine.model is first.engine.model
    assert loads == [folder]


def test_copies_of_a_loaded_llm_share_it_and_go_their_own_way(folder: str, other_folder: str, loads: list[str]) -> None:
    llm = CocoaLLM(model_name=folder, max_new_tokens=2)
    for same in (copy.copy(llm), copy.deepcopy(llm), llm.model_copy(deep=True)):
        assert same.engine is llm.engine
        same.model_name = other_folder
        assert same.complete(PROMPT).raw["model_name"] == other_folder  # type: ignore[index]
        assert llm.complete(PROMPT).raw["model_name"] == folder  # type: ignore[index]
    assert loads.count(folder) == 1


def test_a_pickle_loads_its_model_by_name(folder: str, calibrator: str) -> None:
    llm = CocoaLLM(
        model_name=folder, calibrator=calibrator, alpha=1.5, max_new_tokens=4, system_prompt="Hi.", is_chat_model=False
    )
    before = llm.complete(PROMPT)
    data = pickle.dumps(llm)
    assert len(data) < 20_000
    again = pickle.loads(data)
    assert again.metadata == llm.metadata
    assert again.complete(PROMPT) == before
    assert llm.complete(PROMPT) == before
    assert asyncio.run(pickle.loads(data).acomplete(PROMPT)).text == before.text
    assert copy.deepcopy(pickle.loads(data)).complete(PROMPT).text == before.text


def test_what_cannot_be_pickled_says_so(folder: str) -> None:
    around = CocoaLLM(model=tiny_model("llama"), tokenizer=tiny_tokenizer())
    with pytest.raises(
        UnsupportedFeatureError, match=r"loaded engine, model or tokenizer cannot be pickled.*give model="
    ):
        pickle.dumps(around)
    wrapped = CocoaLLM(model_name=folder, completion_to_prompt=lambda prompt: prompt)
    with pytest.raises(UnsupportedFeatureError, match="because its completion_to_prompt cannot be"):
        pickle.dumps(wrapped)
    assert wrapped.complete(PROMPT, max_new_tokens=1).text is not None
