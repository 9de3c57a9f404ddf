"""A connection to a client: bytes that are not HTTP are answered in the shape of all other errors."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from cocoa_integrations.server.errors import bad_request, response_of

_MALFORMED = "the request is not valid HTTP/1.1; see its request line, headers and chunk sizes"


_LINGER = 2.0
"""Seconds in which the rest of a malformed request is dropped. A connection that is closed before it was read is reset,
and the answer is lost."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # what is installed decides
    """uvicorn's connection, with errors of the HTTP syntax as JSON."""

    transport: Any
    cycle: Any
    _ends = False

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        if not self._ends:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what its parser refuses."""
        self._ends = True
        if self._answers:
            self.transport.close()
        else:
            response = response_of(bad_request(_MALFORMED, None, "malformed_request"))
            response.headers["connection"] = "close"
            lines = [b"HTTP/1.1 400 Bad Request", *(name + b": " + value for name, value in response.raw_headers)]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
            self.transport.resume_reading()
            self.transport.write_eof()
            asyncio.get_running_loop().call_later(_LINGER, self.transport.close)

    @property
    def _answers(self) -> bool:
        """Whether an answer is under way, or the malformed request has got one, as one that is refused early has."""
        if self.cycle is None:
            return False
        waiting = getattr(self, "pipeline", ())  # of httptools: requests that came before the earlier answer ended
        complete = self.cycle.response_complete and not self.cycle.more_body
        return bool(waiting) or (self.cycle.response_started and not complete)

    def _unsupported_upgrade_warning(self) -> None:
        """Not said: uvicorn would advise to install web sockets, which this server does not have."""
