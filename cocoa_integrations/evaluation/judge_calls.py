"""Sends prompts to a judge, any LangChain chat model, until its replies contain what was asked for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from hashlib import sha256
from itertools import islice
from json import dumps
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from cocoa_engine.errors import ConfigError, DataError
from cocoa_integrations.evaluation.files import read_lines

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel, LanguageModelInput
    from langchain_core.messages import AIMessage
    from langchain_core.runnables import Runnable

    Judge = Runnable[LanguageModelInput, AIMessage]

TOKENS = ("input_tokens", "output_tokens")


class Asked(NamedTuple):
    """A prompt, its key in the file, and the function that extracts the verdict from a reply.

    The verdict is any JSON value; ``None`` if the reply contains none.
    """

    key: str
    prompt: str
    verdict: Callable[[str], Any]

    @classmethod
    def of(cls, judge: str, prompt: str, verdict: Callable[[str], Any]) -> Asked:
        """A prompt for a judge. Equal prompts have the same key."""
        return cls(sha256(dumps([judge, prompt]).encode()).hexdigest(), prompt, verdict)


class _Reply(NamedTuple):
    """The text of a reply or an error message, and the numbers of tokens if the provider reports them."""

    text: str | None
    error: str | None
    tokens: dict[str, int] | None = None


class Asking:
    """How prompts are sent to a judge.

    Args:
        judge: the chat model. It is called with temperature 0.
        name: the name of the judge. Default: its class and model name.
        attempts: how often a prompt is sent until there is a verdict.
        timeout: time limit for one reply in seconds.
        concurrency: maximum number of concurrent prompts.

    Raises:
        ConfigError: an option is out of range, or the judge has a temperature.
    """

    def __init__(self, judge: BaseChatModel, name: str | None, attempts: int, timeout: float, concurrency: int) -> None:
        if attempts < 1 or concurrency < 1 or not timeout > 0:
            raise ConfigError("attempts, concurrency and timeout must be above 0")
        if getattr(judge, "temperature", None):
            raise ConfigError("the judge must be deterministic: make it with temperature=0")
        self.name = name or _name(judge)
        self._judge: Judge = judge if getattr(judge, "temperature", None) == 0 else judge.bind(temperature=0.0)
        self._attempts, self._timeout, self._concurrency = attempts, timeout, concurrency

    def replies(self, asked: Sequence[Asked]) -> Iterator[list[dict[str, Any]]]:
        """The lines about each prompt, one for each attempt, as soon as the prompt is completed."""
        stopped = threading.Event()  # set on Ctrl-C, so that outstanding replies are not awaited
        with ThreadPoolExecutor(self._concurrency) as pool:

            def submit(count: int) -> set[Future[list[dict[str, Any]]]]:
                return {pool.submit(self._ask, one, stopped) for one in islice(waiting, count)}

            waiting = iter(asked)
            running = submit(self._concurrency)
            try:
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
                    running |= submit(len(done))
            finally:
                stopped.set()

    def _ask(self, asked: Asked, stopped: threading.Event) -> list[dict[str, Any]]:
        """Send a prompt until there is a verdict. Returns a line for each attempt."""
        lines: list[dict[str, Any]] = []
        while len(lines) < self._attempts and not stopped.is_set():
            reply, error, tokens = self._reply(asked.prompt, stopped)
            verdict = None if reply is None else asked.verdict(reply)
            if verdict is None and error is None:
                error = "no verdict in the reply"
            line = {"judge": self.name, "key": asked.key, "verdict": verdict, "reply": reply, "error": error}
            lines.append({**line, "tokens": tokens})
            if verdict is not None:
                break
        return lines

    def _reply(self, prompt: str, stopped: threading.Event) -> _Reply:
        """The reply. The judge runs in a daemon thread, which does not block the exit if it hangs."""
        replies: SimpleQueue[_Reply] = SimpleQueue()

        def ask() -> None:
            try:
                message = self._judge.invoke(prompt)
                text = str(message.text)
                text.encode()  # raises an error for a lone surrogate, which cannot be stored
                usage: Any = message.usage_metadata
                counts = usage if isinstance(usage, Mapping) else {}  # some providers' are wrong; the reply counts
                tokens = {name: counts[name] for name in TOKENS if type(counts.get(name)) is int}
                replies.put(_Reply(text, None, tokens or None))
            except Exception as error:  # the errors of providers have no common base
                described = f"{type(error).__name__}: {error}"
                replies.put(_Reply(None, described.encode("utf-8", "backslashreplace").decode()))

        threading.Thread(target=ask, daemon=True).start()
        deadline = time.monotonic() + self._timeout
        while (remaining := deadline - time.monotonic()) > 0 and not stopped.is_set():
            with contextlib.suppress(Empty):
                return replies.get(timeout=min(remaining, 0.5))
        return _Reply(None, f"no reply within {self._timeout:g} s")


def read_replies(file: Path) -> list[dict[str, Any]]:
    """The stored replies of judges; none if there is no file.

    Raises:
        DataError: the file was changed after it was written.
    """
    lines = read_lines(file)
    for number, line in enumerate(lines, start=1):
        tokens = line.get("tokens") or {}
        known = isinstance(tokens, dict) and all(isinstance(value, int) for value in tokens.values())
        if not (known and isinstance(line.get("judge"), str) and isinstance(line.get("key"), str)):
            raise DataError(f"{file}, line {number}: not the reply of a judge; the file was changed")
    return lines


def verdicts_of(lines: Iterable[Mapping[str, Any]], judge: str) -> dict[str, Any]:
    """The stored verdicts of a judge, by key."""
    return {
        line["key"]: line["verdict"] for line in lines if line.get("judge") == judge and line.get("verdict") is not None
    }


def cost(lines: Iterable[Mapping[str, Any]], judge: str) -> dict[str, int]:
    """The number of stored calls of a judge, of those that failed, and of the tokens that its provider reported."""
    own = [line for line in lines if line.get("judge") == judge]
    tokens = {name: sum((line.get("tokens") or {}).get(name, 0) for line in own) for name in TOKENS}
    return {"calls": len(own), "without_verdict": sum(line.get("verdict") is None for line in own), **tokens}


def in_words(spent: Mapping[str, int]) -> str:
    """The result of :func:`cost` as a sentence."""
    words = f"Calls of the judge: {spent['calls']}, {spent['without_verdict']} of them without a verdict"
    if spent["input_tokens"] or spent["output_tokens"]:
        words += f"; {spent['input_tokens']} tokens read and {spent['output_tokens']} written"
    return f"{words}."


def _name(judge: BaseChatModel) -> str:
    model = next((value for field in ("model_name", "model") if (value := getattr(judge, field, None))), "")
    return f"{type(judge).__name__} {model}".strip()
