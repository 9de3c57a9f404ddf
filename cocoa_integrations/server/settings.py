"""The settings of a server."""

import ipaddress
from typing import ClassVar

from pydantic import ConfigDict, Field, SecretStr, model_validator

from cocoa_engine.arguments import SettingsModel

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""The names by which programs of the same machine reach a server on a loopback address."""


class ServerSettings(SettingsModel):
    """Settings of a server: who may use it, and the limits of a request. Immutable.

    Raises:
        ConfigError: settings are unknown or out of range, or another machine could use the server without a key.
    """

    _what: ClassVar[str] = "server setting"

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="Address to listen on. Any other than a loopback address needs a key.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on. 0: a free one.")
    api_keys: tuple[SecretStr, ...] = Field(
        (), description="Keys, one of which a client must send as its API key. Without keys, every client is served."
    )
    allow_no_key: bool = Field(
        False, description="Serve other machines without a key, as behind a proxy that checks who calls."
    )
    allowed_hosts: tuple[str, ...] | None = Field(
        None,
        description="Names by which clients may call the server (the header Host), against DNS rebinding; `*` allows "
        "all. Default: localhost, if the server listens on a loopback address, otherwise all.",
    )
    served_names: tuple[str, ...] = Field(
        (),
        description="Names of the model. Other names are then refused. Default: every name is served, and the model is "
        "listed under its own.",
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1, le=2**30, description="Maximum size of the body of a request.")
    max_prompt_chars: int = Field(
        2**20,
        ge=1,
        le=2**30,
        description="Maximum number of characters of all that a prompt may contain: messages, tools, formats and "
        "variables of the template. Texts of messages count as they are, other values as JSON writes them, and a token "
        "id as one.",
    )
    max_prompts: int = Field(256, ge=1, le=10_000, description="Maximum number of prompts or texts in one request.")
    max_messages: int = Field(2000, ge=1, description="Maximum number of messages.")
    max_tools: int = Field(128, ge=0, description="Maximum number of tools.")
    max_json_depth: int = Field(64, ge=1, le=200, description="Maximum nesting of the JSON of a request.")
    max_n: int = Field(8, ge=1, le=10_000, description="Maximum number of answers to one request (`n`).")
    max_stop: int = Field(16, ge=0, description="Maximum number of stop texts.")
    max_answer_tokens: int = Field(
        32768, ge=1, le=10**7, description="Maximum number of new tokens that a request may ask for."
    )
    max_candidates: int = Field(64, ge=1, description="Maximum of `max_candidates` in a request.")
    max_span_tokens: int = Field(256, ge=1, description="Maximum of `max_span_tokens` in a request.")
    retry_after: int = Field(1, ge=0, description="Seconds after which a refused client should try again.")
    progress_interval: float = Field(
        5.0, gt=0, description="Seconds between signs of life in a stream while its next span is not decided."
    )
    write_timeout: float = Field(
        60.0,
        ge=0.01,
        le=86400,
        description="Seconds after which a stream ends whose client does not read what it was sent.",
    )
    shutdown_timeout: float = Field(
        30.0, ge=0, le=10**6, description="Seconds that running answers are given to end after SIGTERM."
    )
    risk_in_logprobs: bool = Field(
        True,
        description="Whether risk is also in `logprobs`, the only place where some clients keep fields that they do "
        "not know.",
    )
    log_prompts: bool = Field(False, description="Write prompts and answers to the log.")

    @property
    def known_hosts(self) -> tuple[str, ...]:
        """The accepted names in the header Host; ``*`` stands for all."""
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        return (*LOOPBACK_NAMES, self.host) if is_loopback(self.host) else ("*",)

    @model_validator(mode="after")  # an error of the field would show the keys
    def _keys_are_visible(self) -> "ServerSettings":
        for number, key in enumerate(self.api_keys):
            text = key.get_secret_value()
            if not text or not text.isascii() or not text.isprintable() or " " in text:
                raise ValueError(f"api_keys: key {number} is empty, or has characters that a header cannot carry")
        return self

    @model_validator(mode="after")
    def _other_machines_need_a_key(self) -> "ServerSettings":
        if not (is_loopback(self.host) or self.api_keys or self.allow_no_key):
            raise ValueError(
                f"host {self.host!r} can be reached from other machines: give a key (--api-key-file), or "
                "--allow-no-key if something else checks who calls"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether an address or a name is that of the machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
