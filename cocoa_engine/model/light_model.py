"""A model of the Llama family as its weights and settings, without transformers' code that runs it.

The lean forward pass needs nothing else. transformers' model classes take two seconds to import on a slow core, and
more memory than the weights of a small model. They are imported when something asks for the model itself.
"""

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from cocoa_engine.interruptions import free_in_child
from cocoa_engine.memory import collector_paused, quiet_torchao

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The models that can be light: transformers' class by the type of the model."""


def import_model_classes() -> None:
    """Import transformers' model classes before something of transformers does: torchao would write to stderr."""
    if "transformers.modeling_utils" in sys.modules:
        return
    with quiet_torchao(), collector_paused():
        import transformers.modeling_utils  # noqa: F401


class LightModel(nn.Module):
    """The modules of a model, with the names that they have in transformers. None of them has a forward pass.

    Its matrices have no memory until they are set. ``checked`` is what the comparison of the lean forward pass with the
    modules of this model found.
    """

    build: "Callable[[], PreTrainedModel]"  # builds transformers' model from these weights

    def __init__(self, config: PreTrainedConfig, model_type: str, checked: str) -> None:
        super().__init__()
        self.config = config
        self.architecture = ARCHITECTURES[model_type]
        self.name_or_path = ""
        self.generation_config = GenerationConfig()
        self.checked = checked
        with torch.device("meta"):
            # the constructor of an embedding would draw numbers, which imports the tracer of torch.compile there
            numbers = torch.empty(config.vocab_size, config.hidden_size)
            self.model: Any = _Part(
                embed_tokens=nn.Embedding.from_pretrained(numbers),  # type: ignore[no-untyped-call]
                layers=nn.ModuleList(_layer(config, model_type) for _ in range(config.num_hidden_layers)),
                norm=_norm(config.hidden_size),
            )
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.model.rotary_emb = _Rotary(config)
        self._built: list[PreTrainedModel] = []  # a list: torch would make the model a part of this one
        self._lock = free_in_child(threading.Lock())

    def whole(self) -> "PreTrainedModel":
        """transformers' model with these weights, in the same memory. It is built once."""
        with self._lock:
            if not self._built:
                built = self.build()
                built.name_or_path = built.config.name_or_path = self.name_or_path
                self._built.append(built)
            return self._built[0]

    @property
    def is_built(self) -> bool:
        return bool(self._built)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head


class _Part(nn.Module):
    """A module of transformers that consists of others, or has one weight."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def _norm(width: int) -> _Part:
    return _Part(weight=nn.Parameter(torch.empty(width)))


def _layer(config: Any, model_type: str) -> _Part:
    width, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    biased, mlp_biased = (bool(getattr(config, f"{part}_bias", False)) for part in ("attention", "mlp"))
    bias = biased or model_type == "qwen2"
    heads, kv_heads = (count * head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    norms = {"q_norm": _norm(head_dim), "k_norm": _norm(head_dim)} if model_type == "qwen3" else {}
    attention = _Part(
        head_dim=head_dim,
        scaling=head_dim**-0.5,
        q_proj=nn.Linear(width, heads, bias=bias),
        k_proj=nn.Linear(width, kv_heads, bias=bias),
        v_proj=nn.Linear(width, kv_heads, bias=bias),
        o_proj=nn.Linear(heads, width, bias=biased),
        **norms,
    )
    sizes = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
    return _Part(
        self_attn=attention,
        mlp=_Part(**{name: nn.Linear(*size, bias=mlp_biased) for name, size in sizes.items()}),
        input_layernorm=_norm(width),
        post_attention_layernorm=_norm(width),
    )


class _Rotary(nn.Module):
    """Rotary embeddings (Su et al. 2021) of unscaled positions, or of positions divided by a factor."""

    inv_freq: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        rope, width = config.rope_parameters, config.head_dim
        frequencies = rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
        frequencies = 1.0 / frequencies
        if rope["rope_type"] == "linear":
            frequencies /= rope["factor"]
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each ``[B, T, head_dim]``, of positions ``[B, T]``."""
        angles = positions[:, :, None].float() * self.inv_freq  # [B, T, head_dim / 2]
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(like.dtype), both.sin().to(like.dtype)
