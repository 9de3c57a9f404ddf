"""The OpenAPI document of the app: its bodies and errors as they are sent, and its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

ERRORS = {
    400: "The request is not valid; `param` names the parameter.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "As many answers as the engine runs and queues are being decoded; try again after `Retry-After` seconds.",
    500: "An internal error.",
    503: "The model is being loaded, or the server shuts down; try again after `Retry-After` seconds.",
}


class ErrorFields(BaseModel):
    """What is wrong, and how to mend it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error, as OpenAI's."""

    error: ErrorFields


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description} for status, description in ERRORS.items()
}
"""The errors of every route, for ``include_router``."""

_REFERENCE = "#/components/schemas/{model}"


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's description for its body, which FastAPI does not parse."""
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=body.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI, bodies: Sequence[type[BaseModel]], *, needs_key: bool) -> None:
    """Make an app's OpenAPI document with the bodies of requests, and the API key if clients must send one."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document["components"]["schemas"]
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas |= models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE)[1][
                "$defs"
            ]
            if needs_key:
                document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"key": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
