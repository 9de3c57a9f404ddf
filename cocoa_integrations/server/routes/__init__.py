"""The routes of the server."""

from cocoa_integrations.server.protocol.chat_request import ChatRequest
from cocoa_integrations.server.protocol.completion_request import CompletionRequest
from cocoa_integrations.server.protocol.score_request import ScoreRequest
from cocoa_integrations.server.routes import chat, completions, info, page, score

OPENAI = (chat.router, completions.router, info.router, score.router)
"""Routes of OpenAI's protocol, which are served below ``/v1`` and without it."""

OWN = (info.own, page.router)
"""Other routes."""

BODIES = (ChatRequest, CompletionRequest, ScoreRequest)
"""The models of their bodies."""

METRICS = info.METRICS

OPEN_PATHS = frozenset((*info.READY, info.LIVE, page.PATH))
"""The paths that need no key."""
