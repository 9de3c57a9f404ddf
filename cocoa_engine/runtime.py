"""Settings of how a model is run. They affect speed and memory, not which tokens are chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import explain, unknown


class Runtime(BaseModel):
    """Settings of speed and memory. Immutable.

    All choices except ``linears="bfloat16"`` give the same text, up to rounding in the last digits of the logits.

    Raises:
        ConfigError: settings are unknown or out of range. The message names each of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    forward: Literal["auto", "modules"] = Field(
        "auto",
        description="auto: the engine's lean forward pass if the model is a supported Llama, Mistral, Qwen2 or Qwen3; "
        "modules: always the Hugging Face modules.",
    )
    linears: Literal["auto", "native", "packed", "shared", "stock", "bfloat16"] = Field(
        "auto",
        description="Linear layers of a step on a CPU. native: the engine's C++ kernels, also for attention and next "
        "tokens, on the model's own weights, built with g++ on first use. packed: a second copy of the weights in "
        "oneDNN's layout. shared: the model's own weights, multiplied from the other side. stock: torch's linear "
        "layers. bfloat16: a half-precision copy of float32 weights, which changes some answers. auto: native in "
        "float32 if it can be built, otherwise packed if memory is ample, otherwise shared.",
    )
    max_batch_size: int = Field(8, ge=1, description="Maximum number of sequences in a forward pass.")
    max_queue: int = Field(256, ge=0, description="Maximum number of waiting calls. Further calls are refused.")
    prefix_cache_mb: int = Field(
        256,
        ge=0,
        description="Memory for keys and values of past prompts, which later prompts with the same prefix reuse.",
    )
    draft_tokens: int = Field(
        4, ge=0, description="Prompt lookup: maximum number of guessed tokens fed after each branch. 0 turns it off."
    )
    cuda_graphs: bool = Field(
        True, description="On a GPU, replay each step of the lean forward pass as one CUDA graph."
    )

    if not TYPE_CHECKING:  # type checkers keep the field-by-field signature

        def __init__(self, **settings: Any) -> None:
            if strangers := settings.keys() - type(self).model_fields.keys():
                raise ConfigError(unknown(sorted(strangers), type(self).model_fields, what="runtime setting"))
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise ConfigError(explain(error)) from None
