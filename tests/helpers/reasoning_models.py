"""Tiny models with the chat templates of reasoning models, which say a given text, or what a question asks for."""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Runtime, SpanStream
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

_MESSAGES = """{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}"""

PLAIN = _MESSAGES + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"

OPENS = _MESSAGES + "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}"
"""As of DeepSeek-R1, QwQ and Qwen3-Thinking: the prompt ends inside the reasoning."""

HYBRID = (
    _MESSAGES
    + """{% if add_generation_prompt %}<|assistant|>
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
)
"""As of Qwen3."""

READS_REASONING = """{% for message in messages %}<|{{ message.role }}|>
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
"""As of Qwen3 for the assistant's last message: the history may hold reasoning."""

TAGS = ("<think>", "</think>")

SPAN = 3
"""The number of tokens of each span of a said text."""


def reasoning_engine(template: str = OPENS, *, tags: str = "text", **options: Any) -> CocoaEngine:
    """A tiny engine.

    Its tags are ordinary text, tokens that are not special, as in Qwen3's tokenizer (``"added"``), or special tokens,
    which decoding removes (``"special"``).
    """
    tokenizer = tiny_tokenizer()
    if tags != "text":
        tokenizer.add_tokens(list(TAGS), special_tokens=tags == "special")
    tokenizer.chat_template = template
    model = tiny_model("llama", seed=3, vocab_size=len(tokenizer), max_position_embeddings=4096)
    return CocoaEngine(model, tokenizer, model_name="thinker", **options)


class Says(LogitsProcessor):
    """Makes a model say a text, in spans of about three tokens: at the first token of each, another one competes.

    The text is kept with ``alpha=0``, because its tokens have the higher probability. Then the answer ends, or goes
    on by itself. The engine sets the length of the prompt.
    """

    def __init__(self, engine: CocoaEngine, text: str, ends: bool = True, prompt_length: int | None = None) -> None:
        self._made_of, self._prompt_length = (engine, text, ends), prompt_length
        self._token_ids = engine.encode(text, add_special_tokens=False)
        self._end = engine.tokenizer.eos_token_id if ends else None

    def for_prompt(self, prompt: Sequence[int]) -> "Says":
        """The engine calls it for each request."""
        return type(self)(*self._made_of, len(prompt))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert self._prompt_length is not None
        at = input_ids.shape[1] - self._prompt_length
        begun = at < len(self._token_ids)
        token_id = self._token_ids[at] if begun else self._end
        if token_id is None:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        if begun and at % SPAN == 0:
            count, probability = self.rivals(at // SPAN)
            for rival in range(count):
                forced[:, (token_id + 1 + rival) % 256] = math.log(probability)
        forced[:, token_id] = 0.0
        return forced

    def rivals(self, span: int) -> tuple[int, float]:
        """How many tokens compete at the start of a span, by its number, and how probable each is."""
        return 1, 0.5


def saying(engine: CocoaEngine, text: str, *, ends: bool = True, kind: type[Says] = Says) -> dict[str, Any]:
    """Options for a call that answers with a text."""
    processors = [kind(engine, text, ends)]
    return {"logits_processor": processors, "alpha": 0.0, "max_new_tokens": 400, "max_span_tokens": SPAN}


RIVALS = 4
"""The most candidates beside the right one. The risk, 1 - p, of the first spans is about 0, 0.47, 0.64, 0.73, 0.78."""


class Wavers(Says):
    """Like ``Says``, with another candidate more at each span."""

    def rivals(self, span: int) -> tuple[int, float]:
        return min(span, RIVALS), 0.9


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
        forced = config.replace(alpha=0.0, max_span_tokens=SPAN)
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


class Speaker(CocoaEngine):
    """Says a text, if one is set, whatever it is asked."""

    says: str | None = None

    def generate(self, prompt: Any, **options: Any) -> Any:
        return super().generate(prompt, **self._saying(options))

    def stream(self, prompt: Any, **options: Any) -> SpanStream:
        return super().stream(prompt, **self._saying(options))

    def _saying(self, options: dict[str, Any]) -> dict[str, Any]:
        if self.says is None:
            return options
        config = options["config"].replace(alpha=0.0, max_span_tokens=SPAN)
        return {**options, "config": config, "logits_processor": [Says(self, self.says)]}


def speaker(
    says: str | None = None,
    *,
    template: str = PLAIN,
    ends: bool = True,
    seed: int = 3,
    **runtime: Any,
) -> Speaker:
    """A tiny engine that says a text, if one is given, whatever it is asked; its answers can end by themselves."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    model = tiny_model("llama", seed=seed, max_position_embeddings=4096)
    if not ends:
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        tokenizer.eos_token = None
    engine = Speaker(model, tokenizer, model_name="tiny", runtime=Runtime(**runtime))
    engine.says = says
    return engine
