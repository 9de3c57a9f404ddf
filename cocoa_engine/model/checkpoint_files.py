"""The files of a model: where its name leads, and checks of them before transformers reads them.

transformers passes wrong values of a tokenizer's files on, to where they fail, and opens whatever an index names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, RootModel

from cocoa_engine.arguments import ValidatedModel
from cocoa_engine.errors import CocoaError, ModelLoadError
from cocoa_engine.model.gguf_reader import SUFFIX, parts_of
from cocoa_engine.safe_text import short_repr

# Options of transformers that determine where files come from. All of them apply to the config, and to the tokenizer if
# it has the model's name. A tokenizer with another name has its own revision and folder.
ACCESS_OPTIONS = ("token", "cache_dir", "local_files_only", "force_download", "proxies")
SOURCE_OPTIONS = (*ACCESS_OPTIONS, "revision", "code_revision", "subfolder", "gguf_file")
FILE_OPTIONS = (*ACCESS_OPTIONS, "revision", "subfolder")


class Location(NamedTuple):
    """Where a model is: the local folder or the Hub id, and its GGUF file there. `None`: it is no GGUF file."""

    source: str
    file: str | None


def locate(name: str) -> Location:
    """What the name of a model means.

    Args:
        name: a Hub id, a folder, a GGUF file, or a Hub id with the name of a GGUF file in that repository, such as
            ``owner/model/model-q8_0.gguf``.

    Returns:
        The name itself, or its folder and file. A folder with one GGUF file and no ``config.json`` means that file. The
        file of a model that was split is its first part.

    Raises:
        ModelLoadError: there is no such file, or a folder has several GGUF files and nothing else.
    """
    path = Path(name).expanduser()
    if name.lower().endswith(SUFFIX):
        if path.is_file():
            return Location(str(path.parent), parts_of(path.name)[0])
        if not path.is_dir():
            return _on_the_hub(name, path)
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(file.name for file in path.iterdir() if file.name.lower().endswith(SUFFIX))
        if len({parts_of(file)[0] for file in files}) == 1:
            return Location(name, parts_of(files[0])[0])
        if files:
            listed = ", ".join(files[:5]) + (", ..." if len(files) > 5 else "")
            raise ModelLoadError(f"{path} has {len(files)} GGUF files ({listed}); name one, such as {path / files[0]}")
    return Location(name, None)


def _on_the_hub(name: str, path: Path) -> Location:
    """A file in a repository of the Hub, if no local path can be meant."""
    words = name.split("/")
    if len(words) < 3 or name.startswith((".", "~")) or path.is_absolute() or Path(words[0]).exists():
        raise ModelLoadError(
            f"there is no file {path}; name a GGUF file, or one in a repository of the Hub: owner/model/file{SUFFIX}"
        )
    return Location("/".join(words[:2]), parts_of("/".join(words[2:]))[0])


def name_of(given: str | os.PathLike[str], what: str) -> str:
    """The name of a model or tokenizer as text.

    Raises:
        ModelLoadError: it is empty, contains a NUL character, or is neither text nor a path.
    """
    name = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise ModelLoadError(
            f"the name of the {what} is {short_repr(given)}; name a local folder or a Hub id"
            if given
            else f"the {what}'s name is empty; name a local folder or a Hub id"
        )
    return name


def with_gguf_file(name: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where a model is, and the options with the GGUF file that its name means."""
    if "gguf_file" in options or "subfolder" in options:
        return name, options
    source, file = locate(name)
    return source, options if file is None else {**options, "gguf_file": file}


def is_path(name: str) -> bool:
    """Whether a name is a local path rather than a Hub id (``model`` or ``owner/model``)."""
    path = Path(name)
    return path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def check_folder(folder: Path, options: dict[str, Any]) -> None:
    """Check that a folder holds a model. The error message includes a hint if it holds something else."""
    if not folder.is_dir():
        found = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ModelLoadError(f"{folder} {found}; name a folder with config.json and weights, a GGUF file, or a Hub id")
    folder = folder / options.get("subfolder", "")
    if "gguf_file" in options:
        if not (folder / options["gguf_file"]).is_file():
            raise ModelLoadError(f"there is no file {options['gguf_file']} in {folder}")
        return
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if "config.json" not in files and "config" not in options:
        hint = ""
        if "adapter_config.json" in files:
            hint = f"; it holds an adapter only: {ADAPTER}"
        raise ModelLoadError(f"{folder} is not a model folder: it has no config.json{hint}")


def gguf_path(name: str, options: Mapping[str, Any]) -> Path:
    """The GGUF file of a folder or, downloaded into the cache if it is not there yet, of a repository of the Hub."""
    from huggingface_hub import hf_hub_download

    folder, file = options.get("subfolder", ""), options["gguf_file"]
    if Path(name).is_dir():
        return Path(name) / folder / file
    access = pick(options, ("token", "cache_dir", "local_files_only", "force_download", "revision"))
    found = [hf_hub_download(name, part, subfolder=folder or None, **access) for part in parts_of(file)]
    return Path(found[0])


ADAPTER = "load it and its base model with peft, and use CocoaEngine(model, tokenizer)"


def require_safetensors(name: str, config: Any, options: dict[str, Any]) -> None:
    """Check that transformers will open safetensors alone, of this checkpoint: an adapter would name another one."""
    if "gguf_file" in options:
        return
    access = pick(options, FILE_OPTIONS)
    if find_file(name, access, "adapter_config.json") is not None:
        raise ModelLoadError(f"{name} holds an adapter (adapter_config.json); {ADAPTER}")
    if options.get("use_safetensors"):
        safetensors_files(name, config, access, options.get("variant"))


def pick(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def find_file(name: str, access: Mapping[str, Any], file: str) -> Path | None:
    """A file of a local folder or a Hub id; `None` if there is none of that name.

    Args:
        name: the folder or the id.
        access: transformers' options of where the files are.
        file: the file's name.
    """
    from transformers.utils import cached_file

    path = cached_file(name, file, **access, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def safetensors_files(name: str, config: Any, access: Mapping[str, Any], variant: str | None = None) -> list[Path]:
    """The files that transformers will open for a checkpoint's weights, none of which is a pickle file.

    Args:
        name: a local folder or a Hub id.
        config: the model's config, which may name the file itself.
        access: transformers' options of where the files are.
        variant: transformers' option of that name.

    Raises:
        ModelLoadError: there are no safetensors; or an index, or the config, names anything but ``*.safetensors`` files
            beside it.
    """
    find = partial(find_file, name, access)
    middle = f".{variant}" if variant else ""
    stated = getattr(config, "transformers_weights", None)
    names = [stated] if stated else [f"model{middle}.safetensors", f"model.safetensors.index{middle}.json"]
    file = next((path for path in map(find, names) if path is not None), None)
    if file is None:
        raise ModelLoadError(
            f"{name} has no weights as safetensors ({' or '.join(names)}); pickle files can run code, so "
            "they are read with allow_pickle=True (--allow-pickle) only: pass it if you trust them, or convert them"
        )
    shards = [file.name]
    if file.suffix == ".json":
        try:
            shards = sorted(set(_Index.model_validate_json(file.read_bytes()).weight_map.values()))
        except ModelLoadError as error:
            raise ModelLoadError(f"cannot load the model of {file}: {error}") from error
    for shard in shards:
        if not shard.endswith(".safetensors") or PureWindowsPath(shard).name != shard:
            raise ModelLoadError(
                f"{name}: {file.name} names {short_repr(shard)}, which is no *.safetensors file beside it; other "
                "files can run code when they are read: pass allow_pickle=True (--allow-pickle) only if you trust them"
            )
    paths = {shard: file if shard == file.name else find(shard) for shard in shards}
    if missing := [shard for shard, path in paths.items() if path is None]:
        raise ModelLoadError(f"{name} has no {missing[0]}")
    return [path for path in paths.values() if path is not None]


class _Index(ValidatedModel):
    _invalid: ClassVar[type[CocoaError]] = ModelLoadError
    weight_map: dict[str, str]


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
