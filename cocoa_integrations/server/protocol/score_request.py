"""A request for the risk of given texts, and its answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import Field

from cocoa_engine import Cancellation, CocoaConfig, CocoaEngine, Generation
from cocoa_engine.errors import ConfigError, PromptError
from cocoa_engine.report import RISK_KEY, RiskReport
from cocoa_integrations._shared.chat_template import ChatTemplateOptions
from cocoa_integrations.chat_service.answer import ChatCall
from cocoa_integrations.chat_service.local import PreparedCall
from cocoa_integrations.server.errors import bad_request, naming
from cocoa_integrations.server.protocol.answers import max_risk_of, score_one, wire_report
from cocoa_integrations.server.protocol.chat_request import Message, entries_of, size_of_messages, template_variables
from cocoa_integrations.server.protocol.decoding import CocoaOptions, DecodingRequest, Flag, Several, Whole
from cocoa_integrations.server.settings import REFUSED, SAME_SETTING, Refused, ServerSettings, each

_NOT_DECODED = "nothing is decoded; leave it out"

REFUSED_IN_SCORE: Refused = {
    **REFUSED,
    **each(" ".join(SAME_SETTING), _NOT_DECODED),
    **each("frequency_penalty presence_penalty top_logprobs", _NOT_DECODED, 0),
    **each("logit_bias stream_options", _NOT_DECODED, {}),
    **each("n", _NOT_DECODED, 1),
    **each("tools functions", _NOT_DECODED, []),
    **each("tool_choice", _NOT_DECODED, "none", "auto"),
    **each("response_format", _NOT_DECODED, {"type": "text"}),
    **each("stream echo continue_final_message logprobs", _NOT_DECODED, False),
    **each("parallel_tool_calls reasoning_effort", _NOT_DECODED, True),
}

_WITHOUT_EFFECT = {
    **dict.fromkeys(("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "max_risk"), _NOT_DECODED),
    **dict.fromkeys(("report", "top_logprobs"), "the entries of the texts have all of the risk"),
    "source": "give source",
}
"""Of the object ``cocoa``, and what to do instead."""


class ScoreRequest(DecodingRequest):
    """The body of a request for the risk of given texts after one prompt."""

    refused: ClassVar[Refused] = REFUSED_IN_SCORE
    lengths: ClassVar[Mapping[str, tuple[str, str]]] = {
        **DecodingRequest.lengths,
        "messages": ("max_messages", ""),
        "texts": ("max_prompts", ""),
        "prompt": ("max_prompt_chars", "tokens"),
    }
    in_prompt: ClassVar[tuple[str, ...]] = ("prompt", "messages", "text", "texts", "chat_template_kwargs")
    prompt: str | Several[Whole] | None = Field(None, description="The prompt, as text or token ids.")
    messages: Several[Message] | None = Field(None, description="The prompt as a conversation; the texts are answers.")
    text: str | None = None
    texts: Several[str] | None = Field(None, description="Several texts, each after the same prompt.")
    source: str | Several[str] | None = Field(
        None, description="Passages that the prompt contains. Each span then has its attention on them."
    )
    divide: Flag = Field(
        True, description="Divide each text at its risk points, so that each part has a risk. Otherwise it is one span."
    )
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def given(self) -> list[str]:
        """The texts."""
        return [self.text] if self.text is not None else self.texts or []

    def check(self, limits: ServerSettings) -> None:
        """Refuse what contradicts itself or is above a limit; see :meth:`DecodingRequest.read`."""
        super().check(limits)
        for one, other in (("prompt", "messages"), ("text", "texts")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise bad_request(f"give either {one} or {other}", one)
        if self.chat_template_kwargs and self.messages is None:
            raise bad_request("chat_template_kwargs has no effect on a prompt; give messages", "chat_template_kwargs")
        for name in _WITHOUT_EFFECT.keys() & self.cocoa.model_fields_set:
            value = getattr(self.cocoa, name)
            if value is not None and value not in (CocoaOptions.model_fields[name].default, "message"):
                raise bad_request(f"cocoa.{name} has no effect here; {_WITHOUT_EFFECT[name]}", f"cocoa.{name}")
        if not self.given:
            raise bad_request("there is no text to score; give at least one", "texts")

    def size_of(self, name: str) -> int:
        """The number of characters that a parameter adds to the prompts; a token counts as one."""
        if name == "messages" and self.messages is not None:
            return size_of_messages(self.messages)
        return len(self.prompt or ()) if name == "prompt" else super().size_of(name)


class ScoreJob:
    """The texts of one request, which are scored a batch at a time, so that those of others are scored in between.

    Args:
        body: the request.
        engine: the engine.
        config: the settings.
        cancellation: ends the work.

    Attributes:
        batches: the numbers of the texts of each batch.

    Raises:
        ApiError: the prompt is not valid.
    """

    def __init__(
        self, body: ScoreRequest, engine: CocoaEngine, config: CocoaConfig, cancellation: Cancellation
    ) -> None:
        self._body, self._engine, self._texts = body, engine, body.given
        self._generations: list[Generation] = []
        size = 1 if body.divide else engine.runtime.max_batch_size
        self.batches = [range(at, min(at + size, len(self._texts))) for at in range(0, len(self._texts), size)]
        # a text prompt stays a text: it is divided into tokens together with the text after it
        self._prompt: Any = body.prompt
        if body.messages is not None:
            with self._naming_parameters():
                template = ChatTemplateOptions(
                    chat_template_kwargs=template_variables(body.chat_template_kwargs, engine)
                )
                call = ChatCall(messages=entries_of(body.messages), template=template)
                self._prompt = PreparedCall(engine, call).token_ids
        self._options: dict[str, Any] = {
            "config": config,
            "source": [body.source] if isinstance(body.source, str) else body.source,
            "divide": body.divide,
            "cancellation": cancellation,
        }

    def score(self, batch: range) -> None:
        """Score a batch of texts, one after the other or together.

        Raises:
            ApiError: the prompt or a text is not valid.
            RequestCancelledError: the work was cancelled.
        """
        texts = self._texts[batch.start : batch.stop]
        with self._naming_parameters(batch.start):
            if len(texts) == 1:
                self._generations.append(score_one(self._engine, self._prompt, texts[0], **self._options))
            else:
                self._generations += self._engine.score(self._prompt, texts, **self._options)

    def answer(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The entries of all texts, and the usage."""
        rivals = self._body.cocoa.candidates
        entries = [
            {
                "object": "cocoa.score",
                "index": number,
                "text": text,
                RISK_KEY: wire_report(RiskReport.of(generation, rivals=rivals), verdict=generation.verdict),
            }
            for number, (text, generation) in enumerate(zip(self._texts, self._generations, strict=True))
        ]
        usages = [generation.usage for generation in self._generations]
        tokens = usages[0].prompt_tokens + sum(usage.completion_tokens for usage in usages)
        risk = max_risk_of(self._generations)
        return entries, {
            "prompt_tokens": tokens,
            "completion_tokens": 0,
            "total_tokens": tokens,
            "completion_tokens_details": {} if risk is None else {"cocoa_max_risk": risk},
        }

    @contextmanager
    def _naming_parameters(self, first: int = 0) -> Iterator[None]:
        """Name the parameter in errors, and the number of a text among all of them."""
        try:
            yield
        except PromptError as error:
            of_prompt = "prompt" if self._body.messages is None else "messages"
            message = re.sub(r"(?<=at index )\d+", lambda found: str(int(found[0]) + first), str(error))
            raise naming(PromptError(message), "text" if "text to score" in message else of_prompt) from None
        except ConfigError as error:
            named = re.search(r"\b(source|divide)\b", str(error))
            raise naming(error, named and named[0]) from None
