"""What each process of a tensor-parallel run does in the tests: load its part, decode, write down what came of it.

python tests/helpers/tensor_parallel_process.py CHECKPOINT OUT

As ``torchrun --nproc-per-node 2 --standalone`` it starts two processes, but they share the time that imports take.
"""

import gc
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from cocoa_engine import CocoaEngine, Generation
from tests.helpers.inside import hook_count

PROMPTS = [[5, 6, 7, 100, 20], [8, 9], list(range(30, 60))]
TEXTS = [[8, 9], [8, 10, 11], [12]]
WAYS_TO_ASK: list[dict[str, Any]] = [{"tp_plan": "auto"}, {"distributed_config": {"tp_plan": "auto"}}]


def decoded(engine: CocoaEngine, *, whole: bool = True) -> list[Generation]:
    """One answer, and unless it is enough a ragged batch, a stream, a seeded sample and some scored texts."""
    answer = engine.generate(PROMPTS[0], max_new_tokens=10)
    if not whole:
        return [answer]
    with engine.stream(PROMPTS[1], max_new_tokens=4) as stream:
        list(stream)
    assert stream.generation is not None
    return [
        answer,
        *engine.generate_batch(PROMPTS, max_new_tokens=4),
        stream.generation,
        engine.generate(PROMPTS[0], max_new_tokens=4, temperature=2.0, seed=1),
        *engine.score(PROMPTS[0], TEXTS),
        engine.score(PROMPTS[0], TEXTS[1]),
    ]


def main(checkpoint: str, out: Path) -> None:
    """Decode with each way to ask for tensor parallelism."""
    for number, options in enumerate(WAYS_TO_ASK):
        engine = CocoaEngine.from_pretrained(checkpoint, **options)
        parts = [weight for weight in engine.model.parameters() if isinstance(weight, DTensor)]
        found = {
            "answers": [answer.model_dump(mode="json") for answer in decoded(engine, whole=number == 0)],
            "unseeded": engine.generate(PROMPTS[0], max_new_tokens=4, temperature=20.0).token_ids,
            "halved": sum(2 * weight.to_local().numel() == weight.numel() for weight in parts),
            "hooks": hook_count(engine.model),
            "info": engine.info().model_dump(mode="json"),
        }
        (out / f"{number}-{os.environ['RANK']}.json").write_text(json.dumps(found))


def divide() -> int:
    """Go on as two processes, with the variables that ``torchrun`` sets.

    Returns:
        As :func:`os.fork`.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    child = os.fork()
    rank = str(int(child == 0))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
    return child


if __name__ == "__main__":
    other = divide()
    main(sys.argv[1], Path(sys.argv[2]))
    assert not other or os.waitpid(other, 0)[1] == 0
    gc.freeze()  # the exit does not look through what was imported
