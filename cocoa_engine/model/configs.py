"""Reads the config of a model: the facts that decoding needs, and whether it is a causal language model at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, PreTrainedConfig

from cocoa_engine.errors import ModelLoadError, UnsupportedModelError, short_repr
from cocoa_engine.model.light_model import import_model_classes

MAX_LAYERS = 1000
"""The largest models have about 130. A number far above that in a config would build modules until memory ends."""

NEEDED = "a decoder-only causal language model is needed, such as Llama, Mistral, Qwen, Gemma, Phi or GPT-2"


def require_decoder_only(config: PreTrainedConfig, name: str) -> None:
    """Check from its config alone that a model is decoder-only and has 3 to 1000 layers."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; {NEEDED}")
    layers = getattr(text_part(config), "num_hidden_layers", None)
    if layers is not None:
        require_layer_count(layers, f"{name}: num_hidden_layers", "config.json")
        if layers < 3:
            raise UnsupportedModelError(f"{name} has {layers} decoder layer(s); a middle-layer window needs 3 or more.")
    # BERT-like models have a causal class too, which is causal only if the config sets is_decoder
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-only (embedding) model, which attends in both directions; {NEEDED}"
        )


def require_layer_count(value: object, field: str, file: str) -> None:
    """Check that the number of layers in a field of a file is a whole number that a model may have."""
    if not isinstance(value, int) or value > MAX_LAYERS:
        raise UnsupportedModelError(
            f"{field} must be a whole number of at most {MAX_LAYERS} (got {short_repr(value)}); correct the model's "
            f"{file}."
        )


_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""The fields of a config.json for the number of layers; transformers reads the others as the first."""


def read_config(name: str, options: dict[str, Any]) -> PreTrainedConfig:
    """A model's config. The number of layers is checked before: some configs build a list of that length."""
    import_model_classes()  # the class of a config imports much of them
    if "gguf_file" not in options or not Path(name).is_dir():  # a local GGUF file has been checked
        parts: list[Any] = [PreTrainedConfig.get_config_dict(name, **options)[0]]
        while parts:  # a config of several models has an object for each, at any depth
            part = parts.pop()
            if isinstance(part, dict):
                for field in (field for field in _LAYER_COUNTS if part.get(field) is not None):
                    require_layer_count(part[field], f"{name}: {field}", "config.json")
            parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    config = AutoConfig.from_pretrained(name, **options)
    for field in ("output_hidden_states", "output_attentions"):
        value = getattr(config, field, None) or False
        if not isinstance(value, int):
            raise ModelLoadError(
                f"{name}: {field} must be true or false (got {short_repr(value)}); correct the model's config.json."
            )
    config.return_dict = True  # as passes need it
    return config


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The text config of a multi-modal model's config; other configs are returned unchanged."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


WINDOW_FIELDS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


def context_window_of(config: PreTrainedConfig) -> int | None:
    """The maximum number of tokens in a sequence, from a model's config; `None` if the config does not state it.

    A scaling of the rotary positions is a factor of the window, except where the config states the scaled length: for
    the types that begin with another one (Llama 3, LongRoPE), and where kinds of layers have their own (Gemma 3).
    """
    text_config = text_part(config)
    values = (getattr(text_config, name, None) for name in WINDOW_FIELDS)
    window = next((value for value in values if isinstance(value, int) and value > 0), None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if window is None or rope.get("rope_type") not in _SCALED_BY_FACTOR:
        return window
    trained, factor = rope.get("original_max_position_embeddings") or window, rope.get("factor")
    if not all(isinstance(number, (int, float)) and 0 < number < _HUGE for number in (trained, factor)):
        return window
    return max(window, int(trained * (factor or 1)))


_HUGE = 2.0**53  # of a file that is wrong, as is a number that is not finite
_SCALED_BY_FACTOR = ("linear", "dynamic", "yarn", "proportional")

Frequencies = Callable[[int], tuple[int, ...]]
"""By the length of a sequence: equal for lengths with the same rotary frequencies."""


def frequencies_of(config: Any) -> Frequencies | None:
    """How the rotary frequencies of a model depend on the length (LongRoPE, dynamic NTK); ``None``: not at all."""
    rope = getattr(config, "rope_parameters", None) or {}
    limits: list[tuple[int, bool]] = []  # up to a length they are the same; beyond it, whether each length differs
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if part.get("rope_type") == "longrope":
            limits.append((part["original_max_position_embeddings"], False))
        if part.get("rope_type") == "dynamic":
            limits.append((config.max_position_embeddings, True))
    if not limits:
        return None
    return lambda length: tuple(0 if length <= limit else length if window else 1 for limit, window in limits)


class Windows:
    """The sliding window of each kind of layer; NotImplementedError where a cache cannot hold branches."""

    def __init__(self, config: PreTrainedConfig) -> None:
        # the second has been converted to ``layer_types`` by transformers
        if strange := sorted(window_sizes(config).keys() - {"sliding_window", "max_window_layers"}):
            raise NotImplementedError(f"unknown kinds of windows ({', '.join(strange)})")
        if "local" in (getattr(config, "attention_layers", None) or ()):
            raise NotImplementedError("local attention layers")
        is_used = getattr(config, "use_sliding_window", True) is not False
        window = getattr(config, "sliding_window", None) if is_used else None
        self._layer_kinds = list(getattr(config, "layer_types", None) or ())
        kinds = set(self._layer_kinds)
        if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
            raise NotImplementedError(f"layers of kind {', '.join(unknown)} cannot hold branches")
        if "sliding_attention" in kinds and window is None:
            raise NotImplementedError("the config has sliding-attention layers but no sliding_window")
        by_kind = {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
        self.by_kind: dict[str, int | None] = by_kind or {"all": window}
        self.smallest = min((size for size in self.by_kind.values() if size is not None), default=None)

    def __getitem__(self, layer: int) -> int | None:
        """The window of one layer; ``None`` for full attention."""
        return self.by_kind[self._layer_kinds[layer] if self._layer_kinds else "all"]


def window_sizes(config: PreTrainedConfig) -> dict[str, int]:
    """All integer config fields with "window" in their name, except patterns (how often windowed layers occur)."""
    fields = {name: value for name, value in vars(config).items() if "window" in name and type(value) is int}
    return {name: value for name, value in fields.items() if not name.endswith("_pattern")}
