"""How a model is run, as against what is decoded: nothing here changes which tokens are chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import explain, unknown


class Runtime(BaseModel):
    """Settings of speed and memory. Immutable.

    Every choice but ``linears="bfloat16"`` gives the same text, up to rounding in the last digits of the logits.

    Raises:
        ConfigError: a setting is unknown or out of range. The message names each one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    forward: Literal["auto", "modules"] = Field(
        "auto",
        description="auto: our lean forward pass for the Llama family (Llama, Mistral, Qwen2, Qwen3) where the model "
        "qualifies; modules: always Hugging Face's own modules.",
    )
    linears: Literal["auto", "native", "packed", "shared", "stock", "bfloat16"] = Field(
        "auto",
        description="What runs a step on a CPU. native: kernels of our own for linear layers, attention and next "
        "tokens (in float32 for all layers of the lean pass at once), on the model's own weights, built with g++ on "
        "first use. Else torch's, and linear layers "
        "packed: a second copy of the weights in oneDNN's layout; shared: the model's own weights, multiplied from the "
        "other side; stock: torch's. auto: native in float32 where it can be built, else packed if memory is ample. "
        "bfloat16: a copy of float32 weights in half precision, which changes some of the answers.",
    )
    max_batch_size: int = Field(8, ge=1, description="At most this many sequences share a forward pass.")
    max_queue: int = Field(256, ge=0, description="At most this many calls wait for a place; further ones are refused.")
    prefix_cache_mb: int = Field(
        256, ge=0, description="Memory for the keys and values of past prompts, which later prompts may begin with."
    )
    draft_tokens: int = Field(
        4, ge=0, description="Prompt lookup: at most this many guessed tokens are fed after each tip; 0 is none."
    )
    cuda_graphs: bool = Field(True, description="On a GPU, replay a step of the lean forward pass as one CUDA graph.")

    if not TYPE_CHECKING:  # type checkers keep the field-by-field signature

        def __init__(self, **settings: Any) -> None:
            if strangers := settings.keys() - type(self).model_fields.keys():
                raise ConfigError(unknown(sorted(strangers), type(self).model_fields, what="runtime setting"))
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise ConfigError(explain(error)) from None
