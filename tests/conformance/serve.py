"""Serves the embedded model on a port of this machine: ``python -m tests.conformance.serve '{"port": 8000}'``."""

from __future__ import annotations

import json
import sys

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server.process import DrainingServer


def main(max_new_tokens: int, **settings: object) -> None:
    """Serve until a signal comes. Requests that name no limit get few tokens: no suite waits for long answers."""
    engine = CocoaEngine.from_pretrained(dtype="float32", config=CocoaConfig(max_new_tokens=max_new_tokens))
    DrainingServer(create_app(engine, ServerSettings(**settings)), log_level="warning").run()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
