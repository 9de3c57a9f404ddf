"""What all routes that decode have in common: the envelope of their answers, and whole and streamed answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import Request, Response
from pydantic import ValidationError

from cocoa_engine import CocoaConfig, __version__
from cocoa_engine.errors import RequestCancelledError
from cocoa_integrations._shared.async_stream import AsyncStream
from cocoa_integrations.server.errors import api_error, log_unexpected, validation_error
from cocoa_integrations.server.lifecycle import ServerState, state_of
from cocoa_integrations.server.middleware import parsed, require_json
from cocoa_integrations.server.protocol.answers import Answered, StreamedAnswer
from cocoa_integrations.server.protocol.decoding import DecodingRequest
from cocoa_integrations.server.record import Record
from cocoa_integrations.server.settings import ServerSettings
from cocoa_integrations.server.work import DONE, Call, EventStream, Interleaved, comment, error_event, event

Answer = TypeVar("Answer")
Asked = TypeVar("Asked", bound=DecodingRequest)


@dataclass(frozen=True)
class Envelope:
    """What all chunks of an answer have in common."""

    fields: dict[str, Any]
    include_usage: bool

    @classmethod
    def of(cls, prefix: str, kind: str, model: str, *, include_usage: bool = False) -> Envelope:
        """A new one.

        Args:
            prefix: the beginning of its id.
            kind: the name of the object.
            model: the name of the model.
            include_usage: whether a stream has its usage.
        """
        fields = {
            "id": f"{prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"cocoa-{__version__}",
        }
        return cls(fields, include_usage)

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """The event of a chunk."""
        return event({**self.fields, "choices": choices, **({"usage": usage} if self.include_usage else {})})


async def admitted(kind: type[Asked], request: Request, resources: AsyncExitStack) -> tuple[Call, Asked]:
    """The call of a request, and the checked request. It counts as a call before its body is parsed.

    Nothing that grows with a body runs in the event loop, and an error is about the first value that is wrong.

    Args:
        kind: the model of the body.
        request: the request.
        resources: what the call holds.

    Raises:
        ApiError: the model is not loaded, the server shuts down, or the body is not valid.
        EngineBusyError: the engine has as many calls as it runs and queues.
    """
    state = state_of(request)
    state.require_ready()
    require_json(request.headers)
    async with state.bodies.read(request.receive) as body:
        call = await resources.enter_async_context(state.open_call(request))
        async with state.bodies.turn(body):
            asked = await call.run(_checked, kind, body, state.settings)
    state.calls.count(call, *asked.places)
    return call, asked


def _checked(kind: type[Asked], body: bytes, settings: ServerSettings) -> Asked:
    data = parsed(body)
    kind.screen(data, settings)
    try:
        asked = kind.model_validate(data)
    except ValidationError as error:
        raise validation_error(error) from None
    asked.check(settings)
    return asked


async def answers_of(
    call: Call, answer: Callable[[int, CocoaConfig], Answer], configs: Sequence[CocoaConfig]
) -> list[Answer]:
    """All answers to one prompt; the first one alone, so that the others reuse its prompt.

    Args:
        call: the call of the engine.
        answer: decodes the answer of a number.
        configs: the settings of each answer.
    """
    first = await call.run(answer, 0, configs[0])
    others = [call.run(answer, number, config) for number, config in enumerate(configs) if number]
    return [first, *await asyncio.gather(*others)]


def json_response(body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """A response with JSON."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text, headers=dict(headers or {}), media_type="application/json")


def whole(
    envelope: Envelope,
    answers: Sequence[Answered],
    usage_of: Callable[[Sequence[Answered]], dict[str, Any]],
    record: Record,
) -> Response:
    """The response with complete answers."""
    usage = usage_of(answers)
    record.answered(answers, usage)
    choices = [one.choice for one in answers]
    risk = usage["completion_tokens_details"].get("cocoa_max_risk")
    headers = {} if risk is None else {"x-cocoa-max-risk": f"{risk:.6g}"}
    return json_response({**envelope.fields, "choices": choices, "usage": usage}, headers)


async def streamed(
    state: ServerState,
    call: Call,
    resources: AsyncExitStack,
    envelope: Envelope,
    streams: Sequence[StreamedAnswer],
    usage_of: Callable[[Sequence[Answered]], dict[str, Any]],
    record: Record,
) -> Response:
    """The response with streamed answers, once the first span is decided: errors until then have their status.

    Args:
        state: the state of the server.
        call: the call of the engine.
        resources: what the call holds. The response takes it over.
        envelope: the envelope of the chunks.
        streams: the answers.
        usage_of: the usage of the answers, called at the end.
        record: is told of the first span and of the end.

    Raises:
        Exception: that of the first span.
    """
    steps = [AsyncStream(call.engine, _chunks(envelope, stream), call.cancellation) for stream in streams]
    for step in steps:
        await resources.enter_async_context(step)
    chunks = Interleaved(steps, state.settings.progress_interval)
    resources.callback(chunks.close)
    try:
        first = await anext(chunks)
    except RequestCancelledError:
        raise call.cancelled() from None
    events = _events(state, call, envelope, streams, first, chunks, usage_of, record)
    timeout = state.settings.write_timeout
    return EventStream(events, resources.pop_all(), timeout, on_stalled=partial(call.cancel, "client"))


def _chunks(envelope: Envelope, stream: StreamedAnswer) -> Generator[list[bytes], None, None]:
    """For each decided span, the events of new chunks."""
    with closing(stream.choices()) as steps:
        for choices in steps:
            yield [envelope.chunk([choice]) for choice in choices]


def _end(
    envelope: Envelope,
    streams: Sequence[StreamedAnswer],
    usage_of: Callable[[Sequence[Answered]], dict[str, Any]],
    record: Record,
) -> bytes:
    """The last events of a stream."""
    answers = [one.answered for one in streams if one.answered is not None]
    usage = usage_of(answers)
    record.answered(answers, usage)
    return (envelope.chunk([], usage) if envelope.include_usage else b"") + DONE


async def _events(
    state: ServerState,
    call: Call,
    envelope: Envelope,
    streams: Sequence[StreamedAnswer],
    first: tuple[int, list[bytes]] | None,
    chunks: Interleaved[list[bytes]],
    usage_of: Callable[[Sequence[Answered]], dict[str, Any]],
    record: Record,
) -> AsyncIterator[bytes]:
    """The events of a stream, up to ``[DONE]`` or an error."""
    item = first
    try:
        while True:
            if item is None:
                yield comment(_progress(streams[0]))
            else:
                record.first_span()
                for chunk in item[1]:
                    yield chunk
            try:
                item = await anext(chunks)
            except StopAsyncIteration:
                break
        yield await call.run(_end, envelope, streams, usage_of, record)
    except Exception as error:
        shown = call.cancelled() if isinstance(error, RequestCancelledError) else api_error(error)
        if shown.status == 500:
            log_unexpected(error, with_message=state.settings.log_prompts)
        record.ended(shown)
        yield error_event(shown)


def _progress(stream: StreamedAnswer) -> str:
    progress = stream.prompt_progress
    if progress is None or progress[0] >= progress[1]:
        return "working"
    return f"reading the prompt: {progress[0]} of {progress[1]} tokens"
