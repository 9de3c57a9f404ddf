"""Tiny causal models with random weights, one per architecture, and tokenizers built in memory for them.

The weights are scaled so that decoding is worth testing: several tokens compete at every second or third step, the
layers disagree by different amounts from token to token, and an answer ends by itself now and then. Engines of such
models for tests of many calls at once, prompts for them, folders with models, to be loaded by name, and a nested schema
that is small enough for them.
"""

import codecs
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from pydantic import BaseModel, Field
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.report import RiskReport, ValueReport

EOS, BOS, PAD = 0, 1, 2
VOCAB_SIZE = 300
NUM_LAYERS = 6

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "pad_token_id": PAD,
}
_HEADS = {"num_attention_heads": 4, "intermediate_size": 64}
_GROUPED = {**_HEADS, "num_key_value_heads": 2, "head_dim": 8}  # two query heads share a key-value head
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WINDOW = 8  # of sliding attention: shorter than most sequences in the tests

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": None},
    "mistral-sliding": {**_GROUPED, "sliding_window": _WINDOW},
    "qwen2": {**_HEADS, "num_key_value_heads": 2},
    "qwen3": _GROUPED,
    "qwen3_moe": {
        **_GROUPED,
        **_EXPERTS,
        "num_experts": 5,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "gemma2": {**_GROUPED, "sliding_window": _WINDOW},
    "gemma3_text": {
        **_GROUPED,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "granite": {
        **_HEADS,
        "num_key_value_heads": 2,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 1.5,
    },
    "olmo2": {**_HEADS, "num_key_value_heads": 2},
    "phi": _HEADS,
    "phi3": {**_HEADS, "num_key_value_heads": 2, "sliding_window": None},
    "gpt2": {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 512},
    "gpt_neo": {
        "num_heads": 4,
        "num_layers": NUM_LAYERS,
        "attention_types": [[["global", "local"], NUM_LAYERS // 2]],
        "window_size": 20,  # longer than a trial that knows no such field
    },
    "gpt_neox": _HEADS,
    "opt": {"num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.15},
    "falcon": {"num_attention_heads": 4},
    "mamba": {"initializer_range": 0.3, "state_size": 8, "expand": 2},
    "qwen3_next": {
        **_GROUPED,
        "initializer_range": 0.05,  # it rounds more than the others
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
}
"""The settings of each architecture beside the common ones."""

RECURRENT = ("mamba", "qwen3_next")
"""Those that carry a state from token to token: branches cannot share it."""

_OUTPUT_SCALE = 1.2
"""Standard deviation of the output layer's weights: about every third step is a risk point at gamma = 0.3."""


def tiny_model(architecture: str, *, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """A model of one of :data:`ARCHITECTURES` with random weights, float32, and further fields of its configuration."""
    settings = {**_COMMON, **ARCHITECTURES[architecture], **overrides}
    config = transformers.AutoConfig.for_model(architecture.partition("-")[0], **settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model.get_output_embeddings().weight.normal_(std=_OUTPUT_SCALE)
        output[EOS] *= 1.5
    return model


_SPECIAL = ["<eos>", "<bos>", "<pad>"]  # ids EOS, BOS, PAD
_FIRST_BYTE = len(_SPECIAL)
_MERGED = ["the ", "ing", " a", "is", "er", "é", "ß", "日", "日本", "😀", "😀😀", "\n\n", "ст", "да", "—" * 8]
"""Texts that are longer tokens; the shorter ones on the way to them (part characters too) are tokens as well."""


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ``VOCAB_SIZE`` tokens, as GPT-2, Llama 3 and Qwen have.

    A character of several bytes is several tokens unless it is in a small list; some tokens are parts of characters.
    """
    letters = bytes_to_unicode()
    vocab = {token: i for i, token in enumerate([*_SPECIAL, *(letters[byte] for byte in range(256))])}
    merges: list[tuple[str, str]] = []
    for text in _MERGED:
        pieces = [letters[byte] for byte in text.encode()]
        while len(pieces) > 1 and len(vocab) < VOCAB_SIZE:
            left, right = pieces[:2]
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
            pieces[:2] = [left + right]

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer)


class LetterTokenizer(transformers.PreTrainedTokenizer):
    """A tokenizer in Python: every character is a token. ``unk_token`` is among the special ones."""

    def __init__(self, letters: Iterable[str], **special: str) -> None:
        self.letters = {letter: number for number, letter in enumerate(letters)}
        super().__init__(**special)

    @property
    def vocab_size(self) -> int:
        return len(self.letters)

    def get_vocab(self) -> dict[str, int]:
        return self.letters | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.letters.get(token, self.added_tokens_encoder.get(str(self.unk_token)))

    def _convert_id_to_token(self, index: int) -> str:
        return [*self.letters][index] if index < len(self.letters) else str(self.unk_token)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


class LoweringTokenizer(LetterTokenizer):
    """One that changes texts: letters become small, white space one space."""

    def __init__(self) -> None:
        super().__init__(map(chr, range(32, 127)), bos_token="~", eos_token="}", unk_token="^")

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(re.sub(r"\s+", " ", text.lower()))


def endless_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """:func:`tiny_tokenizer` without an end token: answers end where the model's generation config says."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


def pieces_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with ``VOCAB_SIZE`` tokens of the family of Llama 2 and Gemma.

    Words begin with a visible space, characters outside the vocabulary fall back to one token per byte, the first
    space of a text is dropped on decoding and a beginning-of-sequence token is added on encoding.
    """
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz", *".,?é日", "▁a", "▁t", "▁th", "in", "er", "he", "▁the"]
    vocab = {token: i for i, token in enumerate([*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])}
    for rest in range(VOCAB_SIZE - len(vocab)):
        vocab["▁" * (rest + 2)] = len(vocab)
    merges = [("▁", "a"), ("▁", "t"), ("▁t", "h"), ("i", "n"), ("e", "r"), ("h", "e"), ("▁t", "he")]

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return _fast(tokenizer)


def _fast(tokenizer: Tokenizer) -> transformers.PreTrainedTokenizerFast:
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_SPECIAL[EOS],
        bos_token=_SPECIAL[BOS],
        pad_token=_SPECIAL[PAD],
        clean_up_tokenization_spaces=False,
    )
    if len(fast) != VOCAB_SIZE:
        raise AssertionError(f"{len(fast)} tokens")
    return fast


def token_bytes(tokenizer: transformers.PreTrainedTokenizerFast) -> list[bytes]:
    """The bytes each token of one of these tokenizers stands for; nothing for the special ones."""
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    byte_level = "<0x00>" not in tokenizer.get_vocab()
    result = []
    for i, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(VOCAB_SIZE)))):
        if i < _FIRST_BYTE:
            result.append(b"")
        elif byte_level:
            result.append(bytes(byte_of[letter] for letter in token))
        elif i < _FIRST_BYTE + 256:
            result.append(bytes([i - _FIRST_BYTE]))
        else:
            result.append(token.replace("▁", " ").encode())
    return result


class WellFormedText(transformers.LogitsProcessor):
    """Bans tokens that would break UTF-8. The prompt must be well-formed too."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
        self.bytes = token_bytes(tokenizer)
        self.banned = cache(self._banned)  # by the bytes of the character that is not complete yet

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        pending = []
        for row in input_ids.tolist():
            decoder = codecs.getincrementaldecoder("utf-8")()
            decoder.decode(b"".join(self.bytes[token] for token in row))
            pending.append(self.banned(decoder.getstate()[0]))
        return scores.masked_fill(torch.stack(pending).to(scores.device), -torch.inf)

    def _banned(self, pending: bytes) -> Tensor:
        banned = torch.zeros(len(self.bytes), dtype=torch.bool)
        for token, more in enumerate(self.bytes):
            try:
                codecs.getincrementaldecoder("utf-8")().decode(pending + more)
            except UnicodeDecodeError:
                banned[token] = True
        return banned


def prompt(seed: int, length: int = 12) -> list[int]:
    """Random tokens; prompts of different seeds begin differently."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, VOCAB_SIZE, (length,), generator=generator).tolist()


def engine_of(model: Any, **runtime: Any) -> CocoaEngine:
    """An engine without caches that make a later call cheaper."""
    return CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(**{"prefix_cache_mb": 0, **runtime}))


def endless(**runtime: Any) -> CocoaEngine:
    """Of a model that never ends by itself."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return CocoaEngine(model, endless_tokenizer(), runtime=Runtime(**{"prefix_cache_mb": 0, **runtime}))


QUESTION = "Who invented the telephone?"
"""The answer of the quick models, those with seed 6, has several spans, of both kinds, within 12 tokens."""

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def save_model(folder: Path, architecture: str = "llama", *, chat: bool = True, **options: Any) -> str:
    """Save a tiny model with its tokenizer, which may have a chat template, and return the name of the folder."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE if chat else None
    tiny_model(architecture, **{"seed": 6, **options}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Item(BaseModel):
    name: Literal["tea", "milk"]


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[7, 42]


class Order(BaseModel):
    """An order."""

    person: Person
    items: list[Item] = Field(min_length=2, max_length=2)
    paid: bool


PATHS = [
    "$.person",
    "$.person.name",
    "$.person.age",
    "$.items",
    "$.items[0]",
    "$.items[0].name",
    "$.items[1]",
    "$.items[1].name",
    "$.paid",
]


@cache
def engine_for_schemas() -> CocoaEngine:
    """Random weights, a chat template, and room for a prompt that contains a schema."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return CocoaEngine(tiny_model("llama", seed=6, max_position_embeddings=4096), tokenizer, model_name="quick")


def value_at(value: Any, path: str) -> Any:
    """The value at one of :data:`PATHS`."""
    for key in path.removeprefix("$").replace("[", ".").replace("]", "").split(".")[1:]:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def check_fields(fields: dict[str, ValueReport], order: Order, report: RiskReport, text: str) -> None:
    """Every field has the risk of the spans that contain it, under its path and at its offsets in the text."""
    assert list(fields) == PATHS
    for path, measured in fields.items():
        written, value = text[measured.start : measured.end], value_at(order.model_dump(), path)
        assert (written if isinstance(value, str) else json.loads(written)) == value
        within = [
            (number, span)
            for number, span in enumerate(report.spans)
            if span.start < measured.end and span.end > measured.start
        ]
        assert measured.spans == [number for number, _ in within]
        assert measured.risk == max(span.risk for _, span in within)
        assert measured.f_mlds == pytest.approx(sum(span.f_mlds for _, span in within) / len(within))
        assert measured.log_prob <= 0
    assert sum(fields[path].log_prob for path in ("$.person", "$.items", "$.paid")) < 0  # words were chosen
    assert fields["$.person"].log_prob <= fields["$.person.name"].log_prob + fields["$.person.age"].log_prob
