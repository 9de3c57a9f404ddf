"""Facts about a loaded model."""

from typing import Literal, cast

from pydantic import ConfigDict, Field

from cocoa_engine.arguments import ResultModel
from cocoa_engine.equations import middle_layers
from cocoa_engine.execution.forward.linears import LinearBackend, native_obstacle
from cocoa_engine.execution.session import Session

BackendName = Literal["shared_cache", "copied_cache", "recompute"]
ForwardName = Literal["static_lean", "lean", "modules", "masked_modules", "plain"]


class ModelInfo(ResultModel):
    """Facts about a loaded model and how it runs."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    model_name: str
    architecture: str
    num_layers: int = Field(description="L, the number of decoder layers.")
    hidden_size: int
    middle_layers: tuple[int, int] = Field(description="The default window m, n, both inclusive.")
    context_window: int | None = Field(description="In tokens. `None` if the model's config does not state it.")
    vocab_size: int
    num_parameters: int
    dtype: str
    device: str
    has_chat_template: bool
    backend: BackendName = Field(description="How branches are run; shared_cache is the fastest.")
    backend_reason: str
    forward: ForwardName = Field(
        description="The forward pass: the engine's lean pass for the Llama family (static_lean: with CUDA graphs), or "
        "the model's modules with the engine's attention (modules), with their own attention under a mask "
        "(masked_modules), or unchanged (plain)."
    )
    linears: LinearBackend = Field(description="How linear layers multiply a few rows on a CPU.")
    native_obstacle: str | None = Field(description="Why the native kernels cannot be used. `None` if they can.")

    @classmethod
    def of(cls, session: Session) -> "ModelInfo":
        """Collect the facts about a model. Selects its backend, if that has not been done before."""
        model, chosen = session.model, session.chosen
        names = ("architecture", "num_layers", "context_window", "vocab_size")
        return cls(
            **{name: getattr(model, name) for name in names},
            model_name=session.model_name,
            hidden_size=int(model.config.hidden_size),
            middle_layers=middle_layers(model.num_layers),
            num_parameters=sum(parameter.numel() for parameter in model.model.parameters()),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            has_chat_template=session.tokens.has_chat_template,
            backend=cast(BackendName, chosen.backend.name),
            backend_reason=chosen.reason,
            forward=cast(ForwardName, chosen.backend.forward_name),
            linears=chosen.linear_backend,
            native_obstacle=native_obstacle(model.model),
        )
