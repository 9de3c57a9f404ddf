"""Errors on the wire, always as OpenAI's, and lines of the log, none of which has text of a request."""

import copy
import json
import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from uvicorn.config import LOGGING_CONFIG
from uvicorn.logging import AccessFormatter, ColourizedFormatter, DefaultFormatter

from cocoa_engine import CocoaConfig, errors
from cocoa_engine.errors import MESSAGE_LIMIT, bounded, one_line, safe_logger, short_repr, shortened
from cocoa_integrations.server.parameters import SAME_SETTING
from cocoa_integrations.server.settings import ServerSettings

logger = safe_logger("cocoa_integrations.server")

_STATUSES: tuple[tuple[type[Exception], int, str | None, str | None], ...] = (
    (errors.EngineBusyError, 429, "engine_busy", None),
    (errors.ConfigError, 400, None, None),
    (errors.PromptError, 400, None, None),
    (errors.ChatTemplateError, 400, None, None),
    (errors.UnsupportedFeatureError, 400, None, None),
    (errors.UnsupportedModelError, 400, None, None),
    (errors.CalibrationError, 400, None, None),
    (errors.IncompleteAnswerError, 422, "schema_mismatch", None),  # not a 5xx, which clients send again
    (errors.MissingExtraError, 501, "missing_extra", None),
    (errors.WorkerError, 503, "no_worker", None),
    (torch.OutOfMemoryError, 503, "out_of_memory", "out of GPU memory; try again later"),
    (errors.CocoaError, 500, None, None),
)
"""The status, the code and the message of errors; by default the error's own message."""

_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class ApiError(errors.CocoaError):
    """An error for the client, with its HTTP status.

    ``param`` is the parameter that is wrong, ``code`` a short name for programs, and ``retry_after`` the seconds to
    wait.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after
        self.kind = "server_error" if status >= 500 else "invalid_request_error"
        if status == 429:
            self.kind = "rate_limit_error"


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    """A 400 that names a parameter."""
    return ApiError(400, message, param=param, code=code)


def at_most(value: float, limit: int, param: str, what: str = "") -> None:
    """Refuse a value above a limit of the server with an :class:`ApiError`."""
    if value > limit:
        raise bad_request(f"{param}: {value} {what}".rstrip() + f" is above the server's limit of {limit}", param)


def api_error(error: Exception, *, retry_after: int = 1) -> ApiError:
    """The error that a client sees, which should try again after ``retry_after`` seconds if the engine is busy."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), code=_CODES.get(error.status_code))
    for kind, status, code, message in _STATUSES:
        if isinstance(error, kind):
            shown = ApiError(status, message or str(error), code=code)
            if status in (429, 503):
                shown.retry_after = retry_after
            if status == 400:
                shown.param = _named_setting(str(error))
                if isinstance(error, errors.PromptError) and "context window" in str(error):
                    shown.code = "context_length_exceeded"
            return shown
    return ApiError(500, f"internal error ({type(error).__name__}); the server's log has more")


@contextmanager
def of_parameter(param: str, kind: type[errors.CocoaError] = errors.PromptError) -> Iterator[None]:
    """Name a parameter in errors of a kind, by default in those of the prompt; :class:`ApiError` is raised instead."""
    try:
        yield
    except kind as error:
        shown = api_error(error)
        shown.param = param
        raise shown from None


def shutting_down(retry_after: int = 1) -> ApiError:
    """The error of a request that comes, or still runs, while the server shuts down."""
    message = "the server is shutting down; try again later"
    return ApiError(503, message, code="shutting_down", retry_after=retry_after)


def client_gone() -> ApiError:
    """The error of a request whose client has closed the connection."""
    return ApiError(499, "the client closed the connection", code="client_closed_request")


def body_of(error: ApiError) -> dict[str, Any]:
    """The JSON of an error."""
    fields = {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}
    # a lone surrogate of the request cannot be sent back
    return {"error": {key: value and value.encode(errors="replace").decode() for key, value in fields.items()}}


def response_of(error: ApiError) -> Response:
    """The response for an error."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(json.dumps(body_of(error)), error.status, headers, media_type="application/json")


def log_unexpected(error: BaseException, *, with_message: bool) -> None:
    """Write an error that no client caused to the log. Its message may quote a prompt."""
    where = "".join(traceback.format_tb(error.__traceback__)).replace("%", "%%")
    logger.error("%s\n" + where, _described(error, with_message))


def _described(error: BaseException, with_message: bool) -> str:
    return _safe(f"{type(error).__name__}{f': {error}' if with_message else ' (--log-prompts shows its message)'}")


def _safe(text: str) -> str:
    return one_line(bounded(text, MESSAGE_LIMIT))


def install(app: FastAPI, settings: ServerSettings, *, on_busy: Callable[[], None]) -> None:
    """Answer every error of an app in OpenAI's shape; ``on_busy`` is told of each refusal for want of places."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            known = ", ".join(path for path in app.openapi()["paths"] if path.startswith("/v1/"))
            error = HTTPException(404, f"there is no {shortened(request.url.path, 200)}; the server has {known}")
        shown = api_error(error, retry_after=settings.retry_after)
        if shown.status == 429:
            on_busy()
        if shown.status == 500:
            log_unexpected(error, with_message=settings.log_prompts)
        response = response_of(shown)
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(dict(error.headers))
        return response

    for kind in (errors.CocoaError, HTTPException, torch.OutOfMemoryError):
        app.add_exception_handler(kind, answer)


def validation_error(error: ValidationError) -> ApiError:
    """The error of a request that its model refuses: the first one, of ``messages[0].role`` for example."""
    first = error.errors(include_url=False)[0]
    # pydantic adds the type that it tried where a parameter takes several
    location = [part for part in first["loc"] if not re.fullmatch(r"str|(list|dict)\[.*\]", str(part))]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    param = shortened(path, 200) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] != "missing":
        message = f"{message} (got {short_repr(first['input'])})"
    return bad_request(f"{param}: {message}", param)


def _named_setting(message: str) -> str | None:
    """The parameter of the setting with which the message of an error begins."""
    match = re.match(r"(?:setting )?(\w+): |passage \d+ of (source) ", message)
    name = match and (match[1] or match[2])
    if name == "max_new_tokens":
        return "max_tokens"
    own = name == "source" or (name in CocoaConfig.model_fields and name not in SAME_SETTING)
    return f"cocoa.{name}" if own else name


class _Lines(ColourizedFormatter):
    """uvicorn's format. A message of another package may quote a request, and is shown only if it may."""

    def __init__(self, shows_texts: Callable[[], bool], **options: Any) -> None:
        super().__init__(**options)
        self._shows_texts = shows_texts

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.exc_text = record.stack_info = None  # another handler may have made the text, with the message
        if record.name.startswith("uvicorn"):
            if isinstance(record.args, tuple):
                record.args = tuple(_safe(value) if isinstance(value, str) else value for value in record.args)
        elif not record.name.startswith("cocoa_"):  # whose loggers are safe themselves
            hidden = f"{record.name} has a message (line {record.lineno} of {record.filename}; --log-prompts shows it)"
            record.msg, record.args = "%s", (_safe(record.getMessage()) if self._shows_texts() else hidden,)
        return super().format(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "".join(traceback.format_tb(ei[2])) + _described(ei[1], self._shows_texts())


class _DefaultLines(_Lines, DefaultFormatter): ...


class _AccessLines(_Lines, AccessFormatter): ...


def log_config(shows_texts: Callable[[], bool]) -> dict[str, Any]:
    """uvicorn's logging, with the messages of this package, and those that other packages have for the root logger.

    ``shows_texts`` says whether the log may have text of requests.
    """
    config = copy.deepcopy(LOGGING_CONFIG)
    for name, kind in (("default", _DefaultLines), ("access", _AccessLines)):
        config["formatters"][name] |= {"()": kind, "shows_texts": shows_texts}
    config["root"] = of_all = {"handlers": ["default"], "level": "WARNING"}
    config["loggers"]["transformers"] = {**of_all, "propagate": False}  # which has a handler of its own
    config["loggers"]["cocoa_integrations.server"] = {**of_all, "level": "INFO", "propagate": False}
    return config


@contextmanager
def unhandled_logged(shows_texts: Callable[[], bool]) -> Iterator[None]:
    """Write warnings, and errors that end a thread or occur in a destructor, to the log. Python would print them.

    The loggers that :func:`log_config` changes have their own handlers again afterwards.
    """

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        own = category.__module__.startswith("cocoa_")
        text = str(message) if own or shows_texts() else "--log-prompts shows its message"
        logger.warning("%s", text if own else f"{category.__name__} in line {lineno} of {filename}: {text}")

    def log(unhandled: Any) -> None:
        if isinstance(unhandled.exc_value, Exception):
            log_unexpected(unhandled.exc_value, with_message=shows_texts())

    before = warnings.showwarning, threading.excepthook, sys.unraisablehook
    names = (None, *log_config(shows_texts)["loggers"])
    loggers = [logging.getLogger(name) for name in names]  # noqa: TID251 - gives them their handlers back
    states = [(channel, channel.handlers[:], channel.level, channel.propagate) for channel in loggers]
    warnings.showwarning, threading.excepthook, sys.unraisablehook = show, log, log
    try:
        yield
    finally:
        warnings.showwarning, threading.excepthook, sys.unraisablehook = before
        for channel, handlers, level, propagate in states:
            channel.handlers, channel.propagate = handlers, propagate
            channel.setLevel(level)
