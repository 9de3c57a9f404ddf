"""Makes the tokenizer of a GGUF file, with the ``tokenizers`` package and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from cocoa_engine.model import ends
from cocoa_engine.model.ends import CONTROL_TOKEN
from cocoa_engine.model.gguf_reader import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL_TOKEN, UNKNOWN_TOKEN, USER_TOKEN = 1, 2, 4  # GGUF's token types; a user's token is added and is not special

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_PATHS = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"

_QWEN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{_REST}"
_LLAMA_3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}{_REST}"
_GPT_4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}{_REST_WITH_PATHS}"
_TEKKEN = _CASED % ("", "") + rf"|\p{{N}}{_REST_WITH_PATHS}"
_GPT_2, _DIGITS = "GPT-2's rule", "every digit is a piece, then GPT-2's rule applies"

PRE_TOKENIZERS = {  # how a byte-level vocabulary cuts a text, by GGUF's name; the published rules
    **dict.fromkeys(("gpt-2", "olmo"), _GPT_2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA_3),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT_4O),
    "tekken": _TEKKEN,
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")  # merges apply to other words
_BEGINS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")  # older files do not say so
_SPACE = "▁"
_PLAIN_PHI3 = ("<unk>", "<s>", "<|endoftext|>")  # the other added tokens of Phi-3 take the spaces after them


def obstacle(file: GgufFile) -> str | None:
    """Why :func:`load` does not know the tokenizer of a file, or ``None``."""
    found = file.metadata
    model, pre = found.get("tokenizer.ggml.model"), found.get("tokenizer.ggml.pre")
    if model == "llama" and "tokenizer.ggml.precompiled_charsmap" not in found:
        return None
    return None if model == "gpt2" and pre in PRE_TOKENIZERS else f"tokenizer {model!r}, {pre!r}"


def load(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer of the file: a byte-level BPE or a SentencePiece BPE.

    Args:
        file: one without an :func:`obstacle`.
    """
    tokenizer, special = make(file)
    return wrapped(file, special, tokenizer_object=tokenizer)


def make(file: GgufFile) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of the file for the ``tokenizers`` package, and its special tokens by transformers' names."""
    from tokenizers import AddedToken

    found = file.metadata
    tokens: list[str] = found["tokenizer.ggml.tokens"]
    kinds = list(found.get("tokenizer.ggml.token_type") or [NORMAL_TOKEN] * len(tokens))
    for token_id in ends.of_gguf(found):
        kinds[token_id] = CONTROL_TOKEN  # whatever the file says: an end is no text
    is_sentencepiece = found["tokenizer.ggml.model"] == "llama"
    if is_sentencepiece:
        tokens = [_respelled(token) for token in tokens]
        tokenizer = _sentencepiece(tokens, kinds, found)
    else:
        tokenizer = _byte_level(tokens, found)
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
    special = {
        f"{role}_token": tokens[number]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (number := found.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    begins = is_sentencepiece or found["tokenizer.ggml.pre"] in _BEGINS_BY_DEFAULT
    if found.get("tokenizer.ggml.add_bos_token", begins) and "bos_token" in special:
        _begin_with(tokenizer, special["bos_token"], byte_level=not is_sentencepiece)
    return tokenizer, special


def wrapped(file: GgufFile, special: Mapping[str, str], **backend: Any) -> PreTrainedTokenizerFast:
    """transformers' tokenizer, with the chat template of the file.

    Args:
        special: as :func:`make` returns them.
        **backend: ``tokenizer_object`` or ``tokenizer_file`` of transformers.
    """
    found = file.metadata
    made = PreTrainedTokenizerFast(
        chat_template=found.get("tokenizer.chat_template"),
        model_max_length=found[f"{found['general.architecture']}.context_length"],
        clean_up_tokenization_spaces=False,
        **special,
        **backend,
    )
    # not given above: of a large vocabulary transformers would ask the Hub what model has this name
    made.name_or_path = str(file.path)
    return made


def _byte_level(tokens: list[str], found: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre: str = found["tokenizer.ggml.pre"]
    merges = [tuple(merge.split(" ", 1)) for merge in found["tokenizer.ggml.merges"]]
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
        merges = [tuple(merge.split(" ", 1)) for merge in found["tokenizer.ggml.merges"]]
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
