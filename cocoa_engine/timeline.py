"""When the phases of a call began and ended."""

import time
from dataclasses import dataclass, field


@dataclass
class Timeline:
    """The phases of one call that it is passed to: ``engine.generate(prompt, timeline=timeline)``.

    The call waits for a batch slot, reads its prompt, and decodes. A stream that is not read decodes nothing,
    but its time goes on. All values are seconds of ``time.monotonic()``; `None` for what has not happened.

    Attributes:
        created: when this object was made, usually just before the call.
        started: when the call got its batch slot.
        prompt_read: when the whole prompt had been fed.
        ended: when the answer was complete.
    """

    created: float = field(default_factory=time.monotonic)
    started: float | None = None
    prompt_read: float | None = None
    ended: float | None = None

    @property
    def queue_seconds(self) -> float | None:
        """The wait for a batch slot."""
        return None if self.started is None else self.started - self.created

    @property
    def prefill_seconds(self) -> float | None:
        """The time in which the prompt was read."""
        return None if self.started is None or self.prompt_read is None else self.prompt_read - self.started

    @property
    def decode_seconds(self) -> float | None:
        """The time from the end of the prompt to the end of the answer."""
        return None if self.prompt_read is None or self.ended is None else self.ended - self.prompt_read
