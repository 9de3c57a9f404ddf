"""The types of logits processors and stopping criteria, such as those of transformers.

Their arguments are not declared: transformers annotates them with subclasses of ``Tensor``, and a checker would refuse
its own processors where a ``Tensor`` is passed.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Processor = Callable[..., "Tensor"]
"""Called as ``(ids [1, t], logits [1, V])``; returns logits ``[1, V]``."""

Criterion = Callable[..., "bool | Tensor"]
"""Called as ``(ids [1, t], None)``; whether the text ends, as a bool or a bool tensor."""

Processors = Processor | Sequence[Processor] | None
Criteria = Criterion | Sequence[Criterion] | None
