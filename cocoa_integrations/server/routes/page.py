"""``/``: a page on which a person asks, sees the answer grow with its risk, and compares two methods."""

import json
import re
from functools import cache
from importlib.resources import files
from secrets import token_urlsafe
from typing import Any

from fastapi import APIRouter, Request, Response

from cocoa_engine import METHODS, CocoaConfig
from cocoa_engine.rendering.documents import style_sheet
from cocoa_engine.rendering.highlights import BOUNDS
from cocoa_engine.rendering.wording import SOURCES
from cocoa_integrations.server.process import state_of

router = APIRouter()

SETTINGS = (
    *("alpha", "gamma", "max_candidates", "max_span_tokens", "span_boundary", "max_new_tokens", "max_risk", "risk"),
    *("temperature", "top_p", "top_k", "seed"),
)
"""The settings with a field of their own. The others can be given as JSON."""


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """The page. It needs no key: it holds nothing of the model, and asks for the key where one is needed."""
    nonce = token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    state = state_of(request)
    config = state.engine.config if state.phase == "ready" else CocoaConfig()
    data = {
        "needs_key": bool(state.settings.api_keys),
        "methods": list(METHODS),
        "method": config.method,
        "bounds": BOUNDS[1:-1],
        "sources": SOURCES,
        "settings": [_field(name, config) for name in SETTINGS],
    }
    parts = {
        "nonce": nonce,
        "style": f"{style_sheet()}\n{_text('page.css')}",
        "script": "\n".join(map(_text, ("wire.js", "spans.js", "page.js"))),
        "data": json.dumps(data).replace("<", "\\u003c"),
    }
    document = re.sub(r"\{(nonce|style|script|data)\}", lambda match: parts[match[1]], _text("page.html"))
    return Response(document, headers=headers, media_type="text/html")


@cache
def _text(name: str) -> str:
    return files("cocoa_integrations.server.page").joinpath(name).read_text(encoding="utf-8")


def _field(name: str, config: CocoaConfig) -> dict[str, Any]:
    """What the page needs to know of a setting."""
    schema = CocoaConfig.model_json_schema()["properties"][name]
    kinds = schema.get("anyOf", [schema])
    choices = [choice for kind in kinds for choice in ([kind["const"]] if "const" in kind else kind.get("enum", ()))]
    return {
        "name": name,
        "description": schema["description"],
        "default": getattr(config, name),
        "choices": choices or None,
        "step": "1" if any(kind.get("type") == "integer" for kind in kinds) else "any",
    }
