"""``model.generate(..., custom_generate=cocoa)``: the tokens of the engine, the manners of ``generate``.

So do pipelines of transformers, and langchain-huggingface over them.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import Tensor

from cocoa_engine import CocoaConfig, CocoaEngine, CocoaError, ConfigError, Generation, PromptError
from cocoa_integrations.transformers import Cocoa, CocoaGenerateOutput, cocoa
from tests.helpers.alike import assert_alike, near
from tests.helpers.inside import hook_count
from tests.helpers.made_up_risk import fitted
from tests.helpers.tiny_models import EOS, PAD, VOCAB_SIZE, engine_for_schemas, tiny_model, tiny_tokenizer

SHORT: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
BOTH = ["Once upon a time", "Who?"]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_p": 0.8, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def tiny() -> CocoaEngine:
    return engine_for_schemas()


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("gpt2", {"method": "dola", "dola_layers": "low"}),
        ("qwen3", {"max_span_tokens": 4, "gamma": 0.2}),
        ("mamba", {"alpha": 6.0, "metric": "con_mlds"}),
    ],
)
def test_tiny_models_answer_as_the_engine(architecture: str, settings: dict[str, Any]) -> None:
    model, tokenizer, rows = tiny_model(architecture, seed=6), tiny_tokenizer(), prompts(4)
    expected = CocoaEngine(model, tokenizer).generate_batch(rows, max_new_tokens=16, **settings)
    assert {each.finish_reason for each in expected} >= {"length"}
    before = hook_count(model)
    for cocoas, texts in ((Cocoa(tokenizer=tokenizer, **settings), True), (cocoa, False)):
        options = {} if texts else settings
        output = model.generate(
            **padded(rows), custom_generate=cocoas, return_dict_in_generate=True, **SHORT, **options
        )
        assert isinstance(output, CocoaGenerateOutput)
        answers(output.sequences, rows, expected, PAD)
        assert output.generations is not None
        for generation, one in zip(output.generations, expected, strict=True):
            assert generation.max_risk == near(one.max_risk)
            if texts:
                assert_alike(generation.model_copy(update={"config": one.config}), one)
        assert texts or {span.text for each in output.generations for span in each.spans} == {""}
    assert hook_count(model) == before


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
def test_greedy_is_generate_s_own(tiny: CocoaEngine, options: dict[str, Any]) -> None:
    """Its processors, end and pad tokens and lengths mean the same, in rows that are padded."""
    model = tiny.model
    inputs, options = padded(prompts(4)), {**SHORT, **options}
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, custom_generate=cocoa, method="greedy", **options), expected)


def test_processors_and_criteria_of_the_user(tiny: CocoaEngine) -> None:
    rows = prompts(3)
    banned = transformers.NoBadWordsLogitsProcessor([[264], [146]])
    lengths: set[int] = set()

    def enough(ids: Tensor, scores: Any) -> Tensor:
        lengths.add(ids.shape[1])
        return torch.tensor([row[-1] % 5 == 0 and row[-1] != EOS for row in ids.tolist()])

    options: dict[str, Any] = {
        **SHORT,
        "logits_processor": transformers.LogitsProcessorList([banned]),
        "stopping_criteria": transformers.StoppingCriteriaList([enough]),
    }
    expected = tiny.generate_batch(rows, max_new_tokens=16, logits_processor=[banned], stopping_criteria=[enough])
    assert "stop" in {each.finish_reason for each in expected}
    lengths.clear()
    answers(tiny.model.generate(**padded(rows), custom_generate=cocoa, **options), rows, expected, PAD)
    assert min(lengths) > max(map(len, rows))  # they see the padding, too


@pytest.mark.parametrize(
    "options",
    [SHORT, {**SHORT, "do_sample": True, "top_k": 0, "temperature": 3.0}, {**SAMPLED, "method": "sample", "top_k": 9}],
)
def test_a_top_k_of_the_user_applies(tiny: CocoaEngine, options: dict[str, Any]) -> None:
    """Besides the top_k of generate."""
    model, rows = tiny.model, prompts(2)
    greedy = tiny.generate_batch(rows, method="greedy", max_new_tokens=16)
    only, wide = (transformers.LogitsProcessorList([transformers.TopKLogitsWarper(count)]) for count in (1, 50))
    output = model.generate(**padded(rows), custom_generate=cocoa, logits_processor=only, **options)
    answers(output, rows, greedy, PAD)
    plain = model.generate(**padded(rows), custom_generate=cocoa, **SHORT)
    assert torch.equal(model.generate(**padded(rows), custom_generate=cocoa, logits_processor=wide, **SHORT), plain)
    assert plain.tolist()[0][max(map(len, rows)) :] != greedy[0].token_ids


@pytest.mark.parametrize("penalty", [None, 1.6])
def test_dola_s_repetition_penalty_gives_way(tiny: CocoaEngine, penalty: float | None) -> None:
    rows, dola = prompts(1), {"method": "dola", "repetition_penalty": penalty}
    expected = tiny.generate(rows[0], max_new_tokens=16, **dola)
    answers(tiny.model.generate(**padded(rows), custom_generate=cocoa, **SHORT, **dola), rows, [expected], PAD)


@pytest.mark.parametrize(
    ("settings", "own"), [({"temperature": 3.0}, {"top_k": 0}), ({**SAMPLED, "method": "sample", "top_k": 9}, {})]
)
def test_spans_and_tokens_are_sampled(tiny: CocoaEngine, settings: dict[str, Any], own: dict[str, Any]) -> None:
    rows, settings = prompts(2), {"seed": 1, "max_new_tokens": 16, **settings}
    sampled = tiny.generate_batch(rows, **{name: value for name, value in settings.items() if name != "do_sample"})
    assert sampled[0].token_ids != tiny.generate(rows[0], max_new_tokens=16).token_ids
    options = {**settings, **own, "do_sample": True}
    answers(tiny.model.generate(**padded(rows), custom_generate=cocoa, **options), rows, sampled, PAD)


def test_a_streamer_gets_the_prompt_then_each_token(tiny: CocoaEngine) -> None:
    ids = torch.tensor([tiny.encode(BOTH[0])])
    streamer = transformers.TextIteratorStreamer(tiny.tokenizer, skip_prompt=True, timeout=1)
    sequences = tiny.model.generate(ids, custom_generate=cocoa, streamer=streamer, **SHORT)
    assert "".join(streamer) == tiny.tokenizer.decode(sequences[0, ids.shape[1] :])
    with pytest.raises(CocoaError, match="one answer at a time"):
        tiny.model.generate(ids.repeat(2, 1), custom_generate=cocoa, streamer=Mock(), **SHORT)


def test_risk_stops_calibrated_and_with_texts(tiny: CocoaEngine) -> None:
    def generated(judge: Cocoa, **options: Any) -> tuple[Any, Generation]:
        more = {**SHORT, **options, "return_dict_in_generate": True}
        output = tiny.model.generate(ids, custom_generate=judge, **more)
        return output.sequences[0, ids.shape[1] :], output.generations[0]

    ids = torch.tensor([tiny.encode(BOTH[0])])
    calibrator, config = fitted(model_name=tiny.model_name), CocoaConfig(max_span_tokens=5)
    tokens, generation = generated(Cocoa(tokenizer=tiny.tokenizer, calibrator=calibrator, max_risk=0.0, config=config))
    assert (generation.finish_reason, generation.calibrated, generation.config.max_span_tokens) == ("risk", True, 5)
    assert generation.text == generation.spans[0].text != ""
    assert tokens.tolist() == generation.token_ids
    _, whole = generated(Cocoa(tokenizer=tiny.tokenizer))
    _, stopped = generated(Cocoa(tokenizer=tiny.tokenizer), stop=whole.text[4:7])
    assert stopped.finish_reason == "stop"
    assert whole.text.startswith(stopped.text)
    assert whole.text[4:7] not in stopped.text


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
        ({"generation_config": transformers.GenerationConfig(dola_layers="high")}, "dola_layers"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_honoured_is_refused(tiny: CocoaEngine, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, PromptError), match=message):
        tiny.model.generate(torch.tensor(prompts(1)), custom_generate=cocoa, **{"max_new_tokens": 4, **options})


def test_settings_that_are_none_are_refused(tiny: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens to generate"):
        Cocoa(max_new_tokens=4)
    with pytest.raises(ConfigError, match="alpha"):
        Cocoa(alhpa=1.0)
    with pytest.raises(ConfigError, match="stop needs a tokenizer"):
        Cocoa(stop="x")
    with pytest.raises(ValueError, match="alhpa"):  # generate's own
        tiny.model.generate(torch.tensor(prompts(1)), custom_generate=cocoa, alhpa=1.0)


@pytest.mark.slow
def test_the_model_is_not_kept_alive() -> None:
    model = tiny_model("llama")
    model.generate(torch.tensor(prompts(1)), custom_generate=cocoa, **SHORT)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.fixture(scope="module")
def pipe(tiny: CocoaEngine) -> transformers.TextGenerationPipeline:
    made: transformers.TextGenerationPipeline = transformers.pipeline(
        "text-generation", model=tiny.model, tokenizer=tiny.tokenizer
    )
    return made


def test_a_pipeline_samples_the_candidates_at_their_own_probabilities(
    pipe: transformers.TextGenerationPipeline, tiny: CocoaEngine
) -> None:
    expected = tiny.generate(BOTH[0], temperature=0.7, seed=5, max_new_tokens=16)
    sampling = Cocoa(tokenizer=tiny.tokenizer, seed=5)
    output = pipe(BOTH[0], custom_generate=sampling, max_new_tokens=16, return_tensors=True)
    token_ids = output[0]["generated_token_ids"]
    prompt = tiny.encode(BOTH[0])
    assert list(token_ids)[len(prompt) :] == expected.token_ids
    ids = torch.tensor([prompt])
    kept = {"custom_generate": sampling, "do_sample": True, "temperature": 0.7, "max_new_tokens": 16}
    sampled = [
        tiny.model.generate(ids, **kept, top_k=top_k, return_dict_in_generate=True).generations[0] for top_k in (50, 0)
    ]
    log_probs = [[span.log_prob for span in answer.spans] for answer in sampled]
    assert log_probs[0] == near(log_probs[1])


GREEDY: dict[str, Any] = {"custom_generate": cocoa, "do_sample": False, "max_new_tokens": 8}


def test_a_pipeline_answers_batches_and_chats(pipe: transformers.TextGenerationPipeline, tiny: CocoaEngine) -> None:
    expected = [answer.text for answer in tiny.generate_batch(BOTH, max_new_tokens=8)]
    batch = pipe(BOTH, batch_size=2, return_full_text=False, **GREEDY)
    assert [answer["generated_text"] for [answer] in batch] == expected
    messages = [{"role": "user", "content": "Hi"}]
    [answer] = pipe(messages, **GREEDY)
    assert answer["generated_text"][-1]["content"] == tiny.chat(messages, max_new_tokens=8).text
    [answer] = pipe(BOTH[0], custom_generate=cocoa)  # at its defaults
    assert len(answer["generated_text"]) > len(BOTH[0])


def test_langchain_huggingface_over_such_a_pipeline(
    pipe: transformers.TextGenerationPipeline, tiny: CocoaEngine
) -> None:
    module = pytest.importorskip("langchain_huggingface.llms.huggingface_pipeline")
    llm = module.HuggingFacePipeline(pipeline=pipe)
    assert len(llm.invoke(BOTH[0], pipeline_kwargs={"custom_generate": cocoa})) > len(BOTH[0])
    expected = [answer.text for answer in tiny.generate_batch(BOTH, max_new_tokens=8)]
    assert llm.batch(BOTH, pipeline_kwargs={**GREEDY, "return_full_text": False}) == expected
    assert "".join(llm.stream(BOTH[0], pipeline_kwargs=GREEDY)) == expected[0]


def test_what_a_pipeline_must_be_told_is_one_line(pipe: transformers.TextGenerationPipeline) -> None:
    with pytest.raises(ConfigError, match=r"top_p=0\.8.*give do_sample=False.*or top_p=1\.0 and top_k=0") as error:
        pipe(BOTH[0], custom_generate=cocoa, top_p=0.8)
    assert "\n" not in str(error.value)
