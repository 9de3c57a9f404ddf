"""The requests that ``ChatCocoaRemote`` sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import BaseMessage
from langchain_openai import ChatOpenAI
from pydantic import Field

from cocoa_integrations._shared.chat_template import ChatTemplateOptions
from cocoa_integrations._shared.load_options import one_model_name
from cocoa_integrations._shared.remote_settings import (
    REMOTE,
    RemoteSettings,
    body_beside_openai,
    checked,
    openai_options,
    refuse_unknown,
    wire_message,
)
from cocoa_integrations._shared.settings import SYNONYMS
from cocoa_integrations.langchain.messages import to_chat
from cocoa_integrations.langchain.options import FRAMEWORK, TOOL_DETAILS, TOOLS
from cocoa_integrations.langchain.tools import refuse_legacy, tool_has_answered, tool_request

OPENAI_SETTINGS = {name: name for name in ("temperature", "top_p", "seed", "stop", "top_logprobs")} | {
    "max_new_tokens": "max_tokens"
}
"""The settings that OpenAI's protocol has too, with the names of the fields."""

OF_CALLS = frozenset({"risk_metadata", "candidates", "source"})
"""Options of a call that are neither settings nor OpenAI's."""


class RemoteRequests(RemoteSettings, ChatTemplateOptions, ChatOpenAI):
    """Base of ``ChatCocoaRemote``: its settings, and what it sends."""

    initial_tool_choice: str | None = None
    """Default ``tool_choice`` of calls with tools, until a tool has answered the last human message; as for
    :class:`ChatCocoa`."""

    candidates: bool = False
    """Whether the entries of spans list the candidates that competed in them, as ``rivals``."""

    source: Sequence[str] = Field(default=(), exclude=True, repr=False)
    """Texts of the prompt. Every span then has ``passage_attention``: the attention of the span on each of them."""

    def given_settings(self) -> dict[str, Any]:
        """The settings that are given, by their names.

        Raises:
            ConfigError: one is out of range.
        """
        return checked({name: getattr(self, OPENAI_SETTINGS.get(name, name)) for name in REMOTE})

    def _payload_options(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings among the options of a call, and the others.

        Raises:
            ConfigError: an option is unknown, or a setting is out of range.
        """
        options = dict(options)
        one_model_name(options, field="model")
        known = {*REMOTE, *SYNONYMS, *OF_CALLS, *FRAMEWORK, *TOOLS, *TOOL_DETAILS, *ChatTemplateOptions.model_fields}
        refuse_unknown(options, known | openai_options(), what=f"a call of {type(self).__name__}", base="OpenAI's API")
        refuse_legacy(options)
        named = {SYNONYMS.get(name, name): value for name, value in options.items()}
        settings = checked({name: value for name, value in named.items() if name in REMOTE})
        return settings, {name: value for name, value in named.items() if name not in REMOTE}

    @property
    def _default_params(self) -> dict[str, Any]:
        return {**super()._default_params, "extra_body": self._extra_body({}, {})}

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        messages = self._convert_input(input_).to_messages()
        settings, rest = self._payload_options(kwargs)
        request = {name: rest.pop(name) for name in (*TOOLS, *TOOL_DETAILS) if name in rest}
        request = {name: value for name, value in request.items() if value is not None}
        extra = self._extra_body(settings, rest)
        of_openai = {OPENAI_SETTINGS[name]: settings[name] for name in settings.keys() & OPENAI_SETTINGS.keys()}
        for name in (*OF_CALLS, *ChatTemplateOptions.model_fields, "extra_body"):
            rest.pop(name, None)
        payload = super()._get_request_payload([], stop=stop, **rest, **of_openai)
        payload["messages"] = [wire_message(entry) for entry in to_chat(messages)]
        if payload.get("top_logprobs") and payload.get("logprobs") is None:
            payload["logprobs"] = True
        # not as OpenAI's own parameter, for which its client would check and parse the answer
        if (response_format := request.get("response_format")) is not None:
            extra["response_format"] = response_format
        if request.get("tools"):
            payload |= self._tools(request, messages)
        payload["extra_body"] = extra
        return payload

    def _extra_body(self, settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a request that OpenAI's protocol does not have.

        Args:
            settings: the settings of the call.
            options: its other options.
        """

        def value(name: str) -> Any:
            return options[name] if options.get(name) is not None else getattr(self, name)

        own = {**self.given_settings(), **settings}
        return body_beside_openai(
            {name: one for name, one in own.items() if name not in OPENAI_SETTINGS},
            ChatTemplateOptions(**{name: value(name) for name in ChatTemplateOptions.model_fields}),
            candidates=value("candidates"),
            source=value("source"),
            given={**(self.extra_body or {}), **(options.get("extra_body") or {})},
        )

    def _tools(self, request: Mapping[str, Any], messages: Sequence[BaseMessage]) -> dict[str, Any]:
        """The parameters of a request for tools."""
        choice = request.get("tool_choice")
        if choice is None and self.initial_tool_choice is not None and not tool_has_answered(messages):
            choice = self.initial_tool_choice
        checked_request = tool_request({**request, "tool_choice": choice})
        parameters = {"tools": list(checked_request.tools), "tool_choice": checked_request.tool_choice}
        if request.get("parallel_tool_calls") is not None:
            parameters["parallel_tool_calls"] = request["parallel_tool_calls"]
        return parameters if checked_request.tools else {}

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        return {**super()._get_invocation_params(stop, **kwargs), "base_url": self.openai_api_base}
