"""GGUF files of each family: the model of the blocks is transformers' model with the same numbers.

Tokenizers of GGUF files, beside slow references and those of transformers.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.decoding import matchers
from cocoa_engine.errors import CocoaError, ModelLoadError, UnsupportedModelError
from cocoa_engine.execution.forward import trial
from cocoa_engine.model import gguf_families, gguf_model, gguf_tokenizer, loading
from cocoa_engine.model.blocks import BLOCK_KINDS, BlockTensor, q5_0_of
from cocoa_engine.model.experts import SeparateExperts
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.loading import load_pretrained
from tests.helpers.backends import made
from tests.helpers.family_gguf import BYTE_LEVEL, FAMILIES, UNPACKED, write_family
from tests.helpers.inside import use_backend
from tests.helpers.libraries import needs_kernels
from tests.helpers.tiny_models import pieces_tokenizer

IDS = torch.randint(3, 260, (1, 20), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def assert_same_answers(engine: CocoaEngine, exact: Any, prompt: Any, methods: Sequence[str] = ("cocoa-sig",)) -> None:
    exact.generation_config.eos_token_id = engine.model.generation_config.eos_token_id
    plain = CocoaEngine(exact, engine.tokenizer, runtime=engine.session.runtime)
    for method in methods:
        answer, expected = (each.generate(prompt, method=method, max_new_tokens=20) for each in (engine, plain))
        assert answer.token_ids == expected.token_ids
        figures = [[span.f_mlds for span in generation.spans] for generation in (answer, expected)]
        assert figures[0] == pytest.approx(figures[1], abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "tied"), [("Q8_0", True), ("Q4_1", False), ("F16", True), ("F32", False)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_that_of_the_file(tmp_path: Path, family: str, kind: str, tied: bool) -> None:
    exact = write_family(tmp_path / "model.gguf", family, kind, tied=tied)
    file = GgufFile(tmp_path / "model.gguf")
    assert gguf_model.obstacle(file) is None
    model = gguf_model.load(file)
    expected = logits(exact)
    torch.testing.assert_close(logits(model), expected, atol=1e-4 * float(expected.std()), rtol=1e-4)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert not model.training
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not any(part in name for part in (".gate.", "router", "conv1d", "bias"))
    ]
    assert all(isinstance(parameter, BlockTensor) for parameter in matrices) == (kind != "F32")
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (tied or family == "gemma2")
    if family in BYTE_LEVEL:
        assert model.generation_config.eos_token_id == [2, 3]
    if kind == "Q8_0":
        unpacked = load_pretrained(file.path)[0]
        assert {type(weight) for weight in unpacked.parameters()} == {torch.nn.Parameter}
        torch.testing.assert_close(logits(model), logits(unpacked), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", UNPACKED)
def test_transformers_unpacks_other_families(tmp_path: Path, family: str, tied: bool) -> None:
    exact = write_family(tmp_path / "model.gguf", family, "Q8_0", tied=tied)
    torch.testing.assert_close(logits(load_pretrained(str(tmp_path / "model.gguf"))[0]), logits(exact))


def test_every_architecture_that_is_read_was_compared() -> None:
    ours, theirs = ({MODEL_ARCH_NAMES[of] for of, *_ in table.values()} for table in (FAMILIES, UNPACKED))
    assert (ours, theirs) == (set(gguf_families.FAMILIES), set(gguf_families.UNPACKED))


@pytest.mark.parametrize("name", sorted(set(MODEL_ARCH_NAMES.values()) - {*gguf_families.FAMILIES, "llama"}))
def test_no_architecture_is_read_as_another_one(tmp_path: Path, name: str) -> None:
    """A file with the tensors of a Llama under the name of every other architecture is refused in one sentence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_family(tmp_path / "model.gguf", "llama", "F32", metadata={"general.architecture": name})
    with pytest.raises(CocoaError, match=r"model\.gguf|complete") as caught:
        load_pretrained(str(tmp_path / "model.gguf"))
    assert "\n" not in str(caught.value)
    if name not in gguf_families.UNPACKED:
        assert re.search(rf"{name}' are not read; use the model's checkpoint \(safetensors\).*qwen3", str(caught.value))


@pytest.mark.parametrize("tensor", ["attn_output.bias", "attn_q_norm.weight", "attn_sinks.weight", "new.weight"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "stablelm", "starcoder2", "qwen35"])
def test_no_tensor_is_left_out(tmp_path: Path, family: str, tensor: str) -> None:
    """transformers ignores those that it does not know."""
    more = {f"blk.0.{tensor}": torch.ones(64)}
    if family == "starcoder2" and tensor == "attn_output.bias":
        return  # it has that
    write_family(tmp_path / "model.gguf", family, "F32", tensors=more)
    with pytest.raises(ModelLoadError, match=r"would be ignored|has no tensor for|does not speak of"):
        load_pretrained(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(("family", "kind"), [("gpt_oss", "MXFP4"), ("granitehybrid", "MXFP4"), ("granitemoe", "Q5_0")])
def test_experts_of_other_types(tmp_path: Path, family: str, kind: str) -> None:
    exact = write_family(tmp_path / "model.gguf", family, "Q8_0", experts=[kind])
    packed = load_pretrained(tmp_path / "model.gguf", keeps_blocks=lambda: True)[0]
    unpacked = load_pretrained(tmp_path / "model.gguf")[0]
    kinds = {weight.kind for weight in packed.parameters() if isinstance(weight, BlockTensor)}
    assert kinds == {"Q8_0", "Q5_0"}
    for model in (packed, unpacked):
        torch.testing.assert_close(logits(model), logits(exact), atol=1e-4, rtol=1e-4)


@given(st.binary(min_size=34, max_size=34).map(lambda data: bytes([100 + data[0] % 40]) + data[1:]))
def test_mxfp4_blocks_are_exact_in_q5_0(data: bytes) -> None:
    """With scales that float16 has, which are those of weights."""
    blocks = np.frombuffer(data[:17], dtype=np.uint8)[None]
    made = q5_0_of(torch.from_numpy(blocks.copy())).numpy()
    theirs, ours = (dequantize(each, of) for each, of in ((blocks, Type.MXFP4), (made, Type.Q5_0)))
    np.testing.assert_allclose(ours, theirs, atol=12 * 2.0**-25, rtol=0)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("width"), ModelLoadError, "has to unpack it, which says: 'width' is missing"),
        (UnsupportedModelError("1 layer"), UnsupportedModelError, "^1 layer$"),  # an error of our own keeps its class
    ],
)
def test_a_file_whose_config_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], message: str
) -> None:
    write_family(tmp_path / "model.gguf", "lfm2", "Q8_0")
    monkeypatch.setattr(loading, "read_config", Mock(side_effect=error))
    with pytest.raises(kind, match=message):
        load_pretrained(str(tmp_path / "model.gguf"))


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("family", "forward"), [*product(FAMILIES, ["auto"]), *product(BYTE_LEVEL, ["modules"])])
def test_the_engine_decodes_from_blocks_as_from_float32(tmp_path: Path, family: str, forward: str) -> None:
    exact = write_family(tmp_path / "model.gguf", family, "Q8_0")
    engine = CocoaEngine.from_pretrained(str(tmp_path / "model.gguf"), runtime=Runtime(forward=forward))
    assert isinstance(engine.model.get_input_embeddings().weight, BlockTensor)
    assert_same_answers(engine, exact, "he 12 inner", ("cocoa-sig", "greedy"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCK_KINDS)), ids=BLOCK_KINDS)
def test_experts_of_every_type_are_read_where_they_are(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [BLOCK_KINDS[(number + step) % len(BLOCK_KINDS)] for step in range(3)]
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    exact = write_family(tmp_path / "model.gguf", "qwen3moe", "Q8_0", experts=kinds, **sizes)
    file = GgufFile(tmp_path / "model.gguf")
    assert gguf_model.obstacle(file) is None
    expected = logits(exact)
    monkeypatch.setattr(BlockTensor, "dequantized", None)  # nothing may unpack a whole matrix
    model: Any = gguf_model.load(file)
    for forward in ("modules", "lean"):
        if forward == "lean" and trial.obstacle() is not None:
            continue
        chosen = made(model, forward, "stock" if trial.obstacle() else "native")
        engine = use_backend(CocoaEngine(model, pieces_tokenizer()), chosen)
        assert_same_answers(engine, exact, IDS[0].tolist())
    torch.testing.assert_close(logits(model), expected, atol=1e-4 * float(expected.std()), rtol=1e-4)
    for layer, block in enumerate(model.model.layers):
        experts = block.mlp.experts
        for name, kind in zip(("gate", "up", "down"), kinds, strict=True):
            weight = experts.get_submodule(f"{name}_proj").weight
            assert weight.kind == kind
            theirs = file.blocks(f"blk.{layer}.ffn_{name}_exps.weight")
            assert all(weight[expert].blocks.data_ptr() == theirs[expert].data_ptr() for expert in range(6))


@needs_kernels
def test_the_modules_run_experts_by_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = write_family(tmp_path / "model.gguf", "qwen3moe-mixed", "Q5_0")
    engine = CocoaEngine.from_pretrained(str(tmp_path / "model.gguf"), runtime=Runtime(forward="modules"))
    assert engine.info().forward == "modules"
    monkeypatch.setattr(SeparateExperts, "_run", None)
    assert_same_answers(engine, exact, "the inner heather")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_count": 4}, r"blk.0.ffn_\w+.weight has the shape \[6, .*not \[4"),
        ({"expert_feed_forward_length": 64}, r"ffn_\w+_exps.weight has the shape"),
        ({}, "the tensor blk.1.exp_probs_b.bias"),
    ],
)
def test_experts_that_are_not_known_or_that_the_metadata_does_not_describe(
    tmp_path: Path, change: dict[str, int], message: str
) -> None:
    """Those that are not known are left to transformers."""
    more = {} if change else {"blk.1.exp_probs_b.bias": torch.zeros(6)}
    metadata = {f"qwen3moe.{key}": value for key, value in change.items()}
    write_family(tmp_path / "model.gguf", "qwen3moe", "Q8_0", metadata=metadata, tensors=more)
    file = GgufFile(tmp_path / "model.gguf")
    if not change:
        assert gguf_model.obstacle(file) == message
        return
    with pytest.raises(ModelLoadError, match=message):
        gguf_model.load(file)


KNOWN_TO_TRANSFORMERS: dict[str, dict[str, Any]] = {  # its reader leaves out the settings that these replace
    "mistral": {},
    "qwen3moe": {"moe_intermediate_size": 768},
    "phi3": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {
        "query_pre_attn_scalar": 256,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", KNOWN_TO_TRANSFORMERS)
def test_transformers_reads_the_same_from_the_file(tmp_path: Path, family: str) -> None:
    write_family(tmp_path / "model.gguf", family, "F32", **KNOWN_TO_TRANSFORMERS[family])
    model: Any = gguf_model.load(GgufFile(tmp_path / "model.gguf"))
    if family.startswith("gemma"):
        for layer in model.model.layers:
            layer.self_attn.scaling = 256**-0.5  # it takes every head to be 256 wide
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", attn_implementation="eager")
    torch.testing.assert_close(logits(model), logits(theirs), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers", "expected"), [("gemma2", 46, 16), ("gemma3", 62, 16), ("gemma3", 3, 32)])
def test_the_scale_of_gemmas_scores(tmp_path: Path, family: str, layers: int, expected: int) -> None:
    """The file does not say it. In the largest models it is the width for each head."""
    write_family(tmp_path / "model.gguf", family, "F32", num_hidden_layers=layers)
    model: Any = gguf_model.load(GgufFile(tmp_path / "model.gguf"))
    assert model.config.query_pre_attn_scalar == expected
    assert model.model.layers[0].self_attn.scaling == expected**-0.5


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
    @given(TEXTS.filter(lambda text: not any(token in text for token in ("  ", *tokenizer.get_added_vocab()))))
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
