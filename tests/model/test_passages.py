"""The tokens of a prompt's passages, found by text or by range, with any tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine.errors import ConfigError
from cocoa_engine.model.prompts import Passages, passage_positions, sources_of_batch
from cocoa_engine.model.tokenizer import Tokens
from tests.helpers.tiny_models import BOS, LoweringTokenizer, sentencepiece_like_tokenizer, tiny_tokenizer

BYTE_LEVEL = Tokens(tiny_tokenizer())
PIECES = Tokens(sentencepiece_like_tokenizer())
PROMPT = "read: the thing is 日本 in the rain. ask: where?"


def slow(tokens: Tokens) -> Tokens:
    """A tokenizer that does not know where its tokens come from."""
    slow_tokens = Tokens(tokens.tokenizer)
    slow_tokens.encode_with_offsets = lambda *_, **__: None  # type: ignore[method-assign]
    return slow_tokens


KINDS = {"byte level": BYTE_LEVEL, "pieces": PIECES, "byte level, slow": slow(BYTE_LEVEL), "pieces, slow": slow(PIECES)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passage", ["the thing is 日本", "in the rain.", "日", "where?"])
def test_the_tokens_of_a_text_hold_its_characters_and_no_more(kind: str, passage: str) -> None:
    tokens = KINDS[kind]
    ids = tokens.encode(PROMPT)
    (found,) = passage_positions(tokens, PROMPT, ids, [passage])
    text = tokens.decode(ids[found.start : found.stop])
    assert passage in text
    for shorter in (range(found.start + 1, found.stop), range(found.start, found.stop - 1)):
        assert passage not in tokens.decode(ids[shorter.start : shorter.stop])


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_and_token_ids_give_what_texts_give(kind: str) -> None:
    tokens = KINDS[kind]
    ids = tokens.encode(PROMPT)
    texts = ["in the rain", "the thing"]
    expected = passage_positions(tokens, PROMPT, ids, texts)
    ranges = [(PROMPT.index(text), PROMPT.index(text) + len(text)) for text in texts]
    assert passage_positions(tokens, PROMPT, ids, ranges) == expected
    assert passage_positions(tokens, ids, ids, texts) == expected
    assert passage_positions(tokens, ids, ids, Passages(expected)) == expected


@given(st.integers(0, len(PROMPT) - 1), st.integers(1, len(PROMPT)), st.sampled_from([*KINDS]))
def test_every_range_has_the_tokens_with_its_characters(start: int, length: int, kind: str) -> None:
    tokens, end = KINDS[kind], min(start + length, len(PROMPT))
    if not PROMPT[start:end].strip():
        return
    ids = tokens.encode(PROMPT)
    (found,) = passage_positions(tokens, PROMPT, ids, [(start, end)])
    first = 2 if ids[0] == BOS else 1
    if end <= len(tokens.decode(ids[:first])):
        assert found == range(0)  # only the first token has its characters
        return
    assert 1 <= found.start < found.stop <= len(ids)
    if start > 0 and kind.startswith("byte"):
        assert PROMPT[start:end].strip() in tokens.decode(ids[found.start : found.stop])


WORDS = st.text(st.sampled_from("aBC \n."), max_size=12)


@given(WORDS, WORDS.filter(str.strip), WORDS)
def test_passages_that_the_tokenizer_changes(before: str, passage: str, after: str) -> None:
    tokens, prompt = Tokens(LoweringTokenizer()), f"Q: {before}| {passage} |{after}"
    ids = tokens.encode(prompt)
    start = prompt.index("|") + 2
    (found,) = passage_positions(tokens, prompt, ids, [(start, start + len(passage))])
    assert tokens.decode(ids[found.start : found.stop]).strip() == " ".join(passage.lower().split())


def test_places_of_passages() -> None:
    """Equal passages are different places, the first token belongs to none, and white space may have been stripped."""
    prompt = "1. the rain\n2. the rain\n"
    ids = BYTE_LEVEL.encode(prompt)
    first, second = passage_positions(BYTE_LEVEL, prompt, ids, ["the rain", "the rain\n"])
    assert first.stop <= second.start
    assert ids[first.start : first.stop] == ids[second.start : second.start + len(first)]
    assert passage_positions(BYTE_LEVEL, prompt, ids, ["the rain"]) == (first,)
    ids = BYTE_LEVEL.encode("say: the rain")
    stripped, plain = (passage_positions(BYTE_LEVEL, "say: the rain", ids, [f"the rain{end}"]) for end in ("\n", ""))
    assert stripped == plain
    ids = BYTE_LEVEL.encode("axb")
    assert passage_positions(BYTE_LEVEL, "axb", ids, [(0, 1), (0, 3)]) == (range(0), range(1, len(ids)))
    assert passage_positions(BYTE_LEVEL, "axb", ids, None) == passage_positions(BYTE_LEVEL, "axb", ids, []) == ()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("the thing", "a list of texts"),
        (["the snow"], "passage 0 of source \\('the snow'\\) is not in the prompt"),
        (["the thing", " "], "passage 1 of source is ' '"),
        ([(3, 3)], "0 <= start < end"),
        ([(0, 10_000)], "the prompt has"),
        ([(0, "4")], "Give a text that is not empty, or"),
        ([7], "passage 0 of source is 7"),
    ],
)
def test_refused_sources(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        passage_positions(BYTE_LEVEL, PROMPT, BYTE_LEVEL.encode(PROMPT), source)


def test_sources_of_a_batch() -> None:
    assert sources_of_batch(None, 2) == [None, None]
    wrong, short = "one list of passages, or None, for each prompt", "source is given for 1 prompts; there are 2"
    refused: list[tuple[Any, str]] = [(["a", "b"], wrong), ("ab", wrong), ([["a"]], short)]
    for source, message in refused:
        with pytest.raises(ConfigError, match=message):
            sources_of_batch(source, 2)
