"""Keeps ``torch.compile`` from tracing into calls of the kernels, without importing its tracer."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(run: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable``, once the tracer is loaded.

    ``torch.compiler.disable`` itself imports the tracer. That takes a second on a slow core and 70 MB.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(run)
    def call(*args: P.args, **options: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return run(*args, **options)
            sys.modules["torch._dynamo"].decorators.skip(call)  # or each wrapper would be compiled by itself
            disabled = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
        return disabled(*args, **options)

    return call
