"""Settings that are sent to a server. Those that are not given are the server's."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, create_model

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import did_you_mean
from cocoa_engine.safe_text import short_repr
from cocoa_integrations._shared.chat_template import ChatTemplateOptions
from cocoa_integrations._shared.settings import SYNONYMS

DEFAULT_URL = "http://127.0.0.1:8000/v1"
"""Where ``cocoa serve`` listens unless it is told otherwise."""

DEFAULT_MODEL = "cocoa"
"""A server answers to every name, unless it was given names."""

NO_KEY = "none"
"""What is sent as the API key if none is given: OpenAI's client needs one, and must not send OpenAI's elsewhere."""

OF_THE_SERVER = ("decore_heads",)
"""Settings that name a file on the server's machine."""

REMOTE = tuple(name for name in CocoaConfig.model_fields if name not in OF_THE_SERVER)
"""The settings that a request can give."""

if TYPE_CHECKING:

    class RemoteSettings(BaseModel):
        """The settings of :class:`~cocoa_engine.CocoaConfig` as fields of a remote model."""

else:

    def _remote_settings(without: Collection[str]) -> type[BaseModel]:
        return create_model(
            "RemoteSettings",
            __doc__="The settings of CocoaConfig as fields of a remote model. `None`: the server's.",
            __base__=BaseModel,
            **{
                name: (Any, Field(default=None, description=CocoaConfig.model_fields[name].description))
                for name in REMOTE
                if name not in without
            },
        )

    # OpenAI's clients have fields of these names
    RemoteSettings = _remote_settings(("temperature", "top_p", "seed", "stop", "top_logprobs", "max_new_tokens"))


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in the form in which they are sent. Those that are ``None`` are left out.

    Raises:
        ConfigError: a setting is out of range.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    config = CocoaConfig(**given)
    return {name: getattr(config, name) for name in given}


def refuse_unknown(names: Collection[str], known: Collection[str], *, what: str, base: str) -> None:
    """Refuse unknown options.

    Args:
        names: the given names.
        known: the names of all options.
        what: what the options were given to, for the message.
        base: the class that has the options besides the settings, for the message.

    Raises:
        ConfigError: there is one. The message names the closest known one.
    """
    if not (strangers := sorted(set(names) - set(known))):
        return
    if here := [name for name in strangers if name in OF_THE_SERVER]:
        raise ConfigError(f"{what}: {here[0]} names a file of the server's machine; give it to `cocoa serve`")
    listed = ", ".join(f"{short_repr(name)}{did_you_mean(name, [*known, *SYNONYMS])}" for name in strangers[:5])
    raise ConfigError(
        f"{what}: unknown option {listed}; known are the settings of CocoaConfig and the options of {base}"
    )


ADDRESSES = ("base_url", "api_base", "openai_api_base")
"""The names of the option that says where a server is."""


def require_addresses(options: Mapping[str, Any]) -> None:
    """Refuse the address of a server that is none.

    Raises:
        ConfigError: it is empty, or does not begin with ``http://`` or ``https://`` and a name.
    """
    for name in ADDRESSES:
        if (given := options.get(name)) is not None and not re.match(r"https?://[^/\s]", str(given)):
            raise ConfigError(f"{name} takes the address of a server, such as {DEFAULT_URL} (got {short_repr(given)})")


def body_beside_openai(
    settings: Mapping[str, Any],
    template: ChatTemplateOptions,
    *,
    candidates: bool,
    source: Sequence[str],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The part of a request that OpenAI's protocol does not have, for ``extra_body`` of its client.

    Args:
        settings: the settings, in the form in which they are sent.
        template: the options of the chat template.
        candidates: whether spans list the candidates that competed.
        source: texts of the prompt whose attention is measured.
        given: what the user adds.
    """
    cocoa = {**settings, **given.get("cocoa", {}), "report": "message"}
    if candidates:
        cocoa["candidates"] = True
    if source:
        cocoa["source"] = list(source)
    variables = dict(template.chat_template_kwargs)
    if template.enable_thinking is not None:
        variables["enable_thinking"] = template.enable_thinking
    return {
        **given,
        **({"chat_template_kwargs": variables} if variables else {}),
        **({"continue_final_message": True} if template.continue_final_message else {}),
        "cocoa": cocoa,
    }


def wire_message(entry: dict[str, Any]) -> dict[str, Any]:
    """A message for a chat template as OpenAI's protocol has it: the arguments of calls are JSON text."""
    if "tool_calls" not in entry:
        return entry
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in entry["tool_calls"]
    ]
    return {**entry, "tool_calls": calls}


@cache
def openai_options() -> frozenset[str]:
    """The parameters of a chat request that OpenAI's client knows."""
    from openai.resources.chat.completions import Completions

    return frozenset(inspect.signature(Completions.create).parameters) - {"self", "messages"}
