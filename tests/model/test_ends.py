"""The tokens that end a text, the union of what every file of a model says; templates and vocabularies of llama.cpp."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import GenerationConfig

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError
from cocoa_engine.model.generation_config import eos_of_gguf, eos_token_ids, turn_end
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.tokenizer import Tokens
from tests.conformance.llama_cpp_files import MODELS, check, compared, forged
from tests.conformance.llama_cpp_files import TEMPLATES as FOLDER
from tests.conformance.tools import OMITTED, source_if_there
from tests.helpers.family_gguf import write_family
from tests.helpers.in_threads import Dictated
from tests.helpers.tiny_models import EOS, PAD, tiny_model, tiny_tokenizer

TURN = 300
SIZE = 304  # of the embeddings: a few more than tokens
CHATML = (
    "{% for message in messages %}<bos>{{ message.role }}\n{{ message.content }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
TEMPLATES: dict[str | None, int | None] = {
    None: None,
    CHATML: TURN,
    # the assistant's turn alone has an end
    "{% for m in messages %}{{ m.content }}{{ ' <|turn|>' if m.role == 'assistant' else '<pad>' }}{% endfor %}": TURN,
    # it is closed by what opens the next turn, or where another turn follows
    "{% for m in messages %}{{ '<|turn|>' if m.role == 'user' }}{{ m.content }}{% endfor %}": TURN,
    "{% for m in messages %}{{ m.content }}{{ '<|turn|>\n' if not loop.last }}{% endfor %}": TURN,
    # the end of a thought is the end of a part
    "{% for m in messages %}{{ m.reasoning + '<pad>' if m.reasoning }}{{ m.content }}<pad><|turn|>{% endfor %}": TURN,
    # ordinary text ends it, or nothing
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}": None,
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ messages[7].content }}": None,
    "{% for m in messages if m.role == 'user' %}{{ m.content }}<pad>{% endfor %}": None,
    "{{ raise_exception('no') }}": None,
}


def tokenizer_with(template: str | None, eos: str | None = "<eos>", marks: Iterable[str] = ("<|turn|>",)) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True)
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    return tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", vocab_size=SIZE)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_end_of_a_turn(template: str | None) -> None:
    tokens = Tokens(tokenizer_with(template))
    assert turn_end(tokens) == TEMPLATES[template]
    tokens.settings.chat_template = CHATML  # a template that is set later
    assert turn_end(tokens) == TURN


@given(
    own=st.none() | st.integers(-2, SIZE + 2) | st.lists(st.integers(-2, SIZE + 2), max_size=3),
    of_call=st.none() | st.lists(st.integers(-2, SIZE + 2), max_size=2),
    eos=st.sampled_from([None, "<eos>", "<pad>"]),
    template=st.sampled_from(sorted(TEMPLATES, key=str)),
)
def test_ends_are_the_union(model: Any, own: Any, of_call: Any, eos: str | None, template: str | None) -> None:
    tokenizer = tokenizer_with(template, eos)
    model.generation_config = GenerationConfig()
    model.generation_config.eos_token_id = own
    config = None if of_call is None else GenerationConfig(eos_token_id=of_call)
    stated = own if of_call is None else of_call
    expected = {tokenizer.eos_token_id, TEMPLATES[template]}
    expected |= {stated} if isinstance(stated, int) else set(stated or ())
    ends = eos_token_ids(model, Tokens(tokenizer), config)
    assert ends == {end for end in expected if end is not None and 0 <= end < SIZE}


@pytest.mark.parametrize("own", [0, None, [], 10**6, -1, [10**6, EOS]])
def test_an_answer_ends_at_each_of_them(model: Any, own: Any) -> None:
    """The template's and the tokenizer's, whatever the generation config says."""
    engine = CocoaEngine(model, tokenizer_with(CHATML, "<pad>"))
    model.generation_config = GenerationConfig()
    model.generation_config.eos_token_id = own
    for end in (TURN, PAD):
        for ask in (engine.generate, lambda prompt, **options: engine.generate_batch([prompt], **options)[0]):
            answer = ask([5, 6], logits_processor=Dictated(2, [70, 71], end), max_new_tokens=9)
            assert (answer.finish_reason, answer.token_ids) == ("eos", [70, 71, end])
            assert answer.text == engine.decode([70, 71])
    # not before min_new_tokens
    waits = GenerationConfig(min_new_tokens=6)
    ended = [engine.generate([seed], generation_config=waits, max_new_tokens=20).token_ids for seed in range(20, 40)]
    assert not {TURN, PAD} & {token_id for token_ids in ended for token_id in token_ids[:6]}


def test_a_grammar_may_end_with_each_of_them(model: Any) -> None:
    engine = CocoaEngine(model, tokenizer_with(CHATML, None))
    model.generation_config = GenerationConfig()
    assert engine.generate("a", logits_processor=engine.constrain(regex="[a-z]{2}")).finish_reason == "eos"
    engine = CocoaEngine(model, tokenizer_with(None, None))
    with pytest.raises(ConfigError, match="end-of-sequence"):
        engine.constrain(regex="a")


NAMES = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"]
NAMES += ["<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<end_of_utterance>", "<turn|>", "<|fim_pad|>", "<|file_sep|>"]


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        *(({"a": 1, name: kind, "b": 1}, [name]) for name in NAMES for kind in (1, 3, 4)),  # whatever their type
        ({"</s>": 1}, []),  # a tag of HTML
        ({"</s>": 4}, []),
        ({"</s>": 3}, ["</s>"]),
        ({"<|end|>": 3, "<|return|>": 3, "<|call|>": 3}, ["<|return|>", "<|call|>"]),
        ({"<|end|>": 3, "<|calls|>": 3, "<|flush|>": 3}, ["<|calls|>", "<|flush|>"]),
        ({"<|im_start|>": 3, "<|user|>": 3, "<s>": 3, "<think>": 4, "<|pad|>": 3}, []),
    ],
)
def test_names_that_end_a_text(tokens: dict[str, int], ends: list[str]) -> None:
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": [*tokens]}
    if len(ends) == 1 and ends[0] in NAMES:
        assert eos_of_gguf(metadata) == [1]  # without types
    metadata["tokenizer.ggml.token_type"] = [*tokens.values()]
    assert [[*tokens][number] for number in eos_of_gguf(metadata)] == ends


def test_keys_name_tokens() -> None:
    for key in ("eos", "eot", "eom"):
        for token_id, ends in ((0, [0]), (2, [2]), (3, []), (-1, []), (2**32 - 1, [])):
            metadata = {"tokenizer.ggml.tokens": ["a", "b", "c"], f"tokenizer.ggml.{key}_token_id": token_id}
            assert eos_of_gguf(metadata) == ends


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}])
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_a_file_whose_end_is_not_that_of_its_template(tmp_path: Path, kind: int, options: dict[str, Any]) -> None:
    """Its eos ends documents; its template, or nothing but the names of its tokens, says what ends a turn."""
    special = {"<unk>": 3, "<|im_start|>": 3, "<|endoftext|>": 3, "<|im_end|>": kind, "<|eom_id|>": 3}
    template = CHATML.replace("<bos>", "<|im_start|>").replace("<|turn|>", "<|im_end|>")
    for number, chat_template in enumerate((template, None)):
        file = tmp_path / f"{number}.gguf"
        write_family(file, "llama", "F32", special=special, ids={"bos": 1, "eos": 2}, template=chat_template)
        assert eos_of_gguf(GgufFile(file).metadata) == [2, 3, 4]
        engine = CocoaEngine.from_pretrained(file, calibrator=None, **options)
        said = engine.encode("he12", add_special_tokens=False)
        for end in (2, 3, 4):
            answer = engine.generate([9], logits_processor=Dictated(1, said, end), max_new_tokens=9)
            assert (answer.finish_reason, answer.token_ids) == ("eos", [*said, end])
            if not options:  # transformers reads the types of tokens by itself
                assert answer.text == "he12"


ENDS = """
<|im_end|> Bielik HuggingFaceTB Kimi-K2 LFM2 MiMo NVIDIA-Nemotron-3 NousResearch Qwen StepFun moonshotai openbmb
<｜end▁of▁sentence｜> Spark deepseek-ai llama-cpp-deepseek
<|eot_id|> meetkai meta-llama
<eos> Mistral Ministral mistralai unsloth-mistral
<|end|> Apriel microsoft unsloth-Apriel
<|end_of_text|> ibm-granite
[e~[ MiniMax-M2 MiniMax-M3
<end_of_sentence> MiniMax-M1
<|message_sep|> GigaChat
<turn|> google-gemma-4
<end_of_turn> google-gemma-2
</assistant> poolside
<|user|> GLM
<|assistant_end|> Apertus
<seed:eos> ByteDance
<|END_TEXT|> Cohere2MoE
<|END_OF_TURN_TOKEN|> CohereForAI-c4ai-command-r-plus
<|END_RESPONSE|> CohereForAI-c4ai-command-r7b
<|end_of_msg|> Kimi-K3
<SPECIAL_12> NVIDIA-Nemotron-Nano
<sep> Reka
<|role_end|> inclusionai
<|eot|> muse
<|return|> openai
<｜hy_eos:opensource｜> tencent
none llama-cpp-rwkv fireworks upstage
"""
"""The end of each family's templates. What opens the next turn is all that ends one of GLM. None: text ends a turn; the
template needs a list of functions; its <|end|> ends thoughts too."""
STATED = {prefix: end for end, *prefixes in map(str.split, ENDS.strip().splitlines()) for prefix in prefixes}
OTHERS = "<|im_start|> <|begin_of_text|> <|start|> <|end|> <|channel|> <|message|> <|close|> <|open|> <|sep|> <|begin|>"
OTHERS += " <|content|> <|start_of_role|> <|end_of_role|> <|assistant|> <think> </think> <|START_OF_TURN_TOKEN|>"


@pytest.mark.slow
def test_the_ends_of_llama_cpp_s_templates() -> None:
    tokenizer = tokenizer_with(None, marks={*STATED.values(), *OTHERS.split()} - {"none"})
    tokens = Tokens(tokenizer)
    ends: dict[str, str] = {}
    for file in sorted((source_if_there("llama-cpp-python") / FOLDER).glob("*.jinja")):
        tokens.settings.chat_template = file.read_text()
        end = turn_end(tokens)
        ends[file.stem] = "none" if end is None else str(tokenizer.convert_ids_to_tokens(end))
    assert len(ends) > 60
    assert ends == {name: STATED[max(filter(name.startswith, STATED), key=len)] for name in ends}


READ = ("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt")
READ += ("phi-3", "qwen2", "qwen35", "refact", "starcoder")
WITHOUT_TEXTS = ("aquila", "baichuan", "gpt-neox")
REFUSED = ("bert-bge", "nomic-bert-moe")  # of encoders


@pytest.mark.slow
def test_templates_are_rendered_as_transformers_does() -> None:
    outcomes = list(compared(source_if_there("llama-cpp-python") / FOLDER))
    different = {name for name, _, outcome in outcomes if outcome == "differs"}
    assert different == OMITTED["templates"].keys()
    assert Counter(outcome for *_, outcome in outcomes)["equal"] > 300


@pytest.mark.slow
def test_no_text_makes_a_control_token() -> None:
    attempts = list(forged(source_if_there("llama-cpp-python") / FOLDER, each=False))
    assert len(attempts) > 400
    assert [(name, kind) for name, kind, _, made in attempts if made] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*READ, *WITHOUT_TEXTS, *REFUSED])
def test_a_vocabulary_has_the_ids_of_llama_cpp(name: str) -> None:
    compared_texts = check(source_if_there("llama-cpp-python") / MODELS / f"ggml-vocab-{name}.gguf")
    assert (compared_texts is None) == (name in REFUSED)
    assert name not in READ or (compared_texts is not None and compared_texts >= 46)
