"""Matrices in GGUF blocks behave as the float32 matrices that they stand for."""

import copy
import pickle

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import nn
from torch.nn import functional as F

from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.weight_identity import sampled

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16")


def _quantized(kind: str, rows: int, columns: int) -> tuple[BlockTensor, torch.Tensor]:
    numbers = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    packed = gguf.quants.quantize(numbers, GGMLQuantizationType[kind])
    blocks = torch.from_numpy(packed.view(np.uint8).reshape(rows, -1).copy())
    return BlockTensor(blocks, kind), torch.from_numpy(gguf.quants.dequantize(packed, GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_modules_compute_what_the_float32_matrix_gives(kind: str) -> None:
    weight, exact = _quantized(kind, 1100, 64)
    layer = nn.Linear(64, 1100)
    embedding = nn.Embedding(1100, 64)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    embedding.weight = layer.weight
    x, ids = torch.randn(2, 3, 64), torch.tensor([[0, 1099], [5, 5]])

    assert (weight.shape, weight.dtype, layer.weight.kind) == ((1100, 64), torch.float32, kind)
    assert torch.allclose(layer(x), F.linear(x, exact, layer.bias), atol=1e-5)
    assert torch.equal(embedding(ids), exact[ids])
    assert torch.equal(weight.dequantized(), exact)
    assert torch.equal(weight.rows(torch.tensor([3])), exact[[3]])


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_matrices_are_taken_apart_without_a_copy(kind: str) -> None:
    matrix, exact = _quantized(kind, 12, 64)
    weight, exact = BlockTensor(matrix.blocks.view(3, 4, -1), kind), exact.view(3, 4, 64)
    assert (weight.shape, weight.dim()) == ((3, 4, 64), 3)
    assert torch.equal(weight.dequantized(), exact)
    assert torch.equal(weight.rows(torch.tensor([0, 11, 5])), exact.view(12, 64)[[0, 11, 5]])
    assert torch.equal(sampled(weight), sampled(exact))
    parameter = nn.Parameter(weight, requires_grad=False)
    for number in (1, torch.tensor(1), -2):
        matrix = parameter[number]
        assert isinstance(matrix, BlockTensor)
        assert matrix.blocks.data_ptr() == weight.blocks[1].data_ptr()
        assert torch.equal(matrix.dequantized(), exact[1])
    assert torch.equal(weight[:, 2], exact[:, 2])
    assert torch.equal(weight[1, 2], exact[1, 2])
    x = torch.randn(5, 64)
    assert torch.allclose(F.linear(x, parameter[2]), F.linear(x, exact[2]), atol=1e-5)


def test_other_operations_unpack() -> None:
    weight, exact = _quantized("Q8_0", 8, 32)
    for result, expected in ((weight + 1, exact + 1), (weight.T, exact.T), (weight[2:4], exact[2:4])):
        assert type(result) is torch.Tensor
        assert torch.equal(result, expected)
    assert torch.equal(weight.to(torch.bfloat16), exact.to(torch.bfloat16))
    assert weight.sum().item() == exact.sum().item()


def test_copies_keep_the_blocks_apart() -> None:
    weight, exact = _quantized("Q4_0", 8, 64)
    layer = nn.Linear(64, 8, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).float()):
        assert isinstance(other.weight, BlockTensor)
        assert isinstance(other.weight, nn.Parameter)
        assert other.weight.blocks.data_ptr() != weight.blocks.data_ptr()
        assert torch.equal(other.weight.dequantized(), exact)
    detached = layer.weight.detach()
    assert isinstance(detached, BlockTensor)
    assert detached.blocks is weight.blocks
    assert isinstance(layer.to("cpu").weight, BlockTensor)
    assert type(layer.to(torch.bfloat16).weight) is nn.Parameter


def test_rows_of_broken_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="whole Q4_0 blocks"):
        BlockTensor(torch.zeros(2, 17, dtype=torch.uint8), "Q4_0")
