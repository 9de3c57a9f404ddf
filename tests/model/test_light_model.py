"""The second start of a GGUF file or the embedded model: the weights alone decode as the whole model does."""

import os
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.forward.linears import kernels_name
from cocoa_engine.files import CACHE_VARIABLE, cache_directory
from cocoa_engine.model import weight_identity
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.light_model import LightModel
from cocoa_engine.model.loading import load_pretrained
from cocoa_integrations.langchain import CocoaLLM
from tests.helpers.alike import same_tokenizer
from tests.helpers.family_gguf import write_family
from tests.helpers.libraries import needs_kernels
from tests.helpers.processes import forked, run

pytestmark = needs_kernels
PROMPT = "he 12 Grüße"
CACHE = cache_directory()
FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, linear": {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
    "llama, by frequency": {"tensors": {"rope_freqs.weight": torch.linspace(1, 8, 8)}},
    "qwen2": {"tied": False},
    "qwen3": {},
    "llama-biases": {},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "checked"


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(tmp_path / "model.gguf", "llama")


def written(path: Path, form: str, kind: str = "Q8_0") -> str:
    write_family(path, form.partition(",")[0], kind, **FORMS[form])
    return str(path)


def answer(engine: CocoaEngine, **settings: Any) -> list[Any]:
    found = engine.generate(PROMPT, max_new_tokens=12, **settings)
    return [found.token_ids, [(span.f_mlds, span.con_mlds, span.log_prob) for span in found.spans]]


def is_light(engine: CocoaEngine) -> bool:
    return isinstance(engine.session.model.model, LightModel)


def started_again(file: str, **options: Any) -> CocoaEngine:
    answer(CocoaEngine.from_pretrained(file))
    engine = CocoaEngine.from_pretrained(file, **options)
    assert is_light(engine)
    return engine


@pytest.mark.parametrize(("form", "kind"), [*((form, "Q8_0") for form in FORMS), ("llama", "F32")])
def test_the_second_start_gives_the_same_answers_and_facts(tmp_path: Path, form: str, kind: str) -> None:
    file = written(tmp_path / "model.gguf", form, kind)

    def facts(engine: CocoaEngine) -> list[Any]:
        answers = [answer(engine, method=method) for method in ("cocoa-sig", "greedy", "dola")]
        return [answers, [text.model_dump() for text in engine.score(PROMPT, [" he 12", " 12 12"])], engine.info()]

    first = CocoaEngine.from_pretrained(file)
    expected = facts(first)
    second = CocoaEngine.from_pretrained(file)
    assert facts(second) == expected
    assert (is_light(first), is_light(second)) == (False, True)
    light, whole = second.held_model, first.model
    expected_weights, weights = dict(whole.named_parameters()), dict(light.named_parameters())
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name] + 0, expected_weights[name] + 0) for name in weights)
    assert light.generation_config.to_dict() == whole.generation_config.to_dict()


@pytest.mark.parametrize(
    "mode", [nullcontext(), torch.inference_mode(), torch.device("meta")], ids=["plain", "inference", "meta"]
)
def test_the_whole_model_is_made_of_the_same_memory_when_it_is_asked_for(file: str, mode: Any) -> None:
    engine = started_again(file)
    expected, light = answer(engine), engine.session.model.model
    lock = engine.session.model.lock
    with mode:
        model = engine.model
    assert isinstance(model, PreTrainedModel)
    assert not any(tensor.is_meta or tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    assert engine.model is model
    own = dict(light.named_parameters())
    before = {name: parameter + 0 for name, parameter in model.named_parameters()}
    model.init_weights()  # they count as loaded
    assert all(parameter is own[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(parameter + 0, before[name]) for name, parameter in own.items())
    assert model not in light.modules()
    assert not is_light(engine)
    assert engine.session.model.lock is lock
    assert engine.session.model.layers == list(model.model.layers)
    assert answer(engine) == expected
    assert answer(engine, method="greedy") == answer(CocoaEngine(model, engine.tokenizer), method="greedy")
    model.config.max_position_embeddings = 64
    assert CocoaEngine(light, engine.tokenizer).context_window == 64  # type: ignore[arg-type]


def test_hooks_on_the_model_of_one_engine_are_seen_by_another_on_the_same_weights(file: str) -> None:
    engine = started_again(file)
    other = CocoaEngine(engine.session.model.model, engine.tokenizer)  # type: ignore[arg-type]
    expected = answer(other)
    assert is_light(other)
    held = engine.session.model
    with held.exclusive():  # a plain forward pass runs the whole model
        logits = held.forward(torch.tensor([[5, 6, 7]]), logits_to_keep=1).logits
    torch.testing.assert_close(logits, held.whole()(torch.tensor([[5, 6, 7]])).logits[:, -1:])

    def zero(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(output)

    hook = engine.model.model.layers[1].mlp.register_forward_hook(zero)
    changed = answer(engine)
    assert changed != expected
    assert answer(other) == changed
    hook.remove()
    assert answer(other) == expected == answer(engine)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"forward": "modules"}, {"linears": "stock"}])
def test_settings_that_run_the_modules_get_them(file: str, settings: dict[str, Any]) -> None:
    expected = answer(started_again(file))[0]
    engine = CocoaEngine.from_pretrained(file, runtime=Runtime(**settings))
    assert answer(engine)[0] == expected
    assert not is_light(engine)
    shared = started_again(file).session.model.model
    again = CocoaEngine(shared, engine.tokenizer, runtime=Runtime(**settings))  # type: ignore[arg-type]
    assert answer(again)[0] == expected


@pytest.mark.parametrize("hidden", [False, True])
def test_nothing_is_noted_of_weights_that_were_changed(folder: Path, file: str, hidden: bool) -> None:
    def change(engine: CocoaEngine) -> None:
        with torch.no_grad():
            norm = engine.model.model.layers[1].input_layernorm.weight
            (norm.data if hidden else norm).mul_(2)

    engine = CocoaEngine.from_pretrained(file)
    change(engine)
    answer(engine)
    assert not list(folder.glob("*.json"))
    engine = CocoaEngine.from_pretrained(file)
    assert not is_light(engine)
    answer(engine)
    (note,) = folder.glob("*.json")
    before = note.read_bytes()
    change(engine)
    answer(engine)
    assert [file.read_bytes() for file in folder.glob("*.json")] == [before]


def test_a_note_is_of_one_file_one_version_of_the_code_and_the_kernels(
    file: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started_again(file)
    options: dict[str, Any] = {"keeps_blocks": lambda: True, "device_map": None}
    for name, expected in ((kernels_name("auto"), True), ("kernels-of-another-processor.so", False)):
        model, _, _ = load_pretrained(file, light_with=partial(str, name), **options)
        assert isinstance(model, LightModel) == expected
    for owner, part, another in ((weight_identity, "_code", lambda: "another"), (torch, "__version__", "99.0")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, part, another)
            assert not is_light(CocoaEngine.from_pretrained(file))
    data = bytearray(Path(file).read_bytes())
    data[GgufFile(Path(file)).tensors["blk.1.ffn_up.weight"].start + 3] ^= 1
    (tmp_path / "other.gguf").write_bytes(data)
    engine = CocoaEngine.from_pretrained(str(tmp_path / "other.gguf"))
    assert not is_light(engine)
    answer(engine)
    assert len(list(folder.glob("*.json"))) == 2
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    for _ in range(2):  # without a cache every start is the first
        engine = CocoaEngine.from_pretrained(file)
        answer(engine)
        assert not is_light(engine)


def test_other_linear_layers_neither_build_nor_load_the_kernels(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "obstacle", lambda: pytest.fail("the kernels were asked for"))
    for linears in ("packed", "stock", "transposed"):
        CocoaEngine.from_pretrained(file, runtime=Runtime(linears=linears))
        assert kernels_name(linears) == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_adapters_share_light_weights_also_with_a_forked_child(file: str) -> None:
    started_again(file)
    models = [CocoaLLM(model_name=file, runtime=Runtime(max_batch_size=size), max_new_tokens=4) for size in (2, 3)]
    texts = [model.invoke(PROMPT) for model in models]
    assert texts[0] == texts[1]
    engines = [model.load() for model in models]
    assert all(map(is_light, engines))
    assert engines[0].session.model.model is engines[1].session.model.model
    expected = models[0]._identifying_params

    def child() -> None:
        assert models[0]._identifying_params == expected

    assert forked(child) == [0]


@pytest.mark.slow
def test_the_second_start_of_the_embedded_model_imports_no_model_classes_and_no_tracer(file: str, folder: Path) -> None:
    shutil.copytree(CACHE / "kernels", folder.parent / "kernels")
    expected, first = answer(started_again(file)), CocoaEngine.from_pretrained()
    assert not is_light(first)
    answers = [expected, answer(first)]
    second = CocoaEngine.from_pretrained()
    assert is_light(second)
    assert answer(second) == answers[1]
    assert second.info() == first.info()
    assert same_tokenizer(second.tokenizer, first.tokenizer)
    assert second.model.name_or_path == first.model.name_or_path == second.model.config.name_or_path
    code = """
import atexit, gc, sys
atexit.register(gc.freeze)  # or the end looks through all that was imported
from cocoa_engine import CocoaEngine
engines = [CocoaEngine.from_pretrained(sys.argv[1]), CocoaEngine.from_pretrained()]
for engine in engines:
    print(engine.generate(sys.argv[2], max_new_tokens=12).token_ids)
    engine.score(sys.argv[2], [" he", " 12"])
    engine.info()
heavy = ("transformers.modeling_utils", "torch._dynamo", "sympy", "torch.distributed.tensor", "torchao", "scipy")
print([name for name in heavy if name in sys.modules])
print(*(type(engine.model).__module__ for engine in engines))
"""
    done = run([sys.executable, "-W", "ignore", "-c", code, file, PROMPT])
    assert (done.returncode, done.stderr) == (0, "")  # torchao, where it is installed, says nothing either
    llama = "transformers.models.llama.modeling_llama"
    assert done.stdout.splitlines() == [*(str(ids) for ids, _ in answers), "[]", f"{llama} {llama}"]
