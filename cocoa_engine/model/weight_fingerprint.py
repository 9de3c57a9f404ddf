"""Detects changed weights by their addresses, torch's version counters, and samples of their values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.weight_samples import is_plain, sampled


class WeightFingerprint(NamedTuple):
    """Equal for the same tensors as long as they are not written to.

    Attributes:
        versions: for each tensor, its address and torch's version counter.
        samples: by device and dtype, the bytes of some elements of each tensor. torch does not count writes through
            ``.data`` (such as merging an adapter); they are detected only if they change one of these elements.
    """

    versions: list[tuple[int, int]]
    samples: dict[tuple[torch.device, torch.dtype], bytes]


def weight_fingerprint(tensors: Iterable[Tensor]) -> WeightFingerprint:
    """The fingerprint of some tensors. On a GPU this needs one small copy to the host."""
    known = [tensor.blocks if isinstance(tensor, BlockTensor) else tensor for tensor in tensors]
    versions = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in known]
    views: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in known:
            if is_plain(tensor):
                views.setdefault((tensor.device, tensor.dtype), []).append(sampled(tensor))
        return WeightFingerprint(versions, {kind: _bytes(torch.cat(parts)) for kind, parts in views.items()})


def _bytes(samples: Tensor) -> bytes:
    """The samples as bytes, so that every change counts and NaN equals itself."""
    return samples.view(torch.uint8).cpu().numpy().tobytes()
