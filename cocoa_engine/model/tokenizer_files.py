"""The files of a tokenizer, checked before transformers reads them: it passes wrong values on, to where they fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from cocoa_engine.arguments import ValidatedModel
from cocoa_engine.errors import CocoaError, ModelLoadError


class _Token(BaseModel):
    model_config = ConfigDict(strict=True)

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = False


class _File(ValidatedModel):
    model_config = ConfigDict(strict=True)
    _invalid: ClassVar[type[CocoaError]] = ModelLoadError


class _SpecialTokens(_File):
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    additional_special_tokens: list[str | _Token] | None = None
    extra_special_tokens: list[str | _Token] | dict[str, str | _Token] | None = None


class _Config(_SpecialTokens):
    model_max_length: float | None = None
    padding_side: Literal["left", "right"] = "right"
    truncation_side: Literal["left", "right"] = "right"
    added_tokens_decoder: dict[str, _Token] = Field(default_factory=dict)


class _AddedTokens(RootModel[dict[str, int]], _File):
    pass


class _Merging(BaseModel):
    """The part of a tokenizer that joins tokens in pairs."""

    merges: Any = None
    continuing_subword_prefix: str | None = None


class _Tokenizer(_File):
    model: _Merging

    def require_prefixes(self) -> None:
        """Check that the second part of each merge has the prefix, which tokenizers cuts off without looking.

        Raises:
            ModelLoadError: one has not. tokenizers would end the process.
        """
        prefix, merges = self.model.continuing_subword_prefix, self.model.merges
        if prefix and isinstance(merges, list):
            for merge in merges:
                second = merge.partition(" ")[2] if isinstance(merge, str) else str(merge[-1:] and merge[-1])
                if not second.startswith(prefix):
                    raise ModelLoadError(
                        "model.continuing_subword_prefix does not begin the second part of every one of model.merges"
                    )


_FILES: dict[str, type[_File]] = {
    "tokenizer_config.json": _Config,
    "special_tokens_map.json": _SpecialTokens,
    "added_tokens.json": _AddedTokens,
    "tokenizer.json": _Tokenizer,
}


def require_tokenizer_files(find: Callable[[str], Path | None]) -> None:
    """Check the files of a tokenizer.

    Args:
        find: gives the path of a file by its name; `None` if there is none.

    Raises:
        ModelLoadError: a file is not JSON, or a value is of a wrong type. It names the file and the value.
    """
    for name, kind in _FILES.items():
        if (path := find(name)) is not None:
            try:
                file = kind.model_validate_json(path.read_bytes())
                if isinstance(file, _Tokenizer):
                    file.require_prefixes()
            except ModelLoadError as error:
                raise ModelLoadError(f"cannot load the tokenizer of {path}: {error}") from error
