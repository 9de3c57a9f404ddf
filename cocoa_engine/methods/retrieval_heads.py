"""Retrieval heads: the attention heads that copy from the context, best first; kept as a small JSON file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import explain

_EMBEDDED = Path(__file__).parent / "embedded_heads.json"
"""The embedded model's, by `cocoa heads`; models fine-tuned from it have the same shape and much the same heads."""

MOST_MASKED = 50
"""The number of heads that DeCoRe's paper masks in models of about 1,000."""


class ScoredHead(BaseModel):
    """One head, both numbers from 0."""

    model_config = ConfigDict(frozen=True)

    layer: int = Field(ge=0)
    head: int = Field(ge=0)
    score: float = Field(ge=0, le=1, description="Mean share of a needle's tokens that it copied.")


class RetrievalHeads(BaseModel):
    """The heads of a model, by falling score.

    Attributes:
        num_layers, num_heads: of the model they were found in.
        samples: needles that were found again, over which the scores are means.
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
            raise ValueError(f"a head beyond the {self.num_layers} layers of {self.num_heads} heads")
        return self

    def best(self, count: int | None) -> tuple[tuple[int, int], ...]:
        """The (layer, head) pairs of the best ``count``; by default 50, at most 1 in 20 as in the paper."""
        if count is None:
            count = min(MOST_MASKED, max(1, self.num_layers * self.num_heads // 20))
        return tuple((head.layer, head.head) for head in self.heads[:count])


def masked_heads(path: str | None, count: int | None, num_layers: int, num_heads: int) -> tuple[tuple[int, int], ...]:
    """The heads that DeCoRe masks.

    Args:
        path: a file of `cocoa heads`; none is the embedded model's, for models of its shape.

    Raises:
        ConfigError: there is no such file, it is not one of heads, or its heads are another model's.
    """
    if path is None:
        embedded = _read(_EMBEDDED, 0)
        if (embedded.num_layers, embedded.num_heads) == (num_layers, num_heads):
            return embedded.best(count)
        raise ConfigError(
            'method="decore" masks the model\'s retrieval heads, which have to be known: find them once with '
            "`cocoa heads NAME --out heads.json`, and give the file as decore_heads."
        )
    file = Path(path)
    try:
        found = _read(file, file.stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"decore_heads: {path} cannot be read ({error}); `cocoa heads` writes it.") from None
    except ValidationError as error:
        raise ConfigError(f"decore_heads: {path} is no file of `cocoa heads`: {explain(error)}") from None
    if (found.num_layers, found.num_heads) != (num_layers, num_heads):
        raise ConfigError(
            f"decore_heads: {path} is of {found.model_name}, with {found.num_layers} layers of {found.num_heads} "
            f"heads; this model has {num_layers} of {num_heads}. Run `cocoa heads` on this one."
        )
    return found.best(count)


@lru_cache(maxsize=16)
def _read(file: Path, _written: int) -> RetrievalHeads:
    return RetrievalHeads.model_validate_json(file.read_text(encoding="utf-8"))
