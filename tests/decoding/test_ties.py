"""Equal logits are ranked by ascending id, and overflow is an error, whichever way the model is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cocoa_engine import METHODS, CocoaEngine, Generation, NonFiniteLogitsError, Runtime
from cocoa_engine.decoding.next_tokens import next_tokens
from cocoa_engine.execution.backends import KINDS
from tests.helpers.backends import WANTED, made
from tests.helpers.libraries import needs_kernels
from tests.helpers.rivals import config_of
from tests.helpers.tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer

COPIES = 5
LINEARS = ("native", "stock")


def with_ties() -> Any:
    """A model in which every token has the logit of ``COPIES - 1`` others, with ids far from its own.

    A logit is one number of the last state or its negative: the same in whatever order a processor sums products.
    """
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        one = torch.eye(head.shape[1])
        head.copy_(torch.cat((one, -one))[: VOCAB_SIZE // COPIES].repeat(COPIES, 1))
    model.generation_config.eos_token_id = None
    return model


def tops_of(answer: Generation) -> list[list[tuple[int, float]]]:
    return [top for span in answer.spans for top in span.top_log_probs or ()]


def ids(answer: Generation) -> list[Any]:
    candidates = [[candidate.token_ids for candidate in span.candidates] for span in answer.spans]
    spans = [span.token_ids for span in answer.spans]
    return [spans, candidates, [[token_id for token_id, _ in top] for top in tops_of(answer)]]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_equal_logits_are_ranked_by_id(method: str, tmp_path: Path) -> None:
    model, prompts = with_ties(), [[5, 6, 7], [20, 30, 40, 50]]
    config = config_of(method, model, tmp_path, max_new_tokens=10, top_logprobs=7, max_candidates=3, gamma=0.2)
    native, stock = (CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(linears=each)) for each in LINEARS)
    forbid = [lambda _, scores: scores.index_fill(1, torch.arange(0, VOCAB_SIZE, 2), -torch.inf)]
    for options in ({}, {"logits_processor": forbid}):
        expected = native.generate(prompts[0], config=config, **options)
        answers = stock.generate_batch(prompts, config=config, **options)
        assert ids(answers[0]) == ids(stock.generate(prompts[0], config=config, **options)) == ids(expected)
        if not options and method == "greedy":
            assert max(expected.token_ids) < VOCAB_SIZE // COPIES  # the first of its copies
        for top in tops_of(expected):
            assert top == sorted(top, key=lambda pair: (-pair[1], pair[0]))


@pytest.mark.parametrize("linears", LINEARS)
def test_equal_logits_of_given_texts_are_ranked_by_id(linears: Any) -> None:
    engine = CocoaEngine(with_ties(), tiny_tokenizer(), runtime=Runtime(linears=linears))
    prompt, texts = [5, 6, 7], [[11, 12, 13], [11, 14, 15, 16]]
    alone = [engine.score(prompt, text, top_logprobs=COPIES + 2) for text in texts]
    together = engine.score(prompt, texts, top_logprobs=COPIES + 2)
    for answer, text in zip([*alone, *together], texts * 2, strict=True):
        assert len(tops_of(answer)) == len(text)
        for top in tops_of(answer):
            highest = [token_id for token_id, _ in top[:COPIES]]
            assert highest == [highest[0] + copy * VOCAB_SIZE // COPIES for copy in range(COPIES)]
            assert [token_id for token_id, _ in top[COPIES:]] == [top[COPIES][0], top[COPIES][0] + VOCAB_SIZE // COPIES]
            assert top == sorted(top, key=lambda pair: (-pair[1], pair[0]))
    assert [*map(ids, alone)] == [*map(ids, together)]


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_kernels), False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_of_the_most_probable_tokens_is_the_lowest_id_among_equals(native: bool, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 400, dtype=dtype)
    logits[0, [3, 399]] = 2.0
    logits[1, :] = -torch.inf
    logits[1, [5, 9, 300]] = 1.0
    logits[2, 100:200] = 1.0
    rows = next_tokens(logits, 4, native=native)
    assert [row and row.token_ids for row in rows] == [(3, 399, 0, 1), (5, 9, 300), (100, 101, 102, 103)]


RUNTIMES: dict[str, dict[str, Any]] = {
    "native": {"linears": "native"},
    "stock": {"linears": "stock"},
    "modules": {"forward": "modules"},
}


def overflowing(kind: str, part: str) -> Any:
    model = tiny_model(kind)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if part in name:
                weight.mul_(1e20)
    return model


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("part", ["embed_tokens", "down_proj", "v_proj", "gate_proj"])
def test_an_overflow_is_an_error(part: str, runtime: str) -> None:
    """The states are finite, but their mean square is not: torch's norm makes them 0, and all logits equal."""
    engine = CocoaEngine(overflowing("llama", part), tiny_tokenizer(), runtime=Runtime(**RUNTIMES[runtime]))
    for call in (
        lambda: engine.generate([5, 6, 7, 20, 30], max_new_tokens=4),
        lambda: next(engine.stream([5, 6])),
        lambda: engine.score([5, 6], [7, 8]),
        lambda: engine.score([5, 6], [[7, 8], [9]]),
    ):
        with pytest.raises(NonFiniteLogitsError):
            call()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "static_lean"])
def test_an_overflow_is_noticed_by_each_backend(kind: str) -> None:
    backend = made(overflowing("llama", "embed_tokens"), kind, "stock").backend
    (tree,) = backend.open([[5, 6, 7]], 4, WANTED)
    assert next_tokens(backend.prefill(tree)[None], 3) == [None]
    assert next_tokens(backend.step([(tree, [(8,), (9,)])])[0].logits, 3) == [None, None]
