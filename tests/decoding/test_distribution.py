"""Entropy and margin of next-token distributions: against float64, with forbidden tokens, and in every result."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import CocoaEngine, Generation
from cocoa_engine.decoding.next_tokens import next_tokens, row_statistics
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

LOGITS = st.lists(st.floats(-60, 60, width=32) | st.just(-math.inf), min_size=2, max_size=40).filter(
    lambda values: any(value > -math.inf for value in values)
)


@given(LOGITS)
def test_entropy_and_margin_are_those_of_float64(values: list[float]) -> None:
    logits = torch.tensor([values])
    allowed = torch.tensor([value for value in values if value > -math.inf], dtype=torch.float64).log_softmax(0)
    best = allowed.sort(descending=True)[0]
    (row,) = next_tokens(logits, 2)
    assert row is not None
    assert row.entropy == pytest.approx(-(allowed.exp() * allowed).sum().item(), abs=1e-4)
    assert 0 <= row.entropy <= math.log(len(values)) + 1e-4
    assert row.margin == pytest.approx((best[0] - best[1]).item() if len(best) > 1 else math.inf, abs=1e-4)
    assert row.log_probs[0] == pytest.approx(best[0].item(), abs=1e-4)


def test_rows_with_one_allowed_token_and_without_any() -> None:
    """One token has no entropy and an infinite margin."""
    logits = torch.full((4, 50), -math.inf)
    logits[0, 7], logits[2, 2], logits[3, 0] = 3.0, math.nan, math.inf
    row, *others = next_tokens(logits, 2)
    assert row is not None
    assert (row.token_ids, row.log_probs, row.entropy, row.margin) == ((7,), (0.0,), 0.0, math.inf)
    assert others == [None, None, None]


def test_rows_with_forbidden_tokens_leave_the_others_alone() -> None:
    logits = torch.randn(5, 70, generator=torch.Generator().manual_seed(1)) * 8
    plain_sum, plain_entropy = row_statistics(logits, logits.amax(dim=1))
    mixed = logits.clone()
    mixed[2, 3:] = -math.inf
    log_sum, entropy = row_statistics(mixed, mixed.amax(dim=1))
    assert torch.allclose(log_sum, mixed.logsumexp(dim=1), rtol=1e-5)
    others = [0, 1, 3, 4]
    assert torch.equal(log_sum[others], plain_sum[others])
    assert torch.equal(entropy[others], plain_entropy[others])
    assert 0 <= entropy[2] <= math.log(3)


def test_a_whole_vocabulary_is_summed_exactly_whatever_its_layout() -> None:
    logits = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(2)) * 4
    exact = logits.double().log_softmax(dim=1)
    for layout in (logits, logits.t().contiguous().t()):
        log_sum, entropy = row_statistics(layout, layout.amax(dim=1))
        assert torch.allclose(log_sum.double(), logits.double().logsumexp(dim=1), atol=3e-6, rtol=0)
        assert torch.allclose(entropy.double(), -(exact.exp() * exact).sum(dim=1), atol=3e-5, rtol=0)


def test_a_near_certain_token_keeps_its_small_entropy() -> None:
    logits = torch.tensor([[18.0, 0.0]])
    _, entropy = row_statistics(logits, logits[:, 0])
    p = 1 / (1 + math.exp(18.0))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log1p(-p), rel=0.1)


def test_an_infinite_margin_survives_json() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())

    def only_seven(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forbidden = torch.full_like(scores, -math.inf)
        forbidden[:, 7] = scores[:, 7]
        return forbidden

    generation = engine.generate([5, 6], logits_processor=only_seven, max_new_tokens=3)
    for name, value in (("token_margins", math.inf), ("token_entropies", 0.0)):
        assert [each for span in generation.spans for each in getattr(span, name)] == [value] * 3
    assert Generation.model_validate_json(generation.model_dump_json()) == generation
