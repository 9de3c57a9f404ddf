"""Retrieval heads, the attention heads that copy from the context, read from a JSON file.

`cocoa heads` writes the file of a model to the cache directory, where it is found without being told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from filelock import FileLock
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from cocoa_engine.arguments import ValidatedModel
from cocoa_engine.equations import answer_surprisal, distribution
from cocoa_engine.errors import ConfigError, safe_logger
from cocoa_engine.files import cache_directory, is_private, private_folder, write_note

if TYPE_CHECKING:  # settings can be imported without torch
    from cocoa_engine.model.language_model import LanguageModel

logger = safe_logger(__name__)

_EMBEDDED = Path(__file__).parent / "embedded_heads.json"
"""The embedded model's heads, found by `cocoa heads`. Models fine-tuned from it have similar heads."""

MAX_MASKED = 50
"""The number of heads that the DeCoRe paper masks in models with about 1,000 heads."""


def _rising(quantiles: list[float]) -> list[float]:
    if sorted(quantiles) != quantiles or not all(map(math.isfinite, quantiles)):
        raise ValueError("quantiles must be finite and must not decrease")
    return quantiles


class ScoredHead(BaseModel):
    """An attention head and its retrieval score. Layers and heads are counted from 0."""

    model_config = ConfigDict(frozen=True)

    layer: int = Field(ge=0)
    head: int = Field(ge=0)
    score: float = Field(ge=0, le=1, description="Mean share of a fact's tokens that the head copied.")


Quantiles = Annotated[list[float], Field(min_length=2), AfterValidator(_rising)]
"""Quantiles of a distribution at equal steps from 0 to 1."""


class RightAnswers(BaseModel):
    """How surprising right answers are: the distribution among which the answers of a model are ranked.

    Attributes:
        of: whose right answers they are, for a reader.
        surprisals: the distribution of :func:`.answer_surprisal` of right answers to short questions.
        span_threshold: 1 - p of the least probable token of an answer, which a tenth of these answers reaches.
    """

    model_config = ConfigDict(frozen=True)

    of: str
    surprisals: Quantiles
    span_threshold: float = Field(gt=0, le=1)

    def rank(self, token_log_probs: Sequence[float]) -> float:
        """The share of the right answers that are less surprising than an answer, in [0, 1].

        A gate at the rank r stops a share 1 - r of right answers like these. It is not a probability of being wrong.
        """
        return distribution(self.surprisals, answer_surprisal(token_log_probs))


class RetrievalHeads(ValidatedModel):
    """The scored heads of a model.

    Attributes:
        model_name: the name of the model.
        num_layers, num_heads: the model's number of layers, and of heads per layer.
        samples: the number of recalled facts over which scores are averaged.
        heads: the heads, ordered by decreasing score.
        reference: the distribution of the source attention of the model's own spans, measured with the best heads on
            prompts with a source: its quantiles at equal steps from 0 to 1. `None` if it was not measured.
        reference_spans: the number of those spans.
        right_answers: the distribution of the model's own right answers. `None` if it was not measured.
    """

    model_config = ConfigDict(frozen=True)

    model_name: str
    num_layers: int
    num_heads: int
    samples: int
    heads: list[ScoredHead] = Field(min_length=1)
    reference: Quantiles | None = None
    reference_spans: int = 0
    right_answers: RightAnswers | None = None

    @model_validator(mode="after")
    def _heads_of_the_model(self) -> RetrievalHeads:
        if any(head.layer >= self.num_layers or head.head >= self.num_heads for head in self.heads):
            raise ValueError(f"a head is outside the {self.num_layers} layers of {self.num_heads} heads")
        if self.reference and not 0 <= self.reference[0] <= self.reference[-1] <= 1:
            raise ValueError("reference must hold quantiles in [0, 1]")
        return self

    def best(self, count: int | None) -> tuple[tuple[int, int], ...]:
        """The (layer, head) pairs of the ``count`` best heads.

        Args:
            count: the number of heads. `None` takes 50, but at most one in 20 heads of the model, as in the paper.
        """
        if count is None:
            count = min(MAX_MASKED, max(1, self.num_layers * self.num_heads // 20))
        return tuple((head.layer, head.head) for head in self.heads[:count])

    def rank(self, source_attention: float | None) -> float | None:
        """The rank of a span among the model's own spans, as a risk in [0, 1] that needs no labels.

        It is 1 - F(source attention), with F the distribution function of :attr:`reference`: the share of the model's
        own spans that attend more to their source. It is not a probability of being wrong.

        Args:
            source_attention: the mean source attention of a span, in [0, 1].

        Returns:
            The rank; `None` if the source attention is `None` or not finite, or if there is no reference.
        """
        if self.reference is None or source_attention is None or not math.isfinite(source_attention):
            return None
        return 1 - distribution(self.reference, source_attention)


SOURCE_HEADS = 20
"""The number of retrieval heads whose attention on the source is measured."""

WHOLE_PROMPT = ("full_attention", "hybrid")
"""The kinds of layers, in transformers' ``layer_types``, that attend to the whole prompt."""


def spread_heads_of(model: LanguageModel) -> RetrievalHeads | None:
    """Heads that stand in for retrieval heads that were not searched for: 20 heads, evenly spread over the layers from
    L/2 to 5L/6, where retrieval heads of language models usually are.

    Only layers that attend to the whole prompt count. Where none of them is between L/2 and 5L/6, all of them are
    taken. The result is `None` for a model without such layers.

    On the embedded model they separate hallucinated spans about as well as the heads that were found; other models were
    not measured.
    """
    num_layers, num_heads = model.num_layers, model.num_heads or 0
    kinds = list(getattr(model.config, "layer_types", None) or WHOLE_PROMPT[:1] * num_layers)
    attending = [layer for layer, kind in enumerate(kinds) if kind in WHOLE_PROMPT]
    if not num_heads or not attending:
        return None
    middle = range(num_layers // 2, max(num_layers // 2 + 1, round(num_layers * 5 / 6)))
    layers = [layer for layer in middle if layer in attending] or attending
    places = [(layer, head) for layer in layers for head in range(num_heads)]
    count = min(SOURCE_HEADS, len(places))
    chosen = [places[round(number * (len(places) - 1) / max(1, count - 1))] for number in range(count)]
    return RetrievalHeads(
        model_name=str(getattr(model.config, "name_or_path", "")),
        num_layers=num_layers,
        num_heads=num_heads,
        samples=0,
        heads=[ScoredHead(layer=layer, head=head, score=0) for layer, head in chosen],
    )


def source_heads(
    path: str | None, model: LanguageModel, fitted: Sequence[tuple[int, int]] | None = None
) -> tuple[tuple[int, int], ...]:
    """The heads whose attention on the source is measured.

    If the model's retrieval heads are not known, they are those of :func:`spread_heads_of`. There are none if the model
    has no attention, or if tensor parallelism divides its heads among processes.

    ``path`` and errors are as for :func:`heads_of_model`. ``fitted`` are the heads of the calibrator in use; they apply
    without a path.
    """
    if model.is_divided:
        return ()
    if path is None and fitted is not None:
        return tuple(fitted)
    heads = heads_of_model(path, model) or spread_heads_of(model)
    return () if heads is None else heads.best(SOURCE_HEADS)


def are_spread(heads: Sequence[tuple[int, int]], retrieval_heads: RetrievalHeads | None, model: LanguageModel) -> bool:
    """Whether heads of :func:`source_heads` were not searched for, but spread over the layers.

    ``retrieval_heads`` are those of the model, if they are known.
    """
    if retrieval_heads is not None and retrieval_heads.samples:
        return False
    spread = spread_heads_of(model)
    return bool(heads) and spread is not None and set(heads) == set(spread.best(SOURCE_HEADS))


def heads_of_model(path: str | None, model: LanguageModel) -> RetrievalHeads | None:
    """The retrieval heads of a loaded model, if they are known.

    Args:
        path: a file written by `cocoa heads`. `None` uses the file that `cocoa heads` has written for this model to the
            cache directory, or else the embedded model's heads, for a model with the same numbers of layers and heads.
        model: the model.

    Raises:
        ConfigError: the file cannot be read, is not a file of heads, or is for other numbers of layers or heads.
    """
    shape = model.num_layers, model.num_heads or 0
    if path is None:
        candidates = (_kept(model), _read(_EMBEDDED, 0))
        return next((heads for heads in candidates if heads and (heads.num_layers, heads.num_heads) == shape), None)
    file = Path(path)
    try:
        heads = _read(file, file.stat().st_mtime_ns)
    except ConfigError as error:
        raise ConfigError(f"decore_heads: {path} is not a file of `cocoa heads`: {error}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that contains a NUL character
        raise ConfigError(f"decore_heads: {path} cannot be read ({error}); `cocoa heads` writes it.") from None
    if (heads.num_layers, heads.num_heads) != shape:
        raise ConfigError(
            f"decore_heads: {path} is for {heads.model_name}, with {heads.num_layers} layers of {heads.num_heads} "
            f"heads; this model has {shape[0]} of {shape[1]}. Run `cocoa heads` on this model."
        )
    return heads


def kept_file(model: LanguageModel) -> Path:
    """The file in the cache directory for the retrieval heads of a model. It may not exist yet.

    The name contains a digest of the model's architecture, shape and weights, so a copy of the model has the same file.

    Raises:
        OSError, RuntimeError: there is no cache directory.
    """
    from cocoa_engine.model.weight_identity import model_digest  # imports torch

    return cache_directory() / "heads" / f"{model_digest(model)}.json"


def keep(heads: RetrievalHeads, model: LanguageModel) -> Path:
    """Write the retrieval heads of a model to the cache directory, where every engine of the model finds them.

    The file is replaced as a whole, under a lock.

    Returns:
        The file.

    Raises:
        OSError, RuntimeError: the cache directory cannot be written to.
    """
    file = kept_file(model)
    private_folder(file.parent)
    with FileLock(f"{file}.lock", timeout=60):
        write_note(file, heads.model_dump_json(indent=1) + "\n")
    return file


def _kept(model: LanguageModel) -> RetrievalHeads | None:
    """The heads in the cache directory; `None` if there are none, or if they cannot be used."""
    try:
        file = kept_file(model)
        return _usable(file, file.stat().st_mtime_ns, is_private(file))
    except (OSError, RuntimeError):
        return None


@lru_cache(maxsize=16)  # every answer asks several times: a file that cannot be used is told once
def _usable(file: Path, written: int, private: bool) -> RetrievalHeads | None:
    if not private:
        logger.warning("other users could write to %s, and it is not used; run `cocoa heads` again", file)
        return None
    try:
        return _read(file, written)
    except (ConfigError, UnicodeDecodeError) as error:
        logger.warning("%s is not a file of `cocoa heads` and is not used: %s", file, error)
        return None


@lru_cache(maxsize=16)
def _read(file: Path, _written: int) -> RetrievalHeads:
    return RetrievalHeads.model_validate_json(file.read_text(encoding="utf-8"))
