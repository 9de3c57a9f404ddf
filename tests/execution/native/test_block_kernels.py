"""The kernels multiply weights in the blocks of GGUF files as the float32 weights that they stand for."""

import pytest
import torch
from torch.nn import functional as F

from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.forward.trial import sample_blocks
from cocoa_engine.execution.native import operators
from cocoa_engine.model.blocks import BLOCK_KINDS, BlockTensor
from tests.helpers.in_threads import threads
from tests.helpers.libraries import needs_kernels

pytestmark = needs_kernels


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
def test_a_row_is_the_same_to_the_bit_whatever_is_fed_with_it(kind: str) -> None:
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
