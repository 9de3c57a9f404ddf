"""Answers prompts greedily with llama.cpp's low-level calls. It runs in a Python that has llama-cpp-python.

    python llama_cpp_worker.py FILE THREADS SLOTS

It needs nothing else of this project. Each line that it reads is a JSON object with ``prompt``, a list of token ids,
and ``tokens``, the maximum number of new ones. It prints the new ids with the seconds that the prompt took and those
that the other tokens took.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as llama
import numpy as np

ERROR = 4  # GGML_LOG_LEVEL_ERROR


class Greedy:
    """Greedy decoding of one sequence at a time."""

    def __init__(self, file: str, threads: int, slots: int) -> None:
        self.model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
        self.vocabulary = llama.llama_model_get_vocab(self.model)
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_threads, options.n_threads_batch = slots, threads, threads
        self.context = llama.llama_init_from_model(self.model, options)
        self.size = llama.llama_vocab_n_tokens(self.vocabulary)

    def answer(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        """Up to ``tokens`` new tokens; a token that ends the answer counts as one."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        start = time.perf_counter()
        found = [self._next(prompt)]
        after_prompt = time.perf_counter()
        while len(found) < tokens and not llama.llama_vocab_is_eog(self.vocabulary, found[-1]):
            found.append(self._next(found[-1:]))
        end = time.perf_counter()
        return {"ids": found, "prompt_seconds": after_prompt - start, "other_seconds": end - after_prompt}

    def _next(self, ids: Sequence[int]) -> int:
        tokens = (llama.llama_token * len(ids))(*ids)  # the batch holds a pointer to it, not the array
        batch = llama.llama_batch_get_one(tokens, len(ids))
        if code := llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        logits = llama.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.size,)).argmax())


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _errors(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Show errors only: llama.cpp logs a page of text for each file."""
    if level == ERROR:
        sys.stderr.write(text.decode())


def main() -> None:
    """Answer the prompts on stdin."""
    file, threads, slots = sys.argv[1:]
    llama.llama_log_set(_errors, ctypes.c_void_p(0))
    llama.llama_backend_init()
    greedy = Greedy(file, int(threads), int(slots))
    about = {"version": llama.__version__, "system": llama.llama_print_system_info().decode()}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        print(json.dumps(greedy.answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
