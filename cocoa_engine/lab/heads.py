"""Retrieval heads: search with needles in haystacks, and the reference distribution of their attention."""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.engine import CocoaEngine
from cocoa_engine.errors import PromptError, UnsupportedModelError
from cocoa_engine.execution.backends.shared_cache import SharedTree
from cocoa_engine.execution.forward.source_attention import Heads, SourceProbe, observed_attention
from cocoa_engine.lab.cache import AnswerCache, CacheFolder, answered
from cocoa_engine.lab.measured import request_prompt
from cocoa_engine.lab.self_made import passages
from cocoa_engine.methods.retrieval_heads import RetrievalHeads, ScoredHead, heads_of_model, keep, spread_heads_of
from cocoa_engine.model.configs import attention_heads
from cocoa_engine.model.generation_config import eos_token_ids
from cocoa_engine.output_files import write_file
from cocoa_engine.results import Generation
from cocoa_engine.scoring.text_tree import opened


class Needle(NamedTuple):
    """A sentence that is unrelated to the text around it, and the question that asks for it."""

    text: str
    question: str


NEEDLES = (
    Needle(
        "The best thing to do in Harrowgate on a rainy afternoon is to count the brass clocks in the old mill.",
        "What is the best thing to do in Harrowgate on a rainy afternoon?",
    ),
    Needle(
        "Old Captain Velmor kept his silver compass under the third step of the lighthouse stairs.",
        "Where did old Captain Velmor keep his silver compass?",
    ),
    Needle(
        "The secret of the baker's black bread is a spoonful of pine honey and two days of patience.",
        "What is the secret of the baker's black bread?",
    ),
)

HAY = (
    "A garden changes slowly, and most of what happens in it happens where nobody looks.",
    "In spring the soil warms from the top, and the worms that spent the winter deep below begin to rise.",
    "People who keep notes from year to year find that the same plants flower a week earlier after a mild winter.",
    "Water is the first worry of every summer, because a dry week in June does more harm than a dry month in August.",
    "Some gardeners leave the fallen leaves on the beds, since they keep the ground moist and feed it when they rot.",
    "Others prefer bare earth, which is easier to weed and warms faster, but which the wind and the rain carry off.",
    "Trees are planted in autumn, when their roots still have time to settle before the frost.",
    "A young tree wants a stake for two years and then none, for a stem that never bends never grows strong.",
    "Fruit is picked when it parts from the branch with a light turn of the hand.",
    "Roses are cut back hard when the willow catkins open, and again, lightly, after their first bloom.",
    "A hedge gives shelter to birds, slows the wind, and needs an hour of work in each month of summer.",
    "Tools last for decades if they are cleaned in the evening and hung up in a dry place.",
    "Compost is ready when it smells of forest and nothing in it can be recognised any more.",
    "In winter there is little to do but to sharpen the spade, read the seed lists and wait for the light.",
)

LENGTHS = (256, 512, 1024)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
RUNS = len(DEPTHS) * len(NEEDLES)
"""The number of needles that are hidden in texts of one length."""

RECALLED = 0.5
"""A run counts if the ROUGE-1 recall of the needle in the answer is above this."""


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
    answer_cache = None if cache is None else AnswerCache(cache, "needles", engine, engine.config, {})
    samples = 0
    for number, (length, depth, needle) in enumerate(runs, start=1):
        prompt = _prompt(engine, needle, length, depth)
        measure = partial(_answered, engine, prompt, needle.text)
        values = measure() if answer_cache is None else answer_cache.get_or_measure([prompt, needle.text], measure)
        if _recall(needle.text, values["answer"]) > RECALLED:
            total += torch.tensor(values["scores"], dtype=torch.float64)
            samples += 1
        on_progress(number, len(runs))
    if not samples:
        raise UnsupportedModelError(
            f"{engine.model_name} recalled none of {len(runs)} needles: it has no clear retrieval heads, or the texts "
            "are too long for it; try shorter ones (--lengths)."
        )
    scores = enumerate((total / samples).tolist())
    heads = [ScoredHead(layer=layer, head=head, score=score) for layer, row in scores for head, score in enumerate(row)]
    heads.sort(key=lambda head: (-head.score, head.layer, head.head))
    return RetrievalHeads(
        model_name=engine.model_name, num_layers=model.num_layers, num_heads=num_heads, samples=samples, heads=heads
    )


def _prompt(engine: CocoaEngine, needle: Needle, length: int, depth: float) -> list[int]:
    """A prompt of about ``length`` tokens that contains the needle."""
    hay = engine.encode(" ".join(HAY), add_special_tokens=False)
    hay = (hay * (length // len(hay) + 1))[:length]
    at = int(depth * len(hay))
    before, after = engine.decode(hay[:at]), engine.decode(hay[at:])
    question = f"{needle.question} Answer with the sentence of the text that says so, word for word."
    prompt = _encoded(engine, f"{before} {needle.text} {after}\n\n{question}")
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

    def __init__(self, heads: Heads) -> None:
        super().__init__(heads, range(0))
        self.seen: dict[int, Tensor] = {}

    def take(self, layer: int, weights: Tensor, first: int) -> None:
        self.seen[layer] = weights[:, -1].argmax(-1).cpu() + first


def _answered(engine: CocoaEngine, prompt: list[int], needle: str) -> dict[str, Any]:
    """Answer greedily. Returns the ``scores`` of each head, ``[L, heads]``, and the ``answer``'s text."""
    backend, model = engine.session.backend, engine.session.model
    num_heads = attention_heads(model.config) or 0
    scores = torch.zeros(model.num_layers, num_heads, dtype=torch.float64)
    heads = [(layer, head) for layer in range(model.num_layers) for head in range(num_heads)]
    place, prompt_ids = _positions(engine, prompt, needle), torch.tensor(prompt)
    ends = eos_token_ids(model.model, engine.session.tokens)
    spec = capture_spec(model, CocoaConfig())._replace(source_heads=())  # nothing but the heads is observed
    with opened(backend, prompt[:-1], 2 * len(place) + 16, spec) as tree:
        backend.prefill(tree)
        token_id, answer = prompt[-1], list[int]()
        while len(answer) < 2 * len(place) + 8:
            probe = _MostAttended(heads)
            with ExitStack() as observing:
                if backend.masks_heads:
                    assert isinstance(tree, SharedTree)
                    tree.probe = probe
                else:
                    length = len(prompt) + len(answer)  # with the token of this step
                    observing.enter_context(model.exclusive())
                    observing.enter_context(observed_attention(model, probe, rows=1, length=length))
                output = backend.step([(tree, [(token_id,)])])[0]
            tree.commit((token_id,))
            token_id = int(output.logits[0].argmax())
            if token_id in ends:
                break
            answer.append(token_id)
            for layer, positions in probe.seen.items():
                inside = (positions >= place.start) & (positions < place.stop)
                copied = prompt_ids[positions.clamp(max=len(prompt) - 1)] == token_id
                scores[layer, : len(positions)] += (inside & copied) / len(place)
    return {"scores": scores.clamp(max=1).tolist(), "answer": engine.decode(answer)}


def _recall(expected: str, actual: str) -> float:
    """ROUGE-1 recall: the share of the expected words that occur in the actual text."""
    words, said = (Counter(word.strip(".,;:!?\"'()").lower() for word in text.split()) for text in (expected, actual))
    return (words & said).total() / words.total()


PROMPTS, MAX_NEW_TOKENS = 60, 48
"""The default number of prompts, as many questions as requests to retell a passage, and the tokens of an answer."""

KNOTS, MIN_SPANS = 101, 50
"""The number of quantiles that are stored. With fewer spans, the distribution would be too rough."""


def with_reference(
    engine: CocoaEngine,
    heads: RetrievalHeads,
    *,
    prompts: int = PROMPTS,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    cache: CacheFolder | None = None,
) -> RetrievalHeads:
    """Measure the reference distribution of a model's source attention.

    Args:
        engine: the engine with the model. Its settings are used for decoding.
        found: the model's retrieval heads.
        prompts: the number of prompts that the model answers.
        seed: seed of the invented passages.
        on_progress: called with the number of prompts answered and their total.
        cache: a :class:`.CacheFolder` that keeps what is measured of every answer; prompts that are in it are not
            answered again.

    Returns:
        The heads with ``reference`` and ``reference_spans``.

    Raises:
        UnsupportedModelError: the model's attention cannot be seen, or its answers have too few spans.
        ConfigError: the cache is required, and cannot be read or written.
    """
    values: list[float] = []
    with tempfile.TemporaryDirectory(prefix="cocoa-heads-") as folder:
        file = Path(folder) / "heads.json"
        write_file(file, heads.model_dump_json())
        config = engine.config.replace(
            decore_heads=str(file), max_new_tokens=MAX_NEW_TOKENS, max_risk=None, method="cocoa-sig"
        )
        asked = []
        for number, passage in enumerate(islice(passages(seed), prompts)):
            request = f"{passage.text}\n\nSummarise the text in two sentences."
            if number % 2:
                task = "Answer the question from the passage, in one sentence."
                request = f"Passage: {passage.text}\n\n{task}\nQuestion: {passage.stated[0].question}"
            asked.append(_encoded(engine, request))
        # the file of the heads has another name each time, so the heads alone count
        settings = config.model_dump(mode="json", exclude={"decore_heads"})
        answer_cache = None if cache is None else AnswerCache(cache, "reference", engine, config, {"config": settings})
        done: list[int] = []

        def advance(count: int) -> None:
            done.append(count)
            on_progress(sum(done), len(asked))

        for _, measured in answered(engine, asked, asked, config, _attention, cache=answer_cache, advance=advance):
            values += measured["source_attention"]
    if len(values) < MIN_SPANS:
        invisible = "Its attention may not be visible (see `cocoa info`)"
        remedy = f"Take more prompts ({PROMPTS} by default)" if values else invisible
        raise UnsupportedModelError(
            f"{engine.model_name} wrote {len(values)} spans with a known source attention in {prompts} answers; at "
            f"least {MIN_SPANS} are needed. {remedy}."
        )
    knots = np.quantile(np.array(values), np.linspace(0, 1, KNOTS)).clip(0, 1)
    rounded = [round(float(knot), 6) for knot in knots]
    return heads.model_copy(update={"reference": rounded, "reference_spans": len(values)})


def _attention(answer: Generation) -> dict[str, Any]:
    """The source attention of the spans with letters or digits, as far as it is known."""
    values = [span.source_attention for span in answer.spans if any(letter.isalnum() for letter in span.text)]
    return {"source_attention": [value for value in values if value is not None]}


def keep_reference(
    engine: CocoaEngine,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    cache: CacheFolder | None = None,
) -> Path | None:
    """Measure the reference distribution of a model that has none, and keep it in the cache directory.

    Its heads are the known retrieval heads, or else those of :func:`spread_heads_of`; see :func:`with_reference`.
    Returns the file; `None` if the model has a reference distribution, or no attention that can be seen.
    """
    model = engine.session.model
    heads = heads_of_model(None, model) or spread_heads_of(model)
    if heads is None or heads.reference is not None:
        return None
    named = heads.model_copy(update={"model_name": engine.model_name})
    with suppress(UnsupportedModelError):
        return keep(with_reference(engine, named, on_progress=on_progress, cache=cache), model)
    return None


def _encoded(engine: CocoaEngine, request: str) -> list[int]:
    prompt = request_prompt(engine, request)
    return engine.encode(prompt) if isinstance(prompt, str) else list(prompt)
