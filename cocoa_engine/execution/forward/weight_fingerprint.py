"""Detects changed weights by their addresses, torch's version counters, and samples of their values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

SAMPLES = 16
"""Number of elements compared in each tensor. More would slow down short calls, fewer would miss more changes."""


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
    known = list(tensors)
    versions = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in known]
    views: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in known:
            if _is_plain(tensor):
                views.setdefault((tensor.device, tensor.dtype), []).append(_sampled(tensor))
        return WeightFingerprint(versions, {kind: _bytes(torch.cat(parts)) for kind, parts in views.items()})


def _is_plain(tensor: Tensor) -> bool:
    """Whether the elements can be read directly: no quantised, distributed or meta tensor."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def _sampled(tensor: Tensor) -> Tensor:
    """Elements spread evenly over a tensor's memory."""
    last = tensor.numel() - 1
    if last > 0 and not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(SAMPLES, last + 1)
    return tensor.as_strided((count,), (max(last, 0) // max(count - 1, 1),))


def _bytes(samples: Tensor) -> bytes:
    """The samples as bytes, so that every change counts and NaN equals itself."""
    return samples.view(torch.uint8).cpu().numpy().tobytes()
