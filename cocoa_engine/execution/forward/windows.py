"""The sliding window of each layer of a model."""

from __future__ import annotations

from transformers import PreTrainedConfig

_KNOWN = ("sliding_window", "max_window_layers")
"""Config fields that this module reads, or that transformers has converted to ``layer_types``."""


class Windows:
    """The sliding window of each kind of layer.

    Args:
        config: the model's text config.

    Raises:
        NotImplementedError: the cache of a layer cannot hold branches (recurrent state, chunked attention), or the
            config has an unknown kind of window.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        if strange := sorted(window_sizes(config).keys() - set(_KNOWN)):
            raise NotImplementedError(f"unknown kinds of windows ({', '.join(strange)})")
        if "local" in (getattr(config, "attention_layers", None) or ()):
            raise NotImplementedError("local attention layers")
        window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            window = None
        self._layer_kinds = list(getattr(config, "layer_types", None) or ())
        kinds = sorted(set(self._layer_kinds))
        unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise NotImplementedError(f"layers of kind {', '.join(unknown)} cannot hold branches")
        if "sliding_attention" in kinds and window is None:
            raise NotImplementedError("the config has sliding-attention layers but no sliding_window")
        self.by_kind: dict[str, int | None] = {
            kind: window if kind == "sliding_attention" else None for kind in kinds
        } or {"all": window}
        self.smallest = min((size for size in self.by_kind.values() if size is not None), default=None)

    def __getitem__(self, layer: int) -> int | None:
        """The window of one layer; ``None`` for full attention."""
        return self.by_kind[self._layer_kinds[layer] if self._layer_kinds else "all"]


def window_sizes(config: PreTrainedConfig) -> dict[str, int]:
    """All integer config fields with "window" in their name, except patterns (how often windowed layers occur)."""
    return {
        name: value
        for name, value in vars(config).items()
        if "window" in name and not name.endswith("_pattern") and type(value) is int
    }
