"""Every key of GGUF's metadata changes the model as it says, is proven to have no effect, or is refused by its name."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig

from cocoa_engine.errors import CocoaError, ModelLoadError, UnsupportedModelError
from cocoa_engine.model import gguf_metadata, gguf_model, gguf_tokenizer
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.loading import load_pretrained, load_tokenizer
from tests.helpers.family_gguf import BYTE_LEVEL, FAMILIES, TOKENS, write_family
from tests.helpers.mutations import outcome

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
