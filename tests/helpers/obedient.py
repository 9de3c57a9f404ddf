"""A tiny model that says what a question asks it to say, and can be held in the middle of its answer."""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, SpanStream
from tests.helpers.reasoning_models import PLAIN, Says
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

RIVALS = 4
"""The most candidates beside the right one. The risk, 1 - p, of the first spans is about 0, 0.47, 0.64, 0.73, 0.78."""


class Wavers(Says):
    """Like ``Says``, with another candidate more at each span."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert self._prompt_length is not None
        at = input_ids.shape[1] - self._prompt_length
        if not (at < len(self._token_ids) and at % self._every == 0):
            return super().__call__(input_ids, scores)
        forced = torch.full_like(scores, -torch.inf)
        token_id = self._token_ids[at]
        for rival in range(min(at // self._every, RIVALS)):
            forced[:, (token_id + 1 + rival) % 256] = math.log(0.9)
        forced[:, token_id] = 0.0
        return forced


def wavering(engine: CocoaEngine, text: str, every: int = 3) -> dict[str, Any]:
    processor = Wavers(engine, text, every)
    return {"logits_processor": [processor], "alpha": 0.0, "max_new_tokens": 400, "max_span_tokens": every}


SAY = "Say: "
HELD_AFTER = 12
"""The number of tokens after which a held answer waits. Three spans are decided before."""


class Obedient(CocoaEngine):
    """Answers a question that contains ``Say: `` with the text after it, less and less sure.

    Args:
        template: its chat template.

    Attributes:
        free: while it is not set, answers wait after :data:`HELD_AFTER` tokens, in the middle of a forward pass.
    """

    def __init__(self, template: str = PLAIN) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        super().__init__(tiny_model("llama", seed=3, max_position_embeddings=4096), tokenizer, model_name="obedient")
        self.free = threading.Event()
        self.free.set()

    def chat(self, messages: Any, *, config: CocoaConfig | None = None, **options: Any) -> Generation:
        return super().chat(messages, **self._forced(messages, config or self.config, options))

    def stream_chat(self, messages: Any, *, config: CocoaConfig | None = None, **options: Any) -> SpanStream:
        return super().stream_chat(messages, **self._forced(messages, config or self.config, options))

    def _forced(
        self, messages: Sequence[Mapping[str, Any]], config: CocoaConfig, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        text = str(messages[-1]["content"]).partition(SAY)[2]
        if not text:
            return {**options, "config": config}
        forced = config.replace(alpha=0.0, max_span_tokens=3)
        return {**options, "config": forced, "logits_processor": [Holds(self, text)]}


class Holds(Wavers):
    """Waits after :data:`HELD_AFTER` tokens until the engine is free."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert self._prompt_length is not None
        if input_ids.shape[1] - self._prompt_length >= HELD_AFTER:
            engine = self._made_of[0]
            assert isinstance(engine, Obedient)
            assert engine.free.wait(60)
        return super().__call__(input_ids, scores)
