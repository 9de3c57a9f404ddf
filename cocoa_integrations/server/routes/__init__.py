"""The routes, one file each."""

from cocoa_integrations.server.routes import chat, completions, health, models

OPENAI = (chat.router, completions.router, models.router)
"""Routes of OpenAI's protocol, which are served below ``/v1`` and without it."""

OWN = (health.router,)
"""Other routes."""

OPEN_PATHS = frozenset(health.PATHS)
"""The paths that need no key."""
