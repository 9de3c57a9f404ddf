"""The routes of the server."""

from cocoa_integrations.server.routes import answers, info, page

OPENAI = (answers.router, info.router)
"""Routes of OpenAI's protocol, which are served below ``/v1`` and without it."""

OWN = (info.own, page.router)
"""Other routes."""

METRICS = info.METRICS

OPEN_PATHS = frozenset((*info.READY, info.LIVE, page.PATH))
"""The paths that need no key."""
