"""Pipelines of transformers, and of langchain-huggingface over them, decode with CoCoA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TextGenerationPipeline, pipeline

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_integrations.transformers import Cocoa, cocoa
from tests.helpers.alike import near
from tests.helpers.model_folders import TEMPLATE
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

PROMPTS = ["Once upon a time", "Who?"]


@pytest.fixture(scope="module")
def engine_of_pipe() -> CocoaEngine:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return CocoaEngine(tiny_model("llama", seed=6), tokenizer)


@pytest.fixture(scope="module")
def pipe(engine_of_pipe: CocoaEngine) -> TextGenerationPipeline:
    made: TextGenerationPipeline = pipeline(
        "text-generation", model=engine_of_pipe.model, tokenizer=engine_of_pipe.tokenizer
    )
    return made


def test_a_pipeline_works_at_its_defaults(pipe: TextGenerationPipeline) -> None:
    [answer] = pipe(PROMPTS[0], custom_generate=cocoa)
    assert len(answer["generated_text"]) > len(PROMPTS[0])


def test_a_pipeline_samples_the_candidates_at_their_own_probabilities(
    pipe: TextGenerationPipeline, engine_of_pipe: CocoaEngine
) -> None:
    expected = engine_of_pipe.generate(PROMPTS[0], temperature=0.7, seed=5, max_new_tokens=16)
    sampling = Cocoa(tokenizer=engine_of_pipe.tokenizer, seed=5)
    output = pipe(PROMPTS[0], custom_generate=sampling, max_new_tokens=16, return_tensors=True)
    token_ids = output[0]["generated_token_ids"]
    prompt = engine_of_pipe.encode(PROMPTS[0])
    assert list(token_ids)[len(prompt) :] == expected.token_ids
    ids = torch.tensor([prompt])
    kept = {"custom_generate": sampling, "do_sample": True, "temperature": 0.7, "max_new_tokens": 16}
    answers = [
        engine_of_pipe.model.generate(ids, **kept, top_k=top_k, return_dict_in_generate=True).generations[0]
        for top_k in (50, 0)
    ]
    log_probs = [[span.log_prob for span in answer.spans] for answer in answers]
    assert log_probs[0] == near(log_probs[1])


def test_a_pipeline_answers_batches_and_chats(pipe: TextGenerationPipeline, engine_of_pipe: CocoaEngine) -> None:
    greedy: dict[str, Any] = {"custom_generate": cocoa, "do_sample": False, "max_new_tokens": 8}
    expected = engine_of_pipe.generate_batch(PROMPTS, max_new_tokens=8)
    answers = pipe(PROMPTS, batch_size=2, return_full_text=False, **greedy)
    assert [answer["generated_text"] for [answer] in answers] == [answer.text for answer in expected]
    messages = [{"role": "user", "content": "Hi"}]
    [answer] = pipe(messages, **greedy)
    assert answer["generated_text"][-1]["content"] == engine_of_pipe.chat(messages, max_new_tokens=8).text


def test_what_a_pipeline_must_be_told_is_one_line(pipe: TextGenerationPipeline) -> None:
    with pytest.raises(ConfigError, match=r"top_p=0\.8.*give do_sample=False.*or top_p=1\.0 and top_k=0") as error:
        pipe(PROMPTS[0], custom_generate=cocoa, top_p=0.8)
    assert "\n" not in str(error.value)


def test_langchain_huggingface_over_such_a_pipeline(pipe: TextGenerationPipeline, engine_of_pipe: CocoaEngine) -> None:
    module = pytest.importorskip("langchain_huggingface.llms.huggingface_pipeline")
    llm = module.HuggingFacePipeline(pipeline=pipe)
    assert len(llm.invoke(PROMPTS[0], pipeline_kwargs={"custom_generate": cocoa})) > len(PROMPTS[0])
    greedy = {"custom_generate": cocoa, "do_sample": False, "max_new_tokens": 8}
    expected = [answer.text for answer in engine_of_pipe.generate_batch(PROMPTS, max_new_tokens=8)]
    assert llm.batch(PROMPTS, pipeline_kwargs={**greedy, "return_full_text": False}) == expected
    assert "".join(llm.stream(PROMPTS[0], pipeline_kwargs=greedy)) == expected[0]
