"""What a context changed of each span: against plain scores of each span by itself, and against the naive reference."""

from typing import Any

import pytest
from transformers import GenerationConfig

from cocoa_engine import CocoaEngine, ConfigError, ContextLift, Generation, PromptError, context_lift
from cocoa_engine.context import context_lift_of_text
from tests.helpers.alike import near
from tests.helpers.hooks import hook_count
from tests.helpers.prompts import chat
from tests.helpers.tiny_models import sentencepiece_like_tokenizer, tiny_model, tiny_tokenizer

CONTEXT = "The lighthouse of Hvalnes was built by the engineer Marta Lindqvist in 1911."
QUESTION = "Who built the lighthouse of Hvalnes, and in which year?"
WITH, WITHOUT = chat(f"{CONTEXT}\n\n{QUESTION}"), chat(QUESTION)


def by_plain_scores(engine: CocoaEngine, generation: Generation, full: list[int], bare: list[int]) -> list[ContextLift]:
    """Each span by itself, after the prompt and the spans before it."""
    lifts = []
    before: list[int] = []
    for span in generation.spans:
        (a,), (b,) = (
            engine.score([*prompt, *before], span.token_ids, config=generation.config).spans for prompt in (full, bare)
        )
        before += span.token_ids
        differences = {name: getattr(a, name) - getattr(b, name) for name in ("log_prob", "con_mlds", "f_mlds")}
        tokens = [x - y for x, y in zip(a.token_log_probs, b.token_log_probs, strict=True)]
        lifts.append(ContextLift(**differences, token_log_probs=tokens))
    return lifts


def assert_same(found: list[ContextLift], expected: list[ContextLift]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-3)
        assert one.log_prob == pytest.approx(other.log_prob, abs=2e-3)
        assert (one.con_mlds, one.f_mlds) == near((other.con_mlds, other.f_mlds))


@pytest.fixture(scope="module")
def answer(engine: CocoaEngine) -> Generation:
    generation = engine.generate(WITH, max_new_tokens=24)
    assert len(generation.spans) > 1
    return generation


def test_against_plain_scores_on_the_real_model(engine: CocoaEngine, answer: Generation) -> None:
    expected = by_plain_scores(engine, answer, engine.encode(WITH), engine.encode(WITHOUT))
    lifts = context_lift(engine, answer, WITHOUT)
    assert_same(lifts, expected)
    assert_same(context_lift(engine, answer, engine.encode(WITHOUT), with_context=WITH), expected)
    assert hook_count(engine.model) == 0
    # what stands in the context is lifted
    of_name = [lift.log_prob for lift, span in zip(lifts, answer.spans, strict=True) if "Lindqvist" in span.text]
    assert of_name
    assert min(of_name) > 5
    assert lifts[0].model_validate_json(lifts[0].model_dump_json()) == lifts[0]
    same = context_lift(engine, answer, WITH)
    assert [lift.log_prob for lift in same] == pytest.approx([0] * len(same), abs=1e-3)


def test_one_forward_pass_more() -> None:
    engine = CocoaEngine(tiny_model("gpt2"), tiny_tokenizer())
    generation = engine.generate([5, 6, 7, 8], max_new_tokens=12)
    fed: list[int] = []
    engine.model.register_forward_pre_hook(
        lambda _, __, inputs: fed.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    context_lift(engine, generation, [7, 8])
    assert fed == [2 + len(generation.token_ids)]


def test_processors_are_left_out_where_the_prompt_is_given() -> None:
    """A repetition penalty changes log p of the answer, but not what the model itself makes of it."""
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    full, bare = [5, 6, 7, 8], [7, 8]
    generation = engine.generate(full, max_new_tokens=12, repetition_penalty=1.8)
    expected = by_plain_scores(engine, generation, full, bare)
    assert_same(context_lift(engine, generation, bare, with_context=full), expected)
    same = context_lift(engine, generation, full, with_context=full)
    assert [lift.log_prob for lift in same] == pytest.approx([0] * len(same), abs=1e-3)
    assert generation.processed
    assert not engine.generate(full, max_new_tokens=1).processed
    assert engine.stream(full, repetition_penalty=1.8).processed
    assert not engine.stream(full).processed
    assert engine.stream(full).prompt == full


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.8},
        {"logits_processor": [lambda ids, logits: logits / 2]},
        {"generation_config": GenerationConfig(no_repeat_ngram_size=1)},
        {"method": "dola"},  # which has a penalty of its own
    ],
)
def test_a_processed_answer_is_not_compared_with_what_was_not(options: dict[str, Any]) -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    generation = engine.generate([5, 6, 7, 8], max_new_tokens=4, **options)
    with pytest.raises(ConfigError, match="as with_context="):
        context_lift(engine, Generation.model_validate_json(generation.model_dump_json()), [7, 8])
    assert context_lift(engine, generation, [7, 8], with_context=[5, 6, 7, 8])


def test_of_a_text(engine: CocoaEngine, answer: Generation) -> None:
    """The same as of the generation, but for an end-of-sequence token."""
    texts = [span.text for span in answer.spans]
    found = context_lift_of_text(engine, texts, WITH, WITHOUT, answer.config)
    known = context_lift(engine, answer, WITHOUT)
    last = len(answer.spans[-1].token_ids) - (answer.finish_reason == "eos")
    for number, (one, other) in enumerate(zip(found, known, strict=True)):
        assert one is not None
        count = last if number == len(known) - 1 else None
        assert one.token_log_probs == pytest.approx(other.token_log_probs[:count], abs=1e-3)
    assert context_lift_of_text(engine, ["", *texts], WITH, WITHOUT)[0] is None


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, sentencepiece_like_tokenizer])
def test_tokens_of_the_spans_of_a_text(tokenizer: Any) -> None:
    """Also where a decoder drops the first space, and characters are spread over tokens."""
    engine = CocoaEngine(tiny_model("llama"), tokenizer())
    spans = [" a", " sea日", "é", "\n is"]
    lifts = context_lift_of_text(engine, spans, [5, 6, 7, 8], [7, 8])
    assert all(lift is not None for lift in lifts)
    whole = engine.score([5, 6, 7, 8], "".join(spans)).spans[0]
    bare = engine.score([7, 8], "".join(spans)).spans[0]
    total = sum(lift.log_prob for lift in lifts if lift is not None)
    assert total == pytest.approx(whole.log_prob - bare.log_prob, abs=1e-3)
    counts = [len(lift.token_log_probs) for lift in lifts if lift is not None]
    ends = [len(engine.decode(whole.token_ids[: sum(counts[: n + 1])]).rstrip("�")) for n in range(len(spans))]
    shift = len("".join(spans)) - ends[-1]  # a dropped space
    assert [end + shift for end in ends] == [len("".join(spans[: n + 1])) for n in range(len(spans))]


def test_bad_input(engine: CocoaEngine, answer: Generation) -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        context_lift(engine, answer, "")
    with pytest.raises(PromptError, match="exceed the model's context window"):
        context_lift(engine, answer, [5] * 8192)
    with pytest.raises(PromptError, match="the answer is empty"):
        context_lift_of_text(engine, [], WITH, WITHOUT)
