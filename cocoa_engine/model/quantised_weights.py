"""Loads a safetensors checkpoint with its matrices quantised to GGUF's blocks, one tensor at a time."""

import math
import mmap
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from cocoa_engine.errors import ConfigError, ModelLoadError, UnsupportedModelError, safe_logger
from cocoa_engine.memory import release_free_memory
from cocoa_engine.model import experts
from cocoa_engine.model.blocks import BlockTensor, block_size
from cocoa_engine.model.checkpoint_files import safetensors_files
from cocoa_engine.model.gguf_model import without_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = safe_logger(__name__)

WeightKind = Literal["q8_0", "q4_k"]

_AT_ONCE = 2**18  # numbers that are quantised at a time
_TRIES = 9  # steps of the search for the scale of 32 numbers


def load(name: str, config: Any, kind: WeightKind, access: Mapping[str, Any]) -> "PreTrainedModel":
    """Load a model whose matrices are quantised while they are read. The float32 model is never in memory as a whole.

    ``"q4_k"`` is for the linear layers in rows of whole blocks of 256, without the output layer; the others and the
    embeddings are ``"q8_0"``. Rows that are no multiple of 32 stay float32. A checkpoint that is quantised already is
    refused, and one that transformers converts while loading, except to put the experts of a layer into one tensor.
    """
    from safetensors import safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{name} is quantised already; load it without weights={kind!r}")
    files = safetensors_files(name, config, access)
    config.dtype = torch.float32
    model: Any = without_weights(config)
    experts.separate(model)
    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    places, ends = model.state_dict(), (model.get_input_embeddings(), model.get_output_embeddings())
    matrices = {  # that may be quantised -> whether they are linear layers inside the model
        f"{path}.weight": module not in ends
        for path, module in model.named_modules()
        if module in ends or type(module) is nn.Linear
    }
    unknown: list[str] = []
    stacks = [path for path, module in model.named_modules() if type(module) is experts.ExpertLinears]
    left = {f"{path}.weight": set(range(places[f"{path}.weight"].shape[0])) for path in stacks}

    def put(key: str, weight: Any) -> None:
        """Put a tensor of the checkpoint into the model."""
        if (expert := _EXPERT.fullmatch(key)) and (stack := f"{expert[1]}.{expert[3]}") in left:
            number = int(expert[2])
            if number not in left[stack]:
                raise ModelLoadError(f"{name}: {key} is of an expert that the config does not have")
            _put_expert(model, stack, number, weight, kind)
            left[stack].remove(number)
            return
        path, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, places)
        if converted is not None:
            raise ConfigError(
                f"transformers converts {key} of {name} while loading, as in a mixture of experts; load it without "
                f"weights={kind!r}"
            )
        if path not in places:
            unknown.append(key)
            return
        shape = weight.get_shape()
        if shape != (expected := list(places[path].shape)):
            raise ModelLoadError(f"{name}: {key} has the shape {shape}, not {expected}")
        is_matrix = path in matrices and len(shape) == 2
        block = _kind(kind, shape[1], is_inside=matrices[path]) if is_matrix else None
        _put(model, path, _whole(weight) if block is None else quantised(weight, block))
        if math.prod(shape) > _AT_ONCE:  # looking for free memory takes longer than packing a small tensor
            release_free_memory()

    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                put(key, tensors.get_slice(key))
    # what the file has counts, as in `from_pretrained`: two weights that differ stay two, whatever the config says
    unfilled = {path for path, tensor in model.state_dict().items() if tensor.is_meta}
    model.tie_weights(missing_keys=unfilled, recompute_mapping=False)
    missing = [path for path, tensor in model.state_dict().items() if tensor.is_meta]
    missing += [f"{path} of expert {min(numbers)}" for path, numbers in left.items() if numbers]
    if missing:
        raise UnsupportedModelError(f"{name} is not a complete causal language model: it lacks {missing[0]}")
    ignored = "|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ("(?!)",))
    if unknown := [key for key in unknown if not re.search(ignored, key)]:
        logger.warning("%s has %d tensors that the model does not have, such as %s", name, len(unknown), unknown[0])
    with suppress(OSError):  # it has none
        model.generation_config = GenerationConfig.from_pretrained(name, **access)
    loaded: PreTrainedModel = model.eval()
    return loaded


_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+\.weight)")


def quantised(weight: Any, kind: str) -> Tensor:
    """A matrix ``[out, in]``, or what safetensors slices it from, in Q8_0 or Q4_K blocks; float32 if not finite."""
    made = _empty(weight.shape if isinstance(weight, Tensor) else weight.get_shape(), kind)
    return made if _pack(weight, made) else _whole(weight)


def _empty(shape: Sequence[int], kind: str) -> BlockTensor:
    """Blocks to be written, for matrices of a shape."""
    numbers, size = block_size(kind)
    outer = (*shape[:-1], shape[-1] // numbers * size)
    # pages of its own: between the tensors that are read and freed, it would leave gaps that none of them fits
    return BlockTensor(torch.frombuffer(mmap.mmap(-1, math.prod(outer)), dtype=torch.uint8).view(outer), kind)


def _pack(weight: Any, into: BlockTensor) -> bool:
    """Write the blocks of a matrix; whether all its numbers are finite. It stops at the first that is not."""
    from gguf import GGMLQuantizationType, quantize

    count, columns = into.shape
    rows = max(1, _AT_ONCE // columns)
    for start in range(0, count, rows):
        part = weight[start : start + rows].float()
        if not part.isfinite().all():
            return False
        packed = (
            _q4_k(part)
            if into.kind == "Q4_K"
            else torch.from_numpy(quantize(part.contiguous().numpy(), GGMLQuantizationType.Q8_0))
        )
        into.blocks[start : start + rows] = packed
    return True


def _whole(weight: Any) -> Tensor:
    whole: Tensor = weight[:]
    return whole.float() if whole.is_floating_point() else whole


def _kind(kind: WeightKind, size: int, *, is_inside: bool) -> str | None:
    """The type of blocks for rows of a size."""
    if kind == "q4_k" and is_inside and size % 256 == 0:
        return "Q4_K"
    return "Q8_0" if size % 32 == 0 else None


def _put_expert(model: nn.Module, path: str, number: int, weight: Any, kind: WeightKind) -> None:
    """Write the matrix of one expert into the stack of all, which is made for the first."""
    shape = tuple(model.get_parameter(path).shape)
    if tuple(weight.get_shape()) != shape[1:]:
        raise ModelLoadError(f"{path} of expert {number} has the shape {weight.get_shape()}, not {list(shape[1:])}")
    if model.get_parameter(path).is_meta:
        block = _kind(kind, shape[2], is_inside=True)
        _put(model, path, torch.empty(shape) if block is None else _empty(shape, block))
    place = model.get_parameter(path).detach()[number]
    if not isinstance(place, BlockTensor):
        place.copy_(_whole(weight))
    elif not _pack(weight, place):
        raise ModelLoadError(f"{path} of expert {number} has numbers that are not finite")


def _put(model: nn.Module, path: str, tensor: Tensor) -> None:
    owner, _, attribute = path.rpartition(".")
    module = model.get_submodule(owner)
    is_parameter = attribute in module._parameters
    setattr(module, attribute, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def _q4_k(weight: Tensor) -> Tensor:
    """Blocks of 256 numbers: 8 groups of 32, each with a scale and a minimum of 6 bits, and 4 bits for each number."""
    groups = weight.reshape(-1, 8, 32)
    scale, low = _scales(groups)
    # both are multiples of a float16 number of the block, 0 to 63
    step, low_step = (part.amax(1, keepdim=True).div(63).half().float() for part in (scale, low))
    scale, low = (_rounded(part, unit, 63) for part, unit in ((scale, step), (low, low_step)))
    numbers = _rounded(groups + (low * low_step)[..., None], (scale * step)[..., None], 15).to(torch.uint8)
    scale, low = scale.to(torch.uint8), low.to(torch.uint8)
    first, second = (part[:, :4] | (part[:, 4:] >> 4 << 6) for part in (scale, low))
    third = (scale[:, 4:] & 15) | (low[:, 4:] << 4)
    numbers = numbers.view(-1, 4, 2, 32)  # groups 2j and 2j + 1 share their bytes
    nibbles = numbers[:, :, 0] | (numbers[:, :, 1] << 4)
    halves = torch.cat((step, low_step), 1).half().view(torch.uint8)
    blocks = torch.cat((halves, first, second, third, nibbles.flatten(1)), 1)
    return blocks.view(weight.shape[0], -1)


def _scales(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale s and minimum m of each group, so that s * q - m with q in 0..15 is close to its numbers.

    Of some scales beside that of the group's range, each with the s and m of least squares for its q, the best is
    taken. Larger numbers count more. Groups are ``[N, 8, 32]`` float32; s and m are ``[N, 8]``, not negative.
    """
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    span = (high - low).clamp(min=1e-30)
    weights = groups.square().mean(-1, keepdim=True).sqrt() + groups.abs()
    total, moment = weights.sum(-1), (weights * groups).sum(-1)
    best_scale, best_low = (span / 15)[..., 0], -low[..., 0]
    best_error = torch.full_like(best_scale, torch.inf)
    for number in range(_TRIES):
        levels = 14 + 2 * number / (_TRIES - 1)
        q = ((groups - low) * (levels / span)).round_().clamp_(0, 15)
        weighted = weights * q
        q_sum, q_square, q_moment = weighted.sum(-1), (weighted * q).sum(-1), (weighted * groups).sum(-1)
        determinant = total * q_square - q_sum.square()
        scale = (total * q_moment - q_sum * moment) / determinant.clamp(min=1e-30)
        minimum = (scale * q_sum - moment) / total.clamp(min=1e-30)
        positive = minimum < 0  # a group of positive numbers has no minimum to take off
        scale = torch.where(positive, q_moment / q_square.clamp(min=1e-30), scale)
        minimum = minimum.clamp(min=0)
        error = (weights * (scale[..., None] * q - minimum[..., None] - groups).square()).sum(-1)
        better = (error < best_error) & (determinant > 0) & (scale > 0)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, minimum, best_low)
        best_error = torch.where(better, error, best_error)
    return best_scale, best_low


def _rounded(values: Tensor, unit: Tensor, most: int) -> Tensor:
    return (values / torch.where(unit == 0, torch.inf, unit)).round().clamp(0, most)
