"""The process that runs the code. It answers the judge's requests: to look up a name, to call, to get or set."""

from __future__ import annotations

import os
from typing import Any

from .process import confine, reason_of, silence
from .values import Channel, MessageError, decode, encode


def main() -> None:
    """Run the code of the first message, and then answer requests until the judge closes the channel."""
    channel = Channel(os.dup(0), os.dup(1))
    silence()
    job = channel.receive()
    confine(job["modules"], seconds=job["seconds"], memory_mb=job["memory_mb"], confined=job["confined"])
    worker = _Worker()
    channel.send(worker.answer({"do": "run", "code": job["code"]}))
    leave, receive, send, answer = os._exit, channel.receive, channel.send, worker.answer
    while True:
        try:
            request = receive()
        except EOFError:
            leave(0)
        try:
            send(answer(request))
        except MessageError as error:
            send({"error": ["ValueError", f"the code returned {error}"]})


class _Worker:
    def __init__(self) -> None:
        self._namespace: dict[str, Any] = {"__name__": "__generated__"}
        self._objects: list[Any] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply: a value, or the type and message of an error."""
        try:
            return {"value": encode(self._done(request), self._keep)}
        except BaseException as error:  # SystemExit too
            return {"error": reason_of(error)}

    def _done(self, request: dict[str, Any]) -> Any:
        what = request["do"]
        if what == "run":
            exec(compile(request["code"], "<generated>", "exec"), self._namespace)
            return None
        if what == "has":
            return request["name"] in self._namespace
        if what == "name":
            return self._namespace[request["name"]]
        of = self._objects[request["object"]]
        if what == "get":
            return getattr(of, request["name"])
        values = decode(request["values"], self._objects.__getitem__)
        if what == "set":
            return setattr(of, request["name"], values[0])
        return of(*values, **decode(request["options"], self._objects.__getitem__))

    def _keep(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1
