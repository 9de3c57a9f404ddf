"""The settings of a decode, and of how a model is run, declared once for Python, the command line and the adapters."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from cocoa_engine.arguments import SettingsModel
from cocoa_engine.equations import SpanLogProb
from cocoa_engine.errors import unknown
from cocoa_engine.spans import RiskSource


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


MethodName = Literal["greedy", "cocoa", "cocoa-sig", "dola", "decore", "diver", "sample"]
"""The decoding methods. Each is a file of :mod:`cocoa_engine.methods`, which builds its registry from these names."""

_LAYERS = r"^(high|low|\d+(,\d+)*)$"

_PAPER: dict[str, Any] = {
    "method": "cocoa-sig",
    "metric": "f_mlds",
    "alpha": 2.5,
    "gamma": 0.3,
    "middle_layers": None,  # L//3 to 2L//3
    "final_layer": "post_norm",
    "span_log_prob": "sum",
    "temperature": 0.0,
}


MAX_STOP_TEXTS = 256
MAX_STOP_LENGTH = 10_000
"""Of a stop text, in characters. The end of an answer is compared with each stop text after every token."""


def require_stop_texts(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The texts at which an answer ends, checked.

    Raises:
        ValueError: there are too many, or one is empty or too long.
    """
    if "" in texts:
        raise ValueError("an empty stop text would end every answer at once; remove it")
    if len(texts) > MAX_STOP_TEXTS:
        raise ValueError(f"at most {MAX_STOP_TEXTS} stop texts are allowed, not {len(texts)}")
    if (longest := max(map(len, texts), default=0)) > MAX_STOP_LENGTH:
        raise ValueError(f"a stop text may have {MAX_STOP_LENGTH} characters, not {longest}")
    return texts


class CocoaConfig(SettingsModel):
    """Settings of one decode. Immutable; :meth:`replace` makes a changed copy.

    Raises:
        ConfigError: settings are unknown or out of range. The message names each of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: MethodName = Field("cocoa-sig", description="Decoding method, which ranks candidate spans.")
    metric: Literal["f_mlds", "con_mlds"] = "f_mlds"
    """The MLDS that ranks spans. Both are always measured."""
    risk: Literal["auto", RiskSource] = "auto"
    """Where the risk of a span comes from. auto: the calibrator if there is one for spans that fits the model and the
    settings; otherwise, if the passages are named (source), the rank of the span's source attention; otherwise 1 - p of
    its least probable token. f_mlds and con_mlds report a raw MLDS, which is not in [0, 1]."""
    alpha: float = Field(2.5, ge=0, le=1e6, description="Weight of the disagreement penalty (alpha in the paper).")
    gamma: float = Field(0.3, gt=0, le=1)
    """A token competes if its probability is at least gamma times the highest. 1 is greedy."""
    max_candidates: int = Field(8, ge=1, le=1000)
    """Maximum number of competing tokens that start a branch. 1 is greedy."""
    max_span_tokens: int = Field(16, ge=1, le=10**6, description="Maximum number of tokens of a branch.")
    span_boundary: Literal["right", "left", "own", "fixed"] = "right"
    """Where branches end: all at the latest (right) or the earliest (left) of their next risk points, each at its own
    next risk point (own), or all after max_span_tokens (fixed)."""
    span_log_prob: SpanLogProb = "greedy_end"
    """log p_S from log p of the tokens, for candidates of unequal length: their sum (the paper), their mean or another
    rule. greedy_end: the sum, but only greedy decoding ends the answer."""
    middle_layers: tuple[int, int] | None = None
    """Window m,n of the middle layers, both inclusive, 0 <= m < n <= L. Default: L//3, 2L//3."""
    final_layer: Literal["post_norm", "pre_norm"] = "post_norm"
    """Whether h[i, L] is taken after (the paper) or before the model's final norm."""
    dola_layers: str = Field("high", pattern=_LAYERS)
    """DoLa: candidate layers: "high", "low" or layers such as "16,18,20"."""
    dola_relative_top: float = Field(0.1, ge=0, le=1)
    """DoLa: a token is allowed if its probability is at least this times the highest."""
    decore_heads: str | None = None
    """File with the model's retrieval heads. DeCoRe masks them, and the attention of the best 20 on the prompt is the
    source attention. Default: the file that `cocoa heads` has written for this model to the cache directory, or else
    the embedded model's heads, for models of its shape."""
    decore_masked_heads: int | None = Field(None, ge=1, le=10**6)
    """DeCoRe: number of retrieval heads to mask, best first. Default: 50, but at most 1 in 20."""
    diver_weight: float = Field(1.0, ge=0, le=1e6)
    """Diver: weight of the mutual information with the prompt."""
    repetition_penalty: float | None = Field(None, ge=0.01, le=1e6)
    """Penalty on tokens that occurred before, which divides their scores. Default: the value of the model's generation
    config; 1.2 for DoLa."""
    max_risk: float | None = Field(None, ge=0, le=2)
    """Decoding stops after the first span whose risk reaches this. It must be in [0, 1] unless the risk is a raw MLDS.
    Default: no limit."""
    max_new_tokens: int = Field(256, ge=1, le=10**7, description="Maximum number of new tokens.")
    temperature: float = Field(0.0, ge=0, le=1e6)
    """0 keeps the best branch. Above 0, a branch is sampled from softmax(score / temperature). sample: every token is
    drawn from softmax(logits / temperature); 0 is greedy, 1 the model's distribution."""
    top_k: int = Field(0, ge=0, le=10**7)
    """sample: tokens are drawn among this many most probable ones. 0 allows all, 1 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """sample: tokens are drawn among the fewest most probable ones that have at least this probability together. 1
    allows all."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Seed of the sampling. Default: a new seed for each call."""
    top_logprobs: int = Field(0, ge=0, le=20)
    """Number of most probable tokens to record, with their log-probabilities, for each token that is decoded or
    scored."""
    stop: Annotated[tuple[str, ...], AfterValidator(require_stop_texts)] = ()
    """Texts that end the answer. They are not part of it."""

    @classmethod
    def paper(cls, **settings: Any) -> CocoaConfig:
        """The settings of the paper. Settings that the paper does not specify have the defaults of this class.

        CoCoA-SIG with fMLDS, alpha = 2.5 (its best overall) and gamma = 0.3, middle layers L/3 to 2L/3, the final state
        after the norm, log p_S as a sum; the best span is kept.

        Args:
            **settings: settings to change, such as ``metric="con_mlds"``.

        Raises:
            ConfigError: as for the constructor.
        """
        return cls(**{**_PAPER, **settings})

    def replace(self, **settings: Any) -> CocoaConfig:
        """A copy with some settings changed, validated like a new one. What was not set is not set in it, either.

        Raises:
            ConfigError: as for the constructor.
        """
        return CocoaConfig(**{**{name: getattr(self, name) for name in self.model_fields_set}, **settings})

    @field_validator("dola_layers", mode="before")
    @classmethod
    def _layers_as_text(cls, value: Any) -> Any:
        return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_text(cls, value: Any) -> Any:
        return () if value is None else (value,) if isinstance(value, str) else value

    @field_validator("method", mode="before")
    @classmethod
    def _known_method(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in get_args(MethodName):
            raise ValueError(unknown([value], get_args(MethodName), what="method"))
        return value

    @model_validator(mode="after")
    def _limit_on_the_scale_of_the_risk(self) -> CocoaConfig:
        if self.max_risk is not None and self.max_risk > 1 and self.risk not in ("f_mlds", "con_mlds"):
            raise ValueError(
                f"max_risk={self.max_risk:g} is outside the scale of the risk, which is in [0, 1]. To limit the raw "
                "MLDS, set risk='f_mlds' too"
            )
        return self

    @field_validator("middle_layers")
    @classmethod
    def _window(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not 0 <= value[0] < value[1]:
            raise ValueError(f"the window m={value[0]}, n={value[1]} must satisfy 0 <= m < n <= number of layers")
        return value
