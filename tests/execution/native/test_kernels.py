"""Our kernels against torch in float64, whatever the sizes, the layout and the number of threads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn import functional as F

from cocoa_engine.decoding.next_tokens import next_tokens
from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.forward.trial import sample_blocks
from cocoa_engine.execution.native import operators
from cocoa_engine.execution.native.operators import untraced
from cocoa_engine.model.blocks import BLOCK_KINDS, BlockTensor
from tests.helpers.in_threads import threads
from tests.helpers.libraries import MULTIPLIES_PAIRS, needs_kernels

pytestmark = needs_kernels

LOWEST = torch.finfo(torch.float32).min


def misplaced(*sizes: int, by: int, halved: bool, generator: torch.Generator) -> torch.Tensor:
    """Random numbers that begin anywhere in a cache line, as a file's do."""
    drawn = torch.randn(torch.Size(sizes).numel() + by, generator=generator)
    return (drawn.bfloat16() if halved else drawn)[by:].view(sizes)


KINDS = ("float32", "bfloat16", "both in bfloat16")
"""Of weights; in the last kind, inputs are numbers in bfloat16 and may be rounded to it."""


@given(
    rows=st.integers(1, 70),
    inputs=st.integers(1, 220),
    outs=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    biases=st.lists(st.booleans(), min_size=3, max_size=3),
    by=st.integers(0, 15),
    spare=st.integers(0, 3),
    count=st.sampled_from([1, 2, 3]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
def test_linear_layers(
    rows: int,
    inputs: int,
    outs: list[int],
    biases: list[bool],
    by: int,
    spare: int,
    count: int,
    kind: str,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = [misplaced(out, inputs, by=by, halved=kind != "float32", generator=generator) for out in outs]
    offsets = [
        torch.randn(out, generator=generator) if biased else None for out, biased in zip(outs, biases, strict=False)
    ]
    x = torch.randn(rows, inputs + spare, generator=generator)
    if kind == "both in bfloat16":
        x = x.bfloat16().float()
    x[:, inputs:] = torch.nan
    x = x[:, :inputs]  # rows need not touch
    with threads(count):
        found = operators.Linears(weights, offsets, rounds_inputs=kind == "both in bfloat16")(x)
    exact = [
        F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        for weight, offset in zip(weights, offsets, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(exact, dim=1).float(), atol=1e-4, rtol=1e-4)


def test_an_input_seen_from_the_side_is_multiplied_as_any_other() -> None:
    weight, x = torch.randn(24, 40), torch.randn(40, 5).t()
    torch.testing.assert_close(operators.Linears([weight], [None])(x), F.linear(x, weight), atol=1e-4, rtol=1e-4)


def test_inputs_may_be_rounded_to_bfloat16() -> None:
    """Where the processor multiplies bfloat16 by bfloat16; then for few rows and for many alike."""
    weight, x = torch.randn(71, 100).bfloat16(), torch.randn(600, 100)
    linears = operators.Linears([weight], [None], rounds_inputs=True)
    found = [linears(x[:rows]) for rows in (1, 7, 8, 9, 17, 64, 600)]
    exact = F.linear(x, weight.float())
    expected = F.linear(x.bfloat16().float(), weight.float()) if MULTIPLIES_PAIRS else exact
    for each in found:
        torch.testing.assert_close(each, expected[: len(each)], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(operators.Linears([weight], [None])(x), exact, atol=1e-4, rtol=1e-4)


def test_weights_that_lie_across_places_are_refused() -> None:
    memory = torch.zeros(4 * 6 * 16 + 4, dtype=torch.uint8)
    weights = [torch.frombuffer(memory.numpy(), dtype=torch.float32, offset=by, count=96).view(6, 16) for by in (0, 2)]
    assert [operators.can_multiply([weight]) for weight in weights] == [True, False]


@given(
    first=st.integers(1, 48),
    rest=st.integers(0, 47),
    inputs=st.sampled_from([16, 61, 576, 1536]),
    outs=st.integers(1, 70),
    by=st.integers(0, 15),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 100),
)
def test_a_row_is_the_same_to_the_bit_whatever_is_fed_with_it(
    first: int, rest: int, inputs: int, outs: int, by: int, kind: str, seed: int
) -> None:
    """In a decoding step, up to 48 rows; in attention, over the same slots."""
    generator = torch.Generator().manual_seed(seed)
    weight = misplaced(outs, inputs, by=by, halved=kind != "float32", generator=generator)
    linears = operators.Linears([weight], [None], rounds_inputs=kind == "both in bfloat16")
    x = torch.randn(min(first + rest, 48), inputs, generator=generator)
    assert torch.equal(linears(x)[:first], linears(x[:first]))
    keys, values = torch.randn(2, 2, 75, 24, generator=generator)
    query = torch.randn(6, min(first + rest, 48), 24, generator=generator)
    together = operators.attend(query, keys, values, None, 0, scale=0.4)
    assert torch.equal(together[:first], operators.attend(query[:, :first], keys, values, None, 0, scale=0.4))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("slot", [0, 40, 149])
def test_what_is_not_a_number_stays_in_its_own_head(slot: int, count: int) -> None:
    query, (keys, values) = torch.randn(4, 3, 24), torch.randn(2, 2, 150, 24)
    keys[:, 100] *= 50  # scores that are higher than those beside what is not a number
    expected = operators.attend(query, keys, values, None, 0, scale=0.4)
    keys[1, slot] = math.nan
    with threads(count):
        found = operators.attend(query, keys, values, None, 0, scale=0.4)
    torch.testing.assert_close(found[:, :48], expected[:, :48])
    assert found[:, 48:].isnan().all()


@given(
    kv_heads=st.integers(1, 4),
    groups=st.integers(1, 9),
    width=st.integers(1, 9),
    head_dim=st.sampled_from([1, 8, 16, 24, 64, 80, 128, 256]),
    slots=st.integers(1, 150),
    spare=st.integers(0, 5),
    masked=st.sampled_from(["none", "from", "anywhere", "all"]),
    count=st.sampled_from([1, 2, 3, 4]),
    size=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_attention(
    kv_heads: int,
    groups: int,
    width: int,
    head_dim: int,
    slots: int,
    spare: int,
    masked: str,
    count: int,
    size: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, kv_heads, slots + spare, head_dim, generator=generator)[:, :, :slots]
    query = torch.randn(width, kv_heads * groups, head_dim, generator=generator).transpose(0, 1) * size
    seen_by_all = {"none": slots, "from": slots // 2, "anywhere": 0, "all": 0}[masked]
    hidden = torch.rand(width, slots, generator=generator) < 0.6
    hidden[:, :seen_by_all] = False
    if masked == "anywhere":
        hidden[:, -1] = False
    if masked == "all":
        hidden[0] = True  # a row of lowest numbers is an even one, as in torch
    mask = torch.zeros(width, slots).masked_fill_(hidden, LOWEST)
    assert operators.can_attend(query, keys, values)
    with threads(count):
        own = None if masked == "none" else mask[:, seen_by_all:].contiguous()
        found = operators.attend(query, keys, values, own, seen_by_all, scale=head_dim**-0.5)
    scores = query.double() @ keys.double().repeat_interleave(groups, 0).transpose(1, 2) * head_dim**-0.5
    weights = (scores.float() + mask).double().softmax(dim=-1)
    exact = (weights @ values.double().repeat_interleave(groups, 0)).transpose(0, 1).reshape(width, -1)
    torch.testing.assert_close(found, exact.float(), atol=2e-4, rtol=1e-4)


@given(
    rows=st.integers(1, 5),
    vocabulary=st.integers(1, 400) | st.just(9000),
    spare=st.integers(0, 20),
    count=st.integers(1, 9),
    size=st.sampled_from([0.0, 0.3, 3.0, 40.0]),
    forbidden=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 1000),
    native=st.booleans(),
)
def test_next_tokens(
    rows: int, vocabulary: int, spare: int, count: int, size: float, forbidden: float, seed: int, native: bool
) -> None:
    """Also with equal logits and forbidden tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary + spare, generator=generator)[:, :vocabulary] * size
    logits = logits.round() if seed % 2 else logits
    hidden = torch.rand(rows, vocabulary, generator=generator) < forbidden
    hidden[:, seed % vocabulary] = False
    logits.masked_fill_(hidden, -torch.inf)
    exact = logits.double().log_softmax(dim=1)
    for each, row, log_probs in zip(next_tokens(logits, count, native=native), logits.tolist(), exact, strict=True):
        assert each is not None
        allowed = [token_id for token_id in range(vocabulary) if row[token_id] > -math.inf]
        allowed.sort(key=lambda token_id: (-row[token_id], token_id))
        assert list(each.token_ids) == allowed[:count]
        assert each.log_probs == pytest.approx(log_probs[allowed[:count]].tolist(), abs=1e-5)
        kept = log_probs[allowed]
        assert each.entropy == pytest.approx(-(kept.exp() * kept).sum().item(), abs=1e-5)
        assert each.entropy >= 0


@pytest.mark.parametrize("lead", [9.0, 14.0, 17.0])
def test_many_improbable_tokens_are_not_lost_beside_a_probable_one(lead: float) -> None:
    logits = torch.zeros(1, 50_000)
    logits[0, 4321] = lead
    (found,) = next_tokens(logits, 2, native=True)
    log_probs = logits.double().log_softmax(dim=1)[0]
    assert found is not None
    assert found.log_probs == pytest.approx(log_probs[[4321, 0]].tolist(), abs=3e-6)
    assert found.entropy == pytest.approx(-(log_probs.exp() * log_probs).sum().item(), rel=1e-4)


@pytest.mark.parametrize("vocabulary", [5, 100])
def test_rows_from_which_no_token_can_be_chosen(vocabulary: int) -> None:
    logits = torch.randn(5, vocabulary)
    logits[0] = -torch.inf
    logits[1, 3], logits[2, 0], logits[3, -1] = torch.nan, torch.inf, torch.nan
    *bad, good = next_tokens(logits, 2, native=True)
    assert bad == [None] * 4
    assert good is not None


@pytest.mark.parametrize("rows", [1, 7, 30])
def test_what_bfloat16_is_given_it_gives_back(rows: int) -> None:
    """Summed up in float32 and rounded once."""
    weight, bias, x = (torch.randn(size).bfloat16() for size in ((40, 70), (40,), (rows, 70)))
    exact = F.linear(x.double(), weight.double(), bias.double())
    found = operators.Linears([weight], [bias])(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=2**-8)


@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_stays_one(kind: str) -> None:
    """A broken model is told from what it says, so nothing may hide it."""
    x, weight = torch.randn(3, 32), torch.randn(8, 32)
    x[1, 5] = torch.nan
    y = operators.Linears([weight if kind == "float32" else weight.bfloat16()], [None], rounds_inputs=True)(x)
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


def test_what_the_kernels_cannot_read_is_told() -> None:
    good = torch.randn(2, 3, 16)
    assert operators.can_attend(good, good, good)
    assert not operators.can_attend(good.double(), good.double(), good.double())
    assert not operators.can_attend(good, good.transpose(1, 2).contiguous().transpose(1, 2), good)
    assert not operators.can_attend(good, good, torch.randn(2, 3, 8))
    assert operators.is_readable(good[0])
    for logits in (good[0].double(), good[0].t(), good[0].to("meta")):
        assert not operators.is_readable(logits)
    weight = torch.randn(4, 4)
    assert operators.can_multiply([weight, weight])
    assert operators.can_multiply([weight.bfloat16()])
    for others in ([weight.t()], [weight.half()], [weight, weight.bfloat16()], [weight.to("meta")]):
        assert not operators.can_multiply(others)


def test_an_input_of_another_width_is_refused() -> None:
    linears = operators.Linears([torch.randn(8, 40)], [None])
    for x in (torch.randn(2, 10), torch.randn(40), torch.randn(2, 40, device="meta")):
        with pytest.raises(RuntimeError, match=r"needs x \[rows, 40\]"):
            linears(x)


# Weights in the blocks of GGUF files: what the float32 weights that they stand for give.


def _inputs(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) / columns**0.5


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("outputs", [1, 6, 37, 130])
def test_every_type_gives_what_its_numbers_give(kind: str, outputs: int) -> None:
    weight = sample_blocks(kind, outputs, 512, torch.Generator().manual_seed(outputs))
    exact, bias = weight.dequantized(), torch.randn(outputs)
    linears = operators.Linears([weight], [bias])
    for count in (1, 2):
        with threads(count):
            for rows in (*range(1, 13), 20, 47, 48, 49, 100):
                x = _inputs(rows, 512)
                torch.testing.assert_close(linears(x), F.linear(x, exact, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_row_of_blocks_is_the_same_to_the_bit_whatever_is_fed_with_it(kind: str) -> None:
    weight = sample_blocks(kind, 43, 768, torch.Generator().manual_seed(2))
    linears, x = operators.Linears([weight], [None]), _inputs(48, 768)
    alone = torch.cat([linears(row[None]) for row in x])
    for rows in range(2, 49):
        assert torch.equal(linears(x[:rows]), alone[:rows]), rows


def test_layers_of_several_types_in_one_call() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = [sample_blocks(kind, 10, 256, generator) for kind in ("Q4_K", "Q6_K", "Q8_0")]
    weights.append(torch.randn(7, 256, generator=generator))
    assert operators.can_multiply(weights)
    x = _inputs(3, 256)
    expected = torch.cat([F.linear(x, each + 0) for each in weights], dim=1)
    torch.testing.assert_close(operators.Linears(weights, [None] * 4)(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_rows_are_unpacked_to_the_numbers_of_gguf(kind: str) -> None:
    weight = sample_blocks(kind, 9, 256, torch.Generator().manual_seed(4))
    index = torch.tensor([8, 0, 0, 3])
    torch.testing.assert_close(operators.unpack(weight, index), weight.rows(index), atol=1e-7, rtol=1e-6)


def test_the_trial_finds_no_fault_here() -> None:
    assert trial.block_obstacle() is None


def test_types_without_a_kernel_are_told() -> None:
    weight = sample_blocks("Q4_0", 4, 256, torch.Generator().manual_seed(5))
    weight.kind = "Q2_K"
    assert not operators.can_multiply([weight])


def test_blocks_that_lie_across_places_are_told() -> None:
    weight = sample_blocks("Q4_0", 8, 256, torch.Generator().manual_seed(6))
    assert operators.can_multiply([weight])
    assert not operators.can_multiply([BlockTensor(weight.blocks[:, : weight.blocks.shape[1] // 2], "Q4_0")])


# Under torch.compile, calls are not traced, in whatever order compiler and kernels are used.


@pytest.mark.slow
@pytest.mark.parametrize("used_before", [False, True])
def test_a_function_runs_outside_of_the_graph(used_before: bool) -> None:
    seen = []

    @untraced
    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return torch.from_numpy(x.numpy() * 2)  # an address, as the kernels take it: no tracer could follow

    if used_before:
        run(torch.ones(2))
    compiled = torch.compile(lambda x: run(x + 1) + 1, backend="eager")
    for value in (1.0, 2.0):
        assert torch.equal(compiled(torch.full((2,), value)), torch.full((2,), 2 * (value + 1) + 1))
    assert seen == [False] * len(seen)
    assert len(seen) == 2 + used_before


def test_linear_layers_are_the_same_in_compiled_code() -> None:
    weight, x = torch.randn(24, 16), torch.randn(3, 16)
    layer = operators.Linears([weight], [None])
    compiled = torch.compile(lambda x: torch.relu(layer(x)), backend="eager")
    counters.clear()
    assert torch.equal(compiled(x), torch.relu(layer(x)))
    assert sum(counters["graph_break"].values()) > 0
