"""The options of adapters that say where a model is: in this process, or at a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, SecretStr

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import UnsupportedFeatureError
from cocoa_engine.model.load_options import LoadOptions
from cocoa_integrations._shared.loading import LazyEngine
from cocoa_integrations.chat_service.local import LocalChat
from cocoa_integrations.chat_service.remote import RemoteChat, remote_chat


class ServiceOptions(LoadOptions):
    """The loading options of a model in this process, and the address of one at a server. Adapters inherit them."""

    base_url: str | None = Field(
        None,
        description="The address of the API of a server (`cocoa serve`) whose model answers, such as "
        "`http://gpu-box:8000/v1`.",
    )
    api_key: SecretStr | None = Field(
        None,
        exclude=True,
        description="With `base_url` the key of the server, if it was given keys; that of OpenAI in the environment is "
        "never sent. Otherwise, in LangChain, the access token of the Hugging Face Hub, which only a download uses.",
    )
    default_headers: dict[str, str] = Field(
        default_factory=dict,
        exclude=True,
        repr=False,
        description="Further headers of each request to the server, such as those of a gateway.",
    )
    max_retries: int = Field(
        2,
        ge=0,
        description="How often a call is tried again: after it ran out of GPU memory, which other work may have used "
        "temporarily, or if the server is busy or cannot be reached. Other errors would come again.",
    )

    if TYPE_CHECKING:
        timeout: float | None

    @property
    def is_remote(self) -> bool:
        """Whether the model is at a server."""
        return self.base_url is not None

    def require_engine(self) -> None:
        """Refuse what needs the engine, if the model is at a server.

        Raises:
            UnsupportedFeatureError: it is.
        """
        if self.is_remote:
            raise UnsupportedFeatureError(
                f"this needs the engine, and the model of this {type(self).__name__} is at {self.base_url}; use one in "
                "this process, without base_url"
            )

    def service_of(self, engine: CocoaEngine | LazyEngine | None) -> LocalChat | RemoteChat:
        """What answers the calls; ``engine`` does, if the model is in this process."""
        if self.base_url is None:
            assert engine is not None
            return LocalChat(engine, max_retries=self.max_retries)
        return remote_chat(
            self.base_url,
            api_key=None if self.api_key is None else self.api_key.get_secret_value(),
            model=self.model_name,
            timeout=self.timeout,
            max_retries=self.max_retries,
            headers=tuple(sorted(self.default_headers.items())),
        )

    if not TYPE_CHECKING:  # type checkers keep the field-by-field assignment

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, SecretStr(value) if name == "api_key" and isinstance(value, str) else value)
