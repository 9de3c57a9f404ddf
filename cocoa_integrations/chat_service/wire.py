"""What a server sends, with the types of all values that are read checked. Other keys are allowed."""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from cocoa_engine.errors import DataError, explain
from cocoa_engine.report import RiskReport, SpanReport

Kind = TypeVar("Kind", bound=BaseModel)

_ALWAYS = ("text", "con_mlds", "f_mlds", "score", "flagged", "source_attention", "reaches_max_risk")
"""What a server writes of every span, and compact reports leave out."""

_FOREIGN = "the server's answer is not one of `cocoa serve`, or of another version"


def _complete(sent: Any) -> Any:
    """The spans, or the report, if the spans have all that a server writes."""
    for number, entry in enumerate(sent if isinstance(sent, list) else sent.spans):
        for name in (*_ALWAYS, *(("chosen",) if entry.rivals else ())):
            if name not in entry.model_fields_set:
                raise ValueError(f"span {number} lacks {name}")
    return sent


Count = Annotated[int, Field(ge=0, lt=2**63)]
Spans = Annotated[list[SpanReport], AfterValidator(_complete)]
Report = Annotated[RiskReport, AfterValidator(_complete)]


class Function(BaseModel):
    """The name and the arguments of a call, or new parts of them."""

    name: str | None = None
    arguments: str | None = None


class SentCall(BaseModel):
    """A tool call, or a new part of one. Only its first part has an id."""

    index: Annotated[int, Field(ge=0, lt=10_000)] | None = None
    id: str | None = None
    function: Function = Function()


class AnswerMessage(BaseModel):
    """The message of an answer, or what a chunk adds to it."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[SentCall] | None = None
    cocoa_spans: Spans | None = None
    cocoa_risk: Report | None = None


class LikelyToken(BaseModel):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, lt=256)]] | None


class Token(LikelyToken):
    """A token of the answer, and the most probable tokens at its position."""

    top_logprobs: list[LikelyToken]


class LogProbs(BaseModel):
    """The tokens of an answer: ``content`` of a chat, and the other lists of a completion."""

    content: list[Token] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[Count] = []


class Choice(BaseModel):
    """An answer, or what a chunk adds to it. In a completion, ``text`` stands for the message."""

    message: AnswerMessage | None = None
    delta: AnswerMessage | None = None
    text: str | None = None
    logprobs: LogProbs | None = None
    finish_reason: str | None = None
    cocoa_spans: Spans | None = None
    cocoa_risk: Report | None = None

    @property
    def added(self) -> AnswerMessage:
        """The message or the delta. The text of a completion is its content."""
        of_text: dict[str, Any] = {"content": self.text, "cocoa_spans": self.cocoa_spans, "cocoa_risk": self.cocoa_risk}
        return self.message or self.delta or AnswerMessage.model_construct(**of_text)

    def tokens(self, top: int) -> list[dict[str, Any]]:
        """The entries of the tokens as a chat has them, with the ``top`` most probable ones at each position.

        Special tokens, which are not part of the text, are left out.
        """
        listed = self.logprobs
        if listed is None or listed.content is not None:
            return [] if listed is None else [token.model_dump() for token in listed.content or ()]

        def likely(token: str, log_prob: float) -> dict[str, Any]:
            return {"token": token, "logprob": log_prob, "bytes": list(token.encode(errors="replace"))}

        ends = [*listed.text_offset[1:], listed.text_offset[0] + len(self.text or "")] if listed.text_offset else []
        lists = (listed.tokens, listed.token_logprobs, listed.top_logprobs, listed.text_offset, ends)
        entries = []
        for token, log_prob, rivals, start, end in zip(*lists, strict=False):
            if log_prob is not None and (not token or end > start):
                ranked = sorted((rivals or {}).items(), key=lambda rival: -rival[1])[:top]
                entries.append({**likely(token, log_prob), "top_logprobs": [likely(*rival) for rival in ranked]})
        return entries


class _Counts(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, sent: Any) -> Any:
        """Other servers write ``null`` for what they do not count."""
        return {name: value for name, value in sent.items() if value is not None} if isinstance(sent, dict) else sent


class PromptDetails(_Counts):
    """What the prompt tokens are."""

    cached_tokens: Count = 0


class CompletionDetails(_Counts):
    """What the new tokens are, and the highest risk of all answers."""

    reasoning_tokens: Count | None = None
    cocoa_max_risk: float | None = None


class SentUsage(_Counts):
    """The token counts of an answer."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails = PromptDetails()
    completion_tokens_details: CompletionDetails = CompletionDetails()


class Chunk(BaseModel):
    """A part of an answer that is streamed."""

    model: str | None = None
    choices: list[Choice]
    usage: SentUsage | None = None


class Completion(Chunk):
    """An answer in one piece."""

    choices: Annotated[list[Choice], Field(min_length=1)]


class Score(BaseModel):
    """The risk of a given text."""

    index: Count
    text: str
    cocoa_risk: Report


class Scores(BaseModel):
    """The risk of given texts."""

    model: str | None = None
    data: list[Score]
    usage: SentUsage


class _Model(BaseModel):
    id: str
    max_model_len: Annotated[int, Field(gt=0, lt=2**63)] | None = None


class Models(BaseModel):
    """The models that a server has."""

    data: Annotated[list[_Model], Field(min_length=1)]


def received(sent: Any, kind: type[Kind]) -> Kind:
    """The JSON of a server as what it should be; :class:`DataError` if a field is missing or has a wrong type."""
    try:
        return kind.model_validate(sent, strict=True)
    except ValidationError as error:
        raise DataError(f"{_FOREIGN}: {explain(error)}") from None
