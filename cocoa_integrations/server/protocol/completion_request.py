"""A request for completions of plain text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, StrictInt, StrictStr, ValidationError, ValidatorFunctionWrapHandler, field_validator

from cocoa_engine import CocoaConfig
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


class CompletionRequest(DecodingRequest):
    """The body of a request for completions."""

    refused: ClassVar[Refused] = REFUSED_IN_COMPLETIONS
    in_prompt: ClassVar[tuple[str, ...]] = ("prompt",)
    prompt: str | Several[StrictStr] | Several[StrictInt] | Several[Several[StrictInt]]
    echo: Flag = False
    logprobs: Whole | None = Field(None, ge=0, le=20)

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _is_text_or_ids(cls, prompt: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(prompt)
        except ValidationError:  # which has an error for each of the four
            raise ValueError("takes a text, a list of texts, a list of token ids, or a list of such lists") from None

    @classmethod
    def screen(cls, given: Mapping[str, Any], limits: ServerSettings) -> None:
        """Refuse what is too long; see :meth:`DecodingRequest.screen`."""
        super().screen(given, limits)
        prompt = given.get("prompt")
        if isinstance(prompt, list) and prompt:
            many = isinstance(prompt[0], (str, list))
            limit = limits.max_prompts if many else limits.max_prompt_chars
            at_most(len(prompt), limit, "prompt", "prompts" if many else "tokens")

    @property
    def places(self) -> tuple[int, str]:
        """The number of answers to all prompts, and the parameter that asks for them."""
        return self.n * len(self.prompts), "prompt" if self.n == 1 else "n"

    def size_of(self, name: str) -> int:
        """The number of characters of the prompts; a token counts as one."""
        return sum(map(len, self.prompts))

    @property
    def top_logprobs(self) -> int | None:
        """The number of most probable tokens that are listed for each token."""
        return self.logprobs

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or token ids."""
        many = isinstance(self.prompt, list) and isinstance(next(iter(self.prompt), None), (str, list))
        return list(self.prompt) if many else [self.prompt]

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is decoded: the prompt alone comes back, with the log-probabilities of its tokens."""
        return self.echo and self.max_tokens == 0

    def check(self, limits: ServerSettings) -> None:
        """Refuse what contradicts itself or is above a limit; see :meth:`DecodingRequest.read`."""
        super().check(limits)
        if not all(self.prompts):
            raise bad_request("the prompt is empty; give some text or at least one token id", "prompt")
        if self.cocoa.source and self.only_echoes:
            message = "cocoa.source has no effect without new tokens; /v1/cocoa/score takes source"
            raise bad_request(message, "cocoa.source")
        if self.logprobs is not None and self.cocoa.given().get("top_logprobs", self.logprobs) != self.logprobs:
            raise bad_request("logprobs and cocoa.top_logprobs differ; give one of them", "logprobs")

    def config(self, base: CocoaConfig, limits: ServerSettings) -> CocoaConfig:
        """The settings of the decode; see :meth:`DecodingRequest.config`."""
        if self.only_echoes:
            return self.model_copy(update={"max_tokens": None}).config(base, limits)
        if self.max_tokens == 0:
            raise bad_request("max_tokens=0 leaves nothing to decode; it needs echo", "max_tokens")
        return super().config(base, limits)
