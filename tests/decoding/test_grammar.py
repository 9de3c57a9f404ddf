"""Grammars: every answer fits, whichever way it is decoded, and each request keeps its own place."""

import json
import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessor

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, MissingExtraError
from cocoa_engine.decoding.grammar import GrammarProcessor, json_rule, json_schema_grammar, regex_grammar
from cocoa_engine.decoding.matchers import load_tokenizer
from tests.helpers.alike import assert_alike
from tests.helpers.in_threads import together
from tests.helpers.mutations import fuzz
from tests.helpers.tiny_models import EOS, pieces_tokenizer, tiny_model, tiny_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "population": {"type": "integer", "maximum": 99}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
TOKENIZER = tiny_tokenizer()
TOKENIZER.add_tokens(
    ['{"', '": "', '",', '", "', '"}', '"}}', '"]', '"],', '["', "1}", "1,", "},"]
)  # they end several values
QUESTIONS = [[{"role": "user", "content": f"Describe {city} as JSON."}] for city in ("Paris", "Rome", "Oslo")]


@pytest.fixture(scope="module")
def city_json(engine: CocoaEngine) -> GrammarProcessor:
    return engine.constrain(json_schema=CITY)


def test_an_answer_fits_its_schema(engine: CocoaEngine, city_json: GrammarProcessor) -> None:
    answer = engine.chat(QUESTIONS[0], max_new_tokens=40, logits_processor=city_json)
    assert answer.finish_reason == "eos"
    assert json.loads(answer.text).keys() == {"city", "population"}
    candidates = [candidate.text for span in answer.spans for candidate in span.candidates]
    assert len(candidates) > 1  # branches competed, each within the grammar
    opening = next(span for span in answer.spans if span.token_ids)
    assert opening.text.startswith('{"city": "')
    assert opening.token_log_probs[0] == 0  # nothing else could follow


@pytest.mark.parametrize("boundary", ["right", "left", "own", "fixed"])
def test_branches_do_not_disturb_each_other(engine: CocoaEngine, city_json: GrammarProcessor, boundary: Any) -> None:
    """A processor that never rolls back, but reads every path from its beginning, decodes the same."""

    class Fresh(LogitsProcessor):
        def __init__(self, prompt: list[int]) -> None:
            self.prompt = prompt

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return city_json.for_prompt(self.prompt)(ids, scores)

    prompt = engine.encode_chat(QUESTIONS[0])
    config = CocoaConfig(max_new_tokens=24, gamma=0.1, max_span_tokens=5, span_boundary=boundary)
    ours = engine.generate(prompt, config=config, logits_processor=city_json)
    assert ours.usage.risk_points > 1
    assert_alike(ours, engine.generate(prompt, config=config, logits_processor=Fresh(prompt)))


LEAVES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"type": "string"}, ["", "a", "red mug"]),
    ({"type": ["string", "integer"]}, ["1", 1]),
    ({"type": "array", "items": {"type": "string"}}, [[], ["a"], ["a", "b"]]),
]
"""Schemas of a value, with values of each."""


@st.composite
def alternatives(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[str]]:
    """Schemas of objects, and texts of values: each fits at least one of the schemas."""
    schemas, texts = [], []
    for _ in range(draw(st.integers(1, 4))):
        members = draw(st.dictionaries(st.sampled_from("abc"), st.sampled_from(LEAVES), min_size=1))
        inner = {name: schema for name, (schema, _) in members.items()}
        schemas.append({"type": "object", "properties": inner, "required": [*inner], "additionalProperties": False})
        for _ in range(2):
            texts.append(json.dumps({name: draw(st.sampled_from(values)) for name, (_, values) in members.items()}))
    return schemas, texts


@pytest.mark.slow
@fuzz(60)
@given(
    st.sampled_from(["anyOf", "oneOf", "rules"]),
    alternatives(),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), min_size=20, max_size=60),
)
def test_the_state_after_any_walk_is_that_of_a_fresh_one(
    spelling: str, made: tuple[list[dict[str, Any]], list[str]], walk: list[tuple[int, int]]
) -> None:
    """The walk goes to prefixes of texts that fit, and with them to every take-back."""
    schemas, texts = made
    grammar = (
        f"start: {' | '.join(f'r{number}' for number in range(len(schemas)))}\n"
        + "\n".join(f"r{number}: {json_rule(schema)}" for number, schema in enumerate(schemas))
        if spelling == "rules"
        else json_schema_grammar({spelling: schemas})
    )
    processor, scores = GrammarProcessor(grammar, TOKENIZER), torch.zeros(1, len(TOKENIZER))
    moved = processor.for_prompt([])
    paths = [TOKENIZER(text).input_ids for text in texts]
    for number, length in walk:
        answer = torch.tensor([paths[number % len(paths)][:length]], dtype=torch.long)
        assert torch.equal(moved(answer, scores), processor.for_prompt([])(answer, scores)), TOKENIZER.decode(answer[0])


def test_one_processor_serves_many_requests_at_once(engine: CocoaEngine, city_json: GrammarProcessor) -> None:
    prompts = [engine.encode_chat(question) for question in QUESTIONS]
    options = {"max_new_tokens": 20, "logits_processor": city_json}
    alone = [engine.generate(prompt, **options) for prompt in prompts]
    assert len({answer.text for answer in alone}) > 1
    batch = engine.generate_batch(prompts, **options)
    at_once = together([lambda prompt=prompt: engine.generate(prompt, **options) for prompt in prompts])
    for answer, *others in zip(alone, batch, at_once, strict=True):
        for other in others:
            assert_alike(answer, other)


@pytest.mark.parametrize("pattern", [r"(19|20)\d\d/[01]\d", r"(19|20)\d\d\/[01]\d\n?", "yes\nno"])
def test_regular_expressions_and_a_lark_grammar(engine: CocoaEngine, pattern: str) -> None:
    answer = engine.chat(QUESTIONS[0], max_new_tokens=12, logits_processor=engine.constrain(regex=pattern))
    assert re.fullmatch(pattern, answer.text)
    assert answer.finish_reason == "eos"
    choice = engine.constrain(grammar='start: "yes" | "no" | "I do not know"')
    assert engine.chat(QUESTIONS[0], max_new_tokens=12, logits_processor=choice).text in ("yes", "no", "I do not know")


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, pieces_tokenizer])
def test_text_that_spells_a_special_token_is_text(tokenizer: Any) -> None:
    engine = CocoaEngine(tiny_model("llama", seed=1, vocab_size=len(tokenizer())), tokenizer())
    for name in engine.tokenizer.all_special_tokens:
        value = f"{name} or {name}"
        processor = engine.constrain(json_schema={"enum": [value, f"{value}."]})
        answer = engine.generate("hi", max_new_tokens=80, logits_processor=processor)
        assert answer.finish_reason == "eos"
        assert json.loads(answer.text).removesuffix(".") == value


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, pieces_tokenizer])
@pytest.mark.parametrize("extra", [0, 20])
def test_random_weights_write_valid_json(tokenizer: Any, extra: int) -> None:
    """Byte-level and byte-fallback tokenizers, and models with more logits than the tokenizer has tokens."""
    made = tokenizer()
    engine = CocoaEngine(tiny_model("llama", seed=1, vocab_size=len(made) + extra), made)
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "日"]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    answer = engine.generate("hi", max_new_tokens=80, logits_processor=engine.constrain(json_schema=schema))
    assert answer.finish_reason == "eos"
    value = json.loads(answer.text)
    assert value["a"] in ("x", "日")
    assert len(value["b"]) <= 3


def test_transformers_generate_takes_it_too() -> None:
    tokenizer, model = tiny_tokenizer(), tiny_model("llama", seed=2)
    processor = GrammarProcessor(regex_grammar("[a-e]{3,9}"), tokenizer)
    ids = torch.tensor([tokenizer("one").input_ids, tokenizer("two").input_ids])
    written = model.generate(ids, logits_processor=[processor], max_new_tokens=12, do_sample=False, pad_token_id=EOS)
    texts = tokenizer.batch_decode(written[:, ids.shape[1] :], skip_special_tokens=True)
    assert all(re.fullmatch("[a-e]{3,9}", text) for text in texts)


def test_the_tokenizer_stays_as_it_was_and_one_that_cannot_be_used_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer("a", padding="max_length", max_length=4, truncation=True)
    before = tokenizer.backend_tokenizer.to_str()
    GrammarProcessor(regex_grammar("a+"), tokenizer)
    assert tokenizer.backend_tokenizer.to_str() == before
    tokenizer.eos_token = None
    for other, message in ((tokenizer, "end-of-sequence"), (object(), "fast tokenizer")):
        with pytest.raises(ConfigError, match=message):
            GrammarProcessor(json_schema_grammar(CITY), other)


def test_something_must_end_the_answer(engine: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match="all end tokens of the model are ignored"):
        engine.constrain(regex="a", ignored_ends=engine.end_token_ids)


def test_tokens_that_do_not_fit_are_an_error(engine: CocoaEngine, city_json: GrammarProcessor) -> None:
    prompt = engine.encode_chat(QUESTIONS[0])

    def insists(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(scores).index_fill(1, torch.tensor([500]), 1.0)

    with pytest.raises(ConfigError, match="put the grammar last"):
        engine.generate(prompt, gamma=1, max_new_tokens=4, logits_processor=[city_json, insists])


def test_without_the_package_the_error_names_the_extra(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"cocoa-integrations\[tools\]"):
        engine.constrain(regex="a")
    with pytest.raises(MissingExtraError, match=r"cocoa-integrations\[tools\]"):
        load_tokenizer("{}", [2])
