"""Logits processors and stopping criteria that call back into a test, and a request held back by one."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from cocoa_engine import CocoaEngine, Generation
from tests.helpers.in_threads import join, start
from tests.helpers.tiny_models import EOS, prompt


class Meets(StoppingCriteria):
    """Calls something after each token, which may say that the answer ends."""

    def __init__(self, call: Callable[[int], Any]) -> None:
        self.call = call
        self.tokens = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        self.tokens += 1
        return bool(self.call(self.tokens))


class Asks(LogitsProcessor):
    """Calls something before each distribution, and changes nothing."""

    def __init__(self, call: Callable[[list[int]], Any]) -> None:
        self.call = call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.call(input_ids[0].tolist())
        return scores


class Held:
    """A request that holds its batch slot until it is let go."""

    def __init__(self, engine: CocoaEngine, *, tokens: int = 6) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.outcome: list[Any] = []
        call = partial(engine.generate, prompt(0), max_new_tokens=tokens, logits_processor=Asks(self._wait))
        self.thread = start(call, self.outcome)
        assert self.inside.wait(60)

    def _wait(self, _: Any) -> None:
        self.inside.set()
        assert self.go_on.wait(60)

    def let_go(self) -> Generation:
        self.go_on.set()
        join([self.thread])
        return self.outcome[0]


class Dictated(LogitsProcessor):
    """Makes the model write tokens after a prompt of a length, then one token for ever."""

    def __init__(self, prompt_length: int, token_ids: list[int], then: int = EOS) -> None:
        self.prompt_length, self.token_ids, self.then = prompt_length, token_ids, then

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written = input_ids.shape[1] - self.prompt_length
        token = self.token_ids[written] if written < len(self.token_ids) else self.then
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)
