"""Retrieval heads: search with facts in long texts, and the reference distribution of their attention."""

import json
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.engine import CocoaEngine
from cocoa_engine.equations import answer_surprisal, improbability
from cocoa_engine.errors import PromptError, UnsupportedModelError
from cocoa_engine.execution.forward.source_attention import Heads, SourceProbe
from cocoa_engine.files import write_file
from cocoa_engine.lab.cache import AnswerCache, CacheFolder, answered
from cocoa_engine.lab.data import Question
from cocoa_engine.lab.measured import question_config, question_prompt, request_prompt
from cocoa_engine.lab.self_made import Fact, Passage, passages
from cocoa_engine.methods.retrieval_heads import (
    SOURCE_HEADS,
    RetrievalHeads,
    RightAnswers,
    ScoredHead,
    heads_of_model,
    keep,
    spread_heads_of,
)
from cocoa_engine.model.prompts import prompt_ids, text_ids
from cocoa_engine.model.tokenizer import token_ends
from cocoa_engine.results import Generation
from cocoa_engine.scoring.text_tree import fed, fed_alone

LENGTHS, NEEDLES, ROUNDS = (256, 512, 1024), 5, 4
"""The lengths of the texts of a round, in tokens; the facts that are asked for in a text; and the most rounds."""

RECALLED = 0.5
"""A fact is recalled if the model gives more than this share of its tokens the highest probability."""

STEADY = 0.95
"""The search ends when :func:`steadiness` is at least this."""

TASK = "Answer each question with the sentence of the text that says so, word for word."


def find_retrieval_heads(
    engine: CocoaEngine,
    lengths: Sequence[int] = LENGTHS,
    advance: Callable[[int], None] = lambda count: None,
    *,
    cache: CacheFolder | None = None,
) -> RetrievalHeads:
    """Score every attention head of an engine's model.

    The model reads a text of invented passages, questions about facts in it, and the sentences that answer them. A head
    copies a token of a sentence if it attends most to this token in the text while the model predicts it. The score of
    a head is the mean share of tokens that it copies (Wu et al., 2024), over the facts that the model recalls. After
    each round of one text of each length, the search ends if the :func:`steadiness` of the best heads is at least
    :data:`STEADY`; at the latest after :data:`ROUNDS` rounds.

    Args:
        engine: the engine with the model.
        lengths: the least lengths of the texts, in tokens. A text ends with a passage.
        advance: called with the least length of a text that has been read.
        cache: a :class:`.CacheFolder` that keeps the scores of every text; texts that are in it are not read again.

    Raises:
        UnsupportedModelError: the model's attention cannot be observed, its heads cannot be numbered, or the model
            recalls no fact.
        PromptError: a text does not fit the context window.
        ConfigError: the cache is required, and cannot be read or written.
    """
    if not engine.session.backend.sees_attention:
        raise UnsupportedModelError(
            f"heads can be observed only if attention goes through transformers' AttentionInterface; that of "
            f"{engine.model_name} has code of its own."
        )
    model = engine.session.model
    num_heads = model.num_heads
    if model.is_divided or num_heads is None:
        why = "is divided among processes" if model.is_divided else "has another number of heads in each layer"
        raise UnsupportedModelError(f"the heads of {engine.model_name} cannot be numbered: the model {why}.")
    answer_cache = None if cache is None else AnswerCache(cache, "needles", engine, engine.config, {})
    drawn, scores = passages(), list[list[list[float]]]()
    texts = [[(_asked(engine, drawn, length), length) for length in lengths] for _ in range(ROUNDS)]
    for of_round in texts:
        for text, length in of_round:
            values = None if answer_cache is None else answer_cache.get(text)
            if values is None:
                values = _copied(engine, text)
                if answer_cache is not None:
                    answer_cache.add(text, values)
            scores += [of_fact for share, of_fact in values["facts"] if share > RECALLED]
            advance(length)
        if scores and steadiness(np.array(scores).reshape(len(scores), -1)) >= STEADY:
            break
    if not scores:
        raise UnsupportedModelError(
            f"{engine.model_name} recalled none of {ROUNDS * len(lengths) * NEEDLES} facts: it has no clear retrieval "
            "heads, or the texts are too long for it; try shorter ones (--lengths)."
        )
    means = enumerate(np.mean(scores, axis=0).tolist())
    heads = [ScoredHead(layer=layer, head=head, score=score) for layer, row in means for head, score in enumerate(row)]
    heads.sort(key=lambda head: (-head.score, head.layer, head.head))
    return RetrievalHeads(
        model_name=engine.model_name, num_layers=model.num_layers, num_heads=num_heads, samples=len(scores), heads=heads
    )


def steadiness(scores: NDArray[np.float64], count: int = SOURCE_HEADS) -> float:
    """How well the best heads of one half of the samples do on the other half, in [0, 1].

    The ``count`` best heads of each half (samples with even and with odd numbers) have a mean score on the other half.
    Its share of the highest mean score that ``count`` heads have there is 1 if the halves choose the same heads, or
    others of the same score. The smaller of the two shares is returned.

    Args:
        scores: the score of each head for each sample, ``[samples, heads]``, not negative. A single sample, and samples
            of one half without any score, have the steadiness 0.
    """
    halves = [scores[::2].mean(axis=0), scores[1::2].mean(axis=0)] if len(scores) > 1 else [np.zeros(1)]
    best = [half.argsort(kind="stable")[::-1][:count] for half in halves]
    sums = [[half[chosen].sum() for chosen in best] for half in halves]
    return min(min(row) / row[at] if row[at] else 0.0 for at, row in enumerate(sums))


class _Text(NamedTuple):
    """The tokens of a prompt with a text and questions, those of the answer, and the sentences of the answer."""

    prompt: list[int]
    answer: list[int]
    sentences: list[str]


def _asked(engine: CocoaEngine, drawn: Iterator[Passage], length: int) -> _Text:
    """A text of at least ``length`` tokens, of passages, and questions in another order than its facts."""
    of_text, stated, size = list[str](), list[Fact](), 0
    while size < min(length, engine.context_window or length):  # a longer text is refused
        passage = next(drawn)
        of_text.append(passage.text)
        stated += passage.stated
        size += len(engine.encode(passage.text, add_special_tokens=False))
    step = len(stated) // NEEDLES
    facts = Random(size).sample(stated[step // 2 :: step][:NEEDLES], NEEDLES)
    questions, sentences = [fact.question for fact in facts], [fact.sentence for fact in facts]
    prompt = request_prompt(engine, "\n\n".join([*of_text, "\n".join([*questions, TASK])]))
    model, tokens = engine.session.model, engine.session.tokens
    before, answer = prompt_ids(model, tokens, prompt), (" " if isinstance(prompt, str) else "") + "\n".join(sentences)
    try:
        return _Text(before, text_ids(model, tokens, prompt, before, answer)[0], sentences)
    except PromptError as error:
        raise PromptError(f"{error} Give shorter --lengths.") from None


class _MostAttended(SourceProbe):
    """Notes the position that each head attends to most, by layer, for the tokens of each pass: ``[heads, W]``."""

    def __init__(self, heads: Heads) -> None:
        super().__init__(heads, range(0))
        self.seen: dict[int, list[Tensor]] = {}

    def take(self, layer: int, weights: Tensor, first: int) -> None:
        self.seen.setdefault(layer, []).append(weights.argmax(-1).cpu() + first)


def _copied(engine: CocoaEngine, text: _Text) -> dict[str, Any]:
    """For each sentence, the share of its tokens that the model predicts, and what heads copy of it, ``[L, heads]``."""
    backend, model = engine.session.backend, engine.session.model
    num_heads = model.num_heads or 0
    before, answer, sentences = text
    probe = _MostAttended([(layer, head) for layer in range(model.num_layers) for head in range(num_heads)])
    spec = capture_spec(model, CocoaConfig())._replace(source_heads=())  # nothing but the heads is observed
    fed_ids = [before[-1], *answer[:-1]]  # which predict the answer
    if backend.masks_heads:
        with fed(backend, before[:-1], [fed_ids], spec, probe=probe) as steps:
            best = torch.cat([step.output.logits.argmax(-1) for step in steps]).cpu()
    else:
        best = fed_alone(model, before[:-1], fed_ids, spec, probe=probe).output.logits.argmax(-1).cpu()
    prompt_tokens, answer_tokens = torch.tensor(before, device="cpu"), torch.tensor(answer, device="cpu")
    place = torch.full((model.num_layers, num_heads, len(answer)), len(before), device="cpu")
    for layer, parts in probe.seen.items():
        of_layer = torch.cat(parts, dim=-1)
        place[layer, : len(of_layer)] = of_layer
    predicted = best == answer_tokens
    copied = predicted & (place < len(before)) & (prompt_tokens[place.clamp(max=len(before) - 1)] == answer_tokens)
    facts = []
    for source, target in zip(_ranges(engine, before, sentences), _ranges(engine, answer, sentences), strict=True):
        part = place[..., target.start : target.stop]
        inside = (part >= source.start) & (part < source.stop) & copied[..., target.start : target.stop]
        facts.append([predicted[target.start : target.stop].double().mean().item(), inside.double().mean(-1).tolist()])
    return {"facts": facts}


def _ranges(engine: CocoaEngine, token_ids: Sequence[int], sentences: Iterable[str]) -> Iterator[range]:
    """The tokens of each sentence: the first run of tokens whose text contains it."""
    text, ends = token_ends(engine.session.tokens, token_ids)
    for sentence in sentences:
        start = text.find(sentence)
        if start < 0:
            raise UnsupportedModelError(
                f"the tokenizer of {engine.model_name} changes the text it is given; its heads cannot be scored."
            )
        yield range(bisect_right(ends, start), bisect_left(ends, start + len(sentence)) + 1)


PROMPTS, MAX_NEW_TOKENS = 60, 48
"""The default number of prompts, two for each passage (retell it, and a question), and the tokens of an answer."""

KNOTS, MIN_SPANS = 101, 50
"""The number of quantiles that are stored. With fewer spans, the distribution would be too rough."""


def with_reference(
    engine: CocoaEngine,
    heads: RetrievalHeads,
    *,
    prompts: int = PROMPTS,
    advance: Callable[[int], None] = lambda count: None,
    cache: CacheFolder | None = None,
) -> RetrievalHeads:
    """Measure the reference distribution of a model's source attention.

    Args:
        engine: the engine with the model. Its settings are used for decoding.
        heads: the model's retrieval heads.
        prompts: the number of prompts that the model answers.
        advance: called with the number of prompts answered since the last call.
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
        requests = (
            f"{passage.text}\n\n{task}"
            for passage in passages()
            for task in (
                "Summarise the text in two sentences.",
                f"Answer the question from the text, in one sentence.\nQuestion: {passage.stated[0].question}",
            )
        )
        asked = [request_prompt(engine, request) for request in islice(requests, prompts)]
        # the file of the heads has another name each time, so the heads alone count
        settings = config.model_dump(mode="json", exclude={"decore_heads"})
        answer_cache = None if cache is None else AnswerCache(cache, "reference", engine, config, {"config": settings})
        for _, measured in answered(engine, asked, asked, config, _attention, cache=answer_cache, advance=advance):
            values += measured["source_attention"]
    if len(values) < MIN_SPANS:
        invisible = "Its attention may not be visible (see `cocoa info`)"
        remedy = f"Take more prompts ({PROMPTS} by default)" if values else invisible
        raise UnsupportedModelError(
            f"{engine.model_name} wrote {len(values)} spans with a known source attention in {prompts} answers; at "
            f"least {MIN_SPANS} are needed. {remedy}."
        )
    return heads.model_copy(update={"reference": quantiles(np.clip(values, 0, 1)), "reference_spans": len(values)})


def quantiles(values: NDArray[np.float64]) -> list[float]:
    """The quantiles of a distribution that are kept."""
    return [round(float(knot), 6) for knot in np.quantile(values, np.linspace(0, 1, KNOTS))]


SHORT: list[list[str]] = json.loads(Path(__file__).with_name("short_questions.json").read_text("utf-8"))
"""Short questions, each with its right answers."""
STOPPED, MIN_RIGHT, ANSWERED = 0.1, 10, 32
"""The share of right answers that the threshold of spans stops, the fewest right answers of a distribution, and the
tokens of an answer."""


def with_right_answers(
    engine: CocoaEngine,
    heads: RetrievalHeads,
    *,
    questions: int = 2 * PROMPTS,
    advance: Callable[[int], None] = lambda count: None,
    cache: CacheFolder | None = None,
) -> RetrievalHeads:
    """Measure how surprising a model's own right answers are; see :class:`.RightAnswers`.

    The model answers ``questions`` short questions. The other arguments are those of :func:`with_reference`.

    Returns:
        The heads with ``right_answers``; without them if the model gives too few right answers.
    """
    asked = [Question(text, None, tuple(known), text) for text, *known in SHORT[:questions]]
    prompts = [question_prompt(engine, question.text) for question in asked]
    config = engine.config.replace(max_new_tokens=ANSWERED, max_risk=None, method="cocoa-sig")
    config = question_config(engine, config)
    answer_cache = None if cache is None else AnswerCache(cache, "right", engine, config)
    right: list[list[float]] = []
    for question, values in answered(engine, asked, prompts, config, _log_probs, cache=answer_cache, advance=advance):
        if values["log_probs"] and question.is_right(values["text"]):
            right.append(values["log_probs"])
    if len(right) < MIN_RIGHT:
        return heads
    surprisals = np.array([answer_surprisal(log_probs) for log_probs in right])
    token_risks = np.array([improbability(min(log_probs)) for log_probs in right])
    own = right_answers(Path(engine.model_name).name, surprisals, token_risks)
    return heads.model_copy(update={"right_answers": own})


def right_answers(of: str, surprisals: NDArray[np.float64], token_risks: NDArray[np.float64]) -> RightAnswers:
    """The distribution of n right answers ``of`` a model.

    Args:
        surprisals: the :func:`.answer_surprisal` of each, ``[n]``.
        token_risks: 1 - p of the least probable token of each, ``[n]``.
    """
    threshold = round(float(np.quantile(token_risks, 1 - STOPPED)), 4)
    return RightAnswers(of=of, surprisals=quantiles(surprisals), span_threshold=threshold)


def _log_probs(answer: Generation) -> dict[str, Any]:
    return {"text": answer.text, "log_probs": [value for span in answer.spans for value in span.token_log_probs]}


def _attention(answer: Generation) -> dict[str, Any]:
    """The source attention of the spans with letters or digits, as far as it is known."""
    values = [span.source_attention for span in answer.spans if any(letter.isalnum() for letter in span.text)]
    return {"source_attention": [value for value in values if value is not None]}


def keep_reference(
    engine: CocoaEngine,
    *,
    advance: Callable[[int], None] = lambda count: None,
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
        return keep(with_reference(engine, named, advance=advance, cache=cache), model)
    return None
