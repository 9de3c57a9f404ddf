"""How branches are run: one shared cache where the model allows it, else a slower way that is right all the same.

:func:`choose` tries them in order on the model at hand, so that an architecture nobody listed is never silently wrong.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cocoa_engine.errors import UnsupportedModelError
from cocoa_engine.execution.backends.base import Backend, FeedRequest, Path, ReadBack, StepOutput, TokenTree
from cocoa_engine.execution.backends.copied_cache import CopiedCache
from cocoa_engine.execution.backends.prefixes import depends_on_weights_alone
from cocoa_engine.execution.backends.recompute import Recompute
from cocoa_engine.execution.backends.shared_cache import SharedCache
from cocoa_engine.execution.forward.base import Forward
from cocoa_engine.execution.forward.lean import Lean, why_not_lean
from cocoa_engine.execution.forward.linears import Way, choose_way
from cocoa_engine.execution.forward.modules import MaskedModules, Modules
from cocoa_engine.execution.forward.static import StaticLean
from cocoa_engine.execution.forward.weight_fingerprint import WrittenState, written_state
from cocoa_engine.execution.forward.windows import window_sizes
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.runtime import Runtime

__all__ = [
    "KINDS",
    "Backend",
    "Chosen",
    "FeedRequest",
    "Path",
    "ReadBack",
    "StepOutput",
    "TokenTree",
    "choose",
    "state_of",
]

logger = logging.getLogger(__name__)


class Chosen(NamedTuple):
    """The backend of a model, and why it is that one."""

    backend: Backend
    reason: str
    way: Way


def _shared(forward: Callable[[LanguageModel, Way], Forward]) -> Callable[..., Backend]:
    def build(model: LanguageModel, way: Way, prefix_cache_bytes: int = 0) -> Backend:
        return SharedCache(forward(model, way), prefix_cache_bytes)

    return build


KINDS: dict[str, Callable[..., Backend]] = {
    "static_lean": _shared(StaticLean),
    "lean": _shared(Lean),
    "modules": _shared(Modules),
    "masked_modules": _shared(MaskedModules),
    "copied_cache": lambda model, *_: CopiedCache(model),
    "recompute": lambda model, *_: Recompute(model),
}
"""Every way, fastest first."""

_FAST = ("static_lean", "lean", "modules", "masked_modules")


class _Found(NamedTuple):
    kind: str
    way: Way
    reason: str
    tried_on: WrittenState  # weights that were zero or NaN then would have let every way pass


# what was found for a model, never the backend itself: that would keep the model alive
_found: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str | None, str, bool], _Found]] = weakref.WeakKeyDictionary()


def choose(model: LanguageModel, runtime: Runtime | None = None) -> Chosen:
    """The fastest backend that is right on this model, found by trying; logs once if branches cannot share a cache."""
    runtime = runtime or Runtime()
    obstacle = "not asked for" if runtime.forward == "modules" else why_not_lean(model)
    prefix_cache_bytes = runtime.prefix_cache_mb * 2**20 if depends_on_weights_alone(model) else 0
    with model.lock:
        found = _found.setdefault(model.model, {})
        graphs = runtime.cuda_graphs and model.device.type == "cuda"
        asked = (obstacle, runtime.linears, graphs)  # the model may have been changed since: hooks, an adapter
        weights = written_state(model.model.parameters())
        known = found.get(asked)
        if known is None or known.tried_on != weights:
            way = choose_way(model.model, runtime.linears)
            kind, reason = _try_all(model, way, obstacle, graphs)
            if kind not in _FAST:
                way = "stock"
                if known is None or known.kind != kind:
                    _log_slower(model, kind, reason)
            known = found[asked] = _Found(kind, way, reason, weights)
        return Chosen(KINDS[known.kind](model, known.way, prefix_cache_bytes), known.reason, known.way)


def state_of(model: LanguageModel) -> tuple[Any, ...]:
    """What a backend was made for: equal as long as the model's weights and hooks are the same."""
    return why_not_lean(model), depends_on_weights_alone(model), written_state(model.model.parameters())


def _try_all(model: LanguageModel, way: Way, obstacle: str | None, graphs: bool) -> tuple[str, str]:
    faults: list[str] = [] if obstacle is None else [f"lean: {obstacle}"]
    for kind, build in KINDS.items():
        if (kind in ("static_lean", "lean") and obstacle) or (kind == "static_lean" and not graphs):
            continue
        if kind == "recompute":
            continue
        try:
            error = _relative_error(build(model, way))
        except torch.OutOfMemoryError:
            raise
        except Exception as fault:  # whatever an unknown architecture raises, it only means: not this way
            faults.append(f"{kind}: {_first_line(fault)}")
            continue
        if not error > _tolerance(torch.bfloat16 if way == "bfloat16" else model.dtype):
            reason = f"checked against plain forward passes, largest relative difference {error:.1e}"
            break
        faults.append(f"{kind}: logits differ from plain forward passes by {error:.1e}")
    else:
        _check_causal(model)
        kind, reason = "recompute", "no cache of this model can be used"
    if faults:
        reason += " (" + "; ".join(faults) + ")"
    return kind, reason


def _log_slower(model: LanguageModel, kind: str, reason: str) -> None:
    logger.warning(
        "%s: branches cannot share the prompt's cache; decoding takes the slower way %r, with the same results: %s",
        type(model.model).__name__,
        kind,
        reason,
    )


def _check_causal(model: LanguageModel) -> None:
    """Raises UnsupportedModelError if later tokens change what the model says of earlier ones."""
    token_ids = torch.arange(8, device=model.device)[None] % model.vocab_size
    with model.exclusive():
        early, late = (
            model.forward(ids, logits_to_keep=ids.shape[1]).logits[0, 3] for ids in (token_ids[:, :4], token_ids)
        )
    if float((early - late).abs().max() / early.float().std()) > _tolerance(model.dtype):
        raise UnsupportedModelError(f"{type(model.model).__name__} reads in both directions; it cannot generate text.")


def _first_line(fault: Exception) -> str:
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]


def _tolerance(dtype: torch.dtype) -> float:
    """Of logits, in standard deviations: a wrong cache is off by about 1, half precision by a few hundredths."""
    return 1e-2 if dtype in (torch.float32, torch.float64) else 0.2


def _relative_error(backend: Backend) -> float:
    """Grow a small tree, keep one branch, go on; compare all logits with plain forward passes of the same tokens."""
    model = backend.model
    cheap = [size for size in window_sizes(model.config).values() if size <= 64]
    length = max([6, *cheap]) + 3  # past every sliding window where that is cheap
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(model.vocab_size, (length + 6,), generator=generator).tolist()
    prompt, (a, b, c, d, e, f) = tokens[:length], tokens[length:]
    if a == b:
        b = (a + 1) % model.vocab_size

    tree = backend.open([prompt], room=8, wanted=CaptureSpec(1, 2, "post_norm"))[0]
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
