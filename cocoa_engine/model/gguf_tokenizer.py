"""Makes the tokenizer of a GGUF file, with the ``tokenizers`` package and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from cocoa_engine.errors import ModelLoadError, safe_logger, short_repr
from cocoa_engine.files import cache_directory, is_private, keep_newest, write_note
from cocoa_engine.model.generation_config import CONTROL_TOKEN, eos_of_gguf
from cocoa_engine.model.gguf_reader import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = safe_logger(__name__)

FOLDER = "gguf"
KEPT = 32  # tokenizers in the cache directory, those that were written last

NORMAL_TOKEN, UNKNOWN_TOKEN, USER_TOKEN = 1, 2, 4  # GGUF's token types; a user's token is added and is not special

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"
_REST_WITH_PATHS = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_LETTERS_WITH_CASE = (  # of DeepSeek's first models: those of these blocks are no such letters
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^ՠ-ֈჇ-ჿᲀ-\x{1c8f}ⴀ-ⴭ\x{a78f}-ꟿꬰ-ꭨ\x{10570}-\x{105bf}\x{16e40}-\x{16e7f}\x{1d400}-\x{1dfff}]]"
)

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{_REST}"
_QWEN_35 = _QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_LLAMA_3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}{_REST}"
_GPT_4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}{_REST_WITH_PATHS}"
_TEKKEN = _CASED % ("", "") + rf"|\p{{N}}{_REST_WITH_PATHS}"
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK_3 += rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_SPACES}"
_DEEPSEEK_LLM = ("[\r\n]", rf"\s?{_LETTERS_WITH_CASE}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+")

_LIKE_LLAMA_3: tuple[str, ...] = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2")
_LIKE_LLAMA_3 += ("midm-2.0", "jina-v5-nano")
_LIKE_GPT_2 = ("gpt-2", "olmo", "mpt", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion")
_LIKE_SMOLLM = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
_LIKE_QWEN = ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez")
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_LIKE_GPT_2, "granite-docling"), (_GPT_2,)),
    **dict.fromkeys(_LIKE_SMOLLM, (r"\p{N}", _GPT_2)),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT_2, "[0-9][0-9][0-9]"),
    **dict.fromkeys((*_LIKE_QWEN, "stablelm2", "hunyuan", "solar-open", "grok-2"), (_QWEN,)),
    "qwen35": (_QWEN_35,),
    **dict.fromkeys((*_LIKE_LLAMA_3, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA_3,)),
    "minicpm5": (r"\p{N}{1,3}", _LLAMA_3.replace("{1,3}", "+")),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_GPT_4O,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT_4O)),
    "tekken": (_TEKKEN,),
    "seed-coder": (_SEED,),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
    "deepseek-llm": (*_DEEPSEEK_LLM, r"\p{N}+"),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_3)),
}
"""How a byte-level vocabulary cuts a text, by GGUF's name: published rules, each of which cuts the pieces further."""
_UNNAMED = (None, "default")  # in files of the time before the names: GPT-2's rule, which all had then
_COMPOSED = (*_LIKE_QWEN, "command-r", "mpt", "olmo", "stablelm2")  # their texts are composed first (NFC)
_BEGINNING = (*_LIKE_LLAMA_3, "tekken")  # older files begin texts without saying so
_WHOLE_WORDS_FIRST = (*_BEGINNING, "minicpm5")  # their merges apply to words that are no token
_WITH_SPACES = ("llama", "gemma4")  # models whose tokens are written with "▁", and bytes as <0x0A>
_SPACE = "▁"
_SHADOWED = "\U0010ffff"  # stands around the id before the text of a token that another one has too
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
_ROLES_OF = {"pad": "padding", "unk": "unknown"}  # by transformers' names, where they differ
_DEFAULTS = {"bos": 1, "eos": 2, "unk": 0}  # llama.cpp's, of a SentencePiece vocabulary
_LISTS = {"tokens": str, "merges": str, "token_type": int, "scores": float}
_NONE = (-1, 2**32 - 1)  # what files write for a token that there is not


def obstacle(file: GgufFile) -> str | None:
    """Why :func:`load` does not know the tokenizer of a file, or ``None``."""
    metadata = file.metadata
    model, pre = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model not in _WITH_SPACES and (model != "gpt2" or (pre not in PRE_TOKENIZERS and pre not in _UNNAMED)):
        return f"tokenizer.ggml.model = {short_repr(model)} with tokenizer.ggml.pre = {short_repr(pre)}"
    if model == "gpt2" and metadata.get("tokenizer.ggml.add_space_prefix"):
        return "tokenizer.ggml.add_space_prefix = True"
    for key, value in metadata.items():
        first, _, name = key.partition(".")
        if first == "tokenizer" and name not in READ and not name.startswith("chat_template.") and value:
            return f"{key} = {short_repr(value)}"
    return None


def _ids_of_roles(file: GgufFile, size: int, *names: str) -> dict[str, int | None]:
    """The tokens of a vocabulary of ``size`` with roles, by transformers' names; ``None`` if there is none."""
    ids: dict[str, int | None] = {}
    defaults = _DEFAULTS if file.metadata.get("tokenizer.ggml.model") == "llama" else {}
    for name in names:
        key = f"tokenizer.ggml.{_ROLES_OF.get(name, name)}_token_id"
        number = file.metadata.get(key, defaults.get(name))
        ids[name] = None if number in (None, *_NONE) else number
        if ids[name] is not None and (type(number) is not int or not 0 <= number < size):
            raise ModelLoadError(f"{file.path}: {key} = {short_repr(number)} is no token of the vocabulary of {size}")
    return ids


def token_ids(file: GgufFile) -> dict[str, int | None]:
    """The special tokens of a model's config, by transformers' names."""
    ids = _ids_of_roles(file, file.tensors["token_embd.weight"].shape[0], "bos", "eos", "pad")
    return {f"{name}_token_id": number for name, number in ids.items()}


def load(file: GgufFile, **options: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of the file (a byte-level BPE or a SentencePiece BPE), with options of transformers' tokenizer.

    It is kept in the cache directory, by the content of the metadata. Reading it takes a third of the time of making
    it: 3 seconds less for a vocabulary of 262,144 tokens.
    """
    model, pre = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model == "gpt2" and pre in _UNNAMED:
        logger.warning("The file does not name its tokenizer's rule (tokenizer.ggml.pre): texts are cut as GPT-2's are")
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
    """The tokenizer of the file for the ``tokenizers`` package, which raises nothing more exact than Exception."""
    from tokenizers import AddedToken, Regex, decoders, processors

    if (why := obstacle(file)) is not None:
        raise ModelLoadError(f"{file.path}: a tokenizer with {why} is not read; name another with tokenizer_name=...")
    metadata = file.metadata
    for name, kind in _LISTS.items():
        values = metadata.get(f"tokenizer.ggml.{name}")
        if values is not None and (not isinstance(values, list) or any(type(item) is not kind for item in values[:1])):
            raise ValueError(f"tokenizer.ggml.{name} = {short_repr(values)} is no list of {kind.__name__}")
    tokens = _tokens(file)
    kinds = list(metadata.get("tokenizer.ggml.token_type") or [NORMAL_TOKEN] * len(tokens))
    if len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} types for {len(tokens)} tokens")
    for number in eos_of_gguf(metadata):
        kinds[number] = CONTROL_TOKEN  # whatever the file says: an end is no text
    is_sentencepiece = metadata["tokenizer.ggml.model"] in _WITH_SPACES
    tokenizer = _sentencepiece(tokens, kinds, metadata) if is_sentencepiece else _byte_level(tokens, metadata)
    if any(_SHADOWED in token for token in tokens):
        unmarked = decoders.Replace(Regex(rf"{_SHADOWED}\d+{_SHADOWED}"), "")
        tokenizer.decoder = decoders.Sequence([unmarked, tokenizer.decoder])
    strips = is_sentencepiece and metadata["general.architecture"] == "phi3"
    added: dict[int, list[AddedToken]] = {CONTROL_TOKEN: [], USER_TOKEN: []}
    for token, kind_of_token in zip(tokens, kinds, strict=True):
        if kind_of_token in added and token.strip(_SPACE):
            is_special, rstrip = kind_of_token == CONTROL_TOKEN, strips and token not in _PLAIN_PHI3
            added[kind_of_token].append(AddedToken(token, special=is_special, normalized=False, rstrip=rstrip))
    tokenizer.add_special_tokens(added[CONTROL_TOKEN])
    tokenizer.add_tokens(added[USER_TOKEN])
    bos = _special_tokens(file).get("bos_token")
    begins = is_sentencepiece or metadata.get("tokenizer.ggml.pre") in _BEGINNING
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", begins):
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        first = [] if is_sentencepiece else [processors.ByteLevel(trim_offsets=False)]
        tokenizer.post_processor = processors.Sequence([*first, template])
    return tokenizer


def _tokens(file: GgufFile) -> list[str]:
    """The vocabulary, each token once: of equal ones the last is read, as in llama.cpp, the others are only written."""
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    if file.metadata["tokenizer.ggml.model"] in _WITH_SPACES:  # llama.cpp's converter writes runs of spaces as they are
        tokens = [token if token.strip(" ") else _SPACE * len(token) for token in tokens]
    last = {token: number for number, token in enumerate(tokens)}
    return [
        token if last[token] == number else f"{_SHADOWED}{number}{_SHADOWED}{token}"
        for number, token in enumerate(tokens)
    ]


def _special_tokens(file: GgufFile) -> dict[str, str]:
    """The special tokens, by transformers' names."""
    tokens = _tokens(file)
    ids = _ids_of_roles(file, len(tokens), "bos", "eos", "pad", "unk")
    return {f"{name}_token": tokens[number] for name, number in ids.items() if number is not None}


def _wrapped(file: GgufFile, **options: Any) -> PreTrainedTokenizerFast:
    """transformers' tokenizer with these options, and the special tokens and the chat templates of the file."""
    metadata, prefix = file.metadata, "tokenizer.chat_template."
    named = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    # as in llama.cpp, a template for tools that stands alone is for all chats
    default = metadata.get("tokenizer.chat_template", named.get("tool_use"))
    settings = {
        "chat_template": {"default": default, **named} if named and default is not None else named or default,
        "model_max_length": metadata.get(f"{metadata['general.architecture']}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    made = PreTrainedTokenizerFast(**{**settings, **_special_tokens(file), **options})
    # not given above: of a large vocabulary transformers would ask the Hub what model has this name
    made.name_or_path = str(file.path)
    return made


def _byte_level(tokens: list[str], metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre: str | None = metadata.get("tokenizer.ggml.pre")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _pairs(metadata["tokenizer.ggml.merges"])
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    rules = PRE_TOKENIZERS.get(pre or "", (_GPT_2,))
    steps = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in rules]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: list[str], kinds: Sequence[int], metadata: Mapping[str, Any]) -> Tokenizer:
    """A SentencePiece BPE. Characters that are no token become the tokens of their bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    stated = metadata.get("tokenizer.ggml.merges")
    merges = _merges(tokens, kinds, metadata) if stated is None else _pairs(stated)
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN_TOKEN), None)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    )
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", metadata["tokenizer.ggml.model"] == "llama")
    prefix, drop = ([normalizers.Prepend(_SPACE)], [decoders.Strip(" ", 1, 0)]) if has_prefix else ([], [])
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *drop]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of tokens that make a token, from their spelling with a space between."""
    cuts = [merge.find(" ", 1) for merge in merges]
    if -1 in cuts:
        raise ValueError(f"tokenizer.ggml.merges has {short_repr(merges[cuts.index(-1)])}, which is no pair")
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def _merges(tokens: list[str], kinds: Sequence[int], metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, in the order in which they are joined.

    SentencePiece stores no pairs: it joins whichever neighbours make the token with the best score.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or str(metadata["general.architecture"]).startswith("gemma"):
        scores = range(0, -len(tokens), -1)  # Gemma's order is that of its tokens; its scores are another
    ranks = {
        token: -score
        for token, kind, score in zip(tokens, kinds, scores, strict=True)
        if kind == NORMAL_TOKEN or (kind == USER_TOKEN and not token.strip(_SPACE))
    }
    pairs = [
        (rank, -cut, cut - len(token), token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return [pair[3:] for pair in sorted(pairs, key=lambda pair: pair[:3])]
