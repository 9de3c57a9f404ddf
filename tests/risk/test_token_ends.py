"""Where the tokens of decoded and given texts end, and given texts divided at their risk points."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest

from cocoa_engine import CocoaEngine, ConfigError, Generation
from tests.helpers.alike import near
from tests.helpers.engines import engine_of, prompt
from tests.helpers.reference import text_of
from tests.helpers.tiny_models import sentencepiece_like_tokenizer, tiny_model, tiny_tokenizer


def assert_exact(engine: CocoaEngine, answer: Generation) -> None:
    """Every token's end is that of the text decoded up to it, complete characters only."""
    ids: list[int] = []
    for span in answer.spans:
        assert len(span.token_ends) == len(span.token_ids)
        assert span.token_ends[-1] == span.end
        assert [*span.token_ends] == sorted(span.token_ends)
        assert span.token_ends[0] >= span.start
        for token_id, end in zip(span.token_ids[:-1], span.token_ends[:-1], strict=True):
            ids.append(token_id)
            assert answer.text[:end] == text_of(engine.tokenizer, ids)[: len(answer.text)]
        ids.append(span.token_ids[-1])


def starts_of(answer: Generation) -> list[int]:
    """The number of tokens before each span."""
    return [0, *accumulate(len(span.token_ids) for span in answer.spans[:-1])]


@pytest.mark.parametrize("method", ["greedy", "cocoa-sig"])
def test_of_decoded_answers(method: str) -> None:
    engine = engine_of(tiny_model("llama"))
    given = prompt(3)
    answer = engine.generate(given, method=method, max_new_tokens=24)
    assert len(answer.text) > 5
    assert_exact(engine, answer)
    with engine.stream(given, method=method, max_new_tokens=24) as stream:
        assert list(stream) == answer.spans
    batch = engine.generate_batch([given, prompt(4)], method=method, max_new_tokens=24)
    assert [span.token_ends for span in batch[0].spans] == [span.token_ends for span in answer.spans]


def test_a_stop_text_cuts_them() -> None:
    engine = engine_of(tiny_model("llama"))
    whole = engine.generate(prompt(3), max_new_tokens=24)
    stop = whole.text[6:9]
    answer = engine.generate(prompt(3), max_new_tokens=24, stop=(stop,))
    assert answer.finish_reason == "stop"
    assert len(answer.text) <= 6
    assert all(end <= len(answer.text) for span in answer.spans for end in span.token_ends)
    assert answer.spans[-1].token_ends[-1] == len(answer.text)


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, sentencepiece_like_tokenizer])
def test_of_given_texts(tokenizer: object) -> None:
    engine = CocoaEngine(tiny_model("llama"), tokenizer())  # type: ignore[operator]
    text = " to be or not"
    (span,) = engine.score("abc", text).spans
    assert span.token_ends[-1] == len(text)
    assert len(span.token_ends) == len(span.token_ids)
    pieces = [text[a:b] for a, b in zip([0, *span.token_ends], span.token_ends, strict=False)]
    decoded = [engine.tokenizer.decode([token_id]).strip() for token_id in span.token_ids]
    assert [piece.strip() for piece in pieces] == decoded


def test_a_given_text_divided_at_its_risk_points() -> None:
    engine = engine_of(tiny_model("llama"))
    answer = engine.generate(prompt(3), method="greedy", max_new_tokens=24)
    divided = engine.score(prompt(3), answer.token_ids, divide=True)
    whole = engine.score(prompt(3), answer.token_ids)
    assert len(divided.spans) > 3
    assert divided.text == whole.text == "".join(span.text for span in divided.spans)
    assert divided.usage == whole.usage
    assert divided.token_ids == whole.token_ids
    margins = [margin for span in divided.spans for margin in span.token_margins]
    assert margins == whole.spans[0].token_margins
    starts = starts_of(divided)
    # greedy tokens are the most probable ones, so only competing tokens divide the text
    gamma = divided.config.gamma
    assert starts == [n for n, margin in enumerate(margins) if n == 0 or margin <= -math.log(gamma)]
    for span, start in zip(divided.spans, starts, strict=True):
        before = [*prompt(3), *answer.token_ids[:start]]
        alone = engine.score(before, span.token_ids).spans[0]
        assert span.f_mlds == near(alone.f_mlds)
        assert span.log_prob == near(alone.log_prob)
    many = engine.score(prompt(3), [answer.token_ids, answer.token_ids[:5]], divide=True)
    assert many[0] == divided
    assert many[1].token_ids == answer.token_ids[:5]


def test_an_unlikely_token_divides_a_text_and_rivals_refuse() -> None:
    engine = engine_of(tiny_model("llama"))
    greedy = engine.generate(prompt(3), method="greedy", max_new_tokens=8).token_ids
    changed = [*greedy[:3], (greedy[3] + 1) % 200 + 20, *greedy[4:]]
    divided = engine.score(prompt(3), changed, divide=True, gamma=1.0)  # no ties: only unlikely tokens divide
    assert 3 in starts_of(divided)
    with pytest.raises(ConfigError, match="divide"):
        engine.score(prompt(3), greedy, divide=True, method="diver")
