"""The state that all calls of an engine share: the model, its tokenizer, the backend and the scheduler."""

import os
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from pydantic import ConfigDict, Field

from cocoa_engine.arguments import ResultModel
from cocoa_engine.config import Runtime
from cocoa_engine.equations import middle_layers
from cocoa_engine.execution.backends import Backend, Chosen, choose, state_of
from cocoa_engine.execution.forward.linears import LinearBackend, native_obstacle
from cocoa_engine.execution.scheduler import Scheduler
from cocoa_engine.interruptions import Cancellation, require_process
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.model.tokenizer import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cocoa_engine.model.light_model import LightModel


class Session:
    """A model and its tokenizer, ready to run.

    Args:
        model: a decoder-only ``PreTrainedModel`` with a language-modelling head, or a light one.
        model_name: the name to store in results; by default the model's ``name_or_path``.

    Raises:
        UnsupportedModelError: the model is not a causal language model, or has fewer than 3 layers.
    """

    def __init__(
        self,
        model: "PreTrainedModel | LightModel",
        tokenizer: "PreTrainedTokenizerBase | Tokens",
        runtime: Runtime,
        model_name: str | None = None,
    ) -> None:
        self._process = os.getpid()
        self.model = LanguageModel(model)
        self.tokens = tokenizer if isinstance(tokenizer, Tokens) else Tokens(tokenizer)
        self.runtime = runtime
        self.scheduler = Scheduler(runtime.max_batch_size, runtime.max_queue)
        self.model_name = model_name or getattr(model, "name_or_path", "") or self.model.architecture
        self._chosen: tuple[tuple[Any, ...], Chosen] | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine cannot be copied deeply or pickled: share it, or load one in each process.")

    def require_process(self) -> None:
        """Raise ForkedProcessError if the process has forked since the session was created."""
        require_process(self._process)

    @property
    def chosen(self) -> Chosen:
        """The backend, chosen at the first access, and again if the model's weights or hooks have changed."""
        with self.model.lock:
            state = state_of(self.model)
            if self._chosen is None or self._chosen[0] != state:
                # the choice is for all calls: the one that needs it first must not end it
                self._chosen = state, Cancellation().run(choose, self.model, self.runtime)
            return self._chosen[1]

    @property
    def backend(self) -> Backend:
        """The backend that runs the model."""
        return self.chosen.backend


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
