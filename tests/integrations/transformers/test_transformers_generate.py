"""``model.generate(..., custom_generate=cocoa)``: the tokens of the engine, the manners of ``generate``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TopKLogitsWarper,
)

from cocoa_engine import CocoaConfig, CocoaEngine, CocoaError, ConfigError, Generation, PromptError
from cocoa_integrations.transformers import Cocoa, CocoaGenerateOutput, cocoa
from tests.helpers.alike import assert_alike, near
from tests.helpers.hooks import hook_count
from tests.helpers.made_up_risk import fitted
from tests.helpers.prompts import PROMPTS
from tests.helpers.tiny_models import EOS, PAD, VOCAB_SIZE, tiny_model, tiny_tokenizer

SHORT: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
REAL = [PROMPTS["question"], PROMPTS["story"]]


def prompts(count: int, length: int = 4) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(20, VOCAB_SIZE, (length + 5 * n,), generator=generator).tolist() for n in range(count)]


def padded(rows: Sequence[Sequence[int]], pad: int = PAD) -> dict[str, Tensor]:
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def answers(sequences: Tensor, rows: Sequence[Sequence[int]], expected: Sequence[Generation], pad: int) -> None:
    """The rows as they were given, then the tokens expected and pad tokens."""
    width, longest = max(map(len, rows)), max(len(each.token_ids) for each in expected)
    assert sequences.shape == (len(rows), width + longest)
    for row, ids, each in zip(sequences.tolist(), rows, expected, strict=True):
        assert row[width - len(ids) :] == [*ids, *each.token_ids, *[pad] * (longest - len(each.token_ids))]


@pytest.mark.parametrize("settings", [{"method": "dola", "dola_layers": "low"}, {"alpha": 6.0, "metric": "con_mlds"}])
def test_the_real_model_answers_as_the_engine(engine: CocoaEngine, settings: dict[str, Any]) -> None:
    rows = [engine.encode(prompt) for prompt in REAL]
    expected = engine.generate_batch(rows, max_new_tokens=10, **settings)
    options = {**SHORT, **settings, "max_new_tokens": 10}
    pad = int(engine.tokenizer.pad_token_id)
    before = hook_count(engine.model)
    answers(engine.model.generate(**padded(rows, pad), custom_generate=cocoa, **options), rows, expected, pad)
    alone = engine.model.generate(
        torch.tensor(rows[:1]), custom_generate=Cocoa(**settings), max_new_tokens=10, do_sample=False
    )
    answers(alone, rows[:1], expected[:1], pad)
    assert hook_count(engine.model) == before


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "mamba"])
def test_tiny_models_answer_as_the_engine(architecture: str) -> None:
    model, tokenizer, rows = tiny_model(architecture, seed=6), tiny_tokenizer(), prompts(4)
    settings: dict[str, Any] = {"max_span_tokens": 4, "gamma": 0.2}
    expected = CocoaEngine(model, tokenizer).generate_batch(rows, max_new_tokens=16, **settings)
    inputs = padded(rows)
    output = model.generate(
        **inputs, custom_generate=Cocoa(tokenizer=tokenizer), return_dict_in_generate=True, **SHORT, **settings
    )
    assert isinstance(output, CocoaGenerateOutput)
    answers(output.sequences, rows, expected, PAD)
    assert {each.finish_reason for each in expected} >= {"length"}
    assert output.generations is not None
    for generation, one in zip(output.generations, expected, strict=True):
        assert generation.max_risk == near(one.max_risk)
        assert_alike(generation.model_copy(update={"config": one.config}), one)
    untold = model.generate(**inputs, custom_generate=cocoa, return_dict_in_generate=True, **SHORT, **settings)
    answers(untold.sequences, rows, expected, PAD)
    assert {span.text for each in untold.generations for span in each.spans} == {""}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 6, "no_repeat_ngram_size": 2},
        {"forced_eos_token_id": EOS, "suppress_tokens": [70, 74]},
        {"encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.5},
        {"eos_token_id": [70, 294], "pad_token_id": 5},
        {"prefix_allowed_tokens_fn": lambda row, ids: range(20 + 60 * row, 80 + 60 * row)},
        {"max_length": 20, "max_new_tokens": None},
    ],
)
def test_greedy_is_generate_s_own(options: dict[str, Any]) -> None:
    """Its processors, end and pad tokens and lengths mean the same, in rows that are padded."""
    model = tiny_model("llama", seed=6)
    inputs, options = padded(prompts(4)), {**SHORT, **options}
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, custom_generate=cocoa, method="greedy", **options), expected)


def test_processors_and_criteria_of_the_user() -> None:
    model, rows = tiny_model("llama", seed=6), prompts(3)
    banned = NoBadWordsLogitsProcessor([[264], [146]])
    lengths: set[int] = set()

    def enough(ids: Tensor, scores: Any) -> Tensor:
        lengths.add(ids.shape[1])
        return torch.tensor([row[-1] % 5 == 0 and row[-1] != EOS for row in ids.tolist()])

    options: dict[str, Any] = {
        **SHORT,
        "logits_processor": LogitsProcessorList([banned]),
        "stopping_criteria": StoppingCriteriaList([enough]),
    }
    expected = CocoaEngine(model, tiny_tokenizer()).generate_batch(
        rows, max_new_tokens=16, logits_processor=[banned], stopping_criteria=[enough]
    )
    assert "stop" in {each.finish_reason for each in expected}
    lengths.clear()
    answers(model.generate(**padded(rows), custom_generate=cocoa, **options), rows, expected, PAD)
    assert min(lengths) > max(map(len, rows))  # they see the padding, too


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "top_k": 0, "temperature": 3.0}])
def test_a_top_k_of_the_user_applies(sampled: dict[str, Any]) -> None:
    model, rows = tiny_model("llama", seed=6), prompts(1)
    only = TopKLogitsWarper(1)
    options = {**SHORT, **sampled, "logits_processor": LogitsProcessorList([only])}
    greedy = CocoaEngine(model, tiny_tokenizer()).generate(rows[0], method="greedy", max_new_tokens=16)
    answers(model.generate(**padded(rows), custom_generate=cocoa, **options), rows, [greedy], PAD)
    wide = {**SHORT, "logits_processor": LogitsProcessorList([TopKLogitsWarper(50)])}
    plain = model.generate(**padded(rows), custom_generate=cocoa, **SHORT)
    assert torch.equal(model.generate(**padded(rows), custom_generate=cocoa, **wide), plain)
    assert plain.tolist()[0][len(rows[0]) :] != greedy.token_ids


def test_dola_s_repetition_penalty_gives_way() -> None:
    model, rows = tiny_model("llama", seed=6), prompts(1)
    engine, dola = CocoaEngine(model, tiny_tokenizer()), {"method": "dola"}
    for penalty in (None, 1.6):
        expected = engine.generate(rows[0], max_new_tokens=16, repetition_penalty=penalty, **dola)
        output = model.generate(**padded(rows), custom_generate=cocoa, repetition_penalty=penalty, **SHORT, **dola)
        answers(output, rows, [expected], PAD)


def test_spans_and_tokens_are_sampled() -> None:
    model, rows = tiny_model("llama", seed=6), prompts(2)
    engine = CocoaEngine(model, tiny_tokenizer())
    spans: dict[str, Any] = {"temperature": 3.0, "top_k": 0, "max_new_tokens": 16}
    sampled = engine.generate_batch(rows, seed=1, temperature=3.0, max_new_tokens=16)
    assert sampled[0].token_ids != engine.generate(rows[0], max_new_tokens=16).token_ids
    answers(model.generate(**padded(rows), custom_generate=cocoa, seed=1, do_sample=True, **spans), rows, sampled, PAD)
    settings: dict[str, Any] = {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "max_new_tokens": 16}
    sampled = engine.generate_batch(rows, method="sample", seed=1, **settings)
    output = model.generate(**padded(rows), custom_generate=cocoa, method="sample", do_sample=True, seed=1, **settings)
    answers(output, rows, sampled, PAD)
    only = LogitsProcessorList([TopKLogitsWarper(1)])  # of the user, besides the top_k of generate
    greedy = engine.generate_batch(rows, method="greedy", max_new_tokens=16)
    options: dict[str, Any] = {**settings, "do_sample": True, "logits_processor": only}
    answers(model.generate(**padded(rows), custom_generate=Cocoa(method="sample"), **options), rows, greedy, PAD)


def test_a_streamer_gets_the_prompt_then_each_token(engine: CocoaEngine) -> None:
    ids = torch.tensor([engine.encode(PROMPTS["question"])])
    streamer = TextIteratorStreamer(engine.tokenizer, skip_prompt=True, timeout=1)
    sequences = engine.model.generate(ids, custom_generate=cocoa, streamer=streamer, **SHORT)
    text = engine.tokenizer.decode(sequences[0, ids.shape[1] :])
    assert "".join(streamer) == text
    with pytest.raises(CocoaError, match="one answer at a time"):
        engine.model.generate(ids.repeat(2, 1), custom_generate=cocoa, streamer=Silent(), **SHORT)


class Silent:
    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


def test_risk_stops_calibrated_and_with_texts(engine: CocoaEngine) -> None:
    calibrator = fitted(model_name=engine.model_name)
    judge = Cocoa(
        tokenizer=engine.tokenizer, calibrator=calibrator, max_risk=0.0, config=CocoaConfig(max_span_tokens=5)
    )
    ids = torch.tensor([engine.encode(PROMPTS["question"])])
    output = engine.model.generate(ids, custom_generate=judge, return_dict_in_generate=True, **SHORT)
    (generation,) = output.generations
    assert (generation.finish_reason, generation.calibrated, generation.config.max_span_tokens) == ("risk", True, 5)
    assert generation.text == generation.spans[0].text != ""
    assert output.sequences.shape[1] == ids.shape[1] + len(generation.token_ids)
    stopped = engine.model.generate(
        ids, custom_generate=Cocoa(tokenizer=engine.tokenizer), stop="Canberra", return_dict_in_generate=True, **SHORT
    )
    assert stopped.generations[0].finish_reason == "stop"
    assert "Canberra" not in stopped.generations[0].text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_return_sequences": 2, "num_beams": 2}, "num_return_sequences=2"),
        ({"do_sample": True, "top_k": 7}, "top_k=7.*do_sample=False"),
        ({"do_sample": True, "max_candidates": 51}, "top_k=50.*do_sample=False"),
        ({"do_sample": True, "method": "dola"}, "top_k=50.*do_sample=False"),
        ({"do_sample": True, "top_k": 0, "top_p": 0.9}, "top_p=0.9"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"output_scores": True}, "output_scores"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"assistant_model": tiny_model("llama")}, "assistant_model"),
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "inputs_embeds"),
        ({"stop": "x"}, "stop needs a tokenizer"),
        ({"alpha": -1.0}, "alpha"),
        ({"position_ids": torch.tensor([[0, 1, 2, 7]])}, "position_ids"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "padded on the left"),
        ({"generation_config": GenerationConfig(dola_layers="high")}, "dola_layers"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], message: str) -> None:
    model = tiny_model("llama")
    with pytest.raises((ConfigError, PromptError), match=message):
        model.generate(torch.tensor(prompts(1)), custom_generate=cocoa, **{"max_new_tokens": 4, **options})


def test_settings_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_new_tokens to generate"):
        Cocoa(max_new_tokens=4)
    with pytest.raises(ConfigError, match="alpha"):
        Cocoa(alhpa=1.0)
    with pytest.raises(ConfigError, match="stop needs a tokenizer"):
        Cocoa(stop="x")
    with pytest.raises(ValueError, match="alhpa"):  # generate's own
        tiny_model("llama").generate(torch.tensor(prompts(1)), custom_generate=cocoa, alhpa=1.0)


@pytest.mark.slow
def test_the_model_is_not_kept_alive() -> None:
    model = tiny_model("llama")
    model.generate(torch.tensor(prompts(1)), custom_generate=cocoa, **SHORT)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
