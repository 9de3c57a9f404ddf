"""Retrieval heads, the attention heads that copy from the context, read from a JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import explain

if TYPE_CHECKING:  # settings can be imported without torch
    from cocoa_engine.model.language_model import LanguageModel

_EMBEDDED = Path(__file__).parent / "embedded_heads.json"
"""The embedded model's heads, found by `cocoa heads`. Models fine-tuned from it have similar heads."""

MAX_MASKED = 50
"""The number of heads that the DeCoRe paper masks in models with about 1,000 heads."""


class ScoredHead(BaseModel):
    """An attention head and its retrieval score. Layers and heads are counted from 0."""

    model_config = ConfigDict(frozen=True)

    layer: int = Field(ge=0)
    head: int = Field(ge=0)
    score: float = Field(ge=0, le=1, description="Mean share of a needle's tokens that the head copied.")


class RetrievalHeads(BaseModel):
    """The scored heads of a model.

    Attributes:
        model_name: the name of the model.
        num_layers, num_heads: the model's number of layers, and of heads per layer.
        samples: the number of recalled needles over which scores are averaged.
        heads: the heads, ordered by decreasing score.
    """

    model_config = ConfigDict(frozen=True)

    model_name: str
    num_layers: int
    num_heads: int
    samples: int
    heads: list[ScoredHead] = Field(min_length=1)

    @model_validator(mode="after")
    def _heads_of_the_model(self) -> RetrievalHeads:
        if any(head.layer >= self.num_layers or head.head >= self.num_heads for head in self.heads):
            raise ValueError(f"a head is outside the {self.num_layers} layers of {self.num_heads} heads")
        return self

    def best(self, count: int | None) -> tuple[tuple[int, int], ...]:
        """The (layer, head) pairs of the ``count`` best heads.

        Args:
            count: the number of heads. `None` takes 50, but at most one in 20 heads of the model, as in the paper.
        """
        if count is None:
            count = min(MAX_MASKED, max(1, self.num_layers * self.num_heads // 20))
        return tuple((head.layer, head.head) for head in self.heads[:count])


SOURCE_HEADS = 20
"""The number of retrieval heads whose attention on the source is measured."""


def masked_heads(path: str | None, count: int | None, num_layers: int, num_heads: int) -> tuple[tuple[int, int], ...]:
    """The heads that DeCoRe masks.

    Args:
        path, num_layers, num_heads: as for :func:`known_heads`.
        count: the number of heads. `None` uses the default of :meth:`RetrievalHeads.best`.

    Returns:
        (layer, head) pairs, best first.

    Raises:
        ConfigError: as for :func:`known_heads`, or the model's retrieval heads are not known.
    """
    found = known_heads(path, num_layers, num_heads)
    if found is None:
        raise ConfigError(
            'method="decore" needs the model\'s retrieval heads. Find them once with '
            "`cocoa heads NAME --out heads.json`, and pass the file as decore_heads."
        )
    return found.best(count)


def source_heads(
    path: str | None, model: LanguageModel, fitted: Sequence[tuple[int, int]] | None = None
) -> tuple[tuple[int, int], ...]:
    """The heads whose attention on the source is measured.

    There are none if the model's retrieval heads are not known, or if tensor parallelism divides its heads among
    processes.

    Args:
        path: as for :func:`known_heads`.
        model: the model.
        fitted: the heads of the calibrator in use. They apply without a path.

    Raises:
        ConfigError: as for :func:`known_heads`.
    """
    if path is None and fitted is not None:
        return () if model.is_divided else tuple(fitted)
    found = known_heads(path, model.num_layers, getattr(model.config, "num_attention_heads", None) or 0)
    return () if found is None or model.is_divided else found.best(SOURCE_HEADS)


def known_heads(path: str | None, num_layers: int, num_heads: int) -> RetrievalHeads | None:
    """The retrieval heads of a model, if they are known.

    Args:
        path: a file written by `cocoa heads`. `None` uses the embedded model's heads, for a model with the same numbers
            of layers and heads.
        num_layers, num_heads: the model's number of layers, and of heads per layer.

    Raises:
        ConfigError: the file cannot be read, is not a file of heads, or is for other numbers of layers or heads.
    """
    if path is None:
        embedded = _read(_EMBEDDED, 0)
        return embedded if (embedded.num_layers, embedded.num_heads) == (num_layers, num_heads) else None
    file = Path(path)
    try:
        found = _read(file, file.stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"decore_heads: {path} cannot be read ({error}); `cocoa heads` writes it.") from None
    except ValidationError as error:
        raise ConfigError(f"decore_heads: {path} is not a file of `cocoa heads`: {explain(error)}") from None
    if (found.num_layers, found.num_heads) != (num_layers, num_heads):
        raise ConfigError(
            f"decore_heads: {path} is for {found.model_name}, with {found.num_layers} layers of {found.num_heads} "
            f"heads; this model has {num_layers} of {num_heads}. Run `cocoa heads` on this model."
        )
    return found


@lru_cache(maxsize=16)
def _read(file: Path, _written: int) -> RetrievalHeads:
    return RetrievalHeads.model_validate_json(file.read_text(encoding="utf-8"))
