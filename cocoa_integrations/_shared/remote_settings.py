"""Settings that are sent to a server. Those that are not given are the server's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, create_model

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import did_you_mean
from cocoa_engine.safe_text import short_repr
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
