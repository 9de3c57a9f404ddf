"""One line of the log for each answered request. Prompts and answers are written only if the settings say so."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cocoa_engine import Generation
from cocoa_engine.safe_text import one_line

logger = logging.getLogger("cocoa_integrations.server.answers")  # whose lines are not shortened


@dataclass(frozen=True)
class AnswerLog:
    """What is written about one request.

    Attributes:
        answer_id: the id of the answer.
        prompt: the messages or prompts; ``None`` if they are not to be written.
    """

    answer_id: str
    prompt: Sequence[Any] | None
    _begun: float = field(default_factory=time.monotonic)

    def answered(self, generations: Sequence[Generation], usage: Mapping[str, Any]) -> None:
        """Write that the request was answered."""
        details = usage["completion_tokens_details"]
        risk = details.get("cocoa_max_risk")
        logger.info(
            "%s: %d prompt tokens (%d cached), %d new tokens, finish reason %s, highest risk %s, %.2f s",
            self.answer_id,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            ", ".join(str(one.finish_reason) for one in generations),
            "not reported" if risk is None else f"{risk:.3f}",
            time.monotonic() - self._begun,
        )
        if self.prompt is not None:
            logger.info("%s: prompt %s", self.answer_id, one_line(json.dumps(self.prompt, ensure_ascii=False)))
            for one in generations:
                logger.info("%s: answer %s", self.answer_id, one_line(json.dumps(one.text, ensure_ascii=False)))

    def ended(self, code: str | None) -> None:
        """Write that the request ended with an error."""
        logger.info("%s: ended with %s after %.2f s", self.answer_id, code, time.monotonic() - self._begun)
