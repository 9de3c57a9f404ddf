"""Bad input: one clear error of ours, before the model is run."""

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from cocoa_engine import (
    CocoaConfig,
    CocoaEngine,
    CocoaError,
    ConfigError,
    NonFiniteLogitsError,
    PromptError,
    RiskCalibrator,
    errors,
)
from cocoa_engine.errors import ChatTemplateError, UnsupportedModelError
from cocoa_engine.model.loading import read_context_window
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

NAN = float("nan")


@pytest.fixture
def idle(engine: CocoaEngine) -> Iterator[CocoaEngine]:
    """The engine; fails the test if the model is run."""
    calls: list[int] = []
    handle = engine.model.register_forward_pre_hook(lambda *_: calls.append(1))
    yield engine
    handle.remove()
    assert not calls


def each_call(engine: CocoaEngine) -> list[Callable[..., Any]]:
    return [
        engine.generate,
        engine.stream,
        lambda prompt, **options: engine.generate_batch(["good", prompt], **options),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -1}, "alpha: .*greater than or equal to 0"),
        *(({"alpha": value}, "alpha: .*finite") for value in (NAN, float("inf"))),
        ({"gamma": 0}, "gamma: .*greater than 0"),
        ({"gamma": 1.5}, "gamma: .*less than or equal to 1"),
        ({"gamma": NAN}, "gamma: .*finite"),
        *(({"temperature": value}, "temperature") for value in (-0.1, NAN)),
        *(({f"max_{what}": 0}, f"max_{what}") for what in ("new_tokens", "candidates", "span_tokens")),
        *(({"middle_layers": layers}, "0 <= m < n") for layers in ((5, 5), (7, 3), (-1, 3))),
        ({"middle_layers": (10, 31)}, "n=31 is beyond the model's 30 layers"),
        ({"method": "cocoa-sgi"}, "unknown method 'cocoa-sgi'.*did you mean 'cocoa-sig'"),
        ({"metric": "mlds"}, "metric: .*'f_mlds' or 'con_mlds'"),
        ({"span_boundary": "middle"}, "span_boundary"),
        ({"stop": ("",)}, "empty stop text"),
        ({"seed": -1}, "seed"),
        ({"alhpa": 1}, "unknown setting 'alhpa'.*did you mean 'alpha'"),
        ({"alpha": "much"}, "alpha: .*number.*'much'"),
    ],
)
def test_settings(idle: CocoaEngine, settings: dict[str, Any], message: str) -> None:
    for call in each_call(idle):
        with pytest.raises(ConfigError, match=message) as caught:
            call("Hello", **settings)
        assert "\n" not in str(caught.value)
    if settings != {"middle_layers": (10, 31)}:
        for make in (lambda s: CocoaConfig(**s), CocoaConfig.model_validate):
            with pytest.raises(ConfigError, match=message):
                make(settings)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        (None, "text or a list of token ids, not NoneType"),
        (12, "not int"),
        (b"bytes", "not bytes"),
        (["a", "b"], "must hold token ids"),
        ([1, True], "must hold token ids"),
        ([1, 49152], "token id 49152 is outside the model's vocabulary of 49152"),
        ([1, -1], "token id -1 is outside"),
        ("word " * 9000, r"the prompt has \d+ tokens and the model's context window is 8192"),
        ([5] * 8192, "has 8192 tokens.*Shorten the prompt by at least 1 token"),
    ],
)
def test_prompts(idle: CocoaEngine, prompt: Any, message: str) -> None:
    for call in each_call(idle):
        with pytest.raises(PromptError, match=message):
            call(prompt)


@pytest.mark.parametrize(
    ("prompt", "text", "message"),
    [
        ("Q", "", "text to score is empty"),
        ("Q", [], "text to score is empty"),
        ("", "A", "the prompt is empty"),
        ([5] * 8000, [5] * 200, r"prompt \(8000 tokens\) and text to score \(200\) exceed"),
        ("Q", ["A", ""], "the text to score at index 1 is empty"),
        ("Q", [[5], []], "the text to score at index 1 is empty"),
        ("Q", ["A", 5], "the text to score at index 1 must be text or a list of token ids, not int"),
        ("Q", ["A", b"x"], "the text to score at index 1 must be text or a list of token ids, not bytes"),
        ("Q", [["A"]], "the text to score at index 0, given as a list, must hold token ids"),
        ("Q", [[5], [50000]], "token id 50000 is outside"),
        ("", ["A"], "the prompt is empty"),
        ([5] * 8000, ["A", [5] * 200], r"prompt \(8000 tokens\) and text to score at index 1 \(200\) exceed"),
        *(("Q", text, "text to score") for text in (None, 5, b"x", [None], [1, True], [1.5])),
    ],
)
def test_score(idle: CocoaEngine, prompt: Any, text: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        idle.score(prompt, text)


def test_other_arguments(idle: CocoaEngine) -> None:
    for given in (5, {"eos_token_id": 2}, "stop"):
        for call in each_call(idle):
            with pytest.raises(ConfigError, match=f"GenerationConfig, not {type(given).__name__}"):
                call("a", generation_config=given)
    for prompts in (None, 5):
        with pytest.raises(PromptError, match="takes a list of prompts"):
            idle.generate_batch(prompts)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):  # which concerns all prompts
        idle.generate_batch(["a"], return_exceptions=True, max_new_tokens=0)
    for batch_size in (0, 1.5, "x", -1):
        with pytest.raises(ConfigError, match="batch_size"):
            idle.generate_batch(["Hello"], batch_size=batch_size)
    for name, value in {"logits_processor": [3], "stopping_criteria": 3}.items():
        with pytest.raises(ConfigError, match=f"{name} must be"):
            idle.generate("Hello", **{name: value})
    for messages in ([], "Hello", [{"content": "no role"}], ["text"], None):
        with pytest.raises(ChatTemplateError):
            idle.chat(messages)  # type: ignore[arg-type]
    for template, message in ((None, "no chat template"), ("{{ raise_exception('no more') }}", "no more")):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        with pytest.raises(ChatTemplateError, match=message):
            CocoaEngine(idle.model, tokenizer).chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(ConfigError, match="config must be a CocoaConfig, not dict"):
        CocoaEngine(idle.model, idle.tokenizer, config={"alpha": 1})  # type: ignore[arg-type]


def test_callables_that_return_something_else_and_extreme_settings_that_are_survived() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    for result in (lambda s: None, lambda s: s[0], lambda s: s[:, :10], lambda s: s.tolist()):
        with pytest.raises(ConfigError, match="logits processor function must return a tensor"):
            engine.generate([5, 6], logits_processor=lambda _, scores: result(scores))  # noqa: B023
    with pytest.raises(ConfigError, match="stopping criterion function must return a bool"):
        engine.generate([5, 6], stopping_criteria=lambda ids, scores: None)
    best = engine.generate([5, 6], max_new_tokens=8)
    assert engine.generate([5, 6], max_new_tokens=8, temperature=5e-324, seed=1).token_ids == best.token_ids
    engine.generate([5, 6], max_new_tokens=4, max_candidates=1000)


def of_config(maker: Any, kind: str, **fields: Any) -> Any:
    small = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    return maker.from_config(AutoConfig.for_model(kind, **(fields if kind == "t5" else small | fields)))


T5 = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
NO_CAUSAL_LM: dict[str, Callable[[], Any]] = {
    "2 decoder layer": lambda: tiny_model("llama", num_hidden_layers=2),
    "encoder-decoder": lambda: of_config(AutoModelForSeq2SeqLM, "t5", **T5),
    "no language-modelling head": lambda: AutoModel.from_config(tiny_model("llama").config),
    "encoder-only": lambda: of_config(AutoModel, "bert", intermediate_size=64),
    "both directions": lambda: of_config(AutoModelForCausalLM, "bert", intermediate_size=64),
    "LlamaForCausalLM has no weights yet": lambda: tiny_model("llama").to("meta"),
    "Linear is not a Hugging Face model": lambda: torch.nn.Linear(2, 2),
    "str is not a Hugging Face model": lambda: "a-name",
    "NoneType is not a Hugging Face model": lambda: None,
}


def test_models_that_are_no_causal_lm_the_fewest_layers_and_no_tokenizer() -> None:
    for message, make in NO_CAUSAL_LM.items():
        with pytest.raises(UnsupportedModelError, match=message):
            CocoaEngine(make(), tiny_tokenizer())
    model = tiny_model("llama", num_hidden_layers=3)
    CocoaEngine(model, tiny_tokenizer()).generate("a", max_new_tokens=3)
    with pytest.raises(UnsupportedModelError, match="the tokenizer is a NoneType"):
        CocoaEngine(model, None)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_an_engine_says_that_it_cannot_be_copied(copied: Callable[[Any], Any]) -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    with pytest.raises(TypeError, match="an engine cannot be copied deeply or pickled"):
        copied(engine)
    assert copy.copy(engine).generate("a", max_new_tokens=3) == engine.generate("a", max_new_tokens=3)


def test_nan_in_the_middle_of_a_decode_and_a_processor_that_allows_nothing() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * NAN if ids.shape[1] == 6 else scores

    for call in (engine.generate, lambda prompt, **rest: engine.generate_batch([prompt] * 2, **rest)):
        with pytest.raises(NonFiniteLogitsError, match="token 6 of the sequence"):
            call([5, 6, 7], max_new_tokens=20, logits_processor=spoil, stopping_criteria=lambda *_: False)
    with pytest.raises(NonFiniteLogitsError, match="forbids every token"):
        engine.generate([5, 6], logits_processor=lambda _, scores: scores - torch.inf)


def test_every_error_has_the_one_base() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    assert len(kinds) > 5
    assert all(issubclass(kind, CocoaError) for kind in kinds)


@pytest.mark.parametrize(
    "wrong", [lambda: CocoaConfig(stop=[""]), lambda: RiskCalibrator.model_validate_json('{"span": {"isotonic": 3}}')]
)
def test_what_holds_an_error_of_validation_does_not_stay_with_it(wrong: Callable[[], Any]) -> None:
    class Caller:
        pass

    def refused() -> weakref.ref[Caller]:
        caller = Caller()
        with pytest.raises(CocoaError) as error:  # a name of the frame that called
            wrong()
        assert error.value.__traceback__ is not None
        return weakref.ref(caller)

    caller = refused()
    gc.collect()
    assert caller() is None


def test_the_paper_s_setting_does_not_follow_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"method": "cocoa-sig", "metric": "f_mlds", "alpha": 2.5, "gamma": 0.3, "middle_layers": None}
    named |= {"final_layer": "post_norm", "span_log_prob": "sum", "temperature": 0.0}
    for field, other in (("final_layer", "pre_norm"), ("alpha", 1.0), ("gamma", 0.5)):
        monkeypatch.setattr(CocoaConfig.model_fields[field], "default", other)
    CocoaConfig.model_rebuild(force=True)
    try:
        assert CocoaConfig().final_layer == "pre_norm"
        assert CocoaConfig.paper().model_dump(include=named.keys()) == named
        assert CocoaConfig.paper(metric="con_mlds", max_new_tokens=9) == CocoaConfig(
            **{**named, "metric": "con_mlds"}, max_new_tokens=9
        )
    finally:
        monkeypatch.undo()
        CocoaConfig.model_rebuild(force=True)
    with pytest.raises(ConfigError, match="alhpa"):
        CocoaConfig.paper(alhpa=1)


def test_text_with_a_lone_surrogate() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    engine = CocoaEngine(tiny_model("llama"), tokenizer)
    bad, where = "a\ud800b", r"has a lone surrogate \(U\+D800\) at character 1"
    chat = [{"role": "system", "content": "Hi"}, {"role": "user", "content": bad}]
    for named, call in (
        *(("the prompt", partial(ask, bad)) for ask in each_call(engine)),
        ("the text", partial(engine.encode, bad)),
        (r"content of message 1 \(user\)", partial(engine.chat, chat)),
        ("the text to score at index 1", partial(engine.score, "a", ["b", bad])),
    ):
        with pytest.raises(PromptError, match=f"{named} {where}"):
            call()
    assert engine.encode("a\U0001f600b")  # a character of two surrogates in UTF-16


def test_a_window_is_read_from_the_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 77}))
    assert read_context_window(tmp_path) == 77
    assert read_context_window(tmp_path, model_kwargs={"n_positions": 55}) == 55
    assert read_context_window(tmp_path / "none") is None
    config = AutoConfig.for_model("llama", max_position_embeddings=33)
    assert read_context_window(tmp_path / "none", model_kwargs={"config": config}) == 33
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert read_context_window(tmp_path) is None
