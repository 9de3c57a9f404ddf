"""The equations: middle window, dis, ConMLDS, fMLDS and the scores, as pure functions."""

import math
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import equations
from cocoa_engine.equations import con_mlds, disagreement, f_mlds, middle_layers
from cocoa_engine.methods import METHODS
from tests.helpers.reference import dis

EPS = 1e-6

seeds = st.integers(0, 2**31 - 1)
log_probs = st.floats(-60, 0)
mldss = st.floats(0, 2)
alphas = st.floats(0, 10)


def states(seed: int, *shape: int, spread: float = 3.0) -> torch.Tensor:
    """Random states whose pairwise angles range from nearly none to obtuse."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(shape[-1], generator=generator)
    return common + spread * torch.rand((), generator=generator) * torch.randn(shape, generator=generator)


def test_window_of_known_depths():
    for layers, window in {32: (10, 21), 30: (10, 20), 28: (9, 18), 6: (2, 4), 3: (1, 2)}.items():
        assert middle_layers(layers) == window


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 0.0], [1.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 1.0], 1.0),
        ([1.0, 2.0], [-2.0, -4.0], 2.0),
        ([3.0, 4.0], [4.0, 3.0], 1 - 24 / 25),
        ([1.0, 0.0], [1.0, 1.0], 1 - 1 / math.sqrt(2)),
        ([0.0, 0.0], [5.0, 1.0], 1.0),
    ],
)
def test_dis_by_hand(a, b, expected):
    assert disagreement(torch.tensor(a), torch.tensor(b)).item() == pytest.approx(expected, abs=EPS)


def test_pooling_improbability_and_entropy_by_hand():
    layers = states(3, 4, 5, 8)  # 4 layers, 5 tokens
    by_hand = torch.stack([sum(layer, torch.zeros(8)) / 5 for layer in layers])
    torch.testing.assert_close(equations.mean_pooled(layers), by_hand)
    torch.testing.assert_close(equations.mean_pooled_sum(layers.sum(dim=1), 5), by_hand)
    assert equations.improbability(math.log(0.25)) == pytest.approx(0.75)
    assert equations.improbability(-1e-12) == pytest.approx(1e-12)  # 1 - e^x would lose digits
    assert str(equations.improbability(0.0)) == "0.0"
    log_p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]]).log()
    torch.testing.assert_close(equations.entropy(log_p), torch.tensor([[1.5 * math.log(2)], [0.0]]))


E1, E2, E3 = torch.eye(3)
HALFWAY = (E1 + E2) / math.sqrt(2)  # 45 degrees from both


@pytest.mark.parametrize(
    ("middle", "final", "con", "final_mlds"),
    [
        ([E1, E1, E1], E1, 0.0, 0.0),
        ([E1, E1, E1], E2, 0.0, 1.0),
        ([E1, E2, E3], E3, 2 / 3, 2 / 3),
        ([E1, -E1], E1, 2 / 2, 2 / 2),
        ([E1, HALFWAY, E2], E2, 2 * (1 - math.sqrt(0.5)) / 3, (1 + (1 - math.sqrt(0.5)) + 0) / 3),
    ],
)
def test_mlds_by_hand(middle, final, con, final_mlds):
    middle = torch.stack(middle)
    assert con_mlds(middle).item() == pytest.approx(con, abs=EPS)
    assert f_mlds(middle, final).item() == pytest.approx(final_mlds, abs=EPS)


@given(seeds, st.integers(2, 12), st.integers(2, 48), st.integers(1, 5))
def test_mlds_equal_the_sums_written_out(seed, count, width, spans):
    layers = states(seed, count + 1, spans, width)
    con, final_mlds = con_mlds(layers[:-1]), f_mlds(layers[:-1], layers[-1])
    assert con.shape == final_mlds.shape == (spans,)
    for span in range(spans):
        *middle, final = layers[:, span]
        con_of_span = sum(dis(a, b) for a, b in pairwise(middle)) / count
        final_of_span = sum(dis(a, final) for a in middle) / count
        assert con[span].item() == pytest.approx(con_of_span, abs=EPS)
        assert final_mlds[span].item() == pytest.approx(final_of_span, abs=EPS)
        assert -EPS <= con_of_span <= 2 * (count - 1) / count + EPS
        assert -EPS <= final_of_span <= 2 + EPS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_everything_runs_in_float32(dtype):
    layers = states(0, 6, 64).to(dtype)
    results, expected = (
        [disagreement(of[0], of[1]), con_mlds(of[:-1]), f_mlds(of[:-1], of[-1])] for of in (layers, layers.float())
    )
    assert all(result.dtype is torch.float32 for result in results)
    assert torch.equal(torch.stack(results), torch.stack(expected))


def test_candidates_without_tokens_and_without_ends_are_errors():
    for call in (
        lambda: equations.span_log_prob([]),
        lambda: equations.span_log_probs([[-1.0], []], "end_mean", [False, True]),
    ):
        with pytest.raises(ValueError, match="at least one token"):
            call()
    with pytest.raises(ValueError, match="1 of 2 candidates"):
        equations.span_log_probs([[-1.0], [-2.0]], "end_mean", [True])


RULES = get_args(equations.SpanLogProb)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("sum", [-1.0, -2.4, -3.0]),
        ("mean", [-1.0, -0.6, -1.5]),
        ("common_length", [-1.0, -0.9, -1.2]),
        ("end_mean", [-4.0, -2.4, -3.0]),  # four times its mean: as long as the second
        ("greedy_end", [-1.0, -2.4, -3.0]),
        ("gnmt", [-1.0, -2.4 / 1.5**0.6, -3.0 / (7 / 6) ** 0.6]),
        ("sqrt", [-1.0, -1.2, -3.0 / math.sqrt(2)]),
    ],
)
def test_each_rule_by_hand(rule, expected):
    """An end token at once, a likely branch that goes on, and an unlikely one."""
    candidates, ended = [[-1.0], [-0.9, -0.5, -0.5, -0.5], [-1.2, -1.8]], [True, False, False]
    values = equations.span_log_probs(candidates, rule, ended)
    assert values == pytest.approx(expected, abs=1e-12)
    assert values.index(max(values)) == (0 if rule in ("sum", "greedy_end", "gnmt", "sqrt") else 1)


@given(st.integers(1, 12), st.integers(0, 2**31 - 1), st.integers(2, 6), alphas)
def test_every_rule_ranks_equally_long_candidates_as_the_sum_does(length, seed, count, alpha):
    generator = torch.Generator().manual_seed(seed)
    candidates = (-5 * torch.rand(count, length, generator=generator, dtype=torch.float64)).tolist()
    mlds = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    ended = (torch.rand(count, generator=generator) < 0.5).tolist()
    by_sum = [equations.cocoa_sig(one, of, alpha) for one, of in zip(map(math.fsum, candidates), mlds, strict=True)]
    for rule in set(RULES) - {"common_length"}:
        values = equations.span_log_probs(candidates, rule, ended)
        scores = [equations.cocoa_sig(one, of, alpha) for one, of in zip(values, mlds, strict=True)]
        assert [one / scores[0] for one in scores] == pytest.approx([one / by_sum[0] for one in by_sum])
    assert equations.span_log_probs(candidates, "common_length", ended) == pytest.approx(
        list(map(math.fsum, candidates))
    )


@given(st.lists(log_probs, min_size=1, max_size=20))
def test_log_p_of_a_span_is_its_sum_by_the_penalty_which_may_be_that_of_many_lengths(token_log_probs):
    lengths = np.arange(1.0, len(token_log_probs) + 1)
    for rule in RULES:
        alone = [equations.length_penalty(length, rule) for length in lengths.tolist()]
        assert equations.length_penalty(lengths, rule) == pytest.approx(alone)
        assert alone == {"sum": [1.0] * len(lengths), "mean": lengths.tolist()}.get(rule, alone)
        log_prob = equations.span_log_prob(token_log_probs, rule)
        assert log_prob == pytest.approx(math.fsum(token_log_probs) / alone[-1], abs=1e-9)
        assert log_prob == equations.span_log_prob(token_log_probs, equations.rule_without_rivals(rule))


@pytest.mark.slow
@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_only_greedy_decoding_ends_the_answer_under_greedy_end(ended):
    kept = equations.may_be_kept("greedy_end", ended)
    assert kept[0]
    assert all(not end for end, may in zip(ended[1:], kept[1:], strict=True) if may)
    assert all(may for end, may in zip(ended, kept, strict=True) if not end)
    for rule in set(RULES) - {"greedy_end"}:
        assert all(equations.may_be_kept(rule, ended))


@pytest.mark.parametrize(
    ("log_prob", "mlds", "alpha", "cocoa", "cocoa_sig"),
    [
        (-2.0, 0.5, 2.5, -3.25, -4.5),
        (-0.1, 0.5, 2.5, -1.35, -0.225),
        (0.0, 0.9, 2.5, -2.25, 0.0),
        (-3.0, 0.0, 2.5, -3.0, -3.0),
        (-3.0, 1.5, 0.0, -3.0, -3.0),
    ],
)
def test_scores_by_hand(log_prob, mlds, alpha, cocoa, cocoa_sig):
    assert equations.cocoa(log_prob, mlds, alpha) == pytest.approx(cocoa, abs=1e-12)
    assert equations.cocoa_sig(log_prob, mlds, alpha) == pytest.approx(cocoa_sig, abs=1e-12)


@given(st.lists(st.tuples(log_probs, mldss), min_size=1, max_size=6), alphas)
def test_each_method_ranks_by_its_equation_and_scores_of_tensors_are_those_of_numbers(candidates, alpha):
    tensors = torch.tensor(candidates, dtype=torch.float64).unbind(-1)
    for name, score in (("cocoa", equations.cocoa), ("cocoa-sig", equations.cocoa_sig)):
        expected = [score(*candidate, alpha) for candidate in candidates]
        assert [METHODS[name].score(*candidate, alpha) for candidate in candidates] == expected
        torch.testing.assert_close(score(*tensors, alpha), torch.tensor(expected, dtype=torch.float64))
    for log_prob, mlds in candidates:
        assert METHODS["greedy"].score(log_prob, mlds, alpha) == log_prob
        assert all(method.score(log_prob, mlds, 0.0) == log_prob for method in METHODS.values())
