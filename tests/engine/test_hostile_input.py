"""Input that is broken on purpose: one short error of the package, before any work, without control characters."""

import gzip
import io
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pyarrow
import pytest
import typer
from pyarrow import parquet
from rich.console import Group
from rich.control import Control
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, GenerationConfig

import cocoa_engine
import cocoa_integrations
from cocoa_engine import (
    CalibrationError,
    CocoaConfig,
    CocoaEngine,
    ConfigError,
    DataError,
    PromptError,
    RiskCalibrator,
    Runtime,
)
from cocoa_engine.arguments import SettingsModel
from cocoa_engine.cli.output import SafeConsole, describe_error, print_json, progress_console
from cocoa_engine.decoding import matchers
from cocoa_engine.decoding.grammar import GrammarProcessor, regex_grammar
from cocoa_engine.errors import CocoaError, ModelLoadError, UnsupportedModelError, safe, safe_logger
from cocoa_engine.files import require_writable, write_file
from cocoa_engine.interruptions import interruptible
from cocoa_engine.lab import files
from cocoa_engine.lab.data import LabelledSpan, LabelledText, checked, read_labelled
from cocoa_engine.methods.retrieval_heads import RetrievalHeads
from cocoa_engine.model.generation_config import usable
from cocoa_engine.model.language_model import MACHINE_ERRORS
from cocoa_engine.model.loading import load_pretrained, load_tokenizer, read_context_window
from cocoa_integrations.evaluation.harness import new_run
from cocoa_integrations.server.settings import ServerSettings
from cocoa_integrations.tool_calling.request import ToolRequest
from tests.helpers.family_gguf import write_family
from tests.helpers.in_threads import Asks
from tests.helpers.made_up_risk import fitted
from tests.helpers.mutations import CONTROLS, MESSAGE_LIMIT
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

ESCAPE = "\x1b[31m\x9b2J\u202e\x07"


def message_of(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, CocoaError)
    message = str(caught.value)
    assert len(message) <= MESSAGE_LIMIT
    assert not CONTROLS.search(message)
    return message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "grammar": 'start: "a"'}, "exactly one"),
        ({"grammar": "begin: 3"}, "cannot be enforced"),
        ({"regex": "(a"}, "cannot be enforced"),
        ({"json_schema": {"type": "nonsense"}}, "cannot be enforced"),
        ({"json_schema": {"type": object}}, "plain JSON"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"grammar": 'start: "\ud800"'}, "surrogate"),
        ({"regex": 5}, "must be a"),
        ({"grammar": b"start: /a/"}, "must be a"),
        ({"json_schema": 5}, "must be a"),
    ],
    ids=str,
)
def test_what_is_no_grammar(options: dict[str, Any], message: str, tiny: CocoaEngine) -> None:
    assert message in message_of(ConfigError, lambda: tiny.constrain(**options))


def test_a_tokenizer_that_is_larger_than_the_vocabulary_and_what_is_no_list_of_token_ids() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["stranger"])
    engine = CocoaEngine(tiny_model("llama"), tokenizer)
    for call in (engine.generate, engine.stream):
        assert "token id 300" in message_of(PromptError, lambda call=call: call("a stranger"))
    for given in (("a", "stranger"), ("a", ["b", "stranger"]), ([5], "stranger")):
        assert "token id 300" in message_of(PromptError, lambda given=given: engine.score(*given))
    assert engine.generate("a", max_new_tokens=2).token_ids
    for token_ids in ([-1], [10**30], ["x"], "x", 5, None):
        assert "token ids" in message_of(PromptError, lambda token_ids=token_ids: engine.decode(token_ids))


def generation_config(name: str, value: Any) -> GenerationConfig:
    config = GenerationConfig(eos_token_id=2)
    setattr(config, name, value)  # the constructor checks some values
    return config


def test_a_huge_size_in_a_generation_config_ends(tiny: CocoaEngine) -> None:
    """A processor of transformers counts up to it, in Python."""
    for name in ("encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "min_length"):
        for value in (2**31, 10**18):
            generate = partial(tiny.generate, [5], generation_config=generation_config(name, value), max_new_tokens=2)
            assert interruptible(generate, 60).token_ids


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", -5.0),
        ("no_repeat_ngram_size", -1),
        *(("bad_words_ids", value) for value in ("x", [[300]])),
        ("sequence_bias", [[[300], 1.0]]),
        *(("forced_bos_token_id", value) for value in ("x", 10**9)),
        *(("forced_eos_token_id", value) for value in (300, [None])),
        ("exponential_decay_length_penalty", [1]),
        ("suppress_tokens", [10**30]),
        ("stop_strings", [5]),
        *(("eos_token_id", value) for value in ("x", 2.5, [None])),
    ],
)
def test_a_broken_generation_config(name: str, value: Any, tiny: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    config = generation_config(name, value)
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    engine.model.generation_config = config
    for used in (tiny, engine):
        monkeypatch.setattr(used.session.scheduler, "enter", lambda **_: pytest.fail("the call is admitted"))
    for call in (
        lambda: tiny.generate([5], generation_config=config),
        lambda: tiny.stream([5], generation_config=config),
        lambda: tiny.generate_batch([[5], [6]], generation_config=config, return_exceptions=True),
        lambda: engine.generate([5]),
    ):
        message = message_of(ConfigError, call)
        assert name in message
        assert "generation config" in message


def test_a_generation_config_whose_fault_shows_late_and_errors_of_a_user_s_processor(tiny: CocoaEngine) -> None:
    config = generation_config("exponential_decay_length_penalty", [1, "x"])
    assert tiny.generate([5], generation_config=config, max_new_tokens=1, gamma=1).token_ids
    message = message_of(ConfigError, lambda: tiny.generate([5], generation_config=config, max_new_tokens=4))
    assert message.startswith("exponential_decay_length_penalty of the generation config cannot be used")
    config = generation_config("repetition_penalty", 1.5)
    with pytest.raises(LookupError, match="the user's"):
        tiny.generate([5], generation_config=config, logits_processor=Asks(Mock(side_effect=LookupError("the user's"))))


def test_a_grammar_and_an_end_token_that_is_none_or_outside_the_vocabulary() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["stranger"])
    engine = CocoaEngine(tiny_model("llama"), tokenizer)
    for token_id in ("x", 2.5, [None]):
        engine.model.generation_config.eos_token_id = token_id
        assert "eos_token_id" in message_of(ConfigError, lambda: engine.constrain(regex="a"))
    engine.model.generation_config.eos_token_id = 2
    outside = GrammarProcessor(regex_grammar("[a-z]"), tokenizer, eos_token_ids=[300])
    assert "vocabulary of 300" in message_of(ConfigError, lambda: engine.generate("a", logits_processor=outside))
    engine.model.generation_config.eos_token_id = [2, 10**9]
    answer = engine.generate("a", logits_processor=engine.constrain(regex="[a-z]{2}"), max_new_tokens=9)
    assert answer.finish_reason == "eos"
    strange = lambda: GrammarProcessor(regex_grammar("[a-z]"), tokenizer, eos_token_ids=[400])  # noqa: E731
    assert "tokenizer" in message_of(ConfigError, strange)


def test_what_is_no_cancellation_and_no_timeline(tiny: CocoaEngine) -> None:
    decoding = (tiny.generate, tiny.stream)
    for call in (
        *decoding,
        lambda prompt, **options: tiny.generate_batch([prompt], **options),
        lambda prompt, **options: tiny.score(prompt, "b", **options),
        lambda prompt, **options: tiny.score(prompt, ["b", "c"], **options),
        lambda prompt, **options: tiny.score(prompt, "b", divide=True, **options),
        lambda prompt, **options: tiny.consistency(prompt, **options),
    ):
        message = message_of(ConfigError, lambda call=call: call("a", cancellation="x"))
        assert message == "cancellation must be a Cancellation, not str."
    for call in decoding:
        message = message_of(ConfigError, lambda call=call: call("a", timeline="x"))
        assert message == "timeline must be a Timeline, not str."


@pytest.mark.slow
@pytest.mark.parametrize("is_deep", [True, False])
def test_schemas_that_are_no_json(is_deep: bool, tiny: CocoaEngine) -> None:
    """One is too deep, the other holds itself."""
    schema: dict[str, Any] = {"type": "object"}
    inner = schema
    for _ in range(100_000 if is_deep else 0):
        inner["properties"] = {"a": {"type": "object"}}
        inner = inner["properties"]["a"]
    inner["properties"] = {"again": {} if is_deep else schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    wrapped = {"type": "json_schema", "json_schema": {"schema": schema}}
    for call in (
        lambda: tiny.constrain(json_schema=schema),
        lambda: ToolRequest.of([tool]),
        lambda: ToolRequest.of(response_format=wrapped),
        lambda: ToolRequest.of(response_format={"type": "json_object", "schema": schema}),
        lambda: ToolRequest.of(response_format={"type": "other", "schema": schema}),
    ):
        message_of(ConfigError, call)


def test_a_nul_character_in_a_path_and_a_calibrator_that_cannot_be_saved(tiny: CocoaEngine, tmp_path: Path) -> None:
    path = str(tmp_path / "a\0b")
    calls: dict[Callable[[], Any], type[Exception]] = {
        lambda: load_pretrained(path): ModelLoadError,
        lambda: load_pretrained(str(tmp_path), tokenizer_name=path): ModelLoadError,
        lambda: load_tokenizer(path, {}): ModelLoadError,
        lambda: RiskCalibrator.load(path): CalibrationError,
        lambda: tiny.generate("a", method="decore", decore_heads=path): ConfigError,
        lambda: read_labelled(path + ".jsonl"): DataError,
        lambda: files.read_text(Path(path)): DataError,
        lambda: fitted(draws=2).save(path): ConfigError,
        lambda: write_file(Path(path), "text"): ConfigError,
        lambda: require_writable(Path(path)): ConfigError,
        lambda: new_run(Path(path), {}).__enter__(): ConfigError,
    }
    for call, error in calls.items():
        message_of(error, call)
    assert "cannot be written" in message_of(ConfigError, lambda: fitted(draws=2).save(tmp_path))
    message_of(ConfigError, lambda: fitted(model_name="\ud800", draws=2).save(tmp_path / "c.json")).encode()
    assert not list(tmp_path.iterdir())


def with_field(folder: Path, kind: str, name: str, value: Any) -> str:
    tiny_model(kind).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)  # they would be too few
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    return str(folder)


def test_config_files_whose_models_cannot_run_and_that_ask_for_tuples(tmp_path: Path) -> None:
    """The second changes nothing. A model that is given with it cannot run."""
    engine = CocoaEngine.from_pretrained(with_field(tmp_path / "a", "llama", "sliding_window", "x"))
    message = message_of(UnsupportedModelError, lambda: engine.generate([5], max_new_tokens=2))
    assert message.startswith("a plain forward pass of LlamaForCausalLM fails (TypeError: ")
    assert "config.json" in message
    tuples = CocoaEngine.from_pretrained(with_field(tmp_path / "b", "qwen2", "return_dict", False))
    model, other = tiny_model("qwen2"), tiny_model("qwen2")
    expected = CocoaEngine(model, tiny_tokenizer()).generate([5], max_new_tokens=2)
    assert tuples.generate([5], max_new_tokens=2).token_ids == expected.token_ids
    other.config.return_dict = False
    message_of(UnsupportedModelError, lambda: CocoaEngine(other, tiny_tokenizer()).generate([5], max_new_tokens=2))


def test_a_model_whose_code_fails() -> None:
    """Errors of the machine do not blame a file."""

    def run_failing(error: Exception) -> None:
        model = tiny_model("llama")
        model.forward = Mock(side_effect=error)
        CocoaEngine(model, tiny_tokenizer()).generate([5], max_new_tokens=2)

    message = message_of(UnsupportedModelError, lambda: run_failing(RuntimeError(ESCAPE + "x" * 10**4)))
    assert message.endswith("the model's config.json or its code may be wrong.")
    for kind in MACHINE_ERRORS:
        with pytest.raises(kind, match="of the machine"):
            run_failing(kind("of the machine"))
        with pytest.raises(kind, match="of the machine"), usable():
            raise kind("of the machine")


def test_a_tokenizer_with_which_no_grammar_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llguidance.LLTokenizer", Mock(side_effect=ValueError(ESCAPE * 10**4)))
    assert "a grammar cannot be enforced" in message_of(ConfigError, lambda: matchers.load_tokenizer("{}", [2]))


RESULTS = ("Generation", "Span", "Consistency", "ModelInfo")


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *((kind, ConfigError) for kind in (CocoaConfig, Runtime, ServerSettings, RetrievalHeads)),
        (RiskCalibrator, CalibrationError),
        *((getattr(cocoa_engine, name), DataError) for name in RESULTS),
    ],
)
def test_wrong_data_of_a_model(kind: Any, error: type[Exception]) -> None:
    strange = "x" * 10**5
    for wrong in (f'{{"{strange}": "{strange}"}}', "[" * 10**5, '{"\\ud800": 1}', "\ud800", 5):
        message_of(error, lambda wrong=wrong: kind.model_validate_json(wrong))
    for wrong in ({strange: strange}, {ESCAPE: 1}, {"\ud800": 1}, 5):
        message_of(error, lambda wrong=wrong: kind.model_validate(wrong))
        message_of(error, lambda wrong=wrong: kind.model_validate_strings(wrong))
        if isinstance(wrong, dict) and issubclass(kind, SettingsModel):
            message_of(error, lambda wrong=wrong: kind(**wrong))


def test_a_compressed_file_may_not_inflate_without_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bomb.jsonl.gz"
    file.write_bytes(gzip.compress(b" " * 3 * 2**20))
    monkeypatch.setattr(files, "INFLATED_LIMIT", 2**20)
    assert "1 MiB" in message_of(DataError, lambda: files.read_text(file))
    monkeypatch.setattr(files, "INFLATED_LIMIT", 2**22)
    assert len(files.read_text(file)) == 3 * 2**20
    file.write_bytes(gzip.compress(b"good" * 9999)[:-20])
    message_of(DataError, lambda: files.read_text(file))
    file.write_bytes(gzip.compress(b"good" * 9999)[:10] + b"\xff" * 50)
    message_of(DataError, lambda: files.read_text(file))


@pytest.mark.parametrize(
    ("text", "repeated"), [(["a" * 3 * 2**20], False), (["a" * 2**15] * 96, True), ([None] * 10**5, True)]
)
def test_a_parquet_file_may_not_inflate_without_limit(
    text: list[Any], repeated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are compressed, a repeated value is stored once, and countless rows of nothing take no room."""
    file = tmp_path / "bomb.parquet"
    table = pyarrow.table({"text": pyarrow.array(text, pyarrow.string())})
    parquet.write_table(table, file, compression="zstd", use_dictionary=repeated)
    assert file.stat().st_size < 2**17
    monkeypatch.setattr(files, "INFLATED_LIMIT", 2**20)
    message = message_of(DataError, lambda: list(files.read_parquet(file)))
    assert message.startswith(f"{file} is larger than 1 MiB")
    monkeypatch.setattr(files, "INFLATED_LIMIT", 2**30)
    assert [row["text"] for _, row in files.read_parquet(file)] == text


def repeated(shape: str) -> Any:
    """A column with a thousand texts of 1 MiB, which is in memory once or a few times."""
    value, count = "a" * 2**20, 1000
    if shape == "json":  # has no dictionaries in memory
        few = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array([f'"{value}"'] * 4))
        return pyarrow.chunked_array([few] * (count // 4))
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([value]))
    if shape == "struct":
        return pyarrow.StructArray.from_arrays([text], ["text"])
    if shape == "list":  # of one row
        return pyarrow.ListArray.from_arrays([0, count], text)
    if shape == "map":
        return pyarrow.MapArray.from_arrays([0, count], pyarrow.array([str(n) for n in range(count)]), text)
    return text


def varint(number: int, length: int = 1) -> bytes:
    """A number of 0 or more as the metadata has it, in at least ``length`` bytes."""
    digits, rest = [], 2 * number
    while rest or len(digits) < length:
        digits.append(rest % 128)
        rest //= 128
    return bytes([*(digit + 128 for digit in digits[:-1]), digits[-1]])


def with_false_sizes(data: bytes) -> bytes:
    """A parquet file whose metadata says that its only column, and so its only group of rows, has one byte."""
    group = parquet.read_metadata(io.BytesIO(data)).row_group(0)
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:]
    for size in {group.total_byte_size, group.column(0).total_uncompressed_size}:
        footer = footer.replace(varint(size), varint(1, len(varint(size))))
    return data[:start] + footer


@pytest.mark.parametrize("shape", ["text", "struct", "list", "map", "json"])
def test_a_parquet_file_with_false_sizes(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 1 MiB, a thousand times, in a file of a few kilobytes. It is refused before the memory is used."""
    table = pyarrow.table({"column": repeated(shape)})
    written, file = io.BytesIO(), tmp_path / "bomb.parquet"
    options = {"compression": "zstd", "write_statistics": False, "dictionary_pagesize_limit": 2**30}
    parquet.write_table(table, written, store_schema=False, **options)
    file.write_bytes(with_false_sizes(written.getvalue()))
    assert file.stat().st_size < 2**13
    assert parquet.read_metadata(file).row_group(0).total_byte_size == 1
    monkeypatch.setattr(files, "INFLATED_LIMIT", 2**26)
    pool = pyarrow.default_memory_pool()
    before = pool.max_memory()
    assert "64 MiB" in message_of(DataError, lambda: list(files.read_parquet(file)))
    assert pool.max_memory() - before < 2**25


COLUMNS: dict[str, list[Any]] = {
    "text": ["a", None, "", "é" * 9, "b" * 5000],
    "bytes": [b"\xff", None, b"", b"a", b"b" * 5000],
    "number": [1, None, 2, 3, 4],
    "list": [["a", None], None, [], ["a", "b"], ["c" * 5000]],
    "list of lists": [[["a"], None, []], None, [], [["b", None]], [[]]],
    "object": [{"a": "x", "b": [1]}, None, {"a": None, "b": []}, {"a": "y", "b": None}, {"a": "x", "b": [None]}],
    "list of objects": [[{"a": "x"}, None], None, [], [{"a": None}], [{"a": "y"}]],
    "date.time": [datetime(2020, 2, 3, 4, 5), None, None, datetime(2021, 1, 1), None],
    "nothing": [None] * 5,
}


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"row_group_size": 2}, {"store_schema": False}])
def test_parquet_values_are_those_that_were_written(options: dict[str, Any], tmp_path: Path) -> None:
    columns = {name: pyarrow.array(values) for name, values in COLUMNS.items()}
    mapped = [[("a", "x")], None, [], [("a", None), ("b", "y")], [("c", "x")]]
    columns["map"] = pyarrow.array(mapped, pyarrow.map_(pyarrow.string(), pyarrow.string()))
    columns["category"] = pyarrow.array(["a", "b", None, "a", "a"]).dictionary_encode()
    columns["large"] = pyarrow.array(["a", "b", None, "a", "a"], pyarrow.large_string())
    columns["fixed"] = pyarrow.array([b"ab", None, b"cd", b"ab", b"ab"], pyarrow.binary(2))
    columns["id"] = pyarrow.ExtensionArray.from_storage(
        pyarrow.uuid(), pyarrow.array([bytes(16)] * 5, pyarrow.binary(16))
    )
    table, file = pyarrow.table(columns), tmp_path / "table.parquet"
    parquet.write_table(table, file, **options)
    assert [row for _, row in files.read_parquet(file)] == parquet.ParquetFile(file).read().to_pylist()
    if options.get("store_schema", True):
        assert [row for _, row in files.read_parquet(file)] == table.to_pylist()


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([str(n) for n in range(257)], "at most 256 stop texts"),
        ("a" * 10_001, "a stop text may have 10000 characters"),
        (["a", ""], "an empty stop text"),
    ],
    ids=["number", "length", "empty"],
)
def test_stop_texts_and_stop_strings_of_a_generation_config_are_limited(
    stops: Any, message: str, tiny: CocoaEngine
) -> None:
    most = [f"{n:010000}" for n in range(256)]
    assert len(CocoaConfig(stop=most).stop) == 256
    assert message in message_of(ConfigError, lambda: CocoaConfig(stop=stops))
    for call in (tiny.generate, tiny.stream):
        config = GenerationConfig(stop_strings=stops)
        told = message_of(ConfigError, lambda call=call, config=config: call("a", generation_config=config))
        assert told.startswith(f"the generation config cannot be used: {message}")
    config = GenerationConfig(stop_strings=most)
    assert tiny.generate("a", generation_config=config, max_new_tokens=1).token_ids


def test_labelled_parts_are_limited_and_looked_at_once() -> None:
    class Parts(tuple[LabelledSpan, ...]):
        looks = 0

        def __iter__(self) -> Iterator[LabelledSpan]:
            Parts.looks += len(self)
            return super().__iter__()

    def with_parts(count: int) -> LabelledText:
        parts = Parts(LabelledSpan(2 * n, 2 * n + 1) for n in range(count))
        return LabelledText("1", "p", "ab" * count, "p", True, parts, "p")

    assert checked([with_parts(10_000)], "f")
    assert "may have 10000" in message_of(DataError, lambda: checked([with_parts(10_001)], "f"))
    record = with_parts(20_000)
    Parts.looks = 0
    assert record.hallucinated_at(0, 40_002) == [True, False] * 20_000 + [False] * 2
    assert [record.hallucinated_at(at, at + 2) for at in range(0, 40_000, 2)] == [[True, False]] * 20_000
    assert Parts.looks == 20_000
    overlapping = LabelledText("1", "p", "abcdef", "p", True, (LabelledSpan(0, 4), LabelledSpan(1, 2)), "p")
    assert overlapping.hallucinated_at(1, 6) == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    ("kind", "field", "layers"),
    [
        *((kind, "num_hidden_layers", layers) for kind in ("llama", "qwen2") for layers in (10**9, 1001, "many")),
        *(("gpt2", "n_layer", layers) for layers in (10**9, 1001, "many")),
        *(("deep in a config", field, 10**9) for field in ("num_hidden_layers", "n_layer")),
        ("gguf", "llama.block_count", 10**9),
    ],
)
def test_more_layers_than_any_model_has(
    kind: str, field: str, layers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some configs build a list of that length."""
    if kind == "deep in a config":
        inner: Any = {"text_config": [{field: layers}]}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": inner}))
        (tmp_path / "model.safetensors").write_bytes(b"")
    elif kind == "gguf":
        write_family(tmp_path / "model.gguf", "llama", "Q8_0", metadata={field: layers})
    else:
        with_field(tmp_path, kind, field, layers)
    for name in ("from_pretrained", "for_model"):
        monkeypatch.setattr(AutoConfig, name, lambda *_, **__: pytest.fail("a config is built"))
    for blocks in (False, True):
        load = partial(load_pretrained, str(tmp_path), keeps_blocks=lambda blocks=blocks: blocks)
        assert f"{field} must be a whole number of at most 1000" in message_of(CocoaError, load)
    if kind in ("llama", "qwen2", "gpt2"):
        assert read_context_window(tmp_path) is None


@pytest.mark.parametrize("kind", [CocoaConfig, Runtime])
def test_every_number_among_the_settings_has_bounds(kind: Any) -> None:
    fields = kind.model_fields.items()
    numbers = [pair for pair in fields if {int, float} & {pair[1].annotation, *get_args(pair[1].annotation)}]
    assert len(numbers) >= 4
    for name, field in numbers:
        ends = {end[0] for bound in field.metadata for end in ("ge", "gt", "le", "lt") if hasattr(bound, end)}
        assert ends == {"g", "l"}, name


def test_an_argument_of_a_log_makes_no_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    text = "a\nERROR: b\r\nc\u2028d\u2029e\x85f\x0bg"
    safe_logger("cocoa_engine.test").warning("%d of %s: %s", 1, text, ValueError(ESCAPE * 10**5))
    (message,) = caplog.messages
    assert message.splitlines() == [message]
    assert message.startswith("1 of a")
    assert "␛[31m" in message
    assert len(message) < 1000
    assert not CONTROLS.search(message)


@pytest.mark.parametrize("color_system", [None, "standard"])
def test_control_characters_in_output_of_commands(color_system: Any) -> None:
    table = Table(ESCAPE, title=ESCAPE)
    table.add_row(Text(ESCAPE, "red"))
    file = io.StringIO()
    console = SafeConsole(file=file, color_system=color_system, force_terminal=True, highlight=False)
    console.print(ESCAPE, table, Markdown(ESCAPE), Group(Text(ESCAPE)), Control.bell())
    printed = file.getvalue()
    assert printed.count("␛[31m\ufffd") == 6
    assert printed.endswith("\x07")  # the console's own
    styles = r"\x1b\[[0-9;]*m" if color_system else r"\n"
    assert re.sub(styles, "", printed[:-1]).replace("\n", "").isprintable()
    assert ("\x1b[31m␛[31m" in printed) == bool(color_system)


def test_control_characters_in_json_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"text\x85": [f"{ESCAPE}\x7f\x80\x9f\u061c\u200e\u200f\u202a\u2066\u2069", "é\u200d\U0001f600\\u009b"]}
    print_json(json.dumps(value, ensure_ascii=False))
    printed = capsys.readouterr().out.removesuffix("\n")
    assert json.loads(printed) == value
    assert all(character.isprintable() or character == "\u200d" for character in printed)
    assert r"\u001b[31m\u009b2J\u202e" in printed
    assert "é\u200d\U0001f600" in printed


def test_consoles_of_all_modules_show_control_characters() -> None:
    folders = [Path(package.__path__[0]) for package in (cocoa_engine, cocoa_integrations)]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    makers = [file for file in files if re.search(r"\bConsole\(", file.read_text(encoding="utf-8"))]
    assert makers == [folders[0] / "rendering/documents.py"]  # of text that is safe
    assert isinstance(progress_console(), SafeConsole)


def test_marks_of_right_to_left_text_stay() -> None:
    text = "\u200fשלום (a)\u200f, \u200emodel\u200e \u061cمرحبا\u061c"
    assert safe(text) == text
    assert safe("\u202eשלום\u2067\u202c") == "<U+202E>שלום<U+2067><U+202C>"


@pytest.mark.parametrize("error", [RuntimeError, ConfigError, typer.BadParameter])
def test_errors_of_commands_are_bounded(error: type[Exception]) -> None:
    message, _ = describe_error(error("much " + ESCAPE * 10**5 + " too long"))
    assert len(message) <= MESSAGE_LIMIT
    assert "much ␛[31m" in message
    assert "too long" in message
