"""Finding a model's retrieval heads: the attention heads that attend to the token that is copied next.

After Wu et al., "Retrieval Head Mechanistically Explains Long-Context Factuality" (2024). A sentence, the needle, is
hidden in a longer text, and the model is asked for it. While the model answers greedily, a head scores 1 / |needle| at
each generated token if the position it attends to most is inside the needle and holds that token. Only runs in which
the model recalls the needle count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.engine import CocoaEngine
from cocoa_engine.errors import PromptError, UnsupportedModelError
from cocoa_engine.execution.backends.base import Backend, TokenTree
from cocoa_engine.execution.backends.shared_cache import SharedTree
from cocoa_engine.execution.forward.observed_attention import observed_attention
from cocoa_engine.execution.forward.source_attention import Heads, SourceProbe
from cocoa_engine.lab.answer_cache import AnswerCache, CacheFolder
from cocoa_engine.lab.haystack import HAY, NEEDLES, Needle
from cocoa_engine.methods.retrieval_heads import RetrievalHeads, ScoredHead
from cocoa_engine.model.configs import attention_heads
from cocoa_engine.model.generation_config import eos_token_ids
from cocoa_engine.scoring.text_tree import opened

LENGTHS = (256, 512, 1024)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
RUNS = len(DEPTHS) * len(NEEDLES)
"""The number of needles that are hidden in texts of one length."""

RECALLED = 0.5
"""A run counts if the ROUGE-1 recall of the needle in the answer is above this."""


class HiddenNeedle(NamedTuple):
    prompt: list[int]
    needle: range  # its positions in the prompt


def find_retrieval_heads(
    engine: CocoaEngine,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    cache: CacheFolder | None = None,
) -> RetrievalHeads:
    """Score every attention head of an engine's model.

    Args:
        engine: the engine with the model.
        lengths: the lengths of the texts that needles are hidden in, in tokens.
        depths: the relative positions of the needle in the text, from 0 to 1.
        on_progress: called with the number of runs done and their total.
        cache: a :class:`.CacheFolder` that keeps the scores of every run; runs that are in it are not repeated.

    Raises:
        UnsupportedModelError: the model's attention cannot be observed, its heads cannot be numbered, or the model
            recalls no needle.
        PromptError: a text does not fit the context window.
        ConfigError: the cache is required, and cannot be read or written.
    """
    backend = engine.session.backend
    if not backend.sees_attention:
        raise UnsupportedModelError(
            f"heads can be observed only if attention goes through transformers' AttentionInterface; that of "
            f"{engine.model_name} has code of its own."
        )
    model = engine.session.model
    num_heads = attention_heads(model.config)
    if model.is_divided or num_heads is None:
        why = "is divided among processes" if model.is_divided else "has another number of heads in each layer"
        raise UnsupportedModelError(f"the heads of {engine.model_name} cannot be numbered: the model {why}.")
    total = torch.zeros(model.num_layers, num_heads, dtype=torch.float64)
    runs = [(length, depth, needle) for length in lengths for depth in depths for needle in NEEDLES]
    known = None if cache is None else AnswerCache(cache, "needles", engine, engine.config, {})
    samples = 0
    for number, (length, depth, needle) in enumerate(runs):
        prompt = _prompt(engine, needle, length, depth)
        values = None if known is None else known.get([prompt, needle.text])
        if values is None:
            run = HiddenNeedle(prompt, _positions(engine, prompt, needle.text))
            scores, answer = _answered(engine, backend, run, num_heads)
            if known is not None:
                known.add([prompt, needle.text], {"scores": scores.tolist(), "answer": answer})
        else:
            scores, answer = torch.tensor(values["scores"], dtype=torch.float64), values["answer"]
        if _recall(needle.text, answer) > RECALLED:
            total += scores
            samples += 1
        on_progress(number + 1, len(runs))
    if not samples:
        raise UnsupportedModelError(
            f"{engine.model_name} recalled none of {len(runs)} needles: it has no clear retrieval heads, or the texts "
            "are too long for it; try shorter ones (--lengths)."
        )
    mean = (total / samples).tolist()
    heads = [
        ScoredHead(layer=layer, head=head, score=score)
        for layer, row in enumerate(mean)
        for head, score in enumerate(row)
    ]
    heads.sort(key=lambda head: (-head.score, head.layer, head.head))
    return RetrievalHeads(
        model_name=engine.model_name, num_layers=model.num_layers, num_heads=num_heads, samples=samples, heads=heads
    )


def hide(engine: CocoaEngine, needle: Needle, length: int, depth: float) -> HiddenNeedle:
    """A prompt of about ``length`` tokens that contains the needle, and the needle's positions."""
    prompt = _prompt(engine, needle, length, depth)
    return HiddenNeedle(prompt, _positions(engine, prompt, needle.text))


def _prompt(engine: CocoaEngine, needle: Needle, length: int, depth: float) -> list[int]:
    """A prompt of about ``length`` tokens that contains the needle."""
    hay = engine.encode(" ".join(HAY), add_special_tokens=False)
    hay = (hay * (length // len(hay) + 1))[:length]
    at = int(depth * len(hay))
    before, after = engine.decode(hay[:at]), engine.decode(hay[at:])
    question = f"{needle.question} Answer with the sentence of the text that says so, word for word."
    text = f"{before} {needle.text} {after}\n\n{question}"
    if engine.has_chat_template:
        text = engine.render_chat([{"role": "user", "content": text}])
        prompt = engine.encode(text, add_special_tokens=False)
    else:
        prompt = engine.encode(f"{text}\nAnswer:")
    window = engine.context_window
    if window is not None and len(prompt) + 64 > window:
        raise PromptError(
            f"a text of {length} tokens does not fit the model's context window of {window}; give shorter --lengths."
        )
    return prompt


def _positions(engine: CocoaEngine, prompt: list[int], needle: str) -> range:
    """The positions of the needle's tokens: the shortest run of tokens whose text contains the needle."""
    end = next((n for n in range(1, len(prompt) + 1) if needle in engine.decode(prompt[:n])), None)
    if end is None:
        raise UnsupportedModelError(
            f"the tokenizer of {engine.model_name} changes the text it is given; its heads cannot be scored."
        )
    start = next(n for n in range(end - 1, -1, -1) if needle in engine.decode(prompt[n:end]))
    return range(start, end)


class _MostAttended(SourceProbe):
    """Notes the position that each head attends to most, by layer."""

    def __init__(self, heads: Heads, seen: dict[int, Tensor]) -> None:
        super().__init__(heads, range(0))
        self._seen = seen

    def take(self, layer: int, weights: Tensor, first: int) -> None:
        """Note the positions of one layer."""
        self._seen[layer] = weights[:, -1].argmax(-1).cpu() + first


@contextmanager
def _most_attended(backend: Backend, tree: TokenTree, heads: Heads, length: int) -> Iterator[dict[int, Tensor]]:
    """The positions that the heads attend to most, by layer, in a step of one token inside the context.

    Args:
        backend: runs the model.
        tree: the sequence.
        heads: all heads of the model.
        length: the number of tokens of the sequence, with that of the step.
    """
    seen: dict[int, Tensor] = {}
    if backend.masks_heads:
        assert isinstance(tree, SharedTree)
        tree.probe = seen.__setitem__
        yield seen
        return
    model = backend.model
    with model.exclusive(), observed_attention(model, _MostAttended(heads, seen), rows=1, length=length):
        yield seen


def _answered(engine: CocoaEngine, backend: Backend, run: HiddenNeedle, num_heads: int) -> tuple[Tensor, str]:
    """Answer greedily. Returns the score of each head, ``[L, heads]``, and the answer's text."""
    model = backend.model
    scores = torch.zeros(model.num_layers, num_heads, dtype=torch.float64)
    heads = [(layer, head) for layer in range(model.num_layers) for head in range(num_heads)]
    prompt_ids = torch.tensor(run.prompt)
    ends = eos_token_ids(model.model, engine.session.tokens)
    reserve = 2 * len(run.needle) + 16
    spec = capture_spec(model, CocoaConfig())._replace(source_heads=())  # nothing but the heads is observed
    with opened(backend, run.prompt[:-1], reserve, spec) as tree:
        backend.prefill(tree)
        token_id, answer = run.prompt[-1], list[int]()
        while len(answer) < 2 * len(run.needle) + 8:
            with _most_attended(backend, tree, heads, len(run.prompt) + len(answer)) as attended:
                output = backend.step([(tree, [(token_id,)])])[0]
            tree.commit((token_id,))
            token_id = int(output.logits[0].argmax())
            if token_id in ends:
                break
            answer.append(token_id)
            for layer, positions in attended.items():
                inside = (positions >= run.needle.start) & (positions < run.needle.stop)
                copied = prompt_ids[positions.clamp(max=len(run.prompt) - 1)] == token_id
                scores[layer, : len(positions)] += (inside & copied) / len(run.needle)
    return scores.clamp(max=1), engine.decode(answer)


def _recall(expected: str, actual: str) -> float:
    """ROUGE-1 recall: the share of the expected words that occur in the actual text."""
    words = Counter(_words(expected))
    return sum((words & Counter(_words(actual))).values()) / sum(words.values())


def _words(text: str) -> Iterator[str]:
    return (word.strip(".,;:!?\"'()").lower() for word in text.split())
