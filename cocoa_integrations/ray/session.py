"""Which replica a request should go to: the one that has the keys and values of its prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from starlette.datastructures import Headers

HEADER = "x-session-id"
"""With it a client names its session."""

MAX_LENGTH = 256
"""Of the name of a session. Longer ones are cut."""


def session_of(headers: Headers, body: bytes) -> str | None:
    """The session of a request. Requests of one session go to the same replica, as long as it has free slots.

    It is the header ``x-session-id``, or ``prompt_cache_key`` of the body. Without both, it is a digest of what the
    turns of a conversation have in common: the messages up to the first one of the user, and the tools. For other
    requests it is a digest of the prompt.

    Args:
        headers: of the request.
        body: of the request.

    Returns:
        The session; `None` for requests without a prompt, which go to any replica.
    """
    if named := headers.get(HEADER):
        return named[:MAX_LENGTH]
    try:
        request = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return None  # the replica says what is wrong
    if not isinstance(request, Mapping):
        return None
    if isinstance(named := request.get("prompt_cache_key"), str) and named:
        return named[:MAX_LENGTH]
    beginning = _beginning(request)
    return None if beginning is None else sha256(repr(beginning).encode(errors="replace")).hexdigest()[:32]


def _beginning(request: Mapping[str, Any]) -> Any:
    messages = request.get("messages")
    if isinstance(messages, list) and messages:
        first: list[Any] = []
        for message in messages:
            first.append(message)
            if isinstance(message, Mapping) and message.get("role") == "user":
                break
        return first, request.get("tools")
    return request.get("prompt")
