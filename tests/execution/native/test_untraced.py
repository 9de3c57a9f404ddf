"""The kernels under ``torch.compile``: calls are not traced, in whatever order compiler and kernels are used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from cocoa_engine.execution.native import operators
from cocoa_engine.execution.native.operators import untraced
from tests.helpers.libraries import needs_kernels


@pytest.mark.slow
@pytest.mark.parametrize("used_before", [False, True])
def test_a_function_runs_outside_of_the_graph(used_before: bool) -> None:
    seen = []

    @untraced
    def run(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return torch.from_numpy(x.numpy() * 2)  # an address, as the kernels take it: no tracer could follow

    if used_before:
        run(torch.ones(2))
    compiled = torch.compile(lambda x: run(x + 1) + 1, backend="eager")
    for value in (1.0, 2.0):
        assert torch.equal(compiled(torch.full((2,), value)), torch.full((2,), 2 * (value + 1) + 1))
    assert seen == [False] * len(seen)
    assert len(seen) == 2 + used_before


@needs_kernels
def test_linear_layers_are_the_same_in_compiled_code() -> None:
    weight, x = torch.randn(24, 16), torch.randn(3, 16)
    layer = operators.Linears([weight], [None])
    compiled = torch.compile(lambda x: torch.relu(layer(x)), backend="eager")
    counters.clear()
    assert torch.equal(compiled(x), torch.relu(layer(x)))
    assert sum(counters["graph_break"].values()) > 0
