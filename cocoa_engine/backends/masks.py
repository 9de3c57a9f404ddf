"""Additive attention masks for a step in which several branches of a sequence share one cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Mask = Tensor | dict[str, Tensor]


class MaskLayout:
    """Which masks a model wants: one for all layers, or one for each kind of layer.

    Args:
        config: the model's text config.

    Raises:
        NotImplementedError: a kind of layer whose cache cannot hold branches (recurrent state, chunked attention).
    """

    def __init__(self, config: Any) -> None:
        window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            window = None
        kinds = sorted(set(getattr(config, "layer_types", None) or ()))
        unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise NotImplementedError(f"layers of kind {', '.join(unknown)} cannot hold branches")
        self.windows: dict[str, int | None]
        if "sliding_attention" in kinds:
            if window is None:
                raise NotImplementedError("the config has sliding-attention layers but no sliding_window")
            self.by_kind = len(kinds) > 1
            self.windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
        else:
            self.by_kind = False
            self.windows = {"all": None if kinds else window}
        self.smallest_window = min((w for w in self.windows.values() if w is not None), default=None)

    def additive(self, visible: Tensor, distance: Tensor, dtype: torch.dtype, device: torch.device) -> Mask:
        """0 where a token may look, the dtype's lowest number elsewhere.

        Args:
            visible: ``[B, W, S]`` bool: the slots on each token's own path.
            distance: ``[B, W, S]``: the token's position less the slot's.

        Returns:
            ``[B, 1, W, S]``, or a dict of them by kind of layer.
        """

        def additive(window: int | None) -> Tensor:
            seen = visible if window is None else visible & (distance < window)
            # a finite lowest number and a float mask: -inf rows give NaN, and eager attention misreads a boolean mask
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
            return mask[:, None].to(device, non_blocking=True)

        masks = {kind: additive(window) for kind, window in self.windows.items()}
        return masks if self.by_kind else next(iter(masks.values()))
