"""LangChain's answer caches never mix settings, and cached answers carry their risk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.caches import BaseCache, InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_integrations._shared.options import OF_SAMPLING
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, get_risk
from tests.helpers.made_up_risk import fitted
from tests.helpers.rivals import heads_file
from tests.helpers.settings import SETTINGS
from tests.helpers.tiny_models import engine_for_schemas, tiny_model, tiny_tokenizer

MODELS = [ChatCocoa, CocoaLLM]
SAID = AIMessage("Yes.")
OTHER = SETTINGS | {"middle_layers": (1, 3), "dola_layers": "low", "decore_heads": "heads.json"}  # written by the test


@pytest.fixture(autouse=True)
def cache() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


def answer(model: Any, **options: Any) -> Any:
    """The generation of a call: what a cache keeps."""
    inputs = [model._convert_input("Once upon a time")]
    return model.generate_prompt(inputs, risk_metadata="full", **options).generations[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("setting", OTHER)
def test_no_setting_replays_an_answer_of_another(
    kind: Any, setting: str, quick_engine: CocoaEngine, spy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(OTHER) == set(CocoaConfig.model_fields)
    Path(heads_file(tmp_path, quick_engine.model, [(0, 0)])).rename(tmp_path / "heads.json")
    monkeypatch.chdir(tmp_path)
    model = kind(engine=quick_engine, max_new_tokens=4)
    other = {setting: OTHER[setting], **({"method": "sample"} if setting in OF_SAMPLING else {})}
    answer(model)
    answer(model, **other)
    assert len(spy.method_calls) == 2
    plain, changed = answer(model), answer(model, **other)
    assert plain is not changed
    assert answer(kind(engine=quick_engine, **{"max_new_tokens": 4, **other})) is changed  # however it was given
    assert len(spy.method_calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("change", ["template", "penalty", "calibrator", "weights"])
def test_a_changed_engine_answers_anew(
    kind: Any, change: str, quick_engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine_of(seed: int) -> CocoaEngine:
        tokenizer, model = tiny_tokenizer(), tiny_model("llama", seed=seed)
        tokenizer.chat_template = quick_engine.tokenizer.chat_template
        monkeypatch.setattr(model, "name_or_path", "the/same")
        return CocoaEngine(model, tokenizer, model_name="quick")

    def ask(engine: CocoaEngine) -> Any:
        return answer(kind(engine=engine, max_tokens=8))

    engine = engine_of(6)
    first = ask(engine)
    assert ask(engine) is first
    if change == "template":
        engine.tokenizer.chat_template = "Other. " + engine.tokenizer.chat_template
    elif change == "penalty":
        engine.model.generation_config.repetition_penalty = 1.7
    elif change == "calibrator":
        engine.calibrator = fitted(model_name="quick", draws=2)
    else:
        assert ask(engine_of(9)).text != first.text
        return
    assert ask(engine) is not first


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("option", ["logits_processor", "stopping_criteria"])
def test_callables_bypass_the_cache(kind: Any, option: str, quick_engine: CocoaEngine, spy: Any) -> None:
    harmless = {"logits_processor": lambda ids, scores: scores, "stopping_criteria": lambda ids, scores: False}
    model = kind(engine=quick_engine, max_tokens=2)
    for _ in range(2):
        answer(model)
        answer(model, **{option: harmless[option]})
        answer(kind(engine=quick_engine, max_tokens=2, **{option: [harmless[option]]}))
    assert len(spy.method_calls) == 5


class SerialisingCache(BaseCache):
    """Keeps text, as caches on disk do."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], str] = {}

    def lookup(self, prompt: str, llm_string: str) -> Any:
        text = self.kept.get((prompt, llm_string))
        return None if text is None else loads(text, allowed_objects="all")

    def update(self, prompt: str, llm_string: str, return_val: Any) -> None:
        self.kept[prompt, llm_string] = dumps(list(return_val))

    def clear(self, **kwargs: Any) -> None:
        self.kept.clear()


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
@pytest.mark.parametrize("kind", MODELS)
def test_risk_survives_a_cache_that_keeps_text(kind: Any, quick_engine: CocoaEngine, spy: Any) -> None:
    model = kind(engine=quick_engine, max_tokens=8, cache=SerialisingCache())
    first, second = answer(model), answer(model)
    assert len(spy.method_calls) == 1
    assert second.text == first.text
    assert get_risk(second).to_dict() == get_risk(first).to_dict()


CONTENTS = st.sampled_from(["Hi", "Ho", [{"type": "text", "text": "Hi"}], [{"type": "text", "text": "H"}, "i"]])
METADATA = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(["a", "b"]),
        "response_metadata": st.dictionaries(st.sampled_from(["cocoa_risk", "x"]), st.floats(0, 1)),
        "additional_kwargs": st.dictionaries(st.just("cocoa_spans"), st.lists(st.integers())),
    },
)
KINDS = st.sampled_from([HumanMessage, AIMessage, SystemMessage])
CONVERSATIONS = st.lists(st.tuples(KINDS, CONTENTS, METADATA), min_size=1, max_size=2)


@pytest.mark.parametrize("length", [3, 4])
@given(conversations=st.tuples(CONVERSATIONS, CONVERSATIONS))
def test_conversations_that_share_an_answer_have_the_same_prompt(conversations: Any, length: int) -> None:
    """Equal messages with equal settings share it. Two of different prompts or settings never do."""
    cache = SerialisingCache()
    one, other = ([kind(content, **more) for kind, content, more in each] for each in conversations)
    chat = ChatCocoa(engine=engine_for_schemas(), max_tokens=3, cache=cache)
    settings = {"max_tokens": length}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ChatCocoa, "_generate", lambda *_, **__: ChatResult(generations=[ChatGeneration(message=SAID)]))
        chat.invoke(one)
        chat.invoke(other, **settings)
    if length != 3 or chat.prompt_text(one) != chat.prompt_text(other):
        assert len(cache.kept) == 2
    elif one == other:
        assert len(cache.kept) == 1


@pytest.mark.also_remote
async def test_the_second_turn_of_a_chat_is_cached(quick_chat: ChatCocoa, spy: Any) -> None:
    chat: Any = quick_chat.bind(max_tokens=4)
    for detail in ("full", "compact", "none"):
        second = [HumanMessage("Hi"), chat.invoke("Hi", risk_metadata=detail), HumanMessage("And?")]
        chat.invoke(second, risk_metadata=detail)
        asked = len(spy.method_calls)
        again = [HumanMessage("Hi", id="1"), second[1], HumanMessage("And?")]  # LangChain leaves ids out
        chat.invoke(again, risk_metadata=detail)
        await chat.ainvoke(again, risk_metadata=detail)
        assert len(spy.method_calls) == asked
