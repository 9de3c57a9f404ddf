"""Bad input: one clear error of ours, before the model is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from cocoa_engine import (
    ChatTemplateError,
    CocoaConfig,
    CocoaEngine,
    CocoaError,
    ConfigError,
    NonFiniteLogitsError,
    PromptError,
    UnsupportedModelError,
)
from cocoa_engine.errors import CalibrationError
from cocoa_engine.model.loading import read_context_window
from cocoa_engine.risk import CalibrationWarning
from tests.helpers.made_up_risk import fitted
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


@pytest.mark.parametrize("given", [5, {"eos_token_id": 2}, "stop"])
def test_what_is_no_generation_config(given: Any, idle: CocoaEngine) -> None:
    for call in (idle.generate, idle.stream, lambda prompt, **options: idle.generate_batch([prompt], **options)):
        with pytest.raises(ConfigError, match=f"GenerationConfig, not {type(given).__name__}"):
            call("a", generation_config=given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -1}, "alpha: .*greater than or equal to 0"),
        ({"alpha": NAN}, "alpha: .*finite"),
        ({"alpha": float("inf")}, "alpha: .*finite"),
        ({"gamma": 0}, "gamma: .*greater than 0"),
        ({"gamma": 1.5}, "gamma: .*less than or equal to 1"),
        ({"gamma": NAN}, "gamma: .*finite"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_candidates": 0}, "max_candidates"),
        ({"max_span_tokens": 0}, "max_span_tokens"),
        ({"middle_layers": (5, 5)}, "0 <= m < n"),
        ({"middle_layers": (7, 3)}, "0 <= m < n"),
        ({"middle_layers": (-1, 3)}, "0 <= m < n"),
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
    for call in (idle.generate, idle.stream, lambda p, **s: idle.generate_batch([p], **s)):
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
    with pytest.raises(PromptError, match=message):
        idle.generate(prompt)
    with pytest.raises(PromptError, match=message):
        idle.stream(prompt)
    with pytest.raises(PromptError, match=message):
        idle.generate_batch(["a good one", prompt])


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
    ],
)
def test_score(idle: CocoaEngine, prompt: Any, text: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        idle.score(prompt, text)


@pytest.mark.parametrize("text", [None, 5, b"x", [None], [1, True], [1.5]])
def test_score_of_no_text(idle: CocoaEngine, text: Any) -> None:
    with pytest.raises(PromptError, match="text to score"):
        idle.score("Q", text)


@pytest.mark.parametrize("prompts", [None, 5])
def test_no_batch(idle: CocoaEngine, prompts: Any) -> None:
    with pytest.raises(PromptError, match="takes a list of prompts"):
        idle.generate_batch(prompts)


@pytest.mark.parametrize("batch_size", [0, 1.5, "x", -1])
def test_batch_size(idle: CocoaEngine, batch_size: Any) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        idle.generate_batch(["Hello"], batch_size=batch_size)


def test_an_engine_config_of_another_type(engine: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match="config must be a CocoaConfig, not dict"):
        CocoaEngine(engine.model, engine.tokenizer, config={"alpha": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("result", [lambda s: None, lambda s: s[0], lambda s: s[:, :10], lambda s: s.tolist()])
def test_a_processor_that_returns_no_logits(result: Any) -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    with pytest.raises(ConfigError, match="logits processor function must return a tensor"):
        engine.generate([5, 6], logits_processor=lambda _, scores: result(scores))


def test_a_criterion_that_returns_nothing() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    with pytest.raises(ConfigError, match="stopping criterion function must return a bool"):
        engine.generate([5, 6], stopping_criteria=lambda ids, scores: None)


def test_extreme_settings_are_survived() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    best = engine.generate([5, 6], max_new_tokens=8)
    assert engine.generate([5, 6], max_new_tokens=8, temperature=5e-324, seed=1).token_ids == best.token_ids
    engine.generate([5, 6], max_new_tokens=4, max_candidates=1000)


def test_processors_that_are_none(idle: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match="logits_processor must be"):
        idle.generate("Hello", logits_processor=[3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="stopping_criteria must be"):
        idle.generate("Hello", stopping_criteria=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [[], "Hello", [{"content": "no role"}], ["text"], None])
def test_chat_messages(idle: CocoaEngine, messages: Any) -> None:
    with pytest.raises(ChatTemplateError):
        idle.chat(messages)


def test_chat_without_a_template() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    with pytest.raises(ChatTemplateError, match="no chat template"):
        engine.chat([{"role": "user", "content": "Hi"}])


def test_a_template_that_refuses() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    engine = CocoaEngine(tiny_model("llama"), tokenizer)
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        engine.chat([{"role": "user", "content": "Hi"}])


def test_too_few_layers() -> None:
    with pytest.raises(UnsupportedModelError, match="2 decoder layer"):
        CocoaEngine(tiny_model("llama", num_hidden_layers=2), tiny_tokenizer())
    CocoaEngine(tiny_model("llama", num_hidden_layers=3), tiny_tokenizer()).generate("a", max_new_tokens=3)


def test_models_that_are_no_causal_lm() -> None:
    small = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    encoder_decoder = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model("t5", vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4)
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        CocoaEngine(encoder_decoder, tiny_tokenizer())
    headless = AutoModel.from_config(tiny_model("llama").config)
    with pytest.raises(UnsupportedModelError, match="no language-modelling head"):
        CocoaEngine(headless, tiny_tokenizer())
    embedding = AutoModel.from_config(AutoConfig.for_model("bert", intermediate_size=64, **small))
    with pytest.raises(UnsupportedModelError):
        CocoaEngine(embedding, tiny_tokenizer())
    both_ways = AutoModelForCausalLM.from_config(AutoConfig.for_model("bert", intermediate_size=64, **small))
    with pytest.raises(UnsupportedModelError, match="both directions"):
        CocoaEngine(both_ways, tiny_tokenizer())
    with pytest.raises(UnsupportedModelError, match="not a Hugging Face model"):
        CocoaEngine(torch.nn.Linear(2, 2), tiny_tokenizer())
    with pytest.raises(UnsupportedModelError, match="the tokenizer is a NoneType"):
        CocoaEngine(tiny_model("llama"), None)


def test_nan_logits_say_at_which_token() -> None:
    model = tiny_model("llama")
    engine = CocoaEngine(model, tiny_tokenizer())
    engine.generate([5, 6, 7], max_new_tokens=4)
    with torch.no_grad():
        model.lm_head.weight[3] = NAN
    with pytest.raises(NonFiniteLogitsError, match=r"token 3 of the sequence"):
        engine.generate([5, 6, 7], max_new_tokens=4)
    with pytest.raises(NonFiniteLogitsError, match="text to score"):
        engine.score([5, 6, 7], [8, 9])


def test_nan_in_the_middle_of_a_decode() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * NAN if ids.shape[1] == 6 else scores

    for call in (engine.generate, lambda prompt, **rest: engine.generate_batch([prompt] * 2, **rest)):
        with pytest.raises(NonFiniteLogitsError, match="token 6 of the sequence"):
            call([5, 6, 7], max_new_tokens=20, logits_processor=spoil, stopping_criteria=lambda *_: False)


def test_a_processor_that_allows_nothing() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    with pytest.raises(NonFiniteLogitsError, match="forbids every token"):
        engine.generate([5, 6], logits_processor=lambda _, scores: scores - torch.inf)


def test_every_error_has_the_one_base() -> None:
    from cocoa_engine import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    assert len(kinds) > 5
    assert all(issubclass(kind, CocoaError) for kind in kinds if kind is not errors.ForeignError)  # a cause of others


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
    for ask in (engine.generate, engine.stream, lambda prompt: engine.generate_batch(["a", prompt])):
        with pytest.raises(PromptError, match=f"the prompt {where}"):
            ask(bad)
    with pytest.raises(PromptError, match=f"the text {where}"):
        engine.encode(bad)
    with pytest.raises(PromptError, match="lone surrogate"):
        engine.score("a", bad)
    with pytest.raises(PromptError, match=rf"content of message 1 \(user\) {where}"):
        engine.chat([{"role": "system", "content": "Hi"}, {"role": "user", "content": bad}])
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


@pytest.mark.slow
def test_an_engine_with_another_calibrator_shares_the_rest() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer(), model_name="tiny")
    calibrator = fitted(model_name="other", draws=2)
    with pytest.warns(CalibrationWarning, match="other"):
        calibrated = engine.with_calibrator(calibrator)
    assert calibrated.session is engine.session
    assert (calibrated.calibrator, engine.calibrator) == (calibrator, None)
    assert calibrated.without_calibrator().calibrator is None
    with pytest.raises(CalibrationError):
        engine.with_calibrator("/no/such.json")
