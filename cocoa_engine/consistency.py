"""Agreement of an answer with sampled answers to the same prompt."""

from collections.abc import Callable, Sequence

from pydantic import ConfigDict, Field

from cocoa_engine.arguments import ResultModel
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError, short_repr
from cocoa_engine.results import Generation
from cocoa_engine.risk import Check
from cocoa_engine.risk.units import DISAGREE
from cocoa_engine.text_matching import normalized, support, token_f1

MAX_SAMPLES = 10_000  # maximum number of sampled answers. All of them are kept

Match = Callable[[str, str], bool | float]
"""Compares a sampled answer with the answer: whether, or how far (in [0, 1]), they agree."""


class Consistency(ResultModel):
    """An answer, sampled answers to the same prompt, and how far they agree."""

    model_config = ConfigDict(frozen=True)

    answer: str = Field(description="The text that the samples are compared with.")
    agreement: float = Field(description="Share of the samples that agree with the answer, in [0, 1].")
    f1: float = Field(description="Mean F1 score of the words of a sample with those of the answer, in [0, 1].")
    matches: list[float] = Field(description="For each sample whether, or how far, it agrees, in [0, 1].")
    samples: list[Generation] = Field(description="The sampled answers.")
    generation: Generation | None = Field(None, description="The answer with its spans, if it is not a mere text.")

    def support(self, text: str) -> float | None:
        """How many samples contain the content words of a part of the answer, such as a sentence or a span.

        SelfCheckGPT's measure by words (Manakul et al., 2023), with shares instead of log-probabilities. Content words
        have a digit, a capital letter or at least four letters.

        Returns:
            The share of the samples that contain a word, averaged over the words, in [0, 1]; `None` for a text without
            content words.
        """
        return support(text, [sample.text for sample in self.samples])

    def check_these(self, most: int = 3) -> list[Check]:
        """The claims of the answer to check first, as :meth:`.Generation.check_these`, with what the samples say.

        A claim has the further reason ``samples disagree`` if its words are, on average, in less than half
        of the samples (:meth:`support`).

        Args:
            most: the largest number of claims.

        Raises:
            ConfigError: the answer was given as a mere text.
            ValueError: ``most`` is negative.
        """
        if self.generation is None:
            raise ConfigError("the answer was given as a text, without the risk of its claims; give the Generation")
        checks = []
        for check in self.generation.check_these(most):
            supported = self.support(check.text)
            disagree = supported is not None and supported < 0.5
            checks.append(check.model_copy(update={"reasons": [*check.reasons, DISAGREE]}) if disagree else check)
        return checks


def same_answer(sample: str, answer: str) -> bool:
    """Whether two answers are equal after normalisation, or share most of their words (F1 of at least 0.5)."""
    return normalized(sample) == normalized(answer) or token_f1(sample, answer) >= 0.5


def sample_configs(config: CocoaConfig, n: int, temperature: float) -> list[CocoaConfig]:
    """The settings of ``n`` sampled answers. With a seed, sample i has the seed ``seed + i``."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_SAMPLES:
        raise ConfigError(f"n must be a whole number from 1 to {MAX_SAMPLES} (got {short_repr(n)})")
    sampled = config.replace(method="sample", temperature=temperature, max_risk=None)
    if sampled.temperature == 0 or sampled.top_k == 1:
        raise ConfigError("with temperature=0 or top_k=1 all samples are alike; give a temperature above 0 and top_k=0")
    if config.seed is None:
        return [sampled] * n
    return [sampled.replace(seed=(config.seed + number) % 2**63) for number in range(n)]


def compare(answer: str | Generation, samples: Sequence[Generation], match: Match | None = None) -> Consistency:
    """Compare at least one sampled answer with an answer, or its text, by default with :func:`same_answer`."""
    text = answer.text if isinstance(answer, Generation) else answer
    matches = []
    for sample in samples:
        agrees = (match or same_answer)(sample.text, text)
        if not isinstance(agrees, (bool, int, float)) or not 0 <= agrees <= 1:
            raise ConfigError(f"match must return a bool or a number in [0, 1], not {agrees!r}.")
        matches.append(float(agrees))
    return Consistency(
        answer=text,
        agreement=sum(matches) / len(matches),
        f1=sum(token_f1(sample.text, text) for sample in samples) / len(samples),
        matches=matches,
        samples=list(samples),
        generation=answer if isinstance(answer, Generation) else None,
    )
