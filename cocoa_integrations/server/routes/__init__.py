"""The routes, one file each."""

from cocoa_integrations.server.routes import chat, health, models, page

OPENAI = (chat.router, models.router)
"""Routes of OpenAI's protocol, which are served below ``/v1`` and without it."""

OWN = (health.router, page.router)
"""Other routes."""

OPEN_PATHS = frozenset((*health.PATHS, page.PATH))
"""The paths that need no key."""
