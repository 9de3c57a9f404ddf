"""Backends run branches: with one shared cache if the model supports it, otherwise more slowly with the same results.

:func:`choose` tests the backends in order on the given model, so that unknown architectures never give wrong results.
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cocoa_engine.config import Runtime
from cocoa_engine.errors import UnsupportedModelError, safe_logger
from cocoa_engine.execution.backends.base import Backend, FeedRequest, Path, ReadBack, TokenTree
from cocoa_engine.execution.backends.shared_cache import SharedCache, depends_on_weights_alone
from cocoa_engine.execution.backends.unshared import ByLength, CopiedCache, Recompute
from cocoa_engine.execution.forward.base import StepOutput
from cocoa_engine.execution.forward.lean import Lean, lean_obstacle
from cocoa_engine.execution.forward.linears import LinearBackend, choose_linear_backend
from cocoa_engine.execution.forward.static import StaticLean
from cocoa_engine.execution.native.build import first_line
from cocoa_engine.model import weight_identity
from cocoa_engine.model.configs import frequencies_of, window_sizes
from cocoa_engine.model.language_model import PASSED_ON, CaptureSpec, LanguageModel, capture, plain_modes
from cocoa_engine.model.light_model import LightModel
from cocoa_engine.model.weight_identity import WeightFingerprint, weight_fingerprint

__all__ = ["Backend", "FeedRequest", "Path", "ReadBack", "StepOutput", "TokenTree", "build", "choose", "state_of"]

logger = safe_logger(__name__)

_SHARED = ("static_lean", "lean", "modules", "masked_modules")
KINDS = (*_SHARED, "copied_cache", "recompute")
"""Every kind of backend, fastest first."""


def build(kind: str, model: LanguageModel, linear_backend: LinearBackend, prefix_cache_bytes: int = 0) -> Backend:
    """Build a backend of one of :data:`KINDS`.

    If the model's rotary frequencies depend on the length, its caches are not used for lengths with other frequencies.

    Raises:
        NotImplementedError: the model does not qualify.
    """
    if kind == "recompute":
        return Recompute(model)
    backend: Backend
    if kind == "copied_cache":
        backend = CopiedCache(model)
    elif kind in ("static_lean", "lean"):
        forward = StaticLean if kind == "static_lean" else Lean
        backend = SharedCache(forward(model, linear_backend), prefix_cache_bytes)
    else:
        from cocoa_engine.execution.forward import modules  # imports transformers' modules, which is slow

        of_modules = modules.Modules if kind == "modules" else modules.MaskedModules
        backend = SharedCache(of_modules(model, linear_backend), prefix_cache_bytes)
    frequencies = frequencies_of(model.config)
    return backend if frequencies is None else ByLength(backend, frequencies)


class Chosen(NamedTuple):
    """The backend of a model, and why it was chosen."""

    backend: Backend
    reason: str
    linear_backend: LinearBackend


# by model: the kind, the linear backend, the reason, and the weights at the test: with zeros or NaNs every kind passes
# it. The values hold no backend, which would keep the model alive
_tried: weakref.WeakKeyDictionary[
    nn.Module, dict[tuple[str | None, str, bool], tuple[str, LinearBackend, str, WeightFingerprint]]
] = weakref.WeakKeyDictionary()


@plain_modes()
def choose(model: LanguageModel, runtime: Runtime | None = None) -> Chosen:
    """Test the backends on a model and return the fastest correct one. Logs a warning if branches cannot share a cache.

    The result of the test is cached until the model's weights or hooks change.

    Raises:
        UnsupportedModelError: no cache can be used, and later tokens change the logits of earlier ones, or the layers'
            hidden states cannot be compared.
    """
    runtime = runtime or Runtime()
    obstacle = "not requested" if runtime.forward == "modules" else lean_obstacle(model)
    linear_backend = choose_linear_backend(model.model, runtime.linears)
    compared = None
    if isinstance(model.model, LightModel):
        if obstacle is None and linear_backend == "native":
            compared = model.model.checked
        else:
            model.whole()
    prefix_cache_bytes = runtime.prefix_cache_mb * 2**20 if depends_on_weights_alone(model.parts()[0]) else 0
    with model.lock:
        graphs = runtime.cuda_graphs and model.device.type == "cuda"
        of_model = _tried.setdefault(model.model, {})
        key = (obstacle, runtime.linears, graphs)  # hooks or an adapter may have changed the model
        weights = weight_fingerprint(model.model.parameters())
        tried = of_model.get(key)
        if tried is None or tried[-1] != weights:
            kind, reason = ("lean", compared) if compared else _try_all(model, linear_backend, obstacle, graphs)
            weight_identity.note(model.model, reason if (kind, linear_backend) == ("lean", "native") else None)
            if kind not in _SHARED:
                linear_backend = "stock"
                if tried is None or tried[0] != kind:  # not again after each step of a training
                    logger.warning(
                        "%s: branches cannot share the prompt's cache; decoding uses the slower backend %r, with the "
                        "same results: %s",
                        model.architecture,
                        kind,
                        reason,
                    )
            tried = of_model[key] = kind, linear_backend, reason, weights
        kind, linear_backend, reason, _ = tried
        return Chosen(build(kind, model, linear_backend, prefix_cache_bytes), reason, linear_backend)


def state_of(model: LanguageModel) -> tuple[str | None, bool, WeightFingerprint]:
    """What the choice of a backend depends on. Equal if the model's weights and hooks are the same."""
    modules, weights = parts = model.parts()
    return lean_obstacle(model, parts), depends_on_weights_alone(modules), weight_fingerprint(weights)


def _try_all(
    model: LanguageModel, linear_backend: LinearBackend, obstacle: str | None, graphs: bool
) -> tuple[str, str]:
    messages: list[str] = [] if obstacle is None else [f"lean: {obstacle}"]
    kind, reason = "recompute", "no cache of this model can be used"
    for cached in KINDS:
        if (cached in ("static_lean", "lean") and obstacle) or (cached == "static_lean" and not graphs):
            continue
        if cached == "recompute":
            _check_supported(model)
            break
        try:
            backend = build(cached, model, linear_backend)
            error = _relative_error(backend)
        except torch.OutOfMemoryError:
            raise
        except Exception as fault:  # unknown architectures raise errors of many types, which rule out this backend only
            messages.append(f"{cached}: {first_line(fault)}")
            continue
        tolerance = _tolerance(torch.bfloat16 if linear_backend == "bfloat16" else model.dtype)
        if error > tolerance > 0.1:  # half precision
            tolerance = max(tolerance, min(0.5, 3 * _rounding_error(model)))
        if not error > tolerance:
            kind = "lean" if backend.forward_name == "lean" else cached  # static_lean does without a failed capture
            reason = f"checked against plain forward passes, largest relative difference {error:.1e}"
            break
        messages.append(f"{cached}: logits differ from plain forward passes by {error:.1e}")
    return kind, f"{reason} ({'; '.join(messages)})" if messages else reason


def _check_supported(model: LanguageModel) -> None:
    """Raise UnsupportedModelError if the model does not run, its layers' hidden states cannot be compared, or later
    tokens change the logits of earlier ones."""
    token_ids = torch.arange(8, device=model.device)[None] % model.vocab_size
    with model.exclusive(), capture(model, CaptureSpec(1, 2, "pre_norm")) as captured:
        try:
            early, late = (
                model.forward(ids, logits_to_keep=ids.shape[1]).logits[0, 3] for ids in (token_ids[:, :4], token_ids)
            )
        except PASSED_ON:
            raise
        except Exception as fault:  # transformers checks few of the fields of a config
            raise UnsupportedModelError(
                f"a plain forward pass of {model.architecture} fails ({type(fault).__name__}: {first_line(fault)}); "
                "the model's config.json or its code may be wrong."
            ) from fault
        captured.stacked(model.device)
    if float((early - late).abs().max() / early.float().std()) > _tolerance(model.dtype):
        raise UnsupportedModelError(f"{model.architecture} attends in both directions; it cannot generate text.")


def _tolerance(dtype: torch.dtype) -> float:
    """Allowed difference of logits in standard deviations. A wrong cache gives about 1, half precision a few 0.01."""
    return 1e-2 if dtype in (torch.float32, torch.float64) else 0.2


def _rounding_error(model: LanguageModel) -> float:
    """How much plain passes of other lengths change the logits of a text, in standard deviations.

    Computed exactly, they would not change. Deep models in half precision on a GPU round by more than 0.2.
    """
    ids = torch.randint(model.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0)).to(model.device)
    with model.exclusive():
        whole, *parts = (
            model.forward(ids[:, :length], logits_to_keep=length).logits[0].float() for length in (64, 1, 2, 5, 17)
        )
    return max(float((part - whole[: len(part)]).abs().max() / whole[: len(part)].std()) for part in parts)


def _relative_error(backend: Backend) -> float:
    """Extend a small tree, keep one branch, extend it again, and compare all logits with plain forward passes."""
    model = backend.model
    cheap = [size for size in window_sizes(model.config).values() if size <= 64]
    length = max([6, *cheap]) + 3  # longer than every small sliding window
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(model.vocab_size, (length + 6,), generator=generator).tolist()
    prompt, (a, b, c, d, e, f) = tokens[:length], tokens[length:]
    if a == b:
        b = (a + 1) % model.vocab_size

    tree = backend.open([prompt], reserve_tokens=8, capture=CaptureSpec(1, 2, "post_norm"))[0]
    try:
        measured: dict[Path, Tensor] = {(): backend.prefill(tree)}
        for paths in ([(a,), (b,)], [(a, c), (b, d)]):
            measured.update(zip(paths, backend.step([(tree, paths)])[0].logits, strict=True))
        tree.commit((b, d))
        measured[(b, d, e)] = backend.step([(tree, [(e,)])])[0].logits[0]
        tree.commit((e,))
        measured[(b, d, e, f)] = backend.step([(tree, [(f,)])])[0].logits[0]
    finally:
        tree.close()

    worst = 0.0
    for branch in ((a, c), (b, d, e, f)):
        with model.exclusive():
            token_ids = torch.tensor([[*prompt, *branch]], device=model.device)
            expected = model.forward(token_ids, logits_to_keep=len(branch) + 1).logits[0, -len(branch) - 1 :].float()
        scale = float(expected.std()) or 1.0
        for depth in range(len(branch) + 1):
            if branch[:depth] in measured:
                difference = float((measured[branch[:depth]] - expected[depth]).abs().max())
                worst = max(worst, difference / scale)
    return worst
