"""Samples answers to a prompt, and compares an answer with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cocoa_engine.config import CocoaConfig
from cocoa_engine.consistency import Consistency, Match, compare, sample_configs
from cocoa_engine.decoding.request import Request
from cocoa_engine.results import Generation


def sampled_consistency(
    request_of: Callable[[CocoaConfig], Request],
    decode: Callable[[Sequence[Request], Sequence[CocoaConfig]], Sequence[Generation]],
    config: CocoaConfig,
    answer: str | Generation | None,
    n: int,
    *,
    temperature: float,
    match: Match | None,
) -> Consistency:
    """Sample ``n`` answers in one batch, and compare an answer with them.

    Args:
        request_of: the checked request of the prompt with the given settings.
        decode: decodes requests, each with its settings.
        config: the settings of the call.
        answer: the answer to compare with. `None` generates it with ``config``.
        n: number of samples, at least 1.
        temperature: temperature of the samples, above 0.
        match: compares a sample with the answer.

    Raises:
        ConfigError: ``n``, ``temperature`` or the result of ``match`` is invalid.
    """
    configs = sample_configs(config, n, temperature)
    requests = [request_of(one) for one in configs]
    if answer is None:  # first, so that the samples reuse its prompt
        (answer,) = decode([request_of(config)], [config])
    return compare(answer, decode(requests, configs), match)
