"""Whether tensors still hold what they held: told from where they are, how often they were written to, and samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

SAMPLES = 16
"""Elements of each tensor that are looked at: more would cost a short call, fewer would miss more."""


class WrittenState(NamedTuple):
    """Equal for the same tensors as long as nobody wrote to them.

    Attributes:
        places: of each tensor its address, and how often torch has counted a write to it.
        samples: by device and dtype, the bytes of some elements of each tensor. A write through ``.data`` (merging an
            adapter is one) moves no address and is not counted; one that misses these elements is not noticed.
    """

    places: list[tuple[int, int]]
    samples: dict[tuple[torch.device, torch.dtype], bytes]


def written_state(tensors: Iterable[Tensor]) -> WrittenState:
    """The state of some tensors as they are now; on a GPU one small copy to the host."""
    known = list(tensors)
    places = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in known]
    views: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in known:
            if _is_plain(tensor):
                views.setdefault((tensor.device, tensor.dtype), []).append(_sampled(tensor))
        return WrittenState(places, {kind: _bytes(torch.cat(parts)) for kind, parts in views.items()})


def _is_plain(tensor: Tensor) -> bool:
    """Whether the elements can be looked at as they are: no quantised or distributed weight, none that is elsewhere."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def _sampled(tensor: Tensor) -> Tensor:
    """Elements evenly spread over a tensor's memory, from its first to about its last."""
    last = tensor.numel() - 1
    if last > 0 and not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(SAMPLES, last + 1)
    return tensor.as_strided((count,), (max(last, 0) // max(count - 1, 1),))


def _bytes(samples: Tensor) -> bytes:
    """As bytes: they tell every change apart, and a NaN is the same as itself."""
    return samples.view(torch.uint8).cpu().numpy().tobytes()
