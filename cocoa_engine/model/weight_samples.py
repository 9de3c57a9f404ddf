"""Samples of a model's weights: they detect changes, and identify a model wherever it is stored."""

from __future__ import annotations

import hashlib
import threading
import weakref

import torch
from torch import Tensor, nn

from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.language_model import LanguageModel, attention_heads

SAMPLES = 16
"""Number of elements sampled in each tensor. More would slow down short calls, fewer would miss more changes."""


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements can be read directly: no quantised, distributed or meta tensor."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def sampled(tensor: Tensor) -> Tensor:
    """Elements spread evenly over a tensor's memory."""
    last = tensor.numel() - 1
    if isinstance(tensor, BlockTensor):
        at = torch.arange(min(SAMPLES, last + 1)) * (last // max(min(SAMPLES, last + 1) - 1, 1))
        return tensor.rows(at // tensor.shape[-1]).gather(1, at[:, None] % tensor.shape[-1]).flatten()
    if last > 0 and not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(SAMPLES, last + 1)
    return tensor.as_strided((count,), (max(last, 0) // max(count - 1, 1),))


_digests: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def model_digest(model: LanguageModel) -> str:
    """A short text that identifies a model: its architecture, its shape and samples of its weights.

    The samples are rounded to bfloat16, so that a model has the same digest if it is loaded as bfloat16 or float32. The
    name is not part of it: a copy of the model is the same model. The digest is computed once for each loaded model.
    """
    with _lock:
        held = model.model
        if (known := _digests.get(held)) is not None:
            return known
        config = model.config
        shape = (model.num_layers, attention_heads(config), model.vocab_size)
        digest = hashlib.sha256(repr((model.architecture, shape)).encode())
        with torch.no_grad():
            for name, weight in sorted(held.named_parameters()):
                digest.update(repr((name, tuple(weight.shape))).encode())
                if (is_plain(weight) or isinstance(weight, BlockTensor)) and weight.is_floating_point():
                    rounded = sampled(weight.detach()).to("cpu", torch.bfloat16).contiguous()
                    digest.update(rounded.view(torch.uint8).numpy().tobytes())
        found = _digests[held] = digest.hexdigest()[:24]
        return found
