"""Messages that quote foreign text are short, and show every control character."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import DataError
from cocoa_engine.risk import CalibrationWarning
from tests.helpers.mutations import CONTROLS, ESCAPES, MESSAGE_LIMIT, fuzz

TEXTS = st.one_of(
    st.text(),
    st.text(alphabet=ESCAPES + "\u202b\u2069a"),
    st.text(alphabet="a\ud800\udcff"),
    st.sampled_from(["\u202e" * 5000, "x" * 10**6 + "\x1b" * 700]),
)


@fuzz(50)
@given(st.lists(TEXTS, min_size=1, max_size=3))
def test_any_text_in_a_message(texts: list[str]) -> None:
    for message in (str(DataError("; ".join(texts))), str(CalibrationWarning.of(texts))):
        assert len(message) <= MESSAGE_LIMIT
        assert not CONTROLS.search(message)
        message.encode()


def test_the_end_of_a_long_message_stays() -> None:
    error = DataError("\u202e" * 5000 + " is too long; shorten it")
    message = str(error)
    assert str(pickle.loads(pickle.dumps(error))) == message
    assert message.startswith("<U+202E>")
    assert message.endswith("; shorten it")
