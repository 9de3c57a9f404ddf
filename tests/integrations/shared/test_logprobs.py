"""Token log-probabilities agree with the text they are of, whatever the tokens are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cocoa_engine import CocoaEngine, Generation
from cocoa_integrations._shared.logprobs import TokenLogprobs
from tests.helpers.tiny_models import sentencepiece_like_tokenizer, tiny_model, tiny_tokenizer


def check(out: Generation, engine: CocoaEngine) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = TokenLogprobs(engine).of_answer(out.spans)
    assert "".join(entry["token"] for entry in content) == out.text
    assert b"".join(bytes(entry["bytes"]) for entry in content) == out.text.encode()
    return content


def test_of_an_answer_that_ended(engine: CocoaEngine) -> None:
    out = engine.chat([{"role": "user", "content": "Say only the word: yes"}], max_new_tokens=48)
    assert out.finish_reason == "eos"
    content = check(out, engine)
    log_probs = [value for span in out.spans for value in span.token_log_probs]
    assert [entry["logprob"] for entry in content] == log_probs[:-1]  # all but the end token's


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, sentencepiece_like_tokenizer])
@pytest.mark.parametrize("seed", range(4))
def test_of_random_tokens(tokenizer: Callable[[], Any], seed: int) -> None:
    engine = CocoaEngine(tiny_model("llama", seed=seed), tokenizer())
    for prompt in ([5, 6], [70, 80, 90], [33]):
        out = engine.generate(prompt, max_new_tokens=40)
        check(out, engine)
        if len(out.text) > 6:
            check(engine.generate(prompt, max_new_tokens=40, stop=out.text[3:5]), engine)
