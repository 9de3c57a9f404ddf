"""Comparison of short texts by their words."""

import re
import string
from collections import Counter
from collections.abc import Sequence


def normalized(text: str) -> str:
    """The text as SQuAD's evaluation compares it: lower case, without punctuation, articles and extra white space."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def contains(text: str, answers: Sequence[str]) -> bool:
    """Whether a text contains one of the answers word for word, when both are normalised."""
    words = f" {normalized(text)} "
    return any(f" {answer} " in words for answer in map(normalized, answers) if answer)


_DECLINED = re.compile(
    r"(\b(not|never|no)|n't)\b[^.]*\b(say|says|state[sd]?|mention(s|ed)?|specif(y|ies|ied)|provide[sd]?|give[ns]?|known?|"
    r"information|contain(s|ed)?|answer|find|found|clear|sure|available)\b|\bunknown\b|\bcannot\b|\bunable\b",
    re.IGNORECASE,
)


def declines(answer: str) -> bool:
    """Whether an answer says, in English, that something is not known or not in the text. It decides by phrases."""
    return bool(_DECLINED.search(answer))


def token_f1(text: str, other: str) -> float:
    """The F1 score of the normalised words of two texts, in [0, 1]. Two texts without words have 1."""
    first, second = normalized(text).split(), normalized(other).split()
    if not first or not second:
        return float(first == second)
    return 2 * sum((Counter(first) & Counter(second)).values()) / (len(first) + len(second))


def content_words(text: str) -> list[str]:
    """The words that have a digit, a capital letter or at least four letters, in lower case, each once.

    The rule needs no list of words. It finds no words within text that is written without spaces.
    """
    words = re.findall(r"\w+", text)
    telling = (word for word in words if len(word) > 3 or any(letter.isdigit() or letter.isupper() for letter in word))
    return list(dict.fromkeys(word.lower() for word in telling))


def support(text: str, others: Sequence[str]) -> float | None:
    """The share of the other texts, at least one, that contain a word, averaged over the content words of a text.

    It is in [0, 1]; `None` for a text without content words.
    """
    words = content_words(text)
    contained = [set(re.findall(r"\w+", other.lower())) for other in others]
    if not words:
        return None
    return sum(word in other for word in words for other in contained) / (len(words) * len(contained))
