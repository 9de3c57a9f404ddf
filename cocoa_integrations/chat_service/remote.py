"""The chat service of a model behind ``cocoa serve``."""

from __future__ import annotations

import asyncio
import json
import os
import re
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import lru_cache
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError, DataError, GenerationTimeoutError
from cocoa_engine.optional import need
from cocoa_engine.safe_text import short_repr
from cocoa_integrations._shared.citations import MOST_PASSAGES
from cocoa_integrations.chat_service.answer import Answer, ChatCall, Piece
from cocoa_integrations.chat_service.wire import (
    Choice,
    Chunk,
    Completion,
    Models,
    SentUsage,
    read_report,
    received,
    usage_of,
)
from cocoa_integrations.tool_calling import Call, CallDelta, invalid_call_text, object_of

if TYPE_CHECKING:
    from openai import AsyncOpenAI, BadRequestError, OpenAI

DEFAULT_MODEL = "cocoa"
"""A server answers to every name, unless it was given names."""

NO_KEY = "none"
"""What is sent as the API key if none is given: OpenAI's client needs one, and must not send OpenAI's elsewhere."""

OF_THE_SERVER = ("decore_heads",)
"""Settings that name a file on the server's machine."""

_AT_ONCE = 8
"""How many prompts of a batch are sent at the same time by default."""


class RemoteChat:
    """A chat service of a server. Create it with :func:`remote_chat`, so that connections are shared.

    Args:
        base_url: the address of the server's API, such as ``http://127.0.0.1:8000/v1``.
        api_key: the key, if the server was given keys. That of OpenAI in the environment is never sent.
        model: the name of the model, if the server was given names.
        timeout: time limit of a request in seconds; by default that of OpenAI's client.
        max_retries: how often a request is sent again if the server is busy or cannot be reached.
        headers: further headers of each request.

    Raises:
        ConfigError: the address is none.
        MissingExtraError: the package openai is not installed.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float | None = None,
        max_retries: int = 2,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        openai = need("openai", extra="remote", what="a model behind a server")
        if not re.match(r"https?://[^/\s]", base_url):
            example = "http://127.0.0.1:8000/v1"
            raise ConfigError(f"base_url takes the address of a server, such as {example} (got {short_repr(base_url)})")
        self.model = model or DEFAULT_MODEL
        without = {name: openai.Omit() for name in ("OpenAI-Organization", "OpenAI-Project")}
        self._options: dict[str, Any] = {
            "base_url": base_url,
            "api_key": api_key or NO_KEY,
            "max_retries": max_retries,
            "default_headers": {**without, **dict(headers)},
            **({} if timeout is None else {"timeout": timeout}),
        }
        self._openai = openai
        self._process = os.getpid()
        self._sync_client: Any = None
        self._clients: weakref.WeakKeyDictionary[Any, AsyncOpenAI] = weakref.WeakKeyDictionary()

    def answer(self, call: ChatCall, on_piece: Callable[[Piece], None] | None = None) -> Answer:
        """The whole answer to a call; ``on_piece`` is told of each span at its end."""
        request = _Request(call, self.model, stream=False)
        with self._clear_errors():
            sent = self._asked(request)
        return request.answer(sent, on_piece)

    def answers(self, calls: Sequence[ChatCall], batch_size: int | None = None) -> list[Answer]:
        """The answers to several calls, of which ``batch_size`` are sent at the same time."""
        with ThreadPoolExecutor(min(len(calls), batch_size or _AT_ONCE)) as pool:
            asked = [pool.submit(copy_context().run, self.answer, call) for call in calls]
            return [future.result() for future in asked]

    def stream(self, call: ChatCall) -> RemoteStream:
        """The answer to a call, span by span. The request is sent when the first one is asked for."""
        return RemoteStream(self, _Request(call, self.model, stream=True))

    async def aanswer(self, call: ChatCall, on_piece: Callable[[Piece], None] | None = None) -> Answer:
        """See :meth:`answer`. Cancelling the task ends the work."""
        request = _Request(call, self.model, stream=False)
        with self._clear_errors():
            sent = await self._aasked(request)
        return request.answer(sent, on_piece)

    async def aanswers(self, calls: Sequence[ChatCall], batch_size: int | None = None) -> list[Answer]:
        """See :meth:`answers`."""
        room = asyncio.Semaphore(batch_size or _AT_ONCE)

        async def answered(call: ChatCall) -> Answer:
            async with room:
                return await self.aanswer(call)

        return await asyncio.gather(*map(answered, calls))

    def astream(self, call: ChatCall) -> AsyncRemoteStream:
        """See :meth:`stream`. Leaving the context ends the work."""
        return AsyncRemoteStream(self, _Request(call, self.model, stream=True))

    def context_window(self) -> int | None:
        """The context window of the model at the server, which is asked; ``None`` if it does not tell."""
        with self._clear_errors():
            listed = received(self._client.get("/models", cast_to=object), Models).data
        return next((entry for entry in listed if entry.id == self.model), listed[0]).max_model_len

    @property
    def _client(self) -> OpenAI:
        self._forget_after_fork()
        if self._sync_client is None:
            self._sync_client = self._openai.OpenAI(**self._options)
        client: OpenAI = self._sync_client
        return client

    @property
    def _async_client(self) -> AsyncOpenAI:
        """The client of this event loop, in which its connections live."""
        self._forget_after_fork()
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = self._openai.AsyncOpenAI(**self._options)
        return self._clients[loop]

    def _forget_after_fork(self) -> None:
        """Connections are not shared with a forked process."""
        if self._process != os.getpid():
            self._process, self._sync_client = os.getpid(), None
            self._clients.clear()

    def _asked(self, request: _Request) -> Any:
        try:
            return self._client.post(**request.arguments(self._openai.Stream))
        except self._openai.BadRequestError as error:
            request.do_without(error)
        return self._client.post(**request.arguments(self._openai.Stream))

    async def _aasked(self, request: _Request) -> Any:
        client = self._async_client
        try:
            return await client.post(**request.arguments(self._openai.AsyncStream))
        except self._openai.BadRequestError as error:
            request.do_without(error)
        return await client.post(**request.arguments(self._openai.AsyncStream))

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except (JSONDecodeError, UnicodeDecodeError, RecursionError):
            raise DataError("the server's answer is no JSON") from None
        except self._openai.APITimeoutError as error:
            raise GenerationTimeoutError(f"the server did not answer in time; raise timeout ({error})") from error


remote_chat = lru_cache(maxsize=64)(RemoteChat)
"""The service of a server, shared by all callers with the same options, as are its connections."""


def sent_settings(config: CocoaConfig) -> dict[str, Any]:
    """The settings of a request: those that were set.

    Raises:
        ConfigError: one of them names a file on the server's machine.
    """
    if wrong := [name for name in OF_THE_SERVER if name in config.model_fields_set]:
        raise ConfigError(f"{wrong[0]} names a file of the server's machine; give it to `cocoa serve`")
    return config.model_dump(mode="json", include=config.model_fields_set)


class RemoteStream:
    """An answer of a server while it is decoded; see :class:`.local.LocalStream`."""

    def __init__(self, service: RemoteChat, request: _Request) -> None:
        self._request = request
        self._steps = self._read(service)

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has been read to its end."""
        return self._request.streamed_answer()

    def open(self) -> None:
        """Nothing is done before the first piece is asked for."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Piece]:
        return next(self._steps)

    def close(self) -> None:
        """Close the connection, which ends the work of the server."""
        self._steps.close()

    def _read(self, service: RemoteChat) -> Generator[list[Piece], None, None]:
        with service._clear_errors(), service._asked(self._request) as events:
            for event in events:
                yield self._request.pieces(event)


class AsyncRemoteStream:
    """See :class:`RemoteStream`."""

    def __init__(self, service: RemoteChat, request: _Request) -> None:
        self._service, self._request = service, request

    async def __aenter__(self) -> Self:
        with self._service._clear_errors():
            self._events = await self._service._aasked(self._request)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._events.close()

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has been read to its end."""
        return self._request.streamed_answer()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Piece]:
        with self._service._clear_errors():
            return self._request.pieces(await anext(self._events))


class _Request:
    """One request, and what has come back."""

    def __init__(self, call: ChatCall, model: str, *, stream: bool) -> None:
        self._call, self._stream = call, stream
        self._finds = hasattr(call.source, "source")
        self._top = call.config.top_logprobs
        self.path = "/completions" if call.messages is None else "/chat/completions"
        self.body = self._body(model)
        self._reasoning = self._content = ""
        self._calls: list[Call] = []
        self._tokens: list[dict[str, Any]] = []
        self._last: Choice | None = None
        self._model: str | None = None
        self._usage = SentUsage()

    def arguments(self, stream_cls: Any) -> dict[str, Any]:
        """The arguments of the client's ``post``."""
        stream = {"stream": True, "stream_cls": stream_cls[object]} if self._stream else {}
        return {"path": self.path, "cast_to": object, "body": self.body, **stream}

    def do_without(self, error: BadRequestError) -> None:
        """Leave out passages that the server does not find, if they were found in the prompt and not named by the user.

        The chat template of the server can change or drop the text of a message.

        Raises:
            BadRequestError: the error is another one.
        """
        source: Any = self._call.source
        if not self._finds or error.param not in ("cocoa.source", "source") or "source" not in self.body["cocoa"]:
            raise error
        source.forget()
        del self.body["cocoa"]["source"]

    def answer(self, sent: Any, on_piece: Callable[[Piece], None] | None) -> Answer:
        """The whole answer of a response."""
        response = received(sent, Completion)
        choice = response.choices[0]
        self._model, self._usage = response.model, response.usage or self._usage
        self._grow(choice)
        answer = self._answer(choice, Piece())
        if on_piece is not None:
            for entry in answer.spans:
                on_piece(Piece(entry))
        return answer

    def pieces(self, sent: Any) -> list[Piece]:
        """What a chunk adds."""
        chunk = received(sent, Chunk)
        self._model = chunk.model or self._model
        self._usage = chunk.usage or self._usage
        pieces: list[Piece] = []
        for choice in chunk.choices[:1]:
            added = choice.added
            deltas = self._grow(choice)
            spans = [span.without("index") for span in added.cocoa_spans or ()]
            entry = spans[0] if spans else None
            tokens = choice.tokens(self._top) if self._call.logprobs else None
            piece = Piece(entry, added.content or "", added.reasoning_content or "", deltas, None, tokens)
            if entry or piece.content or piece.reasoning or deltas:
                pieces.append(piece)
            pieces += [Piece(each) for each in spans[1:]]
            if choice.finish_reason is not None:
                self._last = choice
        return pieces

    def streamed_answer(self) -> Answer:
        """The whole answer of a stream.

        Raises:
            DataError: the stream ended before the answer was complete.
        """
        if self._last is None:
            raise DataError("the server's answer is incomplete: its stream ended early")
        calls = {call.id: number for number, call in enumerate(self._calls)}
        errors = _errors(self._last)
        deltas = [CallDelta(calls[key], None, None, "", error) for key, error in errors.items() if key in calls]
        return self._answer(self._last, Piece(calls=deltas))

    def _grow(self, choice: Choice) -> list[CallDelta]:
        """Add what a response or a chunk has; the new parts of calls."""
        added, deltas = choice.added, []
        self._content += added.content or ""
        self._reasoning += added.reasoning_content or ""
        self._tokens += choice.tokens(self._top)
        for position, sent in enumerate(added.tool_calls or ()):
            number = position if sent.index is None else sent.index
            begins = number >= len(self._calls)
            while number >= len(self._calls):
                self._calls.append(Call(name=""))
            before, written = self._calls[number], sent.function.arguments or ""
            name, call_id = sent.function.name or before.name, sent.id or before.id
            self._calls[number] = Call(name=name, written=before.written + written, id=call_id)
            deltas.append(CallDelta(number, call_id if begins else None, name if begins else None, written))
        return deltas

    def _answer(self, last: Choice, rest: Piece) -> Answer:
        sent = last.added.cocoa_risk
        report = None if sent is None else read_report(sent)
        errors = _errors(last)
        usage, reasoning_tokens = usage_of(self._usage, report)
        return Answer(
            text=self._content if report is None else "".join(span.text or "" for span in report.spans),
            content=self._content,
            reasoning=self._reasoning,
            calls=[_finished(call, errors.get(call.id)) for call in self._calls],
            finish_reason=(sent and sent.finish_reason) or last.finish_reason,
            model_name=self._model,
            usage=usage,
            reasoning_tokens=reasoning_tokens,
            logprobs=self._tokens if self._call.logprobs else None,
            make_report=lambda: report,
            rest=rest,
        )

    def _body(self, model: str) -> dict[str, Any]:
        call = self._call
        if call.logits_processor or call.stopping_criteria:
            raise ConfigError("logits_processor and stopping_criteria cannot be sent to a server; leave them out")
        cocoa: dict[str, Any] = {**sent_settings(call.config), "report": "message"}
        if call.candidates:
            cocoa["candidates"] = True
        if source := self._passages():
            cocoa["source"] = source
        body: dict[str, Any] = {"model": model, "cocoa": cocoa, "stream": self._stream}
        if self._stream:
            body["stream_options"] = {"include_usage": True}
        if call.messages is None:
            tokens = {"logprobs": call.config.top_logprobs} if call.logprobs else {}
            return {**body, "prompt": call.prompt, **tokens}
        variables = dict(call.template.chat_template_kwargs)
        if call.template.enable_thinking is not None:
            variables["enable_thinking"] = call.template.enable_thinking
        body |= {"messages": [_wire_message(entry) for entry in call.messages], **call.tools.parameters}
        if variables:
            body["chat_template_kwargs"] = variables
        if call.template.continue_final_message:
            body["continue_final_message"] = True
        if call.logprobs:
            body["logprobs"] = True
        return body

    def _passages(self) -> list[str]:
        source: Any = self._call.source
        if self._finds:
            messages = self._call.messages
            # no passage goes from one message into the next
            text = str(self._call.prompt) if messages is None else "\0".join(entry["content"] for entry in messages)
            source = source.source(lambda: text, most=MOST_PASSAGES)
        if any(not isinstance(passage, str) for passage in source or ()):
            raise ConfigError("source takes texts where the model is at a server, not ranges of the prompt")
        return list(source or ())


def _errors(choice: Choice) -> dict[str, str]:
    """Why the server could not parse calls, by their ids."""
    report = choice.added.cocoa_risk
    return {call.id: call.error for call in (report.tool_calls if report else ()) if call.error is not None}


def _finished(call: Call, error: str | None) -> Call:
    arguments = object_of(call.written) if error is None else None
    if error is None and arguments is None:
        error = "its arguments are not a JSON object"
    text = invalid_call_text(call.name, call.written)
    return Call(call.name, call.written, arguments, error=error, id=call.id, text=text)


def _wire_message(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A message for a chat template as OpenAI's protocol has it: the arguments of calls are JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in entry.get("tool_calls", ())
    ]
    return {**entry, "tool_calls": calls} if calls else dict(entry)
