"""The state that all calls of an engine share: the model, its tokenizer, the backend and the scheduler."""

import os
from typing import TYPE_CHECKING, Any

from cocoa_engine.execution.backends import Backend, Chosen, choose, state_of
from cocoa_engine.execution.scheduler import Scheduler
from cocoa_engine.interruptions import Cancellation, require_process
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.model.tokenizer import Tokens
from cocoa_engine.runtime import Runtime

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
