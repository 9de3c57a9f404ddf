"""Calibrators, heads, GGUF, configs and the package's own caches: any bytes end in an object or in one short error."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cocoa_engine import CocoaConfig, CocoaEngine, CocoaError, RiskCalibrator, Runtime
from cocoa_engine.execution.native import build
from cocoa_engine.methods import retrieval_heads
from cocoa_engine.methods.retrieval_heads import RetrievalHeads, known_heads
from cocoa_engine.model import gguf_model, gguf_tokenizer, weight_identity
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.loading import load_pretrained, load_tokenizer, read_context_window
from cocoa_engine.risk.calibrator import Settings
from tests.helpers.made_up_risk import fitted
from tests.helpers.model_folders import TEMPLATE, save_model
from tests.helpers.mutations import broken, broken_json, each_change, fuzz, mutated, mutated_json, outcome
from tests.helpers.small_gguf import write
from tests.helpers.tiny_gguf import write_tiny_gguf
from tests.helpers.tiny_models import NUM_LAYERS, tiny_model, tiny_tokenizer

MIDDLE = (NUM_LAYERS // 3, 2 * NUM_LAYERS // 3)
HEADS: dict[str, Any] = {
    "model_name": "tiny",
    "num_layers": NUM_LAYERS,
    "num_heads": 4,
    "samples": 3,
    "heads": [{"layer": 3, "head": 1, "score": 0.5}, {"layer": 4, "head": 0, "score": 0.25}],
    "reference": [0.0, 0.25, 0.25, 1.0],
    "reference_spans": 60,
}


@pytest.fixture(scope="module")
def tiny() -> CocoaEngine:
    return CocoaEngine(tiny_model("llama"), tiny_tokenizer(), model_name="tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def nothing_logged() -> Iterator[None]:
    """What transformers logs of a file may have half a surrogate pair, which a report of a test cannot have."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


# --- calibrators and retrieval heads


def calibrator() -> RiskCalibrator:
    settings = Settings(final_layer="post_norm", middle_layers=MIDDLE, gamma=0.3, max_candidates=8)
    return fitted(model_name="tiny", settings=settings, levels=("span", "answer"), domain=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::cocoa_engine.risk.CalibrationWarning")
def test_calibrators(tiny: CocoaEngine, folder: Path) -> None:
    """What is read can be used: the answer has a risk, or one error says what is missing."""
    good = json.loads(calibrator().model_dump_json())
    answer = tiny.generate("Once upon", max_new_tokens=4)
    file = folder / "calibrator.json"

    def rated(data: bytes) -> Any:
        file.write_bytes(data)
        found = RiskCalibrator.load(file)
        found.mismatches("other", CocoaConfig(), NUM_LAYERS)
        CocoaEngine(tiny.model, tiny.tokenizer, model_name="tiny", calibrator=found)
        return found.rated(answer).answer_risk, [found.risk(span) for span in answer.spans]

    whole, spans = rated(json.dumps(good).encode())
    assert all(0 <= risk <= 1 for risk in [whole, *spans])

    @fuzz(40)
    @given(broken_json(good))
    def check(data: bytes) -> None:
        found = outcome(lambda: rated(data))
        if not isinstance(found, CocoaError):
            assert all(risk is None or 0 <= risk <= 1 for risk in [found[0], *found[1]])

    check()


def test_retrieval_heads(folder: Path) -> None:
    file = folder / "heads.json"
    file.write_text(json.dumps(HEADS))
    assert known_heads(str(file), NUM_LAYERS, 4) is not None

    @fuzz()
    @given(broken_json(HEADS))
    def check(data: bytes) -> None:
        file.write_bytes(data)
        retrieval_heads._read.cache_clear()
        found = outcome(lambda: known_heads(str(file), NUM_LAYERS, 4))
        if isinstance(found, RetrievalHeads):
            assert all(0 <= head.layer < NUM_LAYERS and 0 <= head.head < 4 for head in found.heads)
            assert found.rank(0.3) is None or 0 <= found.rank(0.3) <= 1
        else:
            assert isinstance(found, CocoaError)

    check()


def test_kept_retrieval_heads(tiny: CocoaEngine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken file in the cache directory is as good as none."""
    monkeypatch.setenv("COCOA_CACHE_DIR", str(folder / "cache"))
    model = tiny.session.model
    good = {**HEADS, "num_heads": 4}
    file = retrieval_heads.keep(RetrievalHeads.model_validate(good), model)
    assert known_heads(None, NUM_LAYERS, 4, model) == RetrievalHeads.model_validate(good)

    @fuzz()
    @given(broken_json(good))
    def check(data: bytes) -> None:
        file.write_bytes(data)
        retrieval_heads._read.cache_clear()
        found = known_heads(None, NUM_LAYERS, 4, model)
        assert found is None or isinstance(found, RetrievalHeads)

    check()


@pytest.mark.filterwarnings("ignore::cocoa_engine.risk.CalibrationWarning")
@pytest.mark.parametrize("listed", [False, True])
def test_each_value_of_a_calibrator(folder: Path, listed: bool) -> None:
    """Of any other type, at any place; with packed numbers written as lists too."""
    good = json.loads(calibrator().model_dump_json())
    if listed:
        good["probe"] = {"layer": 1, "model_name": "tiny", "dtype": "float32", "weights": [0.5, 1], "intercept": 0.1}
        good["span"]["domain"] = {"centre": [0.5, 1], "precision": [0.5, 1, 1, 1], "cutoff": 1.0}
    file = folder / "calibrator.json"

    def load(value: Any) -> RiskCalibrator:
        file.write_text(json.dumps(value))
        return RiskCalibrator.load(file)

    refused = 0
    for what, value in each_change(good):
        found = outcome(lambda value=value: load(value))
        assert isinstance(found, (RiskCalibrator, CocoaError)), what
        refused += isinstance(found, CocoaError) and str(file) in str(found)
    assert refused > 1000


def test_each_value_of_retrieval_heads(folder: Path) -> None:
    file = folder / "heads.json"
    for what, value in each_change(HEADS):
        file.write_text(json.dumps(value))
        retrieval_heads._read.cache_clear()
        found = outcome(lambda: known_heads(str(file), NUM_LAYERS, 4))
        assert isinstance(found, RetrievalHeads) or str(file) in str(found), what


# --- GGUF files


@pytest.fixture(scope="module")
def gguf_file(folder: Path) -> Path:
    write_tiny_gguf(folder / "tiny.gguf")
    return folder / "tiny.gguf"


@pytest.mark.slow
def test_gguf_files_in_blocks(gguf_file: Path, folder: Path) -> None:
    """A file that this package reads itself."""
    good = gguf_file.read_bytes()
    header = 9000  # metadata and the list of tensors
    bad = folder / "blocks.gguf"

    def loaded(data: bytes) -> Any:
        bad.write_bytes(data)
        if gguf_model.obstacle(GgufFile(bad)) is None:
            return load_pretrained(bad, keeps_blocks=lambda: True)
        return None

    assert loaded(good) is not None
    count = good.index(b"llama.attention.head_count\x04") + 30  # after the name and the type of the value
    assert good[count : count + 4] == bytes([4, 0, 0, 0])

    @fuzz(60)
    @example(good[:count] + bytes(4) + good[count + 4 :])
    @given(st.one_of(mutated(good[:header]).map(lambda start: start + good[header:]), broken(good)))
    def check(data: bytes) -> None:
        found = outcome(lambda: loaded(data))
        assert found is None or isinstance(found, (tuple, CocoaError))

    check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_gguf_files_that_are_unpacked(gguf_file: Path, folder: Path) -> None:
    """Files that are unpacked, and their context windows, which are read without the weights."""
    good = gguf_file.read_bytes()
    header = 9000  # metadata and the list of tensors
    bad = folder / "unpacked.gguf"

    def loaded(data: bytes) -> Any:
        bad.write_bytes(data)
        window = read_context_window(bad)
        assert window is None or window > 0
        return window, load_pretrained(bad, dtype="float32")

    assert loaded(good)[0] == 128

    @fuzz(15)
    @given(st.one_of(mutated(good[:header]).map(lambda start: start + good[header:]), broken(good)))
    def check(data: bytes) -> None:
        assert isinstance(outcome(lambda: loaded(data)), (tuple, CocoaError))

    check()


FIRST = ("split.count", "split.no", "split.tensors.count", "general.alignment")
"""Keys that are read before all others."""
WRONG: dict[str, list[Any]] = {
    "text": [7, 0.5, True, ["a", "b"]],
    "number": ["x", True, ["a", "b"], [[1], [2]], float("nan")],
}
KINDS = {
    **dict.fromkeys(FIRST, "number"),
    **dict.fromkeys(("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"), "text"),
    **dict.fromkeys(("tokenizer.chat_template", "tokenizer.chat_template.tool_use"), "text"),
    **dict.fromkeys(("tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id"), "number"),
    **dict.fromkeys(("llama.block_count", "llama.context_length", "llama.attention.head_count"), "number"),
    **dict.fromkeys(("llama.embedding_length", "llama.rope.dimension_count"), "number"),
}


@pytest.mark.slow
@pytest.mark.parametrize("key", KINDS)
def test_a_value_of_a_wrong_type_in_gguf_metadata_is_refused_by_its_key(key: str, tmp_path: Path) -> None:
    """By all readers of such a file; the context window, which is only shown, is then not known."""
    file = tmp_path / "model.gguf"
    for value in WRONG[KINDS[key]]:
        with torch.no_grad():
            write(file, "llama", "Q8_0", template="{{ messages }}", metadata={key: value})
        readers: list[Any] = [lambda: load_pretrained(file, keeps_blocks=lambda: True)]
        if not key.startswith("llama."):
            readers.append(lambda: load_tokenizer(str(file), {}))
        for read in readers:
            found = outcome(read)
            assert isinstance(found, CocoaError), value
            assert key in str(found), value
        window = read_context_window(file)
        assert window is None or type(window) is int


def test_context_windows_of_gguf_files(gguf_file: Path, folder: Path) -> None:
    good = gguf_file.read_bytes()[:9000]  # metadata and the list of tensors
    bad = folder / "window.gguf"

    @fuzz(60)
    @given(broken(good))
    def check(data: bytes) -> None:
        bad.write_bytes(data)
        window = read_context_window(bad)
        assert window is None or (type(window) is int and window > 0)

    check()


def test_notes_of_compared_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken note is as good as none: the weights are compared again."""
    monkeypatch.setenv("COCOA_CACHE_DIR", str(folder / "checked"))
    model = tiny_model("llama")
    weight_identity.will_note(model, "weights", "kernels")
    weight_identity.note(model, "equal")
    (note,) = (folder / "checked" / weight_identity.FOLDER).iterdir()
    assert weight_identity.noted("weights", "kernels") == "equal"

    @fuzz(40)
    @given(broken_json(json.loads(note.read_bytes())))
    @example(b"[" * 100_000)
    def check(data: bytes) -> None:
        note.write_bytes(data)
        found = weight_identity.noted("weights", "kernels")
        assert found is None or (found and json.loads(data)["found"] == found)

    check()


def test_kept_tokenizers(gguf_file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken one is made again."""
    monkeypatch.setattr(gguf_tokenizer, "FOLDER", str(folder / "tokenizers"))
    good = gguf_tokenizer.load(GgufFile(gguf_file))
    (kept,) = (folder / "tokenizers").iterdir()
    text = kept.read_bytes()

    @fuzz(40)
    @given(st.one_of(st.binary(max_size=100), st.integers(0, len(text) - 1).map(lambda end: text[:end])))
    def check(data: bytes) -> None:
        kept.write_bytes(data)
        assert gguf_tokenizer.load(GgufFile(gguf_file)).encode("hello") == good.encode("hello")
        assert kept.read_bytes() == text

    check()


# --- configs of a model folder


MORE: dict[str, dict[str, list[Any]]] = {
    "config.json": {
        "sliding_window": [2, 4096, "x"],
        "layer_types": [["sliding_attention"] * NUM_LAYERS, ["full_attention"] * NUM_LAYERS],
        "return_dict": [False],
        "use_cache": [False],
        "output_hidden_states": [True],
        "output_attentions": [True],
        "torch_dtype": ["float32", "float16", "int8"],
        "attention_dropout": [0.5],
        "rope_scaling": [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": "x"}],
        "max_position_embeddings": [4, 2**40],
        "pruned_heads": [{"0": [1]}],
        "torchscript": [True],
        "is_decoder": [False],
        "is_encoder_decoder": [True],
        "chunk_size_feed_forward": [3],
        "quantization_config": [{"quant_method": "gptq", "bits": 4}],
        "auto_map": [{"AutoModelForCausalLM": "modeling.Model"}],
    },
    "generation_config.json": {
        "sequence_bias": [[[[5], 1.0]], [[[300], 1.0]], [[[5, 6], "x"]]],
        "encoder_repetition_penalty": [1.5, -1.0],
        "repetition_penalty": [1.5, -1.0],
        "no_repeat_ngram_size": [2, -1],
        "encoder_no_repeat_ngram_size": [2, -1, 10**18],
        "bad_words_ids": [[[5]], [[300]], [[-1]], [["x"]], [5]],
        "min_length": [3, -1],
        "min_new_tokens": [2, -1],
        "forced_bos_token_id": [5, 300, [5]],
        "forced_eos_token_id": [5, 300, [5, 300], [None]],
        "exponential_decay_length_penalty": [[1, 1.5], [1], [1, "x"], ["x", 1.5]],
        "suppress_tokens": [[5], [300], 5],
        "begin_suppress_tokens": [[5], [300], 5],
        "eos_token_id": [5, 300, -1, [2, 300], [None], "5", 2.5],
        "stop_strings": ["a", ["a", "b"], [5], [""]],
        "max_new_tokens": [5],
        "cache_implementation": ["static", "x"],
    },
    "tokenizer_config.json": {},
}
"""Fields that the tiny model's files lack, with right and wrong values."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_configs_of_models(name: str, folder: Path) -> None:
    """A model with a broken config is refused when it is loaded, or it answers, or says in one error why not."""
    source = folder / "source"
    save_model(source)
    good = (source / name).read_bytes()
    fields = json.loads(good)
    sizes = {key: value for key, value in fields.items() if type(value) is int}

    def answered(data: bytes) -> Any:
        (source / name).write_bytes(data)
        read_context_window(source)
        model, tokenizer, _ = load_pretrained(source)
        return CocoaEngine(model, tokenizer).generate("Once upon", max_new_tokens=3).text

    assert isinstance(answered(good), str)

    @fuzz(20)
    @given(st.one_of(broken_json(fields, MORE[name]), broken_json({**fields, **dict.fromkeys(sizes, 3)})))
    def check(data: bytes) -> None:
        assert isinstance(outcome(lambda: answered(data)), (str, CocoaError))

    check()
    (source / name).write_bytes(good)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights", ["stored", "q8_0"])
def test_weights(folder: Path, weights: Any) -> None:
    source = folder / "weights"
    save_model(source)
    file = source / "model.safetensors"
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")  # the length of the list of tensors, and the list
    tensors = json.loads(good[8:header])

    def loaded(data: bytes) -> Any:
        file.write_bytes(data)
        return load_pretrained(source, weights=weights, keeps_blocks=lambda: True)

    def listed(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data + good[header:]

    assert isinstance(loaded(good), tuple)

    @fuzz(20)
    @given(
        st.one_of(
            mutated(good[:header]).map(lambda start: start + good[header:]),
            broken_json(tensors).map(listed),
            broken_json(tensors).map(listed),
            broken(good),
        )
    )
    def check(data: bytes) -> None:
        assert isinstance(outcome(lambda: loaded(data)), (tuple, CocoaError))

    check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights_as", ["stored", "q8_0"])
def test_indexes_of_divided_weights(folder: Path, weights_as: Any) -> None:
    source = folder / f"divided-{weights_as}"
    save_model(source)
    weights, index = source / "model.safetensors", source / "model.safetensors.index.json"
    weights.unlink()
    tiny_model("llama").save_pretrained(source, max_shard_size="40KB")
    good = json.loads(index.read_text())
    assert len(set(good["weight_map"].values())) > 1

    def loaded(data: bytes) -> Any:
        index.write_bytes(data)
        return load_pretrained(source, weights=weights_as, keeps_blocks=lambda: True)

    assert isinstance(loaded(json.dumps(good).encode()), tuple)

    @fuzz(20)
    @given(broken_json(good))
    def check(data: bytes) -> None:
        assert isinstance(outcome(lambda: loaded(data)), (tuple, CocoaError))

    check()


SPECIAL = {"__type": "AddedToken", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
FILES_OF_A_TOKENIZER: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {
        "eos_token": {"content": "b", **SPECIAL},
        "pad_token": "a",
        "additional_special_tokens": ["a"],
        "added_tokens_decoder": {"3": {"content": "a", **SPECIAL, "special": True}},
        "model_max_length": 100,
        "padding_side": "left",
    },
    "special_tokens_map.json": {"eos_token": {"content": "b", **SPECIAL}, "additional_special_tokens": ["a"]},
    "added_tokens.json": {"<x>": 5, "<new>": 300},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES_OF_A_TOKENIZER)
def test_each_value_of_a_tokenizer_s_files(folder: Path, name: str) -> None:
    """What is refused is refused by the name of its file, and a wrong type by its key."""
    source = folder / f"values-{name}"
    save_model(source)
    for what, value in each_change(FILES_OF_A_TOKENIZER[name]):
        (source / name).write_text(json.dumps(value))
        found = outcome(lambda: load_tokenizer(str(source), {}).encode("Once upon"))
        if isinstance(found, CocoaError):
            assert name in str(found), what
            key = what.partition(" = ")[0].removeprefix("without ")
            assert key in str(found) or what.endswith(("with more", "\ud800")) or key in ("the whole", "__type"), (
                what,
                str(found),
            )


@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_cannot_end_the_process(folder: Path) -> None:
    """tokenizers cuts a prefix off without looking, and copies merges to a place of the longest token's size."""
    source = folder / "merges"
    save_model(source)
    file = source / "tokenizer.json"
    good = json.loads(file.read_text())
    for prefix in ("x", "1", "é", "x" * 5000, "Ġ"):
        file.write_text(json.dumps({**good, "model": {**good["model"], "continuing_subword_prefix": prefix}}))
        found = outcome(lambda: load_tokenizer(str(source), {}))
        assert isinstance(found, CocoaError)
        assert f"{file}: model.continuing_subword_prefix" in str(found)
    longest = max(good["model"]["vocab"], key=lambda token: len(token.encode()))
    for token in (longest, "th"):
        vocabulary = {each: number for each, number in good["model"]["vocab"].items() if each != token}
        file.write_text(json.dumps({**good, "model": {**good["model"], "vocab": vocabulary}}))
        assert isinstance(outcome(lambda: load_tokenizer(str(source), {})), CocoaError)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "default"])
def test_each_value_of_the_scaling_of_positions(folder: Path, kind: str) -> None:
    """The context window is a number or not stated, whatever a config says."""
    source = folder / f"rope-{kind}"
    save_model(source)
    good = json.loads((source / "config.json").read_text())

    def window() -> int | None:
        model, tokenizer, _ = load_pretrained(source)
        return CocoaEngine(model, tokenizer).session.model.context_window

    rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    for what, value in each_change({"max_position_embeddings": 64, "rope_parameters": rope}):
        (source / "config.json").write_text(json.dumps({**good, **(value if isinstance(value, dict) else {})}))
        found = outcome(window)
        assert found is None or isinstance(found, CocoaError) or (isinstance(found, int) and found > 0), what


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tokenizer_files(folder: Path) -> None:
    source = folder / "tokenizer"
    save_model(source)
    good = json.loads((source / "tokenizer.json").read_text())

    @fuzz(20)
    @given(broken_json(good))
    def check(data: bytes) -> None:
        (source / "tokenizer.json").write_bytes(data)
        found = outcome(lambda: load_tokenizer(str(source), {}))
        assert found is not None

    check()


@pytest.mark.filterwarnings("ignore")
def test_chat_templates(tiny: CocoaEngine, folder: Path) -> None:
    source = folder / "chat"
    save_model(source)
    good = TEMPLATE.encode()
    file = source / "chat_template.jinja"
    assert file.read_bytes() == good

    def answered(data: bytes) -> Any:
        file.write_bytes(data)
        engine = CocoaEngine(tiny.model, load_tokenizer(str(source), {}))
        return engine.chat([{"role": "user", "content": "hello"}], max_new_tokens=1).text

    assert isinstance(answered(good), str)

    @fuzz(40)
    @given(broken(good))
    @example(b"{{ messages[0].content.x.y }}")
    @example(b"{{ raise_exception('\x1b[31m' * 2000) }}")
    @example(b"{% include 'other' %}")
    @example(b"{{ 1 / 0 }}")
    @example(b"{{ (" * 2000)
    def check(data: bytes) -> None:
        assert isinstance(outcome(lambda: answered(data)), (str, CocoaError))

    check()


# --- the kernels


def test_checksums_of_the_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library is loaded only with its own checksum beside it."""
    library = folder / "kernels.so"
    library.write_bytes(b"a library")
    checksum = build._checksum_file(library)
    good = build._checksum(b"a library")
    checksum.write_bytes(good)
    monkeypatch.setattr(build, "_opened", lambda file: file.close() or file)
    monkeypatch.setattr(build, "_checked", lambda file: file)
    assert build._kept(library) is not None

    @fuzz(50)
    @given(broken(good), st.just(b"a library") | broken(b"a library"))
    def check(data: bytes, code: bytes) -> None:
        checksum.write_bytes(data)
        library.write_bytes(code)
        assert (build._kept(library) is not None) == (data == hashlib.sha256(code).hexdigest().encode())

    check()


# --- keys of the server


def test_files_of_api_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    from cocoa_integrations.server.command import KEYS_VARIABLE, given_keys
    from cocoa_integrations.server.settings import ServerSettings

    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    file = folder / "keys"
    good = b"# of the team\nfirst-key\n\n  second-key\n"

    def keys(data: bytes) -> Any:
        file.write_bytes(data)
        return [key.get_secret_value() for key in ServerSettings(api_keys=tuple(given_keys([], file))).api_keys]

    assert keys(good) == ["first-key", "second-key"]

    @fuzz(50)
    @given(broken(good))
    def check(data: bytes) -> None:
        found = outcome(lambda: keys(data))
        assert isinstance(found, CocoaError) or (found and all(key.strip() for key in found))

    check()


# --- settings in JSON


@fuzz(40)
@given(broken_json(json.loads(CocoaConfig().model_dump_json())))
def test_settings_in_json(data: bytes) -> None:
    assert isinstance(outcome(lambda: CocoaConfig.model_validate_json(data)), (CocoaConfig, CocoaError))


@fuzz(40)
@given(mutated_json(Runtime().model_dump()))
def test_settings_of_the_runtime(settings: dict[str, Any]) -> None:
    assert isinstance(outcome(lambda: Runtime(**settings)), (Runtime, CocoaError))
