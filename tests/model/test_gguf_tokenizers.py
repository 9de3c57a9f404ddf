"""Tokenizers of GGUF files, beside slow references and those of transformers."""

from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from cocoa_engine.decoding import matchers
from cocoa_engine.model import gguf_tokenizer
from cocoa_engine.model.gguf_reader import GgufFile

BYTES = [f"<0x{number:02X}>" for number in range(256)]
CORPUS = "the theme of the other thing is that they are there; inner dinners, 2024 and 1999.\n\nIt's it, isn't it? " * 3
TEXTS = st.text() | st.text(alphabet="theinrs .,;'\n\t1290<[/]é日🙂") | st.sampled_from([CORPUS, " the", "", "  a  b"])
OFTEN = settings(deadline=None, max_examples=150)


def learned() -> list[str]:
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator([CORPUS], trainer)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return sorted((token for token in vocabulary if len(token) > 1), key=vocabulary.__getitem__)


def write(path: Path, architecture: str, tokens: list[str], kinds: list[int], **more: Any) -> GgufFile:
    model = "gpt2" if "pre" in more else "llama"
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    for name, value in {"model": model, "tokens": tokens, "token_type": kinds, **ids, **more}.items():
        if value is not None:
            writer.add_key_value(f"tokenizer.ggml.{name}", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(path)


def sentencepiece_file(path: Path, architecture: str) -> GgufFile:
    """A vocabulary as llama.cpp's converter writes it.

    Gemma's runs of spaces are added tokens, written as spaces. The order of the others is not that of their scores.
    """
    is_gemma = architecture.startswith("gemma")
    runs = ["  ", "   ", "    "] if is_gemma else []
    long = learned()
    letters = sorted({*"▁ abcdefghijklmnopqrstuvwxyzI.,;?'0123456789é\n"} - {" "})
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", "[INST]", *runs, *BYTES, *long, *letters]
    kinds = [2, 3, 3, 3, 4] + [4] * len(runs) + [6] * 256 + [1] * (len(long) + len(letters))
    before = 5 + len(runs) + 256
    scores = [0.0] * before + [-float(number) for number in range(len(long) + len(letters))]
    if not is_gemma:
        tokens[before:], scores[before:] = tokens[: before - 1 : -1], scores[: before - 1 : -1]
    return write(path, architecture, tokens, kinds, scores=scores, add_space_prefix=False if is_gemma else None)


def joined(text: str, tokens: list[str], kinds: list[int], scores: list[float]) -> list[int]:
    """SentencePiece's BPE, written out: join the neighbours that make the best token, the leftmost of equals."""
    best = {token: score for token, kind, score in zip(tokens, kinds, scores, strict=True) if kind == 1}
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [(best.get(a + b), -at) for at, (a, b) in enumerate(pairwise(pieces))]
        found = max((pair for pair in pairs if pair[0] is not None), default=None)
        if found is None:
            break
        at = -found[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids = []
    for piece in pieces:
        whole = [tokens.index(piece)] if piece in best else None
        ids += whole or [tokens.index(f"<0x{byte:02X}>") for byte in piece.encode()]
    return ids


ARCHITECTURES = ["llama", "phi3", "gemma2", "gemma3"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sentencepiece_tokens_are_joined_by_score(tmp_path: Path, architecture: str) -> None:
    file = sentencepiece_file(tmp_path / "model.gguf", architecture)
    assert gguf_tokenizer.obstacle(file) is None
    tokenizer = gguf_tokenizer.load(file)
    vocabulary = [file.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores")]

    @OFTEN
    @given(TEXTS.filter(lambda text: "  " not in text and "[INST]" not in text))
    def check(text: str) -> None:
        prefix = " " if text and file.metadata.get("tokenizer.ggml.add_space_prefix", True) else ""
        ids = tokenizer(text)["input_ids"]
        assert ids == [1, *joined(prefix + text, *vocabulary)]
        if "▁" not in text:
            assert tokenizer.decode(ids, skip_special_tokens=True) == text

    check()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_added_tokens(tmp_path: Path, architecture: str) -> None:
    tokenizer = gguf_tokenizer.load(sentencepiece_file(tmp_path / "model.gguf", architecture))
    user, added = tokenizer.convert_tokens_to_ids(["<|user|>", "[INST]"])
    assert (user, added) == (3, 4)
    ids = tokenizer("<|user|> the[INST] the")["input_ids"]
    assert [token for token in ids if token in (user, added)] == [user, added]
    written = "" if architecture == "phi3" else " "  # Phi-3's added tokens take the spaces after them
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "the[INST]the"
    plain = tokenizer(f"{written}the", add_special_tokens=False)["input_ids"]
    assert ids == [1, user, *plain, added, *plain]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    for count in (2, 3, 4) if architecture.startswith("gemma") else ():  # its runs of spaces are added tokens
        run = tokenizer(" " * count, add_special_tokens=False)["input_ids"]
        assert (run, tokenizer.decode(run)) == ([3 + count], " " * count)


def test_texts_begin_as_the_file_says(tmp_path: Path) -> None:
    tokens, kinds = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a"], [2, 3, 3] + [6] * 256 + [1, 1]
    for begins in (None, True, False):
        file = write(tmp_path / "model.gguf", "llama", tokens, kinds, scores=[0.0] * len(tokens), add_bos_token=begins)
        expected = [259, 260] if begins is False else [1, 259, 260]
        assert gguf_tokenizer.load(file)("a")["input_ids"] == expected
    file = write(tmp_path / "model.gguf", "llama", [*tokens, "▁a"], [*kinds, 1], merges=["▁ a"])
    assert gguf_tokenizer.load(file)("a")["input_ids"] == [1, 261]  # with the merges of the file


DIGITS = ("smollm", "starcoder", "refact", "command-r")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GgufFile]:
    """A file with a vocabulary of whole words and runs, so that the rule alone decides what is one token."""
    folder = tmp_path_factory.mktemp("bytes")
    merges = [f"{a} {b}" for a in "Ġ1290the'sTHn/." for b in "Ġ1290the'sTHn/."]
    tokens = ["<unk>", "<s>", "</s>", *ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    kinds = [3, 3, 3] + [1] * (len(tokens) - 3)
    return lambda pre: write(
        folder / f"{pre}.gguf", "llama", tokens, kinds, pre=pre, merges=merges, add_bos_token=False
    )


def test_byte_level_rules_are_those_of_transformers(byte_level: Callable[[str], GgufFile]) -> None:
    """For the rules that it knows; it does not compose characters as Qwen's tokenizer does, nor skip merges."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    pairs = []
    for pre in ("gpt-2", *DIGITS, *mapping.GGUF_PRE_TOKENIZER_SPLITS):
        file = byte_level(pre)
        architecture, vocabulary, _ = mapping.get_gguf_tokenizer(str(file.path))
        reference, _ = mapping.convert_gguf_tokenizer(architecture, vocabulary)
        read = gguf_tokenizer.load(file).backend_tokenizer
        read.normalizer = reference.normalizer
        read.model.ignore_merges = False
        if pre in DIGITS:
            steps = [pre_tokenizers.Digits(individual_digits=True), reference.pre_tokenizer]
            reference.pre_tokenizer = pre_tokenizers.Sequence(steps)
        pairs.append((pre, read, reference))

    @settings(deadline=None, max_examples=100)
    @given(TEXTS | st.text(alphabet="theTHnés'/. 1290\n\r日ÅǅA\u0301"))
    def check(text: str) -> None:
        for pre, read, reference in pairs:
            assert read.encode(text).ids == reference.encode(text).ids, pre

    check()


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'s", "Ġ2024", "/", "5", "Ġok"]),
        ("smollm", ["It", "'s", "Ġ", "2", "0", "2", "4", "/", "5", "Ġok"]),
        ("qwen2", ["It", "'s", "Ġ", "2", "0", "2", "4", "/", "5", "Ġok"]),
        ("llama-bpe", ["It", "'s", "Ġ", "202", "4", "/", "5", "Ġok"]),
        ("gpt-4o", ["It's", "Ġ", "202", "4", "/", "5", "Ġok"]),
        ("tekken", ["It", "'s", "Ġ", "2", "0", "2", "4", "/", "5", "Ġok"]),
        ("falcon", ["It", "'", "s", "Ġ", "202", "4", "/", "5", "Ġok"]),
        ("deepseek-v3", ["It", "'s", "Ġ", "202", "4", "/", "5", "Ġok"]),
        ("deepseek-llm", ["It", "'", "s", "Ġ", "2024", "/", "5", "Ġok"]),
        ("deepseek-coder", ["It", "'", "s", "Ġ", "2", "0", "2", "4", "/", "5", "Ġok"]),
        ("bloom", ["It's", "Ġ2024/5", "Ġok"]),
        ("viking", ["It's", "Ġ", "2", "0", "2", "4", "/", "5", "Ġok"]),
        ("tiny_aya", ["It's", "Ġ", "2", "024", "/", "5", "Ġok"]),
        ("minicpm5", ["It", "'s", "Ġ", "202", "4", "/", "5", "Ġok"]),
    ],
)
def test_how_the_rules_cut(byte_level: Callable[[str], GgufFile], pre: str, expected: list[str]) -> None:
    rule = gguf_tokenizer.load(byte_level(pre)).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in rule.pre_tokenize_str("It's 2024/5 ok")] == expected


@pytest.mark.parametrize(
    ("pre", "composes"),
    [
        *dict.fromkeys(("qwen2", "command-r", "mpt", "olmo", "stablelm2"), True).items(),
        *dict.fromkeys(("gpt-2", "qwen35", "smollm", "llama-bpe", "falcon", "tekken"), False).items(),
    ],
)
def test_which_texts_are_composed_first(byte_level: Callable[[str], GgufFile], pre: str, composes: bool) -> None:
    """As by the normalizer in each model's ``tokenizer.json``, or in Qwen's and StableLM 2's own code."""
    tokenizer = gguf_tokenizer.load(byte_level(pre))
    assert (tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")) == composes


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_file_of_the_time_before_the_names(
    byte_level: Callable[[str | None], GgufFile], pre: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The rule was GPT-2's then, and a warning says so."""
    file, named = byte_level(pre), gguf_tokenizer.load(byte_level("gpt-2"))
    assert "tokenizer.ggml.pre" not in caplog.text
    for _ in range(2):  # the second one comes from the cache directory
        caplog.clear()
        assert gguf_tokenizer.load(file).encode(CORPUS) == named.encode(CORPUS)
        assert "tokenizer.ggml.pre" in caplog.text


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_of_equal_tokens_the_last_is_read_and_each_is_written(tmp_path: Path, model: str) -> None:
    letters = ALPHABET if model == "gpt2" else [*BYTES, "▁", "a", "b"]
    tokens = ["<unk>", "<s>", "</s>", "ab", "<s>", *letters, letters[65], "ab", "ab"]
    kinds = [2, 3, 3, 1, 3, *[6 if token in BYTES else 1 for token in tokens[5:]]]
    more: dict[str, Any] = {"pre": "gpt-2"} if model == "gpt2" else {"add_space_prefix": False}
    file = write(tmp_path / "m.gguf", "llama", tokens, kinds, merges=["a b"], add_bos_token=False, **more)
    tokenizer = gguf_tokenizer.load(file)
    assert tokenizer.encode("ab") == [len(tokens) - 1]
    assert tokenizer.encode("<s>") == [4]
    assert [tokenizer.decode([number]) for number in (3, len(tokens) - 2, len(tokens) - 1)] == ["ab"] * 3
    assert tokenizer.decode([len(tokens) - 2, 3, 5 + 65]) == f"abab{tokenizer.decode([len(tokens) - 3])}"
    assert matchers.load_tokenizer(tokenizer.backend_tokenizer.to_str(), [2]).decode_bytes([len(tokens) - 1]) == b"ab"
    assert (tokenizer.bos_token_id, len(tokenizer)) == (1, len(tokens))


@pytest.mark.slow
def test_the_hub_is_not_asked_about_a_large_vocabulary(tmp_path: Path) -> None:
    """transformers looks for Mistral's faulty rule in byte-level vocabularies of more than 100,000 tokens."""
    letters = "".join(map(chr, range(ord("a"), ord("z") + 1)))
    words = ["".join(each) for size in (2, 3, 4) for each in product(letters, repeat=size)][:100_001]
    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    merges = [f"{word[:-1]} {word[-1]}" for word in words]
    kinds = [2, 3, 3, *[1] * (len(tokens) - 3)]
    file = write(tmp_path / "large.gguf", "qwen2", tokens, kinds, pre="qwen2", merges=merges)
    tokenizer = gguf_tokenizer.load(file)
    assert len(tokenizer) == len(tokens)
    assert tokenizer.tokenize("abc def") == ["abc", "Ġ", "def"]
    assert tokenizer.name_or_path == str(file.path)
