"""The routes, one file each."""

from cocoa_integrations.server.protocol.chat_request import ChatRequest
from cocoa_integrations.server.protocol.completion_request import CompletionRequest
from cocoa_integrations.server.protocol.score_request import ScoreRequest
from cocoa_integrations.server.routes import chat, completions, health, info, metrics, models, page, score

OPENAI = (chat.router, completions.router, models.router, score.router, info.router)
"""Routes of OpenAI's protocol, which are served below ``/v1`` and without it."""

OWN = (health.router, info.own, metrics.router, page.router)
"""Other routes."""

BODIES = (ChatRequest, CompletionRequest, ScoreRequest)
"""The models of their bodies."""

METRICS = metrics.PATH

OPEN_PATHS = frozenset((*health.PATHS, page.PATH))
"""The paths that need no key."""
