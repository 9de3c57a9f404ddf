"""The model ``cocoa`` under lm-evaluation-harness: the numbers of the harness's own ``hf`` model, and our tasks."""

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.tasks
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime
from cocoa_engine.errors import ChatTemplateError, ConfigError, PromptError
from cocoa_integrations.evaluation import TASKS, Arm, evaluate, generated_code, load_samples, metrics
from cocoa_integrations.lm_eval import TASKS_PATH, CocoaLM
from cocoa_integrations.lm_eval.__main__ import main
from tests.helpers.alike import near
from tests.helpers.settings import SETTINGS
from tests.helpers.tiny_models import pieces_tokenizer, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

CONTEXT = "Question: What is the capital of France?\nAnswer:"
PAIRS = [
    (CONTEXT, " Paris"),
    (CONTEXT, " The capital of France is Paris."),
    (CONTEXT, " Rome, of course."),
    ("The capital of France is", " Paris"),
    ("The quick brown fox ", "jumps over"),  # the space belongs to the continuation
    ("", "The sky is blue."),
    ("One two three four five six seven", " eight nine ten"),
]
TEXTS = ["The sky is blue because of the way light is scattered.", "Ünïcödé 日本語 😀", ""]


def ask(lm: Any, kind: Any, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """What a model replies to requests of one kind."""
    asked = [Instance(kind, {}, argument, number, ("test", number, 1)) for number, argument in enumerate(arguments)]
    replies: list[Any] = getattr(lm, kind)(asked, disable_tqdm=True)
    return replies


def short_hf(engine: CocoaEngine, max_length: int) -> HFLM:
    """The harness's own model, which counts one token less than ours: not the last one that is predicted."""
    return HFLM(pretrained=engine.model, tokenizer=engine.tokenizer, batch_size=1, max_length=max_length - 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness adds the installed packages to its results, which takes pip more than a second each time."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def hf(engine: CocoaEngine) -> HFLM:
    """The harness's own model on the same weights."""
    return HFLM(pretrained=engine.model, tokenizer=engine.tokenizer, batch_size=1)


@pytest.fixture(scope="module")
def cocoa_lm(engine: CocoaEngine) -> CocoaLM:
    """Ours, with a method whose scores are not log-probabilities."""
    return CocoaLM(engine=engine, method="cocoa-sig", alpha=6.0)


def test_loglikelihood_is_that_of_hf(engine: CocoaEngine, cocoa_lm: CocoaLM, hf: HFLM) -> None:
    ours, theirs = (ask(lm, "loglikelihood", PAIRS) for lm in (cocoa_lm, hf))
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-3)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert {greedy for _, greedy in ours} == {True, False}  # or the comparison says nothing
    # a long context is cut from the left
    cut, expected = (
        [value for value, _ in ask(lm, "loglikelihood", PAIRS[:4])]
        for lm in (CocoaLM(engine=engine, max_length=10), short_hf(engine, 10))
    )
    assert cut == pytest.approx(expected, abs=1e-3)
    with pytest.raises(PromptError, match="must fit 3"):
        ask(CocoaLM(engine=engine, max_length=3), "loglikelihood", PAIRS[:4])


def test_rolling_is_that_of_hf(engine: CocoaEngine, cocoa_lm: CocoaLM, hf: HFLM) -> None:
    texts = [(text,) for text in TEXTS]
    ours, theirs = (ask(lm, "loglikelihood_rolling", texts) for lm in (cocoa_lm, hf))
    assert ours == pytest.approx(theirs, abs=2e-3)
    # in windows
    windows, short = CocoaLM(engine=engine, max_length=8), short_hf(engine, 8)
    in_windows, expected = (ask(lm, "loglikelihood_rolling", texts) for lm in (windows, short))
    assert in_windows == pytest.approx(expected, abs=2e-3)
    assert expected[0] != pytest.approx(theirs[0], abs=0.1)


def test_a_text_begins_with_the_first_token_of_a_tokenizer_without_a_last_one() -> None:
    tokenizer = pieces_tokenizer()
    tokenizer.eos_token = None
    assert CocoaLM(engine=CocoaEngine(tiny_model("llama"), tokenizer)).prefix_token_id == tokenizer.bos_token_id


def test_greedy_generation_is_that_of_hf(engine: CocoaEngine, hf: HFLM) -> None:
    until = {"until": ["\n\n", "."], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0}
    other = {"until": "\n", "max_gen_toks": 4}
    arguments = [(CONTEXT, until), ("The sky is", until), ("One, two,", other), ("Once upon a time", until)]
    expected = ask(hf, "generate_until", arguments)
    for size in (1, 3):
        ours = CocoaLM(engine=engine, method="greedy", batch_size=size)
        assert ask(ours, "generate_until", arguments) == expected
    both = [(CONTEXT, {**until, "until": "\n\n", "stop": "."})]  # the harness's name, and that of the setting
    assert ask(ours, "generate_until", both) == expected[:1]
    assert not any("." in text for text in expected[:2])
    assert len({*expected}) == len(expected)


def test_greedy_flags_ignore_the_generation_config() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    plain = CocoaLM(engine=CocoaEngine(model, tokenizer))
    context = "the thing is "
    ids = plain.tok_encode(context)
    with torch.inference_mode():
        for _ in range(6):
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    start = len(plain.tok_encode(context))
    pairs = [(("", ""), ids[:start], ids[start:]), (("", ""), ids[:start], [*ids[start:-1], ids[-1] + 1])]
    expected = [greedy for _, greedy in plain._loglikelihood_tokens(pairs, disable_tqdm=True)]
    assert expected == [True, False]
    model.generation_config.repetition_penalty = 5.0
    penalised = CocoaLM(engine=CocoaEngine(model, tokenizer))
    assert [greedy for _, greedy in penalised._loglikelihood_tokens(pairs, disable_tqdm=True)] == expected


def test_sampling_and_strange_options_are_refused(cocoa_lm: CocoaLM) -> None:
    for options, message in [
        ({"do_sample": True, "temperature": 0.7}, "asks for sampling"),
        ({"num_beams": 4}, "beam search"),
        ({"repetition_penalti": 1.2}, "unknown option 'repetition_penalti'"),
        ({"max_gen_toks": 10**6}, "leaves no tokens for a prompt"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ask(cocoa_lm, "generate_until", [("x", options)])


def test_every_setting_is_a_model_arg(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: dict[str, Any] = {}

    def from_pretrained(model_name: str | None = None, **options: Any) -> CocoaEngine:
        loaded.update(options, model_name=model_name)
        runtime = options["runtime"].model_copy(update={"weights": "stored"})  # its model is not loaded here
        return CocoaEngine(engine.model, engine.tokenizer, runtime=runtime)

    monkeypatch.setattr(CocoaEngine, "from_pretrained", from_pretrained)
    values = {
        **SETTINGS, "middle_layers": "8-16", "dola_layers": "16-18", "stop": "###",
        "forward": "modules", "linears": "stock", "max_batch_size": 2, "max_queue": 9, "prefix_cache_mb": 1,
        "draft_tokens": 0, "cuda_graphs": False, "weights": "q8_0",
    }  # fmt: skip
    fields = {**CocoaConfig.model_fields, **Runtime.model_fields}
    assert values.keys() == fields.keys()
    assert all(value != fields[name].default for name, value in values.items())
    text = ",".join(f"{name}={value}" for name, value in values.items())
    lm = get_model("cocoa").create_from_arg_string(f"pretrained=,revision=main,dtype=float32,{text}")
    assert (loaded["model_name"], loaded["dtype"], loaded["model_kwargs"]) == (None, "float32", {"revision": "main"})
    assert lm.config == CocoaConfig(**{**SETTINGS, "middle_layers": (8, 16)})
    assert loaded["runtime"] == Runtime(**{name: values[name] for name in Runtime.model_fields})
    assert lm.get_model_info()["cocoa_config"]["alpha"] == 1.5
    json.dumps(lm.get_model_info())


def test_devices(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the harness's command line says ``cuda:0`` too."""
    loaded: dict[str, Any] = {}
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **given: loaded.update(given) or engine)
    both = {"device": "cuda:0", "device_map": "auto"}
    for options, without_gpu, with_gpu in (
        ({"device": "cuda:0"}, None, "cuda:0"),
        ({"device": "cpu"}, None, None),
        ({"device": "mps"}, "mps", "mps"),
        (both, None, "auto"),
    ):
        for there, device_map in ((False, without_gpu), (True, with_gpu)):
            monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
            CocoaLM(**options)
            assert loaded["device_map"] == device_map


def test_bad_model_args(engine: CocoaEngine) -> None:
    for options, message in [
        ({"alfa": 1}, r"unknown option 'alfa' \(did you mean 'alpha'\?\)"),
        ({"batch_size": "many"}, "batch_size"),
        ({"method": "dowsing"}, "method"),
        ({"forward": "modules"}, "engine= is given"),
        ({"method": "dola", "dola_layers": "16-x"}, "dola_layers"),
    ]:
        with pytest.raises(ConfigError, match=message):
            CocoaLM(engine=engine, **options)
    for layers, parsed in ((16, "16"), ("16-18-20", "16,18,20"), ([16, 18], "16,18")):
        assert CocoaLM(engine=engine, dola_layers=layers).config.dola_layers == parsed
    with pytest.raises(ConfigError, match="--metadata"):
        run(engine, ["cocoa_nq"], None)


def run(model: CocoaEngine | HFLM, tasks: list[str], data: Any, **options: Any) -> dict[str, Any]:
    """The harness's own evaluation, of our model or of its own."""
    options["task_manager"] = TaskManager(include_path=TASKS_PATH, include_defaults=False, metadata={"data": data})
    if isinstance(model, CocoaEngine):
        options |= {"model": "cocoa", "model_args": {"engine": model, **options.pop("model_args", {})}}
    else:
        options["model"] = model
    results = lm_eval.simple_evaluate(tasks=tasks, bootstrap_iters=0, **options)
    assert results is not None
    return results


def test_our_tasks_give_what_our_command_gives(
    engine: CocoaEngine, data_files: dict[str, Path], tmp_path: Path
) -> None:
    arm = Arm("cocoa-sig", "f_mlds", 2.5)
    names = ["truthfulqa_mc", "nq"]
    data = {f"cocoa_{name}": str(data_files[name]) for name in names}
    found = run(engine, list(data), data, gen_kwargs={"max_gen_toks": 12})
    config = CocoaConfig(max_new_tokens=12)
    for name in names:
        samples = load_samples(name, data_files[name])
        ours = evaluate(engine, TASKS[name], samples, [arm], tmp_path / name, config=config)
        for metric, figure in ours["arms"][0]["metrics"].items():
            assert found["results"][f"cocoa_{name}"][f"{metric},none"] == near(figure["mean"])
    first, score = load_samples(names[0], data_files[names[0]])[0], found["samples"]["cocoa_truthfulqa_mc"][0]
    expected = engine.score(first.prompt, first.choices[0]).spans[0].score
    assert score["filtered_resps"][0] == pytest.approx(expected, abs=1e-3)


def test_every_task_runs(engine: CocoaEngine, data_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    data = {f"cocoa_{name}": str(path) for name, path in data_files.items()}
    monkeypatch.setattr(generated_code, "confines", lambda: False)
    with pytest.raises(ValueError, match="unsafe"):
        run(engine, ["cocoa_mbpp"], data)
    options: dict[str, Any] = {"model_args": {"method": "greedy"}, "gen_kwargs": {"max_gen_toks": 4}}
    found = run(engine, list(data), data, limit=1, confirm_run_unsafe_code=True, **options)
    for name, task in TASKS.items():
        for column in task.columns:
            assert math.isfinite(found["results"][f"cocoa_{name}"][f"{column.metric},none"])
            assert found["higher_is_better"][f"cocoa_{name}"][column.metric] == (column.better == "more")
        if not task.multiple_choice:
            assert found["configs"][f"cocoa_{name}"]["generation_kwargs"]["until"] == list(task.until)


def test_chat_templates_are_applied_as_hf_does(engine: CocoaEngine, hf: HFLM, data_files: dict[str, Path]) -> None:
    """The harness's ``apply_chat_template``: the same prompts and, decoding greedily, the same answers."""
    data = {"cocoa_nq": str(data_files["nq"]), "cocoa_truthfulqa_mc": str(data_files["truthfulqa_mc"])}
    options: dict[str, Any] = {"apply_chat_template": True, "system_instruction": "Be brief.", "limit": 1}
    options["gen_kwargs"] = {"max_gen_toks": 4}
    ours = run(engine, ["cocoa_nq"], data, model_args={"method": "greedy"}, **options)
    theirs = run(hf, ["cocoa_nq"], data, **options)
    for one, other in zip(ours["samples"]["cocoa_nq"], theirs["samples"]["cocoa_nq"], strict=True):
        assert one["arguments"][0][0] == other["arguments"][0][0]
        assert "<|im_start|>system\nBe brief.<|im_end|>" in one["arguments"][0][0]
        assert one["resps"] == other["resps"]
    lm = CocoaLM(engine=engine)
    assert lm.chat_template(True) == hf.chat_template(True) == engine.tokenizer.chat_template
    assert lm.tokenizer_name

    found = run(engine, ["cocoa_truthfulqa_mc"], data, **options)
    first = load_samples("truthfulqa_mc", data_files["truthfulqa_mc"])[0]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": first.prompt}]
    expected = engine.score(engine.render_chat(messages), first.choices[0].lstrip()).spans[0].score
    assert found["samples"]["cocoa_truthfulqa_mc"][0]["filtered_resps"][0] == pytest.approx(expected, abs=1e-3)


def test_chat_templates_that_write_special_tokens_or_take_no_system_message() -> None:
    tokenizer = pieces_tokenizer()  # it puts <bos> before every text
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
        "{{ raise_exception('no system message') }}{% endif %}{{ message.content }} {% endfor %}"
        "{% if add_generation_prompt %}the{% if loud %}!{% endif %}{% endif %}"
    )
    engine = CocoaEngine(tiny_model("llama"), tokenizer)
    lm = CocoaLM(engine=engine)
    chat = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    text = lm.apply_chat_template(chat)
    assert text == "<bos>hi the"
    assert CocoaLM(engine=engine, chat_template_args={"loud": True}).apply_chat_template(chat) == "<bos>hi the!"
    ids = engine.encode("hi the")
    assert lm.tok_encode(text) == ids
    (score,) = lm.span_score([Instance("span_score", {}, (text, " thing"), 0)])
    assert score == near(engine.score("hi the", " thing").spans[0].score)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        CocoaLM(engine=CocoaEngine(tiny_model("llama"), tiny_tokenizer())).apply_chat_template(chat)


def test_command_line(
    engine: CocoaEngine,
    data_files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # reading the harness's thousands of own tasks would take half a minute
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **__: engine)
    data = json.dumps({"data": str(data_files["truthfulqa_mc"])})
    command = ["run", "--model", "cocoa", "--model_args", "pretrained=,method=cocoa,alpha=1.0,middle_layers=8-16"]
    command += ["--tasks", "cocoa_truthfulqa_mc", "--metadata", data, "--limit", "1", "--output_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *command])
    main()
    assert "|cocoa_truthfulqa_mc|" in capsys.readouterr().out
    (file,) = tmp_path.rglob("results_*.json")
    results = json.loads(file.read_text())
    first = load_samples("truthfulqa_mc", data_files["truthfulqa_mc"])[0]
    scored = engine.score(first.prompt, first.choices, method="cocoa", alpha=1.0, middle_layers=(8, 16))
    scores = [one.spans[0].score for one in scored]
    n = len(first.references)
    found = results["results"]["cocoa_truthfulqa_mc"]["mc2,none"]
    assert found == near(metrics.mc2(scores[:n], scores[n:]))
    assert results["config"]["cocoa_config"]["middle_layers"] == [8, 16]
