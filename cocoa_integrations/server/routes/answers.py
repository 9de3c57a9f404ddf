"""``/v1/chat/completions``, ``/v1/completions`` and ``/v1/cocoa/score``: whole answers and streams."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from cocoa_engine import Generation, __version__
from cocoa_engine.errors import ConfigError, PromptError, RequestCancelledError
from cocoa_engine.report import RISK_KEY, RiskReport
from cocoa_integrations._shared.engines import AsyncStream
from cocoa_integrations._shared.options import ChatTemplateOptions
from cocoa_integrations.chat_service.answer import ChatCall
from cocoa_integrations.chat_service.local import PreparedCall
from cocoa_integrations.chat_service.wire import Completion, Scores
from cocoa_integrations.server.errors import api_error, body_of, log_unexpected
from cocoa_integrations.server.middleware import parsed, require_json
from cocoa_integrations.server.process import ServerState, state_of
from cocoa_integrations.server.protocol.answers import (
    Answered,
    Job,
    RiskFields,
    StreamedAnswer,
    max_risk_of,
    score_one,
    usage_of,
    wire_report,
)
from cocoa_integrations.server.protocol.messages import entries_of, template_variables
from cocoa_integrations.server.protocol.requests import ChatRequest, CompletionRequest, DecodingRequest, ScoreRequest
from cocoa_integrations.server.record import Record
from cocoa_integrations.server.routes.info import served_name
from cocoa_integrations.server.work import DONE, Call, EventStream, event, interleaved

Asked = TypeVar("Asked", bound=DecodingRequest)

BODIES: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, ScoreRequest)
REFERENCE = "#/components/schemas/{model}"
"""Of a model in the OpenAPI document."""

router = APIRouter()


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's description for its body, which FastAPI does not parse."""
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model=body.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


@router.post("/chat/completions", openapi_extra=_takes(ChatRequest), response_model=Completion)
async def chat(request: Request) -> Response:
    """Answer a conversation. Every answer has its risk in ``message.cocoa_risk`` and ``logprobs.cocoa_risk``."""
    return await _answered(ChatRequest, request)


@router.post("/completions", openapi_extra=_takes(CompletionRequest), response_model=Completion)
async def completions(request: Request) -> Response:
    """Continue texts. Every answer has its risk in ``cocoa_risk``, and with ``logprobs`` in ``logprobs.cocoa_risk``."""
    return await _answered(CompletionRequest, request)


async def _answered(kind: type[ChatRequest] | type[CompletionRequest], request: Request) -> Response:
    async with AsyncExitStack() as resources:
        call, body = await _admitted(kind, request, resources)
        reply = await call.run(Reply, body, state_of(request), call)
        return await (reply.streamed(resources) if body.stream else reply.whole())
    raise AssertionError("unreachable")


@router.post("/cocoa/score", openapi_extra=_takes(ScoreRequest), response_model=Scores)
async def score(request: Request) -> Response:
    """Measure the risk of given texts after a prompt. Nothing is decoded."""
    state = state_of(request)
    async with AsyncExitStack() as resources:
        call, body = await _admitted(ScoreRequest, request, resources)
        scoring = await call.run(Scoring, body, state, call)
        # a batch at a time, so that the texts of other requests are scored in between
        size = 1 if body.divide else call.engine.runtime.max_batch_size
        for start in range(0, len(body.given), size):
            async with state.later_texts if start else state.first_texts, state.scoring:
                await call.run(scoring.score, start, body.given[start : start + size])
        return await call.run(scoring.response)
    raise AssertionError("unreachable")


async def _admitted(kind: type[Asked], request: Request, resources: AsyncExitStack) -> tuple[Call, Asked]:
    """The call of a request, and the checked request. It counts as a call before its body is parsed.

    Nothing that grows with a body runs in the event loop, and an error is about the first value that is wrong.
    """
    state = state_of(request)
    state.require_ready()
    require_json(request.headers)
    async with state.bodies.read(request.receive) as body:
        call = await resources.enter_async_context(state.calls.opened(state.engine, request.receive))
        async with state.bodies.turn(body):
            asked = await call.run(lambda: kind.read(parsed(body), state.settings))
    state.calls.count(call, *asked.places)
    return call, asked


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


class Scoring:
    """The texts of one request that are scored. Made in a worker thread, since it renders the prompt."""

    def __init__(self, body: ScoreRequest, state: ServerState, call: Call) -> None:
        self._body, self._state, self._engine = body, state, call.engine
        self._generations: list[Generation] = []
        self._options: dict[str, Any] = {
            "config": body.config(call.engine.config, state.settings),
            "source": [body.source] if isinstance(body.source, str) else body.source,
            "divide": body.divide,
            "cancellation": call.cancellation,
        }
        self._envelope = _envelope("score", "list", body, state)
        # a text prompt stays a text: it is divided into tokens together with the text after it
        self._prompt: Any = body.prompt
        if body.messages is not None:
            variables = template_variables(body.chat_template_kwargs, call.engine)
            template = ChatTemplateOptions(chat_template_kwargs=variables)
            asked = ChatCall(messages=entries_of(body.messages), template=template)
            self._prompt = self._named(0, lambda: PreparedCall(call.engine, asked).token_ids)

    def score(self, start: int, texts: list[str]) -> None:
        """Score texts, one alone or several together; the first has the number ``start`` among those of the request."""
        if len(texts) == 1:
            scored = self._named(start, lambda: [score_one(self._engine, self._prompt, texts[0], **self._options)])
        else:
            scored = self._named(start, lambda: self._engine.score(self._prompt, texts, **self._options))
        self._generations += scored

    def response(self) -> Response:
        """The entries of all texts, and the usage."""
        self._state.metrics.add("scored_texts", len(self._generations))
        entries = [
            {
                "object": "cocoa.score",
                "index": number,
                "text": text,
                RISK_KEY: wire_report(
                    RiskReport.of(generation, rivals=self._body.cocoa.candidates), verdict=generation.verdict
                ),
            }
            for number, (text, generation) in enumerate(zip(self._body.given, self._generations, strict=True))
        ]
        usages = [generation.usage for generation in self._generations]
        tokens = usages[0].prompt_tokens + sum(usage.completion_tokens for usage in usages)
        usage = {
            "prompt_tokens": tokens,
            "completion_tokens": 0,
            "total_tokens": tokens,
            "completion_tokens_details": max_risk_of(self._generations),
        }
        return _response({**self._envelope, "data": entries, "usage": usage})

    def _named(self, start: int, work: Any) -> Any:
        """Do some work; an error names its parameter, and the number of a text among all of them."""
        try:
            return work()
        except PromptError as error:
            message, of_prompt = str(error), "prompt" if self._body.messages is None else "messages"
            if self._body.texts is not None:  # the engine numbers those that it scores together
                numbered = r"text to score(?: at index (\d+))?"
                message = re.sub(numbered, lambda one: f"text to score at index {start + int(one[1] or 0)}", message)
            of_text = "text" if self._body.texts is None else "texts"
            shown = api_error(PromptError(message))
            shown.param = of_text if "text to score" in message else of_prompt
        except ConfigError as error:
            shown = api_error(error)
            if named := re.search(r"\b(source|divide)\b", str(error)):
                shown.param = named[0]
        raise shown


class Reply:
    """The answers to one request. Made in a worker thread, since it renders prompts and compiles the grammar."""

    def __init__(self, body: ChatRequest | CompletionRequest, state: ServerState, call: Call) -> None:
        self._body, self._state, self._call = body, state, call
        engine, config = call.engine, body.config(call.engine.config, state.settings)
        seeds = [None if config.seed is None else (config.seed + number) % 2**63 for number in range(body.n)]
        self._configs = [config, *(config.replace(seed=seed) for seed in seeds[1:])]
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
            listing = {"lists_invalid": body.cocoa.invalid_calls}
        else:
            operation, prefix, kind = "text_completion", "cmpl", "text_completion"
            has_logprobs = body.logprobs is not None  # without tokens it would surprise clients of this old protocol
            prompts = body.prompts
            calls = [replace(asked, prompt=prompt, logprobs=has_logprobs, lists_special=True) for prompt in prompts]
            listing = {"top": body.logprobs, "echo": body.echo, "only_echo": body.only_echoes}
        self._envelope = _envelope(prefix, kind, body, state)
        self._record = Record(state, operation, config, self._envelope, prompts, count=body.n)
        report = body.cocoa.report
        in_logprobs = report in ("both", "logprobs") and has_logprobs and state.settings.risk_in_logprobs
        self._risk = RiskFields(report in ("both", "message"), in_logprobs)
        self._jobs = [
            Job(engine, call, self._risk, first=number * body.n, **listing) for number, call in enumerate(calls)
        ]
        self._streams: list[StreamedAnswer] = []

    async def whole(self) -> Response:
        """The response with complete answers."""

        async def answers_of(job: Job) -> list[Answered]:
            # the first one alone, so that the others reuse its prompt
            first = await self._call.run(job.answer, 0, self._configs[0])
            others = enumerate(self._configs[1:], start=1)
            return [first, *await asyncio.gather(*(self._call.run(job.answer, *other) for other in others))]

        def complete() -> Response:
            choices = [choice for _, choice in answers]
            return _response({**self._envelope, "choices": choices, "usage": self._usage(answers)})

        answers = [answered for job in await asyncio.gather(*map(answers_of, self._jobs)) for answered in job]
        return await self._call.run(complete)

    def _usage(self, answers: Sequence[Answered]) -> dict[str, Any]:
        usage = usage_of([answer for answer, _ in answers], self._body.n, reported=any(self._risk))
        self._record.answered(answers, usage)
        return usage

    async def streamed(self, resources: AsyncExitStack) -> Response:
        """The response with streamed answers, once the first span is decided: errors until then have their status.

        It takes over ``resources``, which the call holds.
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
        self, item: tuple[int, list[bytes]] | None, chunks: AsyncIterator[tuple[int, list[bytes]] | None]
    ) -> AsyncIterator[bytes]:
        """The events of a stream, up to ``[DONE]`` or an error; a comment if there was none for a while.

        Clients ignore comments, which keep a connection from timing out.
        """
        try:
            while True:
                if item is not None:
                    self._record.first_span()
                    for part in item[1]:
                        yield part
                elif (progress := self._streams[0].stream.prompt_progress) is None or progress[0] >= progress[1]:
                    yield b": working\n\n"
                else:
                    yield b": reading the prompt: %d of %d tokens\n\n" % progress
                try:
                    item = await anext(chunks)
                except StopAsyncIteration:
                    break
            yield await self._call.run(self._end)
        except Exception as error:
            shown = self._call.cancelled() if isinstance(error, RequestCancelledError) else api_error(error)
            if shown.status == 500:
                log_unexpected(error, with_message=self._state.settings.log_prompts)
            self._record.ended(shown)
            yield event(body_of(shown))

    def _end(self) -> bytes:
        """The last events of a stream."""
        usage = self._usage([stream.answered for stream in self._streams if stream.answered is not None])
        return (self._chunk([], usage) if self._body.include_usage else b"") + DONE
