"""Many given texts after one prompt: the figures of each alone, but the prompt is encoded once."""

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, NonFiniteLogitsError, Runtime, Usage
from cocoa_engine.execution.backends import KINDS
from cocoa_engine.execution.backends.shared_cache import SharedCache
from tests.helpers.alike import assert_alike, assert_all_alike
from tests.helpers.backends import made
from tests.helpers.inside import hook_count, record, use_backend
from tests.helpers.reference import FullForward, Reference, assert_same
from tests.helpers.rivals import config_of
from tests.helpers.tiny_models import RECURRENT, tiny_model, tiny_tokenizer

PROMPT = list(range(20, 60))
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("llama", "mistral-sliding", "gemma3_text", "gpt2", "mamba", "qwen3_next")),
    ("gemma3_text", {"method": "cocoa", "metric": "con_mlds", "span_log_prob": "mean", "final_layer": "pre_norm"}),
    ("gemma3_text", {"middle_layers": (0, 6)}),
]


def random_texts(count: int = 12) -> list[list[int]]:
    """Token ids that often begin alike; the first text twice, and the beginning of another."""
    rng = random.Random(0)
    texts = [[rng.randrange(3, 7) for _ in range(rng.randrange(1, 8))] for _ in range(count)]
    return [*texts, texts[0], texts[1][:1]]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "settings"), CASES)
def test_same_figures_as_alone_and_as_the_reference(architecture: str, settings: dict[str, Any]) -> None:
    model, tokenizer, config = tiny_model(architecture), tiny_tokenizer(), CocoaConfig(**settings)
    engine, reference = CocoaEngine(model, tokenizer), Reference(FullForward(model), tokenizer, config)
    texts = random_texts()
    for text, one in zip(texts, engine.score(PROMPT, texts, config=config), strict=True):
        assert_alike(one, engine.score(PROMPT, text, config=config))
        assert_same(one, reference.score(PROMPT, text))
        count, passes = len(text), 2 if architecture not in RECURRENT else 1 + len(text)
        usage = {"prompt_tokens": len(PROMPT), "completion_tokens": count, "fed_tokens": count}
        assert one.usage == Usage(**usage, forward_passes=passes)
    assert hook_count(engine.model) == 0


STEPS: list[tuple[str, int, dict[str, Any]]] = [
    *((kind, width, {}) for kind in KINDS for width in (1, 3, 128)),
    ("lean", 9, {"method": "dola", "dola_layers": "1,2"}),  # three rows of a contrast in a step
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width", "settings"), STEPS)
def test_every_way_and_any_width_of_a_step(
    kind: str, width: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    engine, texts = CocoaEngine(model, tiny_tokenizer()), random_texts(8)
    alone = [engine.score(PROMPT, text, **settings) for text in texts]
    chosen = made(model, kind, "transposed")
    monkeypatch.setattr(type(chosen.backend), "paths_per_step", width)
    use_backend(engine, chosen)
    assert_all_alike(engine.score(PROMPT, texts, **settings), alone)


def test_the_prompt_is_fed_once_and_so_is_each_shared_beginning() -> None:
    engine = CocoaEngine(tiny_model("gpt2"), tiny_tokenizer())
    engine.info()
    fed: list[int] = []
    engine.model.register_forward_pre_hook(
        lambda _, __, inputs: fed.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    engine.score(PROMPT, [[5, 6, 7], [5, 6, 8, 9], [4], [5, 6, 7], [5]])
    assert fed == [len(PROMPT), len({(5,), (5, 6), (5, 6, 7), (5, 6, 8), (5, 6, 8, 9), (4,)})]


def test_forms_in_which_texts_may_come() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    expected = engine.score("the sea", [[5, 6], [7, 8]])
    for texts in (((5, 6), (7, 8)), torch.tensor([[5, 6], [7, 8]]), [torch.tensor([5, 6]), torch.tensor([7, 8])]):
        assert engine.score("the sea", texts) == expected  # type: ignore[call-overload]
    assert isinstance(engine.score("the sea", torch.tensor([5, 6])), Generation)  # type: ignore[call-overload]
    (one,) = engine.score("the sea", [" is"])
    assert_alike(one, engine.score("the sea", " is"))
    assert engine.score("the sea", ("is", "a"))[1].text == "a"


@pytest.mark.slow
def test_many_steps_hold_no_more_than_one_and_the_cache_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are used again: the cache is as large as the largest step needs. It is freed after an error, too."""
    model = tiny_model("llama")
    engine = CocoaEngine(model, tiny_tokenizer())
    engine.info()
    opened: list[tuple[int, Any]] = []  # the tokens that memory is reserved for, and a reference to the store
    original = SharedCache.open

    def record(self: SharedCache, prompts: Any, reserve_tokens: int, capture: Any) -> Any:
        trees = original(self, prompts, reserve_tokens, capture)
        opened.extend((reserve_tokens, weakref.ref(tree.store)) for tree in trees)
        return trees

    monkeypatch.setattr(SharedCache, "open", record)
    monkeypatch.setattr(SharedCache, "paths_per_step", 16)
    engine.score(PROMPT, [[a, b] for a in range(3, 40) for b in range(3, 6)])
    assert [reserved for reserved, _ in opened] == [16]
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="at index 0, 1 are NaN"):
        engine.score(PROMPT, [[8, 9], [10]])
    gc.collect()
    assert len(opened) > 1
    assert not any(store() for _, store in opened)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dola", "decore", "diver"])
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_methods_that_read_more_read_the_prompt_once(architecture: str, method: str, tmp_path: Path) -> None:
    if (architecture, method) == ("mamba", "decore"):
        pytest.skip("it has no attention heads to mask")
    model = tiny_model(architecture)
    config = config_of(method, model, tmp_path, **({"dola_layers": "0,1"} if method == "dola" else {}))
    engine = CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))
    texts = random_texts(6)
    for prompt in (PROMPT[:9], [7]):
        alone = [engine.score(prompt, text, config=config) for text in texts]
        passes = record(engine) if architecture != "mamba" else []
        together = engine.score(prompt, texts, config=config)
        assert_all_alike(together, alone)
        if passes:  # twice the prompt and the texts; one of a single token needs no pass before it to be contrasted
            contrasted_alone = method != "diver" and len(prompt) == 1
            assert len(passes) == (3 if contrasted_alone else 4)
            assert {one.usage.forward_passes for one in together} == {len(passes)}
