"""A local server with OpenAI's chat completions that replays recorded answers, and a chat model that asks it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatResult


class Recorded:
    """Recorded answers by a text that the prompt contains; the last recorded that fits is replayed.

    Attributes:
        answers: the answer for a prompt that contains the key; a number is the status of an error.
        requests: what was asked, in order.
    """

    def __init__(self, answers: dict[str, str | int]) -> None:
        self.answers = answers
        self.requests: list[dict[str, Any]] = []
        self.url = ""

    def answer(self, request: dict[str, Any]) -> str | int:
        self.requests.append(request)
        prompt = request["messages"][0]["content"]
        return next((answer for key, answer in reversed(self.answers.items()) if key in prompt), 404)

    @contextmanager
    def served(self) -> Iterator[Recorded]:
        """Serves the answers on a free port of this machine."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self.answer))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join(30)


def _handler(answer: Callable[[dict[str, Any]], str | int]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = answer(request)
            if isinstance(found, int):
                self.send_response(found)
                self.end_headers()
                return
            words = len(request["messages"][0]["content"].split()), len(found.split())
            body = {
                "choices": [{"message": {"role": "assistant", "content": found}}],
                "usage": {"prompt_tokens": words[0], "completion_tokens": words[1], "total_tokens": sum(words)},
            }
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class OpenAIChat(BaseChatModel):
    """As little of a client of such a server as a judge needs."""

    url: str
    model: str = "recorded"
    temperature: float | None = 0.0

    @property
    def _llm_type(self) -> str:
        return "openai"

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> Any:
        content = str(messages[0].content)
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": self.temperature,
        }
        response = httpx.post(f"{self.url}/chat/completions", json=request, timeout=30)
        response.raise_for_status()
        answered = response.json()
        usage = answered["usage"]
        message = AIMessage(
            content=answered["choices"][0]["message"]["content"],
            usage_metadata=UsageMetadata(
                input_tokens=usage["prompt_tokens"],
                output_tokens=usage["completion_tokens"],
                total_tokens=usage["total_tokens"],
            ),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])
