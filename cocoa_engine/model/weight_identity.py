"""Which weights a model has: whether they have changed, and whether they are those of another model or process.

The lean forward pass is compared with transformers' modules once for the same weights, kernels and code. A new process
that finds the note does without the modules, see :class:`~cocoa_engine.model.light_model.LightModel`.
"""

import hashlib
import json
import threading
import weakref
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from cocoa_engine.errors import safe_logger
from cocoa_engine.files import cache_directory, keep_newest, read_note, write_note
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.language_model import LanguageModel

logger = safe_logger(__name__)

FOLDER = "checked"
KEPT = 64  # notes, those that were written last
SAMPLES = 16
"""Number of elements sampled in each tensor. More would slow down short calls, fewer would miss more changes."""


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements can be read directly: no quantised, distributed or meta tensor."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def sampled(tensor: Tensor) -> Tensor:
    """Elements spread evenly over a tensor's memory."""
    last = tensor.numel() - 1
    if isinstance(tensor, BlockTensor):
        at = torch.arange(min(SAMPLES, last + 1), device="cpu") * (last // max(min(SAMPLES, last + 1) - 1, 1))
        return tensor.rows(at // tensor.shape[-1]).gather(1, at[:, None] % tensor.shape[-1]).flatten()
    if last > 0 and not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(SAMPLES, last + 1)
    return tensor.as_strided((count,), (max(last, 0) // max(count - 1, 1),))


WeightFingerprint = tuple[list[tuple[int, int]], dict[tuple[torch.device, torch.dtype], bytes]]
"""Equal for the same tensors as long as they are not written to.

It has the address and torch's version counter of each tensor, and the bytes of some elements. torch does not count
writes through ``.data`` (such as merging an adapter); they are detected only if they change one of these elements.
"""


def weight_fingerprint(tensors: Iterable[Tensor]) -> WeightFingerprint:
    """The fingerprint of some tensors. On a GPU this needs one small copy to the host."""
    held = [tensor.blocks if isinstance(tensor, BlockTensor) else tensor for tensor in tensors]
    versions = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in held]
    views: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.inference_mode():  # views are made faster than without gradients alone
        for tensor in held:
            if is_plain(tensor):
                views.setdefault((tensor.device, tensor.dtype), []).append(sampled(tensor))
        # as bytes, so that every change counts and NaN equals itself
        samples = {kind: torch.cat(parts).view(torch.uint8).cpu() for kind, parts in views.items()}
    return versions, {kind: part.numpy().tobytes() for kind, part in samples.items()}


_digests: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def model_digest(model: LanguageModel) -> str:
    """A short text that identifies a model: its architecture, its shape and samples of its weights, not its name.

    The samples are rounded to bfloat16, so that a model has the same digest if it is loaded as bfloat16 or float32.
    """
    with _lock:
        held = model.model
        if held in _digests:
            return _digests[held]
        shape = (model.num_layers, model.num_heads, model.vocab_size)
        digest = hashlib.sha256(repr((model.architecture, shape)).encode())
        with torch.no_grad():
            for name, weight in sorted(held.named_parameters()):
                digest.update(repr((name, tuple(weight.shape))).encode())
                if (is_plain(weight) or isinstance(weight, BlockTensor)) and weight.is_floating_point():
                    rounded = sampled(weight.detach()).to("cpu", torch.bfloat16).contiguous()
                    digest.update(rounded.view(torch.uint8).numpy().tobytes())
        return _digests.setdefault(held, digest.hexdigest()[:24])


_asked: weakref.WeakKeyDictionary[nn.Module, tuple[Path, WeightFingerprint]] = weakref.WeakKeyDictionary()


def noted(weights: str, kernels: str) -> str | None:
    """What the comparison found with a digest of weights and settings, with these kernels and this code, if it did."""
    reason = (read_note(_note_of(weights, kernels)) or {}).get("found")
    return reason if isinstance(reason, str) and reason else None


def will_note(model: nn.Module, weights: str, kernels: str) -> None:
    """Say which weights a model has, for :func:`note`. The arguments are those of :func:`noted`."""
    _asked[model] = _note_of(weights, kernels), weight_fingerprint(model.parameters())


def note(model: nn.Module, reason: str | None) -> None:
    """Keep what the comparison found, if :func:`will_note` was told of the model and its weights are as they were."""
    file, as_loaded = _asked.pop(model, (None, None))
    if file is None or reason is None or weight_fingerprint(model.parameters()) != as_loaded:
        return
    try:
        write_note(file, json.dumps({"found": reason}))
        keep_newest(file.parent, "*.json", KEPT)
    except OSError as error:
        logger.info("%s is not kept: %s", file, error)


def _note_of(weights: str, kernels: str) -> Path:
    parts = [weights, kernels, _code(), torch.__version__, transformers.__version__]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return cache_directory() / FOLDER / f"{digest[:32]}.json"


@cache
def _code() -> str:
    """A digest of the code that is compared, the kernels included."""
    digest, package = hashlib.sha256(), Path(__file__).parent.parent
    for file in sorted(path for folder in ("execution", "model") for path in (package / folder).rglob("*")):
        if file.suffix in (".py", ".cpp", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
