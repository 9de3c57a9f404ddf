"""A listener on LlamaIndex's events, and logits processors that script or count an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent

from cocoa_engine import CocoaEngine

PROMPT = "The capital of France is"


class Listener(BaseEventHandler):
    """Keeps every event."""

    events: list[BaseEvent] = []  # noqa: RUF012  # a pydantic field

    @classmethod
    def class_name(cls) -> str:
        return "Listener"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    def of(self, *kinds: type[BaseEvent]) -> list[Any]:
        """The events of these classes, in order."""
        return [event for event in self.events if isinstance(event, kinds)]


class Counter:
    """A logits processor that counts its calls and changes nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores


class Script:
    """A logits processor that makes the assistant say what ``answer`` returns for the prompt's text."""

    def __init__(self, engine: CocoaEngine, answer: Callable[[str], str]) -> None:
        self._engine = engine
        self._answer = answer
        self._opening = engine.encode("<|im_start|>assistant\n", add_special_tokens=False)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        sequence, size = ids[0].tolist(), len(self._opening)
        start = max(n for n in range(size, len(sequence) + 1) if sequence[n - size : n] == self._opening)
        answer = self._engine.encode(self._answer(self._engine.decode(sequence[:start])), add_special_tokens=False)
        answer.append(self._engine.tokenizer.eos_token_id)
        forced = torch.full_like(scores, -torch.inf)
        forced[:, answer[min(len(sequence) - start, len(answer) - 1)]] = 0.0
        return forced
