"""Settings of how a model is run. They affect speed and memory. Only narrower weights change answers."""

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from cocoa_engine.arguments import SettingsModel


class Runtime(SettingsModel):
    """Settings of speed and memory. Immutable.

    All choices except ``linears="bfloat16"`` and ``weights`` give the same text, up to rounding in the last digits of
    the logits.

    Raises:
        ConfigError: settings are unknown or out of range. The message names each of them.
    """

    _what: ClassVar[str] = "runtime setting"

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    forward: Literal["auto", "modules"] = "auto"
    """auto: a lean forward pass for models of the Llama family (Llama, Mistral, Phi-3, Qwen2, Qwen3, Qwen3-MoE,
    Granite, OLMo2, Gemma 2, Gemma 3) that qualify, otherwise Hugging Face's modules; modules: always Hugging Face's
    modules."""
    linears: Literal["auto", "native", "packed", "transposed", "stock", "bfloat16"] = "auto"
    """How a decoding step multiplies by linear layers on a CPU. native: C++ kernels on the model's own weights,
    compiled with g++ on first use; they also run attention and rank next tokens, and in float32 run all layers of the
    lean pass in one call. packed: torch, with a second copy of the weights in oneDNN's layout; transposed: torch, on
    the model's own weights in transposed form; stock: torch's linear layers. auto: native for float32 weights if the
    kernels can be compiled, otherwise packed if memory is ample. bfloat16: a bfloat16 copy of float32 weights, by the
    kernels if they can be compiled, otherwise packed; where the processor multiplies bfloat16 by bfloat16, inputs are
    rounded too. It changes some answers."""
    weights: Literal["stored", "float32", "q8_0", "q4_k"] = "stored"
    """What from_pretrained makes of the weights. stored: nothing; a GGUF file's stay in its blocks on a CPU. float32:
    they are unpacked, to four bytes for each weight. q8_0, q4_k: the matrices of a safetensors checkpoint are quantised
    to GGUF's blocks while they are read on a CPU, to about 8.5 and 4.5 bits for each weight, which changes answers."""
    max_batch_size: int = Field(8, ge=1, le=4096, description="Maximum number of sequences in a forward pass.")
    max_queue: int = Field(256, ge=0, le=10**6)
    """Maximum number of waiting calls. Further calls are refused."""
    prefix_cache_mb: int = Field(256, ge=0, le=2**24)
    """Memory for keys and values of past prompts, which later prompts with the same prefix reuse."""
    draft_tokens: int = Field(4, ge=0, le=1000)
    """Prompt lookup: maximum number of draft tokens after each leaf. 0 turns it off."""
    cuda_graphs: bool = True
    """On a GPU, replay each step of the lean forward pass as one CUDA graph."""
