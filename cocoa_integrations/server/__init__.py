"""``cocoa serve``: an HTTP server with OpenAI's protocol, whose answers carry the risk of every span."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cocoa_engine.integration import need

if TYPE_CHECKING:
    from cocoa_integrations.server.app import create_app as create_app
    from cocoa_integrations.server.settings import ServerSettings as ServerSettings

__all__ = ["ServerSettings", "create_app"]

# the command line lists `cocoa serve` without importing a web framework, also where the extra is not installed
_LAZY = {"ServerSettings": "settings", "create_app": "app"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        need("fastapi", extra="serve", what=__name__)
        return getattr(import_module(f"cocoa_integrations.server.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
