"""The code of an answer, in whatever shape a model writes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_integrations.evaluation.generated_code import code_of

PLAIN = "def add(a, b):\n    return a + b"
CODES = (
    PLAIN,
    "import math\n\n\ndef area(r):\n    # a fence is ```\n    return math.pi * r * r",
    'def f(x):\n    """Doubles.\n\n    ```\n    >>> f(1)\n    ```\n    """\n    return 2 * x',
    'def f(x):\n    """```python```"""\n    return "```"',
    "class A:\n    pass\n\nadd = lambda a, b: a + b",
    "def f(s):\n    return re.sub('\\d', '', s)",  # an escape that Python warns of
)
FENCES = ("```", "````")
TAGS = ("", "python", "Python", "PYTHON", "py", " python3", "{.python}")
WORDS = ("", "Here is the code:", "Solution", "Note: this is it", "Sure! It adds `a` and `b`.\n\nAs follows.")

codes, fences, tags, words = map(st.sampled_from, (CODES, FENCES, TAGS, WORDS))


@given(codes, st.sampled_from(("", "\n", "\n[/PYTHON]", "\n[/PYTHON]\nThis is it.", "\n[/python]")))
def test_bare_code(code: str, after: str) -> None:
    assert code_of(code + after) == code


@given(codes, fences, st.sampled_from(WORDS), st.sampled_from(("", "\n[/PYTHON]")))
def test_bare_code_that_a_fence_closes(code: str, fence: str, after: str, closed: str) -> None:
    assert code_of(f"{code}\n{fence}\n{after}{closed}") == code


@given(words, fences, tags, codes, st.sampled_from(("", "[PYTHON]\n", "[python]\n")), words)
def test_fenced_code(before: str, fence: str, tag: str, code: str, opened: str, after: str) -> None:
    assert code_of(f"{before}\n{opened}{fence}{tag}\n{code}\n{fence}\n{after}") == code


@given(words, fences, tags, codes)
def test_fence_that_is_never_closed(before: str, fence: str, tag: str, code: str) -> None:
    assert code_of(f"{before}\n{fence}{tag}\n{code}") == code


@given(words, codes, words)
def test_tags_in_the_answer(before: str, code: str, after: str) -> None:
    assert code_of(f"{before}\n[PYTHON]\n{code}\n[/PYTHON]\n{after}") == code


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (f"{PLAIN}\n```\nThis adds.", PLAIN),
        (f"```sh\npip install numpy\n```\nand\n```python\n{PLAIN}\n```", PLAIN),
        (f"{PLAIN}\n```\nIt is used so:\n```python\nx = add(1, 2)\n```", PLAIN),
        (f"1. The code:\n   ```python\n   {PLAIN[:14]}\n       return a + b\n   ```", PLAIN),
        ("```python\ndef add(a, b) return a + b\n```\nThis adds.", "def add(a, b) return a + b"),
        ("def add(a, b) return a + b", "def add(a, b) return a + b"),
        ("", ""),
        ("\0", "\0"),
    ],
)
def test_of_an_answer(answer: str, code: str) -> None:
    assert code_of(answer) == code


@given(st.text(st.sampled_from("`\n[]/PYTHON d:=1('\"\\\0"), max_size=60))
def test_any_text_has_some(answer: str) -> None:
    assert isinstance(code_of(answer), str)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("endless", "code"),
    [
        ("```\n" * 3000, ""),
        ("(" * 100_000, "(" * 100_000),
        ("-" * 100_000 + "1", "-" * 100_000 + "1"),
        ("[PYTHON]" * 3000, ""),
    ],
    ids=["fences", "parentheses", "signs", "tags"],
)
def test_answers_without_an_end(endless: str, code: str) -> None:
    assert code_of(endless) == code
