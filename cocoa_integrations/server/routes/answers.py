"""``/v1/chat/completions``, ``/v1/completions`` and ``/v1/cocoa/score``: whole answers and streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from cocoa_engine import __version__
from cocoa_engine.errors import RequestCancelledError
from cocoa_integrations._shared.workers import AsyncStream
from cocoa_integrations.chat_service.answer import ChatCall
from cocoa_integrations.chat_service.wire import Completion, Scores
from cocoa_integrations.server.errors import api_error, log_unexpected
from cocoa_integrations.server.lifecycle import ServerState, state_of
from cocoa_integrations.server.middleware import parsed, require_json
from cocoa_integrations.server.openapi import takes
from cocoa_integrations.server.protocol.answers import Answered, Job, RiskFields, StreamedAnswer, usage_of
from cocoa_integrations.server.protocol.chat_request import ChatRequest, entries_of
from cocoa_integrations.server.protocol.completion_request import CompletionRequest
from cocoa_integrations.server.protocol.decoding import DecodingRequest, config_of_answer
from cocoa_integrations.server.protocol.score_request import ScoreJob, ScoreRequest
from cocoa_integrations.server.record import Record
from cocoa_integrations.server.routes.info import served_name
from cocoa_integrations.server.settings import ServerSettings
from cocoa_integrations.server.work import DONE, Call, EventStream, comment, error_event, event, interleaved

Asked = TypeVar("Asked", bound=DecodingRequest)

router = APIRouter()


@router.post("/chat/completions", openapi_extra=takes(ChatRequest), response_model=Completion)
async def chat(request: Request) -> Response:
    """Answer a conversation. Every answer has its risk in ``message.cocoa_risk`` and ``logprobs.cocoa_risk``."""
    return await _answered(ChatRequest, request)


@router.post("/completions", openapi_extra=takes(CompletionRequest), response_model=Completion)
async def completions(request: Request) -> Response:
    """Continue texts. Every answer has its risk in ``cocoa_risk``, and with ``logprobs`` in ``logprobs.cocoa_risk``."""
    return await _answered(CompletionRequest, request)


@router.post("/cocoa/score", openapi_extra=takes(ScoreRequest), response_model=Scores)
async def score(request: Request) -> Response:
    """Measure the risk of given texts after a prompt. Nothing is decoded."""
    state = state_of(request)
    async with AsyncExitStack() as resources:
        call, body = await _admitted(ScoreRequest, request, resources)
        envelope, job = await call.run(_score_job, body, state, call)
        for batch in job.batches:
            async with state.later_texts if batch.start else state.first_texts, state.scoring:
                await call.run(job.score, batch)
        return await call.run(_scored, envelope, job, state)
    raise AssertionError("unreachable")


def _score_job(body: ScoreRequest, state: ServerState, call: Call) -> tuple[dict[str, Any], ScoreJob]:
    config = body.config(call.engine.config, state.settings)
    envelope = _envelope("score", "list", body, state)
    return envelope, ScoreJob(body, call.engine, config, call.cancellation)


def _scored(envelope: dict[str, Any], job: ScoreJob, state: ServerState) -> Response:
    entries, usage = job.answer()
    state.metrics.add("scored_texts", len(entries))
    return _response({**envelope, "data": entries, "usage": usage})


async def _answered(kind: type[ChatRequest] | type[CompletionRequest], request: Request) -> Response:
    state = state_of(request)
    async with AsyncExitStack() as resources:
        call, body = await _admitted(kind, request, resources)
        reply = await call.run(Reply, body, state, call)
        return await (reply.streamed(resources) if body.stream else reply.whole())
    raise AssertionError("unreachable")


async def _admitted(kind: type[Asked], request: Request, resources: AsyncExitStack) -> tuple[Call, Asked]:
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
        call = await resources.enter_async_context(state.calls.opened(state.engine, request.receive))
        async with state.bodies.turn(body):
            asked = await call.run(_read, kind, body, state.settings)
    state.calls.count(call, *asked.places)
    return call, asked


def _read(kind: type[Asked], body: bytes, settings: ServerSettings) -> Asked:
    return kind.read(parsed(body), settings)


def _envelope(prefix: str, kind: str, body: DecodingRequest, state: ServerState) -> dict[str, Any]:
    """What all chunks of an answer have in common."""
    return {
        "id": f"{prefix}-{uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": served_name(body.model, state),
        "system_fingerprint": f"cocoa-{__version__}",
    }


def _response(body: dict[str, Any]) -> Response:
    """A response with JSON, whose header has its highest risk."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    risk = body["usage"]["completion_tokens_details"].get("cocoa_max_risk")
    headers = {} if risk is None else {"x-cocoa-max-risk": f"{risk:.6g}"}
    return Response(text, headers=headers, media_type="application/json")


class Reply:
    """The answers to one request. Made in a worker thread, since it renders prompts and compiles the grammar.

    Args:
        body: the request.
        state: the state of the server.
        call: the call of the engine.

    Raises:
        ApiError: a parameter is not valid.
    """

    def __init__(self, body: ChatRequest | CompletionRequest, state: ServerState, call: Call) -> None:
        self._body, self._state, self._call = body, state, call
        engine = call.engine
        config = body.config(engine.config, state.settings)
        self._configs = [config_of_answer(config, number) for number in range(body.n)]
        asked = ChatCall(
            config=config,
            source=body.cocoa.source,
            candidates=body.cocoa.candidates,
            logits_processor=body.processors(engine),
            cancellation=call.cancellation,
        )
        listing: dict[str, Any] = {}
        if isinstance(body, ChatRequest):
            operation, prefix, kind = "chat", "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion"
            has_logprobs = body.logprobs is not False
            tools, template, messages = body.tool_request(), body.template_options(engine), entries_of(body.messages)
            chat = replace(asked, messages=messages, tools=tools, template=template, calls_must_fit=True)
            prompts: list[Any] = messages
            calls = [replace(chat, logprobs=bool(body.logprobs))]
        else:
            operation, prefix, kind = "text_completion", "cmpl", "text_completion"
            has_logprobs = body.logprobs is not None  # without tokens it would surprise clients of this old protocol
            prompts = body.prompts
            calls = [replace(asked, prompt=prompt, logprobs=has_logprobs, lists_special=True) for prompt in prompts]
            listing = {"top": body.logprobs, "echo": body.echo, "only_echo": body.only_echoes}
        self._envelope = _envelope(prefix, kind, body, state)
        self._record = Record(state, operation, config, self._envelope, prompts, count=body.n)
        self._risk = RiskFields.of(body.cocoa, allow_logprobs=has_logprobs and state.settings.risk_in_logprobs)
        self._jobs = [
            Job(engine, each, self._risk, first=number * body.n, **listing) for number, each in enumerate(calls)
        ]
        self._streams: list[StreamedAnswer] = []

    async def whole(self) -> Response:
        """The response with complete answers."""
        answers = await asyncio.gather(*map(self._answers_of, self._jobs))
        return await self._call.run(self._complete, [answered for of_prompt in answers for answered in of_prompt])

    async def _answers_of(self, job: Job) -> list[Answered]:
        """All answers to one prompt; the first one alone, so that the others reuse its prompt."""
        first = await self._call.run(job.answer, 0, self._configs[0])
        others = [self._call.run(job.answer, number, config) for number, config in enumerate(self._configs) if number]
        return [first, *await asyncio.gather(*others)]

    def _complete(self, answers: Sequence[Answered]) -> Response:
        choices = [answered.choice for answered in answers]
        return _response({**self._envelope, "choices": choices, "usage": self._usage(answers)})

    def _usage(self, answers: Sequence[Answered]) -> dict[str, Any]:
        usage = usage_of([answered.answer for answered in answers], self._body.n, reported=self._risk.reported)
        self._record.answered(answers, usage)
        return usage

    async def streamed(self, resources: AsyncExitStack) -> Response:
        """The response with streamed answers, once the first span is decided: errors until then have their status.

        Args:
            resources: what the call holds. The response takes it over.

        Raises:
            Exception: that of the first span.
        """
        call, settings = self._call, self._state.settings
        self._streams = [
            StreamedAnswer(job, number, config) for job in self._jobs for number, config in enumerate(self._configs)
        ]
        steps = [AsyncStream(call.engine, self._chunks(stream), call.cancellation) for stream in self._streams]
        for step in steps:
            await resources.enter_async_context(step)
        chunks = interleaved(steps, settings.progress_interval)
        resources.push_async_callback(chunks.aclose)
        try:
            first = await anext(chunks)
        except RequestCancelledError:
            raise call.cancelled() from None
        stalled = partial(call.cancel, "client")
        return EventStream(self._events(first, chunks), resources.pop_all(), settings.write_timeout, stalled)

    def _chunks(self, stream: StreamedAnswer) -> Generator[list[bytes], None, None]:
        """For each decided span, the events of new chunks."""
        with closing(stream.choices()) as steps:
            for choices in steps:
                yield [self._chunk([choice]) for choice in choices]

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        include_usage = {"usage": usage} if self._body.include_usage else {}
        return event({**self._envelope, "choices": choices, **include_usage})

    async def _events(
        self, first: tuple[int, list[bytes]] | None, chunks: AsyncIterator[tuple[int, list[bytes]] | None]
    ) -> AsyncIterator[bytes]:
        """The events of a stream, up to ``[DONE]`` or an error."""
        try:
            for part in self._parts(first):
                yield part
            async for item in chunks:
                for part in self._parts(item):
                    yield part
            yield await self._call.run(self._end)
        except Exception as error:
            shown = self._call.cancelled() if isinstance(error, RequestCancelledError) else api_error(error)
            if shown.status == 500:
                log_unexpected(error, with_message=self._state.settings.log_prompts)
            self._record.ended(shown)
            yield error_event(shown)

    def _parts(self, item: tuple[int, list[bytes]] | None) -> Iterator[bytes]:
        """The events of a step; a comment if there was none for a while."""
        if item is not None:
            self._record.first_span()
            yield from item[1]
            return
        progress = self._streams[0].prompt_progress
        if progress is None or progress[0] >= progress[1]:
            yield comment("working")
        else:
            yield comment(f"reading the prompt: {progress[0]} of {progress[1]} tokens")

    def _end(self) -> bytes:
        """The last events of a stream."""
        usage = self._usage([stream.answered for stream in self._streams if stream.answered is not None])
        return (self._chunk([], usage) if self._body.include_usage else b"") + DONE
