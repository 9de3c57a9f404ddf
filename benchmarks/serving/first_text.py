"""What comes before the first text of an answer: forward passes and tokens are counted, no time is measured."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from benchmarks.serving.client import Body, Streamed, ask_all
from benchmarks.serving.names import OURS, OURS_SIG, RIVAL
from benchmarks.serving.processes import free_port, running, transformers_serve
from benchmarks.serving.rival import body_of, unpacked_into
from cocoa_engine import CocoaEngine

REQUESTS = range(1, 13)
"""Those that the comparison asks one at a time, in its first three rounds."""


def measure(threads: int, folder: Path) -> dict[str, Any]:
    """Count.

    Args:
        threads: threads of the other server.
        folder: for logs and the model.
    """
    engine = unpacked_into(folder / "model")
    counts = {
        name: [before_first_text(engine, body_of(number, 64, {}), method) for number in REQUESTS]
        for name, method in ((OURS, "greedy"), (OURS_SIG, "cocoa-sig"))
    }
    model, port = str(folder / "model"), free_port()
    asked = [body_of(number, 8, {"temperature": 0, "model": model}) for number in REQUESTS]
    with running(transformers_serve(port, model), port, threads, folder / "first.log") as server:
        answers = asyncio.run(ask_all(server.url, asked, 1))
    counts[RIVAL] = [_first_piece(one, engine) for one in answers]
    return {name: {part: [one[part] for one in of] for part in ("passes", "tokens")} for name, of in counts.items()}


def before_first_text(engine: CocoaEngine, body: Body, method: str) -> dict[str, int]:
    """Forward passes after the prompt and before the first text of an answer, and the tokens of this text."""
    passes: list[Any] = []
    engine.session.scheduler.observers.append(passes.append)
    try:
        config = engine.config.replace(method=method, max_new_tokens=body["max_tokens"])
        with engine.stream_chat(body["messages"], config=config) as stream:
            tokens = 0
            for span in stream:
                tokens += len(span.token_ids)
                if span.text:
                    break
    finally:
        engine.session.scheduler.observers.remove(passes.append)
    return {"passes": sum(batch[0].paths is not None for batch in passes), "tokens": tokens}


def _first_piece(answer: Streamed, engine: CocoaEngine) -> dict[str, int]:
    """Likewise of a server that sends each token: the first one follows from the prompt's own pass."""
    if answer.failure is not None:
        raise RuntimeError(answer.failure)
    tokens = len(engine.tokenizer.encode(answer.pieces[0][1], add_special_tokens=False))
    return {"passes": tokens - 1, "tokens": tokens}
