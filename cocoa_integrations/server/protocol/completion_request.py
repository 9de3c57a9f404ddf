"""A request for completions of plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator

from cocoa_engine import CocoaConfig
from cocoa_engine.safe_text import short_repr
from cocoa_integrations.server.errors import at_most, bad_request
from cocoa_integrations.server.protocol.decoding import DecodingRequest, Flag, Several, Whole
from cocoa_integrations.server.settings import REFUSED, Refused, ServerSettings, each

REFUSED_IN_COMPLETIONS: Refused = {
    **REFUSED,
    **each("suffix", "the model continues a prompt only", ""),
    **each("max_completion_tokens", "give max_tokens"),
    **each("top_logprobs", "give logprobs", 0),
    **each("messages tools functions", "/v1/chat/completions has it", []),
    **each("response_format", "/v1/chat/completions has it", {"type": "text"}),
    **each("tool_choice", "/v1/chat/completions has it", "none", "auto"),
    **each("parallel_tool_calls reasoning_effort", "/v1/chat/completions has it", True),
    **each("chat_template_kwargs", "/v1/chat/completions has it", {}),
    **each("continue_final_message add_generation_prompt", "/v1/chat/completions has it", False),
    **each("add_special_tokens", "give the prompt as token ids", True),
}

TextOrIds = str | list[int]


class CompletionRequest(DecodingRequest):
    """The body of a request for completions."""

    refused: ClassVar[Refused] = REFUSED_IN_COMPLETIONS
    in_prompt: ClassVar[tuple[str, ...]] = ("prompt",)
    prompt: str | Several[str] | Several[int] | Several[Several[int]]
    echo: Flag | None = None
    logprobs: Whole | None = Field(None, ge=0, le=20)

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_text_or_ids(cls, prompt: Any) -> Any:
        if not (isinstance(prompt, str) or _is_ids(prompt) or _is_many(prompt)):
            raise ValueError("takes a text, a list of texts, a list of token ids, or a list of such lists")
        return prompt

    @classmethod
    def screen(cls, given: Mapping[str, Any], limits: ServerSettings) -> None:
        """Refuse what is too long; see :meth:`DecodingRequest.screen`."""
        super().screen(given, limits)
        prompt = given.get("prompt")
        if isinstance(prompt, list) and prompt:
            if isinstance(prompt[0], (str, list)):
                at_most(len(prompt), limits.max_prompts, "prompt", "prompts")
            else:
                at_most(len(prompt), limits.max_prompt_chars, "prompt", "tokens")

    @property
    def places(self) -> tuple[int, str]:
        """The number of answers to all prompts, and the parameter that asks for them."""
        return self.answers * len(self.prompts), "prompt" if self.answers == 1 else "n"

    def size_of(self, name: str) -> int:
        """The number of characters of the prompts; a token counts as one."""
        return sum(map(len, self.prompts))

    @property
    def top_logprobs(self) -> int | None:
        """The number of most probable tokens that are listed for each token."""
        return self.logprobs

    @property
    def prompts(self) -> list[TextOrIds]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return list(self.prompt) if _is_many(self.prompt) else [self.prompt]  # type: ignore[arg-type, list-item]

    @property
    def echoes(self) -> bool:
        """Whether answers begin with their prompts."""
        return bool(self.echo)

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is decoded: the prompt alone comes back, with the log-probabilities of its tokens."""
        return self.echoes and self.max_tokens == 0

    def check(self, limits: ServerSettings) -> None:
        """Refuse what is not supported, contradicts itself, or is above a limit.

        Raises:
            ApiError: there is such a parameter. It names it.
        """
        super().check(limits)
        if not all(self.prompts):
            raise bad_request("the prompt is empty; give some text or at least one token id", "prompt")
        if self.options.source and self.only_echoes:
            message = "cocoa.source has no effect without new tokens; /v1/cocoa/score takes source"
            raise bad_request(message, "cocoa.source")
        if self.logprobs is not None and self.options.given().get("top_logprobs", self.logprobs) != self.logprobs:
            raise bad_request("logprobs and cocoa.top_logprobs differ; give one of them", "logprobs")

    def config(self, base: CocoaConfig, limits: ServerSettings) -> CocoaConfig:
        """The settings of the decode; see :meth:`DecodingRequest.config`."""
        if self.only_echoes:
            return self.model_copy(update={"max_tokens": None}).config(base, limits)
        if self.max_tokens == 0:
            raise bad_request(f"max_tokens={short_repr(0)} leaves nothing to decode; it needs echo", "max_tokens")
        return super().config(base, limits)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def _is_many(value: Sequence[Any] | Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(one, str) for one in value) or all(isinstance(one, list) and _is_ids(one) for one in value)
