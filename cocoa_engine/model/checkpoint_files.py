"""The files of a model: where its name leads, and checks of them before transformers reads them.

transformers passes wrong values of a tokenizer's files on, to where they fail, and opens whatever an index names.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError, ValidationInfo, create_model, field_validator

from cocoa_engine.errors import ModelLoadError, explain, short_repr
from cocoa_engine.model.gguf_reader import SUFFIX, parts_of
from cocoa_engine.model.load_options import ACCESS_OPTIONS

ADAPTER = "load it and its base model with peft, and use CocoaEngine(model, tokenizer)"

FILE_OPTIONS = (*ACCESS_OPTIONS, "revision", "subfolder")


def locate(name: str) -> tuple[str, str | None]:
    """Where the model of a name is: its folder or Hub id, and its GGUF file there; `None`: it is no GGUF file.

    A name may be a Hub id, a folder, a GGUF file, or that of one in a repository, such as ``owner/model/small.gguf``. A
    folder with one GGUF file and no ``config.json`` means that file. Of a model that was split it is the first part.
    """
    path = Path(name).expanduser()
    if path.is_file():  # Ollama's have no suffix
        return str(path.parent), parts_of(path.name)[0]
    if name.lower().endswith(SUFFIX) and not path.is_dir():
        words = name.split("/")
        if len(words) < 3 or name.startswith((".", "~")) or path.is_absolute() or Path(words[0]).exists():
            raise ModelLoadError(
                f"there is no file {path}; name a GGUF file, or one in a repository of the Hub: "
                f"owner/model/file{SUFFIX}"
            )
        return "/".join(words[:2]), parts_of("/".join(words[2:]))[0]
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(file.name for file in path.iterdir() if file.name.lower().endswith(SUFFIX))
        if len({parts_of(file)[0] for file in files}) == 1:
            return name, parts_of(files[0])[0]
        if files:
            listed = ", ".join(files[:5]) + (", ..." if len(files) > 5 else "")
            raise ModelLoadError(f"{path} has {len(files)} GGUF files ({listed}); name one, such as {path / files[0]}")
    return name, None


def name_of(value: str | os.PathLike[str], what: str) -> str:
    """The name of a model or tokenizer as text, if it is not empty and has no NUL character."""
    name = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise ModelLoadError(f"the name of the {what} is {short_repr(value)}; name a local folder or a Hub id")
    return name


def located(name: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where a model is, without ``~``, and the options with the GGUF file that its name means."""
    if "gguf_file" not in options and "subfolder" not in options:
        name, file = locate(name)
        options = options if file is None else {**options, "gguf_file": file}
    return os.path.expanduser(name), options


def is_path(name: str) -> bool:
    """Whether a name is a path rather than a Hub id (``model``, ``owner/model``)."""
    path = Path(name)
    return path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def require_model(name: str, options: dict[str, Any]) -> str:
    """Check that a folder holds a model, and return its name. What has a Hub id is not looked for."""
    if not is_path(name):
        return name
    source = Path(name)
    if not source.is_dir():
        raise ModelLoadError(
            f"{source} does not exist; name a folder with config.json and weights, a GGUF file, or a Hub id"
        )
    folder = source / options.get("subfolder", "")
    if "gguf_file" in options:
        if not (folder / options["gguf_file"]).is_file():
            raise ModelLoadError(f"there is no file {options['gguf_file']} in {folder}")
    elif not (folder / "config.json").exists() and "config" not in options:
        hint = f"; it holds an adapter only: {ADAPTER}" if (folder / "adapter_config.json").exists() else ""
        raise ModelLoadError(f"{folder} is not a model folder: it has no config.json{hint}")
    return str(source)


def gguf_path(name: str, options: Mapping[str, Any]) -> Path:
    """The GGUF file of a folder or, downloaded into the cache if it is not there yet, of a repository of the Hub."""
    from huggingface_hub import hf_hub_download

    folder, file = options.get("subfolder", ""), options["gguf_file"]
    if Path(name).is_dir():
        return Path(name) / folder / file
    access = pick(options, ("token", "cache_dir", "local_files_only", "force_download", "revision"))
    paths = [hf_hub_download(name, part, subfolder=folder or None, **access) for part in parts_of(file)]
    return Path(paths[0])


def pick(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def find_file(name: str, access: Mapping[str, Any], file: str) -> Path | None:
    """A file of a local folder or a Hub id, by transformers' options of where files are; `None` if there is none."""
    from transformers.utils import cached_file

    path = cached_file(name, file, **access, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def require_safetensors(name: str, config: Any, options: dict[str, Any]) -> None:
    """Check that transformers will open safetensors alone, of this checkpoint: an adapter would name another one."""
    if "gguf_file" in options:
        return
    access = pick(options, FILE_OPTIONS)
    if find_file(name, access, "adapter_config.json") is not None:
        raise ModelLoadError(f"{name} holds an adapter (adapter_config.json); {ADAPTER}")
    if options.get("use_safetensors"):
        safetensors_files(name, config, access, options.get("variant"))


def safetensors_files(name: str, config: Any, access: Mapping[str, Any], variant: str | None = None) -> list[Path]:
    """The files that transformers will open for a checkpoint's weights, none of which is a pickle file.

    An index, or the config, names ``*.safetensors`` files beside it, and nothing else. ``access`` and ``variant`` are
    transformers' options.
    """
    middle = f".{variant}" if variant else ""
    stated = getattr(config, "transformers_weights", None)
    names = [stated] if stated else [f"model{middle}.safetensors", f"model.safetensors.index{middle}.json"]
    find = partial(find_file, name, access)
    file = next((path for path in map(find, names) if path is not None), None)
    if file is None:
        raise ModelLoadError(
            f"{name} has no weights as safetensors ({' or '.join(names)}); pickle files can run code, so "
            "they are read with allow_pickle=True (--allow-pickle) only: pass it if you trust them, or convert them"
        )
    shards = set(_read(_INDEX, file, "model").weight_map.values()) if file.suffix == ".json" else {file.name}
    paths = []
    for shard in sorted(shards):
        if not shard.endswith(".safetensors") or PureWindowsPath(shard).name != shard:
            raise ModelLoadError(
                f"{name}: {file.name} names {short_repr(shard)}, which is no *.safetensors file beside it; other "
                "files can run code when they are read: pass allow_pickle=True (--allow-pickle) only if you trust them"
            )
        path = file if shard == file.name else find(shard)
        if path is None:
            raise ModelLoadError(f"{name} has no {shard}")
        paths.append(path)
    return paths


def _read(kind: Any, path: Path, what: str) -> Any:
    """A file of JSON. An error names it."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        raise ModelLoadError(f"cannot load the {what} of {path}: {explain(error)}") from error


class _AddedToken(BaseModel):
    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = False


class _Merging(BaseModel):
    """The part of a tokenizer that joins tokens in pairs."""

    merges: Any = None
    continuing_subword_prefix: str | None = None

    @field_validator("continuing_subword_prefix")
    @classmethod
    def _begins_merges(cls, prefix: str | None, info: ValidationInfo) -> str | None:
        """Check that the second part of each merge has the prefix. tokenizers would end the process if one has not."""
        merges = info.data.get("merges")
        for merge in merges if prefix and isinstance(merges, list) else ():
            second = merge.partition(" ")[2] if isinstance(merge, str) else str(merge[-1:] and merge[-1])
            if not second.startswith(prefix or ""):
                raise ValueError("it does not begin the second part of every one of model.merges")
        return prefix


_Token = str | _AddedToken
_SPECIAL: dict[str, Any] = {
    **{f"{role}_token": (_Token | None, None) for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
    "additional_special_tokens": (list[_Token] | None, None),
    "extra_special_tokens": (list[_Token] | dict[str, _Token] | None, None),
}
_CONFIG: dict[str, Any] = {
    "model_max_length": (int | float | None, None),
    **dict.fromkeys(("padding_side", "truncation_side"), (Literal["left", "right"], "right")),
    "added_tokens_decoder": (dict[str, _AddedToken], {}),
}
_INDEX = create_model("_Index", weight_map=(dict[str, str], ...))
_TOKENIZER_FILES: dict[str, Any] = {
    "tokenizer_config.json": create_model("_Config", **_SPECIAL, **_CONFIG),
    "special_tokens_map.json": create_model("_SpecialTokens", **_SPECIAL),
    "added_tokens.json": dict[str, int],
    "tokenizer.json": create_model("_Tokenizer", model=(_Merging, ...)),
}


_ChatTemplate = create_model("_ChatTemplate", chat_template=(str | dict[str, str], ...))


def read_chat_template(path: Path) -> str | dict[str, str]:
    """The template of a ``chat_template.json``, or several by name."""
    template: str | dict[str, str] = _read(_ChatTemplate, path, "tokenizer").chat_template
    return template


def require_tokenizer_files(find: Callable[[str], Path | None]) -> None:
    """Check the files of a tokenizer, whose paths ``find`` gives: a wrong one is named, and its first wrong values."""
    for name, kind in _TOKENIZER_FILES.items():
        if (path := find(name)) is not None:
            _read(kind, path, "tokenizer")
