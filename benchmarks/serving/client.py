"""A client of OpenAI's protocol that notes when each chunk of a stream came. It parses the chunks after the end."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import aiohttp

PATH = "/v1/chat/completions"
SEPARATOR = b"\n\n"

Body = Mapping[str, Any]


@dataclass
class Streamed:
    """One streamed answer.

    Attributes:
        number: the number of its request.
        asked: when it was asked for, in seconds of ``time.perf_counter``.
        events: when each event came, and its bytes.
        status: of the response. 0: there was none.
        error: why the stream ended before its end.
        refusals: how often it was refused with status 429 before.
    """

    number: int
    asked: float
    events: list[tuple[float, bytes]] = field(default_factory=list)
    status: int = 0
    error: str | None = None
    refusals: int = 0

    @cached_property
    def chunks(self) -> list[tuple[float, dict[str, Any]]]:
        """The chunks, each with the time at which it came."""
        data = ((at, event.removeprefix(b"data: ")) for at, event in self.events if event.startswith(b"data: "))
        return [(at, json.loads(text)) for at, text in data if text != b"[DONE]"]

    @property
    def failure(self) -> str | None:
        """What went wrong; ``None`` if the answer is complete."""
        if self.error is not None or self.status != 200:
            return self.error or f"status {self.status}"
        for _, chunk in self.chunks:
            if "error" in chunk:
                return str(chunk["error"])
        return None if any(_finish_reason(chunk) for _, chunk in self.chunks) else "the stream has no end"

    @property
    def pieces(self) -> list[tuple[float, str]]:
        """The pieces of the text, each with the time at which it came."""
        found = ((at, (choice["delta"].get("content") or "")) for at, choice in self._choices())
        return [(at, text) for at, text in found if text]

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(text for _, text in self.pieces)

    @property
    def tokens(self) -> int:
        """The number of tokens of the answer, as the server counts them."""
        counts = [chunk["usage"]["completion_tokens"] for _, chunk in self.chunks if chunk.get("usage")]
        return counts[-1] if counts else 0

    @property
    def to_first(self) -> float:
        """Seconds from the request to the first piece of text."""
        return self.pieces[0][0] - self.asked

    @property
    def between(self) -> list[float]:
        """Seconds between the pieces of the text."""
        times = [at for at, _ in self.pieces]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    def _choices(self) -> Iterator[tuple[float, dict[str, Any]]]:
        return ((at, choice) for at, chunk in self.chunks for choice in chunk.get("choices", ()))


def _finish_reason(chunk: Mapping[str, Any]) -> str | None:
    reasons = (choice.get("finish_reason") for choice in chunk.get("choices", ()))
    return next((reason for reason in reasons if reason), None)


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without a limit of connections."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as opened:
        yield opened


async def ask(client: aiohttp.ClientSession, url: str, body: Body, number: int = 0) -> Streamed:
    """Stream one answer. A refused call is repeated after the time that the server names.

    Args:
        client: the client.
        url: the address of the server.
        body: the request, without ``stream``.
        number: the number of the request.
    """
    answer = Streamed(number, time.perf_counter())
    try:
        while True:
            async with client.post(url + PATH, json={**body, "stream": True}) as response:
                answer.status = response.status
                if response.status == 429:
                    answer.refusals += 1
                    await asyncio.sleep(float(response.headers["retry-after"]))
                    continue
                if response.status != 200:
                    answer.error = (await response.text())[:500]
                    return answer
                rest = b""
                async for part in response.content.iter_any():
                    now = time.perf_counter()
                    *events, rest = (rest + part).split(SEPARATOR)
                    answer.events += [(now, event) for event in events]
                return answer
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
        return answer


async def ask_all(url: str, bodies: Sequence[Body], at_once: int, until: float | None = None) -> list[Streamed]:
    """Ask all requests, a number of them at a time.

    Args:
        url: the address of the server.
        bodies: the requests.
        at_once: how many are asked at the same time.
        until: go around until this time of ``time.perf_counter``. By default, each is asked once.
    """
    answers: list[Streamed] = []
    numbers = iter(range(len(bodies) if until is None else 10**9))

    async def worker(client: aiohttp.ClientSession) -> None:
        for number in numbers:
            if until is not None and time.perf_counter() >= until:
                return
            answers.append(await ask(client, url, bodies[number % len(bodies)], number % len(bodies)))

    async with session() as client:
        await asyncio.gather(*(worker(client) for _ in range(at_once)))
    return answers
