"""Makes the tokenizer of a GGUF file, with the ``tokenizers`` package and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from cocoa_engine.cache_directory import cache_directory, is_private, keep_newest, write_note
from cocoa_engine.errors import ModelLoadError, safe_cause
from cocoa_engine.logs import safe_logger
from cocoa_engine.model.generation_config import CONTROL_TOKEN, eos_of_gguf
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.safe_text import short_repr

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = safe_logger(__name__)

FOLDER = "gguf"
KEPT = 32
"""The number of tokenizers that stay in the cache directory, those that were written last."""

NORMAL_TOKEN, UNKNOWN_TOKEN, USER_TOKEN = 1, 2, 4  # GGUF's token types; a user's token is added and is not special

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_PATHS = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"

_QWEN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{_REST}"
_QWEN_35 = _QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_LLAMA_3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}{_REST}"
_GPT_4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}{_REST_WITH_PATHS}"
_TEKKEN = _CASED % ("", "") + rf"|\p{{N}}{_REST_WITH_PATHS}"
_GPT_2, _DIGITS = "GPT-2's rule", "every digit is a piece, then GPT-2's rule applies"

_LIKE_LLAMA_3 = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
)
PRE_TOKENIZERS = {  # how a byte-level vocabulary cuts a text, by GGUF's name; the published rules
    **dict.fromkeys(("gpt-2", "olmo", "mpt"), _GPT_2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN),
    "qwen35": _QWEN_35,
    **dict.fromkeys((*_LIKE_LLAMA_3, "dbrx", "smaug-bpe"), _LLAMA_3),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT_4O),
    "tekken": _TEKKEN,
}
_WHOLE_WORDS_FIRST = (
    *_LIKE_LLAMA_3,
    "tekken",
)  # merges apply to other words; older files begin texts without saying so
_SPACE = "▁"
_PLAIN_PHI3 = ("<unk>", "<s>", "<|endoftext|>")  # the other added tokens of Phi-3 take the spaces after them


_ROLES = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "cls", "prefix", "suffix", "middle")
_FIM_ROLES = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")
READ = (
    *(f"ggml.{role}_token_id" for role in (*_ROLES, *_FIM_ROLES)),
    *(f"ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token")),
    *("ggml.add_space_prefix", "chat_template", "chat_templates"),
    "ggml.add_eos_token",  # of no effect: no prompt ends with it
    "ggml.token_type_count",  # of no effect: types of the tokens of an encoder's input
    "huggingface.json",  # the same vocabulary again
)
"""The keys of a tokenizer that are read, or without effect. Others are refused if they are set."""
_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}  # llama.cpp's, of a SentencePiece vocabulary
_LISTS = {"tokens": str, "merges": str, "token_type": int, "scores": float}
_NONE = (-1, 2**32 - 1)  # what files write for a token that there is not


def obstacle(file: GgufFile) -> str | None:
    """Why :func:`load` does not know the tokenizer of a file, or ``None``."""
    found = file.metadata
    model, pre = (found.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model != "llama" and (model != "gpt2" or pre not in PRE_TOKENIZERS):
        return f"tokenizer.ggml.model = {short_repr(model)} with tokenizer.ggml.pre = {short_repr(pre)}"
    if model == "gpt2" and found.get("tokenizer.ggml.add_space_prefix"):
        return "tokenizer.ggml.add_space_prefix = True"
    for key in found:
        first, _, name = key.partition(".")
        if first == "tokenizer" and name not in READ and not name.startswith("chat_template.") and found[key]:
            return f"{key} = {short_repr(found[key])}"
    return None


def token_id(file: GgufFile, role: str, size: int) -> int | None:
    """The token that has a role, such as ``"eos"``; ``None`` if there is none.

    Args:
        size: of the vocabulary.

    Raises:
        ModelLoadError: it is no token of the vocabulary.
    """
    key, found = f"tokenizer.ggml.{role}_token_id", file.metadata
    number = found.get(key, _DEFAULTS.get(role) if found.get("tokenizer.ggml.model") == "llama" else None)
    if number is None or number in _NONE:
        return None
    if type(number) is not int or not 0 <= number < size:
        raise ModelLoadError(f"{file.path}: {key} = {short_repr(number)} is no token of the vocabulary of {size}")
    return number


def token_ids(file: GgufFile) -> dict[str, int | None]:
    """The special tokens of a model's config, by transformers' names.

    Raises:
        ModelLoadError: one is no token of the vocabulary.
    """
    size = file.tensors["token_embd.weight"].shape[0]
    roles = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{name}_token_id": token_id(file, role, size) for name, role in roles.items()}


def load(file: GgufFile, **options: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of the file: a byte-level BPE or a SentencePiece BPE.

    It is kept in the cache directory under the content of the file's metadata, in the format of ``tokenizers``. Reading
    it there takes a third of the time of making it: 3 seconds less for a vocabulary of 262,144 tokens.

    Args:
        file: the file.
        **options: of transformers' tokenizer.

    Raises:
        ModelLoadError: as for :func:`make`.
    """
    rules = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    place = cache_directory() / FOLDER / f"tokenizer-{file.metadata_digest()}-{rules}-{version('tokenizers')}.json"
    with suppress(Exception):  # there is none, or it is damaged: tokenizers raises nothing more exact
        if is_private(place):
            return _wrapped(file, tokenizer_file=str(place), **options)
    tokenizer = make(file)
    try:
        write_note(place, tokenizer.to_str())
        keep_newest(place.parent, "tokenizer-*.json", KEPT)
    except OSError as error:
        logger.warning("%s is not kept, and is made again at each start: %s", place, error)
    return _wrapped(file, tokenizer_object=tokenizer, **options)


def make(file: GgufFile) -> Tokenizer:
    """The tokenizer of the file for the ``tokenizers`` package.

    Raises:
        ModelLoadError: it is one of another kind, or its part of the metadata is incomplete or wrong.
    """
    if (why := obstacle(file)) is not None:
        raise ModelLoadError(f"{file.path}: a tokenizer with {why} is not read; name another with tokenizer_name=...")
    try:
        return _made(file)
    except ModelLoadError:
        raise
    except Exception as error:  # the package tokenizers raises nothing more exact
        raise ModelLoadError(f"the tokenizer of {file.path} is incomplete or wrong ({error})") from safe_cause(error)


def _made(file: GgufFile) -> Tokenizer:
    from tokenizers import AddedToken

    found = file.metadata
    for name, kind in _LISTS.items():
        values = found.get(f"tokenizer.ggml.{name}")
        if values is not None and (not isinstance(values, list) or any(type(each) is not kind for each in values[:1])):
            raise ValueError(f"tokenizer.ggml.{name} = {short_repr(values)} is no list of {kind.__name__}")
    tokens = _tokens(file)
    if len(set(tokens)) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens has a token twice")
    kinds = list(found.get("tokenizer.ggml.token_type") or [NORMAL_TOKEN] * len(tokens))
    if len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} types for {len(tokens)} tokens")
    for number in eos_of_gguf(found):
        kinds[number] = CONTROL_TOKEN  # whatever the file says: an end is no text
    is_sentencepiece = _is_sentencepiece(file)
    tokenizer = _sentencepiece(tokens, kinds, found) if is_sentencepiece else _byte_level(tokens, found)
    strips = is_sentencepiece and found["general.architecture"] == "phi3"
    pairs = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if token.strip(_SPACE)]

    def added(kind: int) -> list[AddedToken]:
        return [
            AddedToken(
                token,
                special=kind == CONTROL_TOKEN,
                normalized=False,
                rstrip=strips and token not in _PLAIN_PHI3,
            )
            for token, of in pairs
            if of == kind
        ]

    tokenizer.add_special_tokens(added(CONTROL_TOKEN))
    tokenizer.add_tokens(added(USER_TOKEN))
    special = _special_tokens(file)
    begins = is_sentencepiece or found["tokenizer.ggml.pre"] in _WHOLE_WORDS_FIRST
    if found.get("tokenizer.ggml.add_bos_token", begins) and "bos_token" in special:
        _begin_with(tokenizer, special["bos_token"], byte_level=not is_sentencepiece)
    return tokenizer


def _is_sentencepiece(file: GgufFile) -> bool:
    return bool(file.metadata["tokenizer.ggml.model"] == "llama")


def _tokens(file: GgufFile) -> list[str]:
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    return [_respelled(token) for token in tokens] if _is_sentencepiece(file) else tokens


def _special_tokens(file: GgufFile) -> dict[str, str]:
    """The special tokens, by transformers' names."""
    tokens = _tokens(file)
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    numbers = {name: token_id(file, role, len(tokens)) for name, role in roles.items()}
    return {f"{name}_token": tokens[number] for name, number in numbers.items() if number is not None}


def _wrapped(file: GgufFile, **options: Any) -> PreTrainedTokenizerFast:
    """transformers' tokenizer, with the special tokens and the chat templates of the file.

    Args:
        **options: ``tokenizer_object`` or ``tokenizer_file`` of transformers, and further options of its tokenizer.
    """
    settings = {
        "chat_template": _chat_template(file.metadata),
        "model_max_length": file.metadata.get(f"{file.metadata['general.architecture']}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    made = PreTrainedTokenizerFast(**{**settings, **_special_tokens(file), **options})
    # not given above: of a large vocabulary transformers would ask the Hub what model has this name
    made.name_or_path = str(file.path)
    return made


def _chat_template(found: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template, or several by name. As in llama.cpp, one for tools that stands alone is for all chats."""
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): found[key] for key in found if key.startswith(prefix)}
    default: str | None = found.get("tokenizer.chat_template", named.get("tool_use"))
    if not named:
        return default
    return named if default is None else {"default": default, **named}


def _byte_level(tokens: list[str], found: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre: str = found["tokenizer.ggml.pre"]
    merges = _pairs(found["tokenizer.ggml.merges"])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    rule = PRE_TOKENIZERS[pre]
    by_gpt_2 = rule in (_GPT_2, _DIGITS)
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_gpt_2)]
    if rule == _DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif not by_gpt_2:
        steps.insert(0, pre_tokenizers.Split(Regex(rule), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rule == _QWEN:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: list[str], kinds: Sequence[int], found: Mapping[str, Any]) -> Tokenizer:
    """A SentencePiece BPE. Characters that are no token become the tokens of their bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in found:
        merges = _pairs(found["tokenizer.ggml.merges"])
    else:
        merges = _merges(_ranks(tokens, kinds, found))
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN_TOKEN), None)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    )
    prefixed = found.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    drop = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *drop]
    )
    return tokenizer


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of tokens that make a token, from their spelling with a space between."""
    cuts = [merge.find(" ", 1) for merge in merges]
    if -1 in cuts:
        raise ValueError(f"tokenizer.ggml.merges has {short_repr(merges[cuts.index(-1)])}, which is no pair")
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def _respelled(token: str) -> str:
    """A token of spaces alone, which llama.cpp's converter writes as spaces, in SentencePiece's spelling."""
    return token if token.strip(" ") else _SPACE * len(token)


def _ranks(tokens: list[str], kinds: Sequence[int], found: Mapping[str, Any]) -> dict[str, float]:
    """In which order tokens are made of others, smallest first. Only these are made."""
    scores = found.get("tokenizer.ggml.scores")
    if scores is None or str(found["general.architecture"]).startswith("gemma"):
        scores = range(0, -len(tokens), -1)  # Gemma's order is that of its tokens; its scores are another
    return {
        token: -score
        for token, kind, score in zip(tokens, kinds, scores, strict=True)
        if kind == NORMAL_TOKEN or (kind == USER_TOKEN and not token.strip(_SPACE))
    }


def _merges(ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, in the order in which they are joined.

    SentencePiece stores no pairs: it joins whichever neighbours make the token with the best score.
    """
    found = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                found.append((rank, -cut, cut - len(token), left, right))
    found.sort(key=lambda pair: pair[:3])
    return [pair[3:] for pair in found]


def _begin_with(tokenizer: Tokenizer, token: str, *, byte_level: bool) -> None:
    """Let every text begin with a token."""
    from tokenizers import processors

    template = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    first = [processors.ByteLevel(trim_offsets=False)] if byte_level else []
    tokenizer.post_processor = processors.Sequence([*first, template])
