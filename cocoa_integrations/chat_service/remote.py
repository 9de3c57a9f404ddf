"""The chat service of a model behind ``cocoa serve``."""

from __future__ import annotations

import asyncio
import json
import os
import re
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cached_property, lru_cache
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from cocoa_engine import CocoaConfig, Usage
from cocoa_engine.errors import ConfigError, DataError, GenerationTimeoutError
from cocoa_engine.integration import need, short_repr
from cocoa_integrations._shared.citations import MOST_PASSAGES
from cocoa_integrations.chat_service.answer import Answer, ChatCall, Piece
from cocoa_integrations.chat_service.wire import Choice, Chunk, Completion, Models, SentUsage, received
from cocoa_integrations.tool_calling import Call, CallDelta, invalid_call_text, new_id, object_of

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
        self.openai = openai = need("openai", extra="remote", what="a model behind a server")
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
        self._process = os.getpid()
        self._client: OpenAI | None = None
        self._clients: weakref.WeakKeyDictionary[Any, AsyncOpenAI] = weakref.WeakKeyDictionary()

    def answer(self, call: ChatCall, on_piece: Callable[[Piece], None] | None = None) -> Answer:
        """The whole answer to a call; ``on_piece`` is told of each span at its end."""
        asked = RemoteStream(self, call, stream=False)
        with self.clear_errors():
            sent = asked.send()
        return asked.whole(sent, on_piece)

    def answers(self, calls: Sequence[ChatCall], batch_size: int | None = None) -> list[Answer]:
        """The answers to several calls, of which ``batch_size`` are sent at the same time."""
        with ThreadPoolExecutor(batch_size or _AT_ONCE) as pool:
            asked = [pool.submit(copy_context().run, self.answer, call) for call in calls]
            return [future.result() for future in asked]

    def stream(self, call: ChatCall) -> RemoteStream:
        """The answer to a call, span by span. The request is sent when the first one is asked for."""
        return RemoteStream(self, call, stream=True)

    async def aanswer(self, call: ChatCall, on_piece: Callable[[Piece], None] | None = None) -> Answer:
        """See :meth:`answer`. Cancelling the task ends the work."""
        asked = RemoteStream(self, call, stream=False)
        with self.clear_errors():
            sent = await asked.asend()
        return asked.whole(sent, on_piece)

    async def aanswers(self, calls: Sequence[ChatCall], batch_size: int | None = None) -> list[Answer]:
        """See :meth:`answers`."""
        room = asyncio.Semaphore(batch_size or _AT_ONCE)

        async def answered(call: ChatCall) -> Answer:
            async with room:
                return await self.aanswer(call)

        return await asyncio.gather(*map(answered, calls))

    def context_window(self) -> int | None:
        """The context window of the model at the server, which is asked; ``None`` if it does not tell."""
        with self.clear_errors():
            listed = received(self.client().get("/models", cast_to=object), Models).data
        return next((entry for entry in listed if entry.id == self.model), listed[0]).max_model_len

    def client(self) -> OpenAI:
        """The client of this process."""
        self._forget_after_fork()
        if self._client is None:
            self._client = self.openai.OpenAI(**self._options)
        assert self._client is not None
        return self._client

    def async_client(self) -> AsyncOpenAI:
        """The client of this event loop, in which its connections live."""
        self._forget_after_fork()
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = self.openai.AsyncOpenAI(**self._options)
        return self._clients[loop]

    def _forget_after_fork(self) -> None:
        """Connections are not shared with a forked process."""
        if self._process != os.getpid():
            self._process, self._client = os.getpid(), None
            self._clients.clear()

    @contextmanager
    def clear_errors(self) -> Iterator[None]:
        """Raise this package's errors for an answer that is no JSON, and for one that does not come in time."""
        try:
            yield
        except (JSONDecodeError, UnicodeDecodeError, RecursionError):
            raise DataError("the server's answer is no JSON") from None
        except self.openai.APITimeoutError as error:
            raise GenerationTimeoutError(f"the server did not answer in time; raise timeout ({error})") from error


remote_chat = lru_cache(maxsize=64)(RemoteChat)
"""The service of a server, shared by all callers with the same options, as are its connections."""


def sent_settings(config: CocoaConfig) -> dict[str, Any]:
    """The settings of a request: those that were set. None may name a file of the server's machine."""
    if wrong := [name for name in OF_THE_SERVER if name in config.model_fields_set]:
        raise ConfigError(f"{wrong[0]} names a file of the server's machine; give it to `cocoa serve`")
    return config.model_dump(mode="json", include=config.model_fields_set)


class RemoteStream:
    """One request, and what has come back: an answer while it is decoded; see :class:`.local.LocalStream`.

    It is read by a loop, or by one with ``async for`` in its context.
    """

    def __init__(self, service: RemoteChat, call: ChatCall, *, stream: bool) -> None:
        self._service, self._call, self._stream = service, call, stream
        self._path = "/completions" if call.messages is None else "/chat/completions"
        self._body = self._request()
        self._reasoning = self._content = ""
        self._calls: list[Call] = []
        self._numbers: dict[int, int] = {}  # of the last call with each index
        self._tokens: list[dict[str, Any]] = []
        self._last: Choice | None = None
        self._model: str | None = None
        self._usage = SentUsage()

    def _request(self) -> dict[str, Any]:
        call, source = self._call, self._call.source
        if call.logits_processor or call.stopping_criteria:
            raise ConfigError("logits_processor and stopping_criteria cannot be sent to a server; leave them out")
        cocoa: dict[str, Any] = {**sent_settings(call.config), "report": "message"}
        if call.candidates:
            cocoa["candidates"] = True
        if call.tools.tools:
            cocoa["invalid_calls"] = True
        passages: Any = source
        if callable(source):
            # no passage goes from one message into the next
            text = call.prompt if call.messages is None else "\0".join(entry["content"] for entry in call.messages)
            passages = source(lambda: str(text), most=MOST_PASSAGES)
        if any(not isinstance(passage, str) for passage in passages or ()):
            raise ConfigError("source takes texts where the model is at a server, not ranges of the prompt")
        if passages:
            cocoa["source"] = list(passages)
        body: dict[str, Any] = {"model": self._service.model, "cocoa": cocoa, "stream": self._stream}
        if self._stream:
            body["stream_options"] = {"include_usage": True}
        if call.messages is None:
            tokens = {"logprobs": call.config.top_logprobs} if call.logprobs else {}
            return {**body, "prompt": call.prompt, **tokens}
        variables = dict(call.template.chat_template_kwargs)
        if call.template.enable_thinking is not None:
            variables["enable_thinking"] = call.template.enable_thinking
        body |= {"messages": [], **call.tools.parameters}
        for entry in call.messages:
            functions = [(tool_call, tool_call["function"]) for tool_call in entry.get("tool_calls", ())]
            calls = [  # in OpenAI's protocol the arguments of calls are JSON text
                {**tool_call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
                for tool_call, function in functions
            ]
            body["messages"].append({**entry, **({"tool_calls": calls} if calls else {})})
        if variables:
            body["chat_template_kwargs"] = variables
        if call.template.continue_final_message:
            body["continue_final_message"] = True
        if call.logprobs:
            body["logprobs"] = True
        return body

    def send(self) -> Any:
        """Send the request. Returns the JSON of the response, or its events."""
        post = self._service.client().post
        try:
            return post(**self._arguments(self._service.openai.Stream))
        except self._service.openai.BadRequestError as error:
            self._do_without_passages(error)
        return post(**self._arguments(self._service.openai.Stream))

    async def asend(self) -> Any:
        """See :meth:`send`."""
        post = self._service.async_client().post
        try:
            return await post(**self._arguments(self._service.openai.AsyncStream))
        except self._service.openai.BadRequestError as error:
            self._do_without_passages(error)
        return await post(**self._arguments(self._service.openai.AsyncStream))

    def _arguments(self, stream_cls: Any) -> dict[str, Any]:
        stream = {"stream": True, "stream_cls": stream_cls[object]} if self._stream else {}
        return {"path": self._path, "cast_to": object, "body": self._body, **stream}

    def _do_without_passages(self, error: BadRequestError) -> None:
        """Leave out passages that the server does not find, if they were found in the prompt and not named by the user.

        The chat template of the server can change or drop the text of a message. Another error is raised again.
        """
        source, is_named = self._call.source, error.param in ("cocoa.source", "source")
        if not (callable(source) and is_named and "source" in self._body["cocoa"]):
            raise error
        source(str, most=0)  # the answer has none
        del self._body["cocoa"]["source"]

    def open(self) -> None:
        """Nothing is done before the first piece is asked for."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Piece]:
        return next(self._steps)

    def close(self) -> None:
        """Close the connection, which ends the work of the server."""
        self._steps.close()

    @cached_property  # made when it is read: the generator refers to this object
    def _steps(self) -> Generator[list[Piece], None, None]:
        with self._service.clear_errors(), self.send() as events:
            for event in events:
                yield self._pieces(event)

    async def __aenter__(self) -> Self:
        with self._service.clear_errors():
            self._events = await self.asend()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._events.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Piece]:
        with self._service.clear_errors():
            return self._pieces(await anext(self._events))

    def _pieces(self, sent: Any) -> list[Piece]:
        """What a chunk adds."""
        chunk = received(sent, Chunk)
        self._model = chunk.model or self._model
        self._usage = chunk.usage or self._usage
        pieces: list[Piece] = []
        for choice in chunk.choices[:1]:
            added, deltas, tokens = choice.added, *self._grow(choice)
            spans = [span.without("index") for span in added.cocoa_spans or ()]
            entry = spans[0] if spans else None
            listed = tokens if self._call.logprobs else None
            piece = Piece(entry, added.content or "", added.reasoning_content or "", deltas, None, listed)
            if entry or piece.content or piece.reasoning or deltas:
                pieces.append(piece)
            pieces += [Piece(span) for span in spans[1:]]
            if choice.finish_reason is not None:
                self._last = choice
        return pieces

    def _grow(self, choice: Choice) -> tuple[list[CallDelta], list[dict[str, Any]]]:
        """Add what a response or a chunk has; the new parts of calls and the new tokens."""
        added, deltas, tokens = choice.added, [], choice.tokens(self._call.config.top_logprobs)
        self._content += added.content or ""
        self._reasoning += added.reasoning_content or ""
        self._tokens += tokens
        for position, sent in enumerate(added.tool_calls or ()):
            index = position if sent.index is None else sent.index
            number = self._numbers.get(index, len(self._calls))
            # some servers give all calls one index, or none: a part with another id is of that call, or begins one
            if sent.id and (number == len(self._calls) or sent.id != self._calls[number].id):
                ids = [call.id for call in self._calls]
                number = ids.index(sent.id) if sent.id in ids else len(ids) if sent.function.name else number
            if begins := number == len(self._calls):
                self._calls.append(Call(id=sent.id or new_id()))
            self._numbers[index] = number
            before, written = self._calls[number], sent.function.arguments or ""
            name, call_id = sent.function.name or before.name, before.id
            self._calls[number] = Call(name=name, written=before.written + written, id=call_id)
            deltas.append(CallDelta(number, call_id if begins else None, name if begins else None, written))
        return deltas, tokens

    def whole(self, sent: Any, on_piece: Callable[[Piece], None] | None) -> Answer:
        """The whole answer of a response."""
        response = received(sent, Completion)
        self._last = response.choices[0]
        self._model, self._usage = response.model, response.usage or self._usage
        self._grow(self._last)
        answer = self.answer
        if on_piece is not None:
            for entry in answer.spans:
                on_piece(Piece(entry))
        return answer

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has been read to its end.

        Raises:
            DataError: the stream ended before the answer was complete.
        """
        if self._last is None:
            raise DataError("the server's answer is incomplete: its stream ended early")
        sent, usage, report, reasoning_tokens = self._last.added.cocoa_risk, self._usage, None, None
        errors: dict[str, str] = {}  # why the server could not parse calls, by their ids
        if sent is not None:  # as a model in this process has it
            report = sent.without("finish_reason", "verdict")
            report = report.with_values(spans=[span.without("index") for span in sent.spans])
            errors = {call.id: call.error for call in sent.tool_calls if call.error is not None}
            if report.reasoning is not None:
                reasoning_tokens = usage.completion_tokens_details.reasoning_tokens
        calls, deltas = [], []
        for number, call in enumerate(self._calls):
            error, arguments = errors.get(call.id), None
            if error is not None:
                deltas.append(CallDelta(number, None, None, "", error))
            elif call.name is None:
                error = "it has no name"
            elif (arguments := object_of(call.written or "{}")) is None:
                error = "its arguments are not a JSON object"
            text = invalid_call_text(call.name, call.written)
            calls.append(Call(call.name, call.written, arguments, error=error, id=call.id, text=text))
        spans = [] if report is None else report.spans
        return Answer(
            text=self._content if report is None else "".join(span.text or "" for span in spans),
            content=self._content,
            reasoning=self._reasoning,
            calls=calls,
            finish_reason=(sent and sent.finish_reason) or self._last.finish_reason,
            model_name=self._model,
            usage=Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                risk_points=sum(span.kind == "risk_point" for span in spans),
                cached_tokens=usage.prompt_tokens_details.cached_tokens,
            ),
            reasoning_tokens=reasoning_tokens,
            logprobs=self._tokens if self._call.logprobs else None,
            make_report=lambda: report,
            rest=Piece(calls=deltas) if self._stream else Piece(),
        )
