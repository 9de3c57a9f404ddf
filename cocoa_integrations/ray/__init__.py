"""Several machines, by Ray: ``cocoa serve --ray``, ``cocoa score --ray`` and ``cocoa eval --ray``.

``serve run cocoa_integrations.ray:app model=FOLDER replicas=2`` deploys the same server on a Ray cluster.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cocoa_engine.integration import need

if TYPE_CHECKING:
    from cocoa_integrations.ray.application import app as app
    from cocoa_integrations.ray.settings import RaySettings as RaySettings

__all__ = ["RaySettings", "app"]

# what routes requests is tested without Ray, so the package itself does not ask for it
_LAZY = {"RaySettings": "settings", "app": "application"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        need("ray", extra="ray", what=f"cocoa_integrations.ray.{name}")
        return getattr(import_module(f"cocoa_integrations.ray.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
