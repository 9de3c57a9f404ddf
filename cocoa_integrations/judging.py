"""The risk of answers that another model, or a person, wrote, measured sentence by sentence. Needs no framework."""

import asyncio
import itertools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Span
from cocoa_engine.errors import ConfigError, PromptError
from cocoa_engine.report import RiskReport, severity
from cocoa_integrations._shared.citations import find_in, spread
from cocoa_integrations._shared.engines import in_worker
from cocoa_integrations._shared.limits import Limit
from cocoa_integrations._shared.tries import Measure as JudgeMeasure

__all__ = ["AnswerJudge", "JudgeMeasure", "Judgement", "RagasRisk"]

Prompt = Callable[[str, list[str]], str | Sequence[Mapping[str, Any]]]  # of the question and its contexts


@dataclass(frozen=True)
class Judgement:
    """The risk of an answer.

    Attributes:
        risk: the risk of the answer; higher is riskier, and infinite if it is not a finite number.
        measure: the value of the report that ``risk`` is.
        threshold: the value from which a risk is too high; ``None``: no verdict.
        report: the report. Its spans are the sentences of the answer.
    """

    risk: float
    measure: JudgeMeasure
    threshold: float | None
    report: RiskReport

    @property
    def passing(self) -> bool | None:
        """Whether the risk is below the threshold; ``None`` without one."""
        return None if self.threshold is None else severity(self.risk) < self.threshold

    @property
    def comment(self) -> str:
        """One sentence about the riskiest span."""
        worst = max(self.report.spans, key=lambda span: span.value("risk"))
        kind = self.report.risk_meaning or "unknown"
        source = "" if self.measure == "answer_risk" else f" ({kind})"
        risk, text = worst.value("risk"), (worst.text or "").strip()
        return f"{self.measure} {self.risk:.3f}{source}; riskiest: {text!r} ({risk:.3f})"


class AnswerJudge:
    """Measures the risk of given answers with the model of an engine::

        judge = AnswerJudge(CocoaEngine.from_pretrained(), threshold=0.15)
        judgement = judge.judge("Who wrote Dune?", "Frank Herbert wrote Dune.", contexts=["Dune, by Frank Herbert."])
        judgement.risk, judgement.passing

    How far it goes (SmolLM2-135M-Instruct, ``docs/explanation/signal.md``; AUROC of 0.5 is chance): the raw fMLDS of
    given texts has an AUROC of 0.50 to 0.56 by span, and 0.49 by answer on TruthfulQA. A calibrated risk has 0.58 to
    0.81 by span on the data set that it was fitted on, and the embedded calibrator 0.710 for whole answers to NQ-Swap
    questions, which the model wrote itself. It hardly carries over to other kinds of text. Fit a calibrator on judged
    answers like yours, and check it, before a verdict decides anything.

    Cost: one forward pass for the answer, and one for each sentence if there are several.

    Args:
        engine: the engine whose model reads the answers.
        threshold: the value from which a risk is too high. Default: no verdict.
        measure: ``"answer_risk"`` (needs a calibrator for answers), ``"mean_risk"`` or ``"max_risk"`` of the sentences,
            which grows with their number. Default: ``"answer_risk"`` if the engine has it, otherwise ``"mean_risk"``.
        prompt: makes the prompt from the question and its contexts. Default: both as one message of the chat template,
            or as plain text if there is none. Use the prompt that the answer was written for, if you know it.
        config: the settings. Default: the engine's.

    Raises:
        ConfigError: an argument has a wrong type or is out of range.
    """

    def __init__(
        self,
        engine: CocoaEngine,
        *,
        threshold: float | None = None,
        measure: JudgeMeasure | None = None,
        prompt: Prompt | None = None,
        config: CocoaConfig | None = None,
    ) -> None:
        if not isinstance(engine, CocoaEngine):
            raise ConfigError(f"a judge takes a CocoaEngine, not a {type(engine).__name__}; models have it as .engine.")
        if measure is not None and measure not in get_args(JudgeMeasure):
            raise ConfigError(f"measure must be one of {', '.join(get_args(JudgeMeasure))} (got {measure!r}).")
        self.engine = engine
        self._of_spans = engine.without_answer_risk()
        self.threshold = None if threshold is None else Limit(threshold).threshold
        self._measure = measure
        self._prompt = prompt
        self._config = config

    def judge(self, question: str, answer: str, contexts: Sequence[str] | None = None) -> Judgement:
        """The risk of an answer to a question, perhaps written from contexts.

        Contexts that the prompt has as they are count as its source: the attention to each of them is measured.

        Raises:
            ConfigError: an argument is not text, or ``measure="answer_risk"`` and the engine has no calibrator for
                answers.
            PromptError: the answer is empty or white space, or does not fit the context window after its prompt.
        """
        if not isinstance(question, str) or not isinstance(answer, str):
            raise ConfigError("a judge takes the question and the answer as texts.")
        if isinstance(contexts, str) or not all(isinstance(text, str) for text in contexts or ()):
            raise ConfigError("contexts takes a list of texts.")
        if not answer.strip():
            raise PromptError("the answer is empty; a judge needs the text of an answer.")
        passages = list(contexts or ())
        lines = "\n\n".join(passages)
        text = f"Context:\n{lines}\n\nQuestion: {question}" if passages else question
        prompt: str | Sequence[Mapping[str, Any]] = f"{text}\nAnswer:"
        if self._prompt is not None:
            prompt = self._prompt(question, passages)
        elif self.engine.has_chat_template:
            prompt = [{"role": "user", "content": text}]
        if isinstance(prompt, str):  # a prompt of the user's own may have control tokens
            before = self.engine.encode(prompt, split_special_tokens=self._prompt is None)
        else:
            before = self.engine.encode_chat(prompt)
        in_prompt = find_in(self.engine.decode(before), passages)  # a prompt need not have every context as it is
        source = [passages[number].strip() for number in in_prompt] or None
        begins = isinstance(prompt, str) and not prompt[-1:].isspace() and not answer[:1].isspace()
        whole = self.engine.score(before, f" {answer}" if begins else answer, config=self._config, source=source)
        measure = self._measure or ("mean_risk" if whole.answer_risk is None else "answer_risk")
        if measure == "answer_risk" and whole.answer_risk is None:
            raise ConfigError("measure='answer_risk' needs an engine with a calibrator for answers; use 'mean_risk'.")
        judged = whole.model_copy(update={"text": answer, "spans": self._sentences(before, answer, whole, source)})
        out_of_domain = whole.out_of_domain or judged.has_spans_out_of_domain
        report = RiskReport.of(judged.model_copy(update={"out_of_domain": out_of_domain}))
        spans = list(report.spans)
        for number, span in enumerate(spans):
            if span.passage_attention:
                attention = spread(span.passage_attention, in_prompt, len(passages))
                spans[number] = span.with_values(passage_attention=attention)
        return Judgement(severity(getattr(report, measure)), measure, self.threshold, report.with_values(spans=spans))

    async def ajudge(self, question: str, answer: str, contexts: Sequence[str] | None = None) -> Judgement:
        """Like :meth:`judge`, without blocking the event loop."""
        return await in_worker(self.engine, self.judge, question, answer, contexts)

    def _sentences(self, before: list[int], answer: str, whole: Generation, source: list[str] | None) -> list[Span]:
        """A span for each sentence. A token belongs to the sentence in which it ends."""
        (span,), ids = whole.spans, whole.token_ids
        lead = len(whole.text) - len(answer)  # the space that a plain prompt needs
        token_ends = [max(end - lead, 0) for end in span.token_ends]
        cuts, spans = [0], []
        for sentence in whole.sentences[:-1]:
            cut = bisect_left(token_ends, sentence.end - lead) + 1
            cuts += [cut] if cuts[-1] < cut < len(ids) else []
        for first, after in itertools.pairwise([*cuts, len(ids)]):
            if len(cuts) > 1:
                span = self._of_spans.score(
                    [*before, *ids[:first]], ids[first:after], config=self._config, source=source
                ).spans[0]
            start = token_ends[first - 1] if first else 0
            end = token_ends[after - 1] if after < len(ids) else len(answer)
            placed = {"start": start, "end": end, "text": answer[start:end], "token_ends": token_ends[first:after]}
            spans.append(span.model_copy(update=placed))
        return spans


class RagasRisk:
    """The risk of an answer as a single-turn metric of RAGAS, which need not be installed::

        metric = RagasRisk(engine)
        await metric.single_turn_ascore(sample)  # sample.user_input, sample.response, sample.retrieved_contexts

    The score is the risk: lower is better. See :class:`AnswerJudge` for how far it goes.

    Args:
        engine: the engine, or an :class:`AnswerJudge`.
        name: the name of the metric.
        **options: options of :class:`AnswerJudge`.
    """

    def __init__(self, engine: CocoaEngine | AnswerJudge, *, name: str = "cocoa_risk", **options: Any) -> None:
        self.name = name
        self.judge = judge_of(engine, options)

    @property
    def required_columns(self) -> dict[str, set[str]]:
        """The columns that a sample must have."""
        return self.get_required_columns()

    def get_required_columns(self, with_optional: bool = False) -> dict[str, set[str]]:
        """The columns of a sample that the metric reads."""
        optional = {"retrieved_contexts"} if with_optional else set()
        return {"SINGLE_TURN": {"user_input", "response"} | optional}

    def init(self, run_config: Any) -> None:
        """Nothing to prepare."""

    def single_turn_score(self, sample: Any, callbacks: Any = None) -> float:
        """The risk of the response of a sample; errors are those of :meth:`AnswerJudge.judge`."""
        contexts = list(sample.retrieved_contexts or ())
        return self.judge.judge(sample.user_input, sample.response, contexts).risk

    async def single_turn_ascore(self, sample: Any, callbacks: Any = None, timeout: float | None = None) -> float:
        """Like :meth:`single_turn_score`; a ``TimeoutError`` after ``timeout`` seconds."""
        contexts = list(sample.retrieved_contexts or ())
        judged = self.judge.ajudge(sample.user_input, sample.response, contexts)
        return (await asyncio.wait_for(judged, timeout)).risk


def judge_of(engine: CocoaEngine | AnswerJudge, options: Mapping[str, Any]) -> AnswerJudge:
    """The given judge, which takes no options beside it, or one with an engine."""
    if not isinstance(engine, AnswerJudge):
        return AnswerJudge(engine, **options)
    if options:
        raise ConfigError(f"give {', '.join(sorted(options))} to the AnswerJudge.")
    return engine
