"""Calibrators, heads, GGUF, configs and the package's own caches: any bytes end in an object or in one short error."""

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import CocoaConfig, CocoaEngine, CocoaError, RiskCalibrator, Runtime
from cocoa_engine.errors import ModelLoadError, UnsupportedModelError
from cocoa_engine.execution.native import build
from cocoa_engine.methods import retrieval_heads
from cocoa_engine.methods.retrieval_heads import RetrievalHeads, heads_of_model
from cocoa_engine.model import gguf_tokenizer, weight_identity
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.loading import load_pretrained, load_tokenizer, read_context_window
from cocoa_integrations.server.command import KEYS_VARIABLE, given_keys
from cocoa_integrations.server.settings import ServerSettings
from tests.helpers.family_gguf import write_family, write_tiny_gguf
from tests.helpers.made_up_risk import TINY, fitted
from tests.helpers.mutations import broken, broken_json, each_change, fuzz, mutated, mutated_json, outcome, survives
from tests.helpers.tiny_models import NUM_LAYERS, save_model, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")
HEADS: dict[str, Any] = {
    "model_name": "tiny",
    "num_layers": NUM_LAYERS,
    "num_heads": 4,
    "samples": 3,
    "heads": [{"layer": 3, "head": 1, "score": 0.5}, {"layer": 4, "head": 0, "score": 0.25}],
    "reference": [0.0, 0.25, 0.25, 1.0],
    "reference_spans": 60,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(save_model(tmp_path / "source"))


@pytest.fixture(autouse=True)
def nothing_logged() -> Iterator[None]:
    """What transformers logs of a file may have half a surrogate pair, which a report of a test cannot have."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def calibrator() -> RiskCalibrator:
    return fitted(model_name="tiny", settings=TINY, levels=("span", "answer"), domain=True, draws=2)


@pytest.mark.slow
def test_calibrators(tiny: CocoaEngine, calibrator: RiskCalibrator, tmp_path: Path) -> None:
    """What is read can be used: the answer has a risk, or one error says what is missing."""
    file = tmp_path / "calibrator.json"
    calibrator.save(file)
    answer = tiny.generate("Once upon", max_new_tokens=4)

    def risks() -> list[float | None]:
        loaded = RiskCalibrator.load(file)
        loaded.mismatches("other", CocoaConfig(), NUM_LAYERS)
        CocoaEngine(tiny.model, tiny.tokenizer, model_name="tiny", calibrator=loaded)
        return [loaded.rated(answer).answer_risk, *(loaded.risk(span) for span in answer.spans)]

    good = broken_json(json.loads(file.read_text()))
    survives(file, good, risks, lambda found: all(risk is None or 0 <= risk <= 1 for risk in found), 40)


@pytest.mark.slow
def test_each_value_of_a_calibrator(calibrator: RiskCalibrator, tmp_path: Path) -> None:
    """Of any other type, at any place; some packed numbers are written as lists."""
    good = json.loads(calibrator.model_dump_json())
    good["probe"] = {"layer": 1, "model_name": "tiny", "dtype": "float32", "weights": [0.5, 1], "intercept": 0.1}
    good["span"]["domain"] = {"centre": [0.5, 1], "precision": [0.5, 1, 1, 1], "cutoff": 1.0}
    assert "domain" in good["answer"]
    for level in ("span", "answer"):  # one of each list is as good as all
        validation = good[level]["validation"]
        validation |= {"reliability": validation["reliability"][:1], "rivals": {"fMLDS": validation["rivals"]["fMLDS"]}}
    file = tmp_path / "calibrator.json"
    refused = 0
    for what, value in each_change(good):
        file.write_text(json.dumps(value))
        found = outcome(lambda: RiskCalibrator.load(file))
        assert isinstance(found, (RiskCalibrator, CocoaError)), what
        refused += isinstance(found, CocoaError) and str(file) in str(found)
    assert refused > 1000


def test_retrieval_heads(tiny: CocoaEngine, tmp_path: Path) -> None:
    file = tmp_path / "heads.json"

    def heads() -> RetrievalHeads | None:
        retrieval_heads._read.cache_clear()
        return heads_of_model(str(file), tiny.session.model)

    def is_right(found: RetrievalHeads) -> bool:
        places = [0 <= head.layer < NUM_LAYERS and 0 <= head.head < 4 for head in found.heads]
        return all(places) and 0 <= (found.rank(0.3) or 0) <= 1

    file.write_text(json.dumps(HEADS))
    survives(file, broken_json(HEADS), heads, is_right)
    for what, value in each_change(HEADS):
        file.write_text(json.dumps(value))
        found = outcome(heads)
        assert isinstance(found, RetrievalHeads) or str(file) in str(found), what


def test_broken_files_of_the_cache_are_as_good_as_none(
    tiny: CocoaEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retrieval heads, notes of compared weights and tokenizers are found or made again."""
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path / "cache"))
    file = retrieval_heads.keep(RetrievalHeads.model_validate(HEADS), tiny.session.model)

    def kept_heads() -> RetrievalHeads | None:
        retrieval_heads._read.cache_clear()
        return heads_of_model(None, tiny.session.model)

    assert kept_heads() == RetrievalHeads.model_validate(HEADS)
    survives(file, broken_json(HEADS), kept_heads, lambda found: found is None or isinstance(found, RetrievalHeads))

    model = tiny_model("llama")
    weight_identity.will_note(model, "weights", "kernels")
    weight_identity.note(model, "equal")
    (note,) = (tmp_path / "cache" / weight_identity.FOLDER).iterdir()
    assert weight_identity.noted("weights", "kernels") == "equal"

    def is_noted(found: str | None) -> bool:
        return found is None or bool(found and json.loads(note.read_bytes())["found"] == found)

    bad = broken_json(json.loads(note.read_bytes()))
    survives(note, bad, lambda: weight_identity.noted("weights", "kernels"), is_noted, 40, [b"[" * 100_000])

    monkeypatch.setattr(gguf_tokenizer, "FOLDER", "tokenizers")
    write_tiny_gguf(tmp_path / "kept.gguf")

    def encoded() -> list[int]:
        return gguf_tokenizer.load(GgufFile(tmp_path / "kept.gguf")).encode("hello")

    good = encoded()
    (kept,) = (tmp_path / "cache" / "tokenizers").iterdir()
    text = kept.read_bytes()
    bad = st.binary(max_size=100) | st.integers(0, len(text) - 1).map(lambda end: text[:end])
    survives(kept, bad, encoded, lambda found: found == good and kept.read_bytes() == text, 40, [b"", b"{}"])


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["blocks", "unpacked"])
def test_gguf_files(tmp_path: Path, kept: bool) -> None:
    file = tmp_path / f"{kept}.gguf"
    write_tiny_gguf(file)
    good = file.read_bytes()
    header = 9000  # metadata and the list of tensors
    count = good.index(b"llama.attention.head_count\x04") + 30  # after the name and the type of the value
    assert good[count : count + 4] == bytes([4, 0, 0, 0])
    no_heads = good[:count] + bytes(4) + good[count + 4 :]

    def loaded() -> Any:
        window = read_context_window(file)
        assert window is None or window > 0
        return window, load_pretrained(file, dtype="auto" if kept else "float32", keeps_blocks=lambda: True)

    assert loaded()[0] == 128
    changed = mutated(good[:header]).map(lambda start: start + good[header:])
    survives(file, changed | broken(good), loaded, examples=60 if kept else 15, worst=[no_heads])


NO_TEXT: tuple[Any, ...] = (7, 0.5, True, ["a", "b"])
NO_NUMBER: tuple[Any, ...] = ("x", True, ["a", "b"], [[1], [2]], float("nan"))
COUNTS = ("block_count", "context_length", "attention.head_count", "embedding_length", "expert_count")
WRONG: dict[str, tuple[Any, ...]] = {
    # these are read before all others
    **dict.fromkeys(("split.count", "split.no", "split.tensors.count", "general.alignment"), NO_NUMBER),
    **dict.fromkeys(("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"), NO_TEXT),
    **dict.fromkeys(("tokenizer.chat_template", "tokenizer.chat_template.tool_use"), NO_TEXT),
    **dict.fromkeys((f"tokenizer.ggml.{role}_token_id" for role in ("eos", "bos", "fim_pad")), (*NO_NUMBER, 0.5, [2])),
    **dict.fromkeys((f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores")), ("x", [1, 2])),
    **dict.fromkeys((f"llama.{name}" for name in (*COUNTS, "rope.dimension_count")), (*NO_NUMBER, 1.5)),
    **dict.fromkeys(("llama.rope.freq_base", "llama.logit_scale"), NO_NUMBER),
    **dict.fromkeys(("tokenizer.ggml.token_type", "llama.rope.dimension_sections"), (7, "x", ["x"])),
    **dict.fromkeys(("llama.rope.scaling.finetuned", "tokenizer.ggml.add_bos_token"), ("x", 1)),
    "llama.attention.causal": (1,),
    "llama.attention.sliding_window_pattern": ("x",),
    "llama.rope.scaling.type": (1,),
}


@pytest.mark.slow
@pytest.mark.parametrize("norms", ["F32", "F16"], ids=["in blocks", "unpacked"])
@pytest.mark.parametrize("key", WRONG)
def test_a_value_of_a_wrong_type_in_gguf_metadata_is_refused_by_its_key(key: str, norms: str, tmp_path: Path) -> None:
    """By all readers of such a file; the context window, which is only shown, is then not known."""
    file = tmp_path / "model.gguf"
    readers: list[Any] = [lambda: load_pretrained(file, keeps_blocks=lambda: True)]
    readers += [] if key.startswith("llama.") else [lambda: load_tokenizer(str(file), {})]
    for value in WRONG[key]:
        write_family(file, "llama", "Q8_0", template="{{ messages }}", norms=norms, metadata={key: value})
        for read in readers:
            found = outcome(read)
            assert isinstance(found, (ModelLoadError, UnsupportedModelError)), value
            assert key in str(found), value
        window = read_context_window(file)
        assert window is None or type(window) is int


MORE: dict[str, dict[str, Any]] = {
    "config.json": {
        **dict.fromkeys(("return_dict", "use_cache", "is_decoder"), (False,)),
        **dict.fromkeys(("output_hidden_states", "output_attentions", "torchscript", "is_encoder_decoder"), (True,)),
        "sliding_window": [2, 4096, "x"],
        "layer_types": [["sliding_attention"] * NUM_LAYERS, ["full_attention"] * NUM_LAYERS],
        "torch_dtype": ["float32", "float16", "int8"],
        "attention_dropout": [0.5],
        "rope_scaling": [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": "x"}],
        "max_position_embeddings": [4, 2**40],
        "pruned_heads": [{"0": [1]}],
        "chunk_size_feed_forward": [3],
        "quantization_config": [{"quant_method": "gptq", "bits": 4}],
        "auto_map": [{"AutoModelForCausalLM": "modeling.Model"}],
    },
    "generation_config.json": {
        "sequence_bias": [[[[5], 1.0]], [[[300], 1.0]], [[[5, 6], "x"]]],
        **dict.fromkeys(("encoder_repetition_penalty", "repetition_penalty"), (1.5, -1.0)),
        **dict.fromkeys(("no_repeat_ngram_size", "min_new_tokens"), (2, -1)),
        "encoder_no_repeat_ngram_size": [2, -1, 10**18],
        "bad_words_ids": [[[5]], [[300]], [[-1]], [["x"]], [5]],
        "min_length": [3, -1],
        "forced_bos_token_id": [5, 300, [5]],
        "forced_eos_token_id": [5, 300, [5, 300], [None]],
        "exponential_decay_length_penalty": [[1, 1.5], [1], [1, "x"], ["x", 1.5]],
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([5], [300], 5)),
        "eos_token_id": [5, 300, -1, [2, 300], [None], "5", 2.5],
        "stop_strings": ["a", ["a", "b"], [5], [""]],
        "max_new_tokens": [5],
        "cache_implementation": ["static", "x"],
    },
    "tokenizer_config.json": {},
}
"""Fields that the tiny model's files lack, with right and wrong values."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_configs_of_models(name: str, source: Path) -> None:
    """A model is refused when it is loaded, or it answers, or says in one error why not."""
    fields = json.loads((source / name).read_bytes())
    sizes = {key: value for key, value in fields.items() if type(value) is int}
    bad = broken_json(fields, MORE[name]) | broken_json({**fields, **dict.fromkeys(sizes, 3)})

    def answered() -> str:
        read_context_window(source)
        model, tokenizer, _ = load_pretrained(source)
        return CocoaEngine(model, tokenizer).generate("Once upon", max_new_tokens=3).text

    survives(source / name, bad, answered, examples=20)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["stored", "q8_0"])
def test_weights_and_their_index(source: Path, weights: Any) -> None:
    file, index = source / "model.safetensors", source / "model.safetensors.index.json"
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")  # the length of the list of tensors, and the list
    listed = broken_json(json.loads(good[8:header])).map(
        lambda data: len(data).to_bytes(8, "little") + data + good[header:]
    )

    def loaded() -> Any:
        return load_pretrained(source, weights=weights, keeps_blocks=lambda: True)

    bad = st.one_of(mutated(good[:header]).map(lambda start: start + good[header:]), listed, listed, broken(good))
    survives(file, bad, loaded, examples=20)
    file.unlink()
    tiny_model("llama").save_pretrained(source, max_shard_size="40KB")
    survives(index, broken_json(json.loads(index.read_text())), loaded, examples=20)


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
@pytest.mark.parametrize("name", FILES_OF_A_TOKENIZER)
def test_each_value_of_a_tokenizer_s_files(source: Path, name: str) -> None:
    """What is refused is refused by the name of its file, and a wrong type by its key."""
    for what, value in each_change(FILES_OF_A_TOKENIZER[name]):
        (source / name).write_text(json.dumps(value))
        found = outcome(lambda: load_tokenizer(str(source), {}).encode("Once upon"))
        if isinstance(found, CocoaError):
            assert name in str(found), what
            key = what.partition(" = ")[0].removeprefix("without ")
            is_named = what.endswith(("with more", "\ud800")) or key in ("the whole", "__type") or key in str(found)
            assert is_named, (what, str(found))


def test_a_tokenizer_cannot_end_the_process(source: Path) -> None:
    """tokenizers cuts a prefix off without looking, and copies merges to a place of the longest token's size."""
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
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "default"])
def test_each_value_of_the_scaling_of_positions(source: Path, kind: str) -> None:
    """The context window is a number or not stated, whatever a config says."""
    save_model(source, num_hidden_layers=3)
    good = json.loads((source / "config.json").read_text())

    def window() -> int | None:
        model, tokenizer, _ = load_pretrained(source)
        return CocoaEngine(model, tokenizer).context_window

    rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    for what, value in each_change({"max_position_embeddings": 64, "rope_parameters": rope}):
        (source / "config.json").write_text(json.dumps({**good, **(value if isinstance(value, dict) else {})}))
        found = outcome(window)
        assert found is None or isinstance(found, CocoaError) or (isinstance(found, int) and found > 0), what


@pytest.mark.slow
def test_tokenizer_files(source: Path) -> None:
    file = source / "tokenizer.json"
    survives(file, broken_json(json.loads(file.read_text())), lambda: load_tokenizer(str(source), {}), examples=20)


def test_chat_templates(tiny: CocoaEngine, source: Path) -> None:
    file = source / "chat_template.jinja"
    worst = [b"{{ messages[0].content.x.y }}", b"{{ raise_exception('\x1b[31m' * 2000) }}", b"{% include 'other' %}"]
    worst += [b"{{ 1 / 0 }}", b"{{ (" * 2000]

    def answered() -> str:
        engine = CocoaEngine(tiny.model, load_tokenizer(str(source), {}))
        return engine.chat([{"role": "user", "content": "hello"}], max_new_tokens=1).text

    survives(file, broken(file.read_bytes()), answered, examples=40, worst=worst)


def test_checksums_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library is loaded only with its own checksum beside it."""
    library = tmp_path / "kernels.so"
    checksum, good = library.with_suffix(build.CHECKSUM), build._checksum(b"a library")
    monkeypatch.setattr(build, "_opened", lambda file: file.close() or file)
    monkeypatch.setattr(build, "_declared", lambda file: file)

    @fuzz(50)
    @given(st.just(good) | broken(good), st.just(b"a library") | broken(b"a library"))
    def check(data: bytes, code: bytes) -> None:
        checksum.write_bytes(data)
        library.write_bytes(code)
        assert (build._kept(library) is not None) == (data == hashlib.sha256(code).hexdigest().encode())

    check()


def test_files_of_api_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    file = tmp_path / "keys"
    file.write_bytes(b"# of the team\nfirst-key\n\n  second-key\n")

    def keys() -> list[str]:
        return [key.get_secret_value() for key in ServerSettings(api_keys=tuple(given_keys([], file))).api_keys]

    assert keys() == ["first-key", "second-key"]
    survives(file, broken(file.read_bytes()), keys, lambda found: found and all(key.strip() for key in found), 50)


@fuzz(40)
@given(broken_json(json.loads(CocoaConfig().model_dump_json())), mutated_json(Runtime().model_dump()))
def test_settings(data: bytes, runtime: dict[str, Any]) -> None:
    assert isinstance(outcome(lambda: CocoaConfig.model_validate_json(data)), (CocoaConfig, CocoaError))
    assert isinstance(outcome(lambda: Runtime(**runtime)), (Runtime, CocoaError))
