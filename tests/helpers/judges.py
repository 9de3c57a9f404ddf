"""A chat model that judges by rule: what is tested is what becomes of a reply, not how good a judge is."""

from collections.abc import Callable
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field


class RuleJudge(BaseChatModel):
    """Answers every prompt by a rule, notes the prompts, and counts words as tokens."""

    rule: Callable[[str], str]
    prompts: list[str] = Field(default_factory=list)
    options: list[dict[str, Any]] = Field(default_factory=list)
    temperature: float | None = None

    @property
    def _llm_type(self) -> str:
        return "rule"

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> Any:
        prompt = str(messages[0].content)
        self.prompts.append(prompt)
        self.options.append(options)
        answer = self.rule(prompt)
        read, written = len(prompt.split()), len(answer.split())
        usage = UsageMetadata(input_tokens=read, output_tokens=written, total_tokens=read + written)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=answer, usage_metadata=usage))])
