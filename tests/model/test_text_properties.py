"""Text assembly: spans concatenate to the answer, offsets are right, stop texts are cut wherever they fall.

The tiny models write random text. With :class:`WellFormedText` it is well-formed, so that characters of two to four
bytes are spread over tokens and spans; without it most of it is not text at all, which must be survived too.
"""

import codecs
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList

from cocoa_engine import CocoaConfig, CocoaEngine, Generation
from cocoa_engine.model.tokenizer import REPLACEMENT, Detokenizer, Tokens, token_ends
from cocoa_integrations._shared.logprobs import TokenLogprobs
from tests.helpers.in_threads import Dictated
from tests.helpers.reference import FullForward, Reference, assert_same, text_of
from tests.helpers.tiny_models import (
    BOS,
    EOS,
    VOCAB_SIZE,
    WellFormedText,
    pieces_tokenizer,
    tiny_model,
    tiny_tokenizer,
    token_bytes,
)

pytestmark = pytest.mark.slow

TOKENIZERS = {"byte-level": tiny_tokenizer, "sentencepiece": pieces_tokenizer}
KNIFE_EDGE = 1e-4

families = st.sampled_from(sorted(TOKENIZERS))
PROMPT_TEXTS = ["the ", "das ist", "日本", "Ω 😀", "a", "да, да", "er is here", "\n\n"]
prompts = st.sampled_from(PROMPT_TEXTS)
boundaries = st.sampled_from(["right", "left", "own", "fixed"])


class Family:
    def __init__(self, name: str) -> None:
        self.tokenizer = TOKENIZERS[name]()
        model = tiny_model("llama", seed=1)
        self.engine = CocoaEngine(model, self.tokenizer)
        self.forward = FullForward(model)
        self.well_formed: list[LogitsProcessor] = [WellFormedText(self.tokenizer)]

    def generate(self, prompt: str, *, well_formed: bool = True, **settings: Any) -> Generation:
        processors = LogitsProcessorList(self.well_formed) if well_formed else None
        return self.engine.generate(prompt, logits_processor=processors, **settings)

    def check(self, answer: Generation, prompt: str, settings: dict[str, Any]) -> None:
        reference = Reference(self.forward, self.tokenizer, CocoaConfig(**settings), logits_processor=self.well_formed)
        expected = reference.generate(self.tokenizer(prompt).input_ids)
        assume(expected.margin > KNIFE_EDGE)
        if spoilt(answer.token_ids, self.tokenizer):
            expected = replace(expected, text=answer.text)
        assert_same(answer, expected)


@cache
def family(name: str) -> Family:
    return Family(name)


def spoilt(token_ids: list[int], tokenizer: Any) -> bool:
    """Whether a broken character has changed the text before it.

    A decoder with byte fallback writes a whole run of byte tokens as replacement characters if its end is not text:
    a line feed in it, which is text by itself, is gone again. An answer that is streamed cannot follow.
    """
    return "<0x0A>" in tokenizer.get_vocab() and REPLACEMENT in tokenizer.decode(token_ids, skip_special_tokens=True)


def check_assembly(answer: Generation, tokenizer: Any) -> None:
    assert "".join(span.text for span in answer.spans) == answer.text
    assert all(answer.text[span.start : span.end] == span.text for span in answer.spans)
    offsets = [0, *(span.end for span in answer.spans)]
    assert offsets == [*(span.start for span in answer.spans), len(answer.text)]
    assert [token for span in answer.spans for token in span.token_ids] == answer.token_ids
    if answer.finish_reason != "stop" and not spoilt(answer.token_ids, tokenizer):
        assert answer.text == text_of(tokenizer, answer.token_ids)
    for stop in answer.config.stop:
        assert stop not in answer.text
    for span in answer.spans:
        if span.chosen is not None:
            kept = span.candidates[span.chosen].token_ids
            assert kept[: len(span.token_ids)] == span.token_ids
            assert kept == span.token_ids or (answer.finish_reason in ("length", "stop") and span is answer.spans[-1])


@settings(max_examples=25)
@given(families, prompts, boundaries, st.booleans(), st.integers(1, 20), st.sampled_from([0.1, 0.3, 1.0]))
def test_spans_concatenate_to_the_text(name, prompt, boundary, well_formed, max_new_tokens, gamma):
    chosen = family(name)
    settings = {"span_boundary": boundary, "max_new_tokens": max_new_tokens, "gamma": gamma, "max_candidates": 3}
    answer = chosen.generate(prompt, well_formed=well_formed, **settings)
    check_assembly(answer, chosen.tokenizer)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_characters_are_split_over_spans(name):
    """The properties of this file would be empty if no character ever crossed a border of spans."""
    chosen, crossings = family(name), 0
    byte_of = token_bytes(chosen.tokenizer)
    for prompt in PROMPT_TEXTS:
        for span in chosen.generate(prompt, max_new_tokens=20, gamma=0.1, max_candidates=3).spans[:-1]:
            begin = b"".join(byte_of[token] for token in span.token_ids)
            crossings += begin.decode(errors="ignore") != begin.decode(errors="replace")
    assert crossings > 2


@settings(max_examples=25)
@given(st.data(), families, prompts, boundaries)
def test_stop_texts_from_the_model_s_own_answer(data, name, prompt, boundary):
    """A stop text may begin and end anywhere: inside a token, across tokens, spans and characters."""
    chosen = family(name)
    settings = {"max_new_tokens": 14, "span_boundary": boundary, "max_candidates": 3}
    free = chosen.generate(prompt, **settings).text
    stops = []
    for _ in range(data.draw(st.integers(1, 2), label="number of stop texts")):
        start = data.draw(st.integers(0, max(0, len(free) - 1)), label="start")
        end = data.draw(st.integers(start + 1, start + 6), label="end")
        stops.append(free[start:end])
    assume(all(stop and REPLACEMENT not in stop for stop in stops))
    settings["stop"] = tuple(stops)

    answer = chosen.generate(prompt, **settings)

    check_assembly(answer, chosen.tokenizer)
    chosen.check(answer, prompt, settings)
    processors = LogitsProcessorList(chosen.well_formed)
    stream = chosen.engine.stream(prompt, logits_processor=processors, **settings)
    assert list(stream) == answer.spans
    assert stream.generation == answer
    both = chosen.engine.generate_batch(["a", prompt], logits_processor=processors, **settings)
    for asked, found in zip(["a", prompt], both, strict=True):
        check_assembly(found, chosen.tokenizer)
        chosen.check(found, asked, settings)


SUN, BOOK = "日".encode(), "本".encode()


@pytest.mark.parametrize("max_new_tokens", [2, 8])
@pytest.mark.parametrize(
    ("pieces", "stop", "text", "tokens"),
    [
        ([b"x", SUN, b"y"], "日", "x", 2),
        ([b"x", SUN[:2], SUN[2:]], "日", "x", 3),
        ([b"x", SUN + BOOK[:1], BOOK[1:2], BOOK[2:]], "日", "x", 2),
        ([b"x", SUN + BOOK[:1], BOOK[1:2], BOOK[2:]], "x日", "", 2),
        ([b"the ", b"is", b"er"], "e i", "th", 2),
        ([b"the ", b"is", b"er"], "he", "t", 1),
    ],
)
def test_stop_texts_in_dictated_tokens(pieces, stop, text, tokens, max_new_tokens):
    """The answer ends with the token that completes the stop text, even if that begins another character."""
    chosen = family("byte-level")
    byte_of = token_bytes(chosen.tokenizer)
    dictated = [byte_of.index(piece) for piece in pieces]
    processor = LogitsProcessorList([Dictated(1, dictated)])
    answer = chosen.engine.generate([5], logits_processor=processor, stop=stop, max_new_tokens=max_new_tokens)
    check_assembly(answer, chosen.tokenizer)
    if tokens <= max_new_tokens:
        assert (answer.text, answer.finish_reason) == (text, "stop")
    assert answer.token_ids == dictated[: min(tokens, max_new_tokens)]


def utf8(raw: bytes) -> str:
    """Python's decoding of bytes that more may follow: a character that is not complete is left out."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(raw)


@settings(max_examples=150)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1) | st.sampled_from(range(130, 259)), max_size=12))
def test_text_is_that_of_the_complete_characters(token_ids):
    """Bytes that never are text stay as U+FFFD, only a character that may still be completed is left out."""
    tokenizer = family("byte-level").tokenizer
    byte_of = token_bytes(tokenizer)
    track = Detokenizer(Tokens(tokenizer))
    for count, token_id in enumerate(token_ids, 1):
        track.push(token_id)
        assert track.text == utf8(b"".join(byte_of[each] for each in token_ids[:count]))


@settings(max_examples=80)
@given(st.text(st.sampled_from("aé日😀 \ufffd\U0010ffff"), max_size=6), st.integers(0, 30))
def test_text_of_byte_fallback_is_that_of_the_complete_characters(text, count):
    tokenizer = family("sentencepiece").tokenizer
    token_ids = tokenizer(text, add_special_tokens=False).input_ids[:count]
    expected = text_of(tokenizer, token_ids)
    assert token_ends(Tokens(tokenizer), token_ids)[0] == expected
    assert text.lstrip(" ").startswith(expected.lstrip(" "))


PIECES = [bytes([byte]) for byte in "x日😀\ufffd".encode()]
"""A character of three bytes, one of four, and a U+FFFD that is meant, byte by byte."""


@pytest.mark.parametrize("ended_by", ["length", "eos", "stop", "risk"])
@pytest.mark.parametrize("count", range(1, len(PIECES) + 1))
def test_an_answer_that_ends_inside_a_character(count, ended_by):
    engine = family("byte-level").engine
    byte_of = token_bytes(engine.tokenizer)
    token_ids = [byte_of.index(piece) for piece in PIECES[:count]]
    last = {"eos": [EOS], "stop": [BOS]}.get(ended_by, [])
    options = {"max_new_tokens": count if ended_by == "length" else 30, "stop": "<bos>"}
    options |= {"max_risk": 0.0} if ended_by == "risk" else {}
    dictated = LogitsProcessorList([Dictated(1, [*token_ids, *last])])
    answer = engine.generate([5], logits_processor=dictated, **options)
    if ended_by != "risk":  # this stops at the first span, which is the answer
        assert (answer.finish_reason, answer.token_ids) == (ended_by, [*token_ids, *last])
    expected = utf8(b"".join(PIECES[:count]))
    assert answer.text == expected
    check_assembly(answer, engine.tokenizer)
    assert list(engine.stream([5], logits_processor=dictated, **options)) == answer.spans
    assert engine.generate_batch([[5], [5]], logits_processor=dictated, **options)[1].text == expected
    entries = TokenLogprobs(engine).of_answer(answer.spans)
    assert "".join(entry["token"] for entry in entries) == expected
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == expected.encode()
    assert engine.score([5], answer.token_ids).text == expected
