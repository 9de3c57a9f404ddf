"""Words of a text, their ranges, and which of them carry no content."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import regex


class Range(NamedTuple):
    """A part of a text: offset of its first character, and the offset after its last one."""

    start: int
    end: int


def words_of(listed: str) -> frozenset[str]:
    """The words of a list that is written as text."""
    return frozenset(listed.split())


_ADDRESS = re.compile(r"(?:https?://|www\.)[^\s<>\"'`]+|(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_AFTER_ADDRESS = ".,;:!?)]}'\"*_"
# scripts that are written without spaces: Thai, Lao, Myanmar, Khmer, kana, Chinese characters
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)
_DIGIT, _LETTER = r"[\p{nt=De}\p{nt=Di}]", r"[\p{L}\p{M}\p{nt=De}\p{nt=Di}\p{nt=Nu}]"
_WORD = regex.compile(
    rf"""\p{{L}}[+\#]+  # C++, C#, F#
    | (?:(?:(?<!\S)[-−+])?\p{{Sc}}?(?={_DIGIT}))?  # the sign and the currency of a number
    {_LETTER}(?:{_LETTER} | (?:['’ʼ\-‐‑_&@·\u200c\u200d\u00ad] | (?<={_DIGIT})[.,:/–](?={_DIGIT})
        # U.S., e.g., file.py, but not the end of a sentence that lacks a space
        | (?<=\p{{Uppercase}})\. | (?<!\p{{M}})\.(?=\p{{Lowercase}}|{_DIGIT}))(?={_LETTER}))*
    (?:(?<={_DIGIT})[%‰°\p{{Sc}}])?""",
    regex.VERBOSE,
)


def word_ranges(text: str, cuts: Iterable[int] = ()) -> list[Range]:
    """The words of a text, in order, without the punctuation around them.

    A number with its sign, currency and per cent is one word, as is an address, a hyphenated word, or an abbreviation
    with inner full stops. A run of a script that is written without spaces is cut at ``cuts``, such as ends of tokens.
    """
    allowed = sorted(set(cuts))
    ranges: list[Range] = []
    at = 0
    for address in _ADDRESS.finditer(text):
        end = address.start() + len(address.group().rstrip(_AFTER_ADDRESS))
        if address.start() < at or end == address.start():
            continue
        ranges += _words(text, at, address.start(), allowed)
        ranges.append(Range(address.start(), end))
        at = end
    return [*ranges, *_words(text, at, len(text), allowed)]


def _words(text: str, begin: int, end: int, cuts: list[int]) -> list[Range]:
    """The words of a part of a text that has no address."""
    words = (word.span() for word in _WORD.finditer(text, begin, end))
    return [piece for start, after in words for piece in _pieces(text, start, after, cuts)]


def _pieces(text: str, start: int, end: int, cuts: list[int]) -> list[Range]:
    """A word as it is, or cut where it is of a script without spaces."""
    bounds = {start, end}
    for run in _UNSPACED.finditer(text, start, end):
        bounds |= {*run.span(), *(cut for cut in cuts if run.start() < cut < run.end())}
    return [Range(low, high) for low, high in itertools.pairwise(sorted(bounds))]


def is_unspaced(word: str) -> bool:
    """Whether a word is of a script that is written without spaces."""
    return bool(_UNSPACED.match(word))


ENGLISH = words_of(
    """
    a an the this that these those some any no every each either neither both all such same other another i me my
    mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers herself
    it its itself they them their theirs themselves one ones who whom whose which what whoever whatever someone
    somebody something anyone anybody anything everyone everybody everything nobody nothing none there here and or
    but nor so yet for if because although though while whereas unless until since as than whether that when where
    why how after before once of in on at by to from with without within into onto upon about above below over under
    between among through during against across along around behind beside besides beyond despite down up off out
    near per via toward towards like be am is are was were been being have has had having do does did doing done
    will would shall should can could may might must ought let get gets got not also too very just only even still
    already again ever never then now thus hence therefore however moreover indeed rather quite almost often always
    usually sometimes much many more most less least few several own well isn't aren't wasn't weren't don't doesn't
    didn't won't wouldn't can't cannot couldn't shouldn't haven't hasn't hadn't i'm i've i'll i'd you're you've
    you'll you'd he's he'll he'd she's she'll she'd it's it'll we're we've we'll we'd they're they've they'll they'd
    that's there's here's what's who's let's yes ok okay please sure e.g i.e etc vs
    """
)

# frequent in English, and rare in other languages
_ONLY_ENGLISH = words_of("the of and to is was are were that with for it this from have has which by be not at")
ENOUGH_ENGLISH = 0.12  # share of these words; English prose has about 0.3
FEW_WORDS = 8
SHORT = 3  # letters
FREQUENT = 3  # occurrences in the text
FREQUENT_SHARE = 0.04  # of the words of the text


class FunctionWords:
    """Tells function words from content words, in one text.

    In English, and in a text of fewer than 8 words of the Latin alphabet, the list decides. In other languages a word
    without capital and digit is a function word if it has at most 3 letters, or if it is frequent in the text: at least
    3 times, and 4 % of its words. The first word of a sentence counts as if it had no capital. In scripts that are
    written without spaces, only frequency counts, and runs of hiragana are function words up to 2 letters.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._counts = Counter(word.lower() for word in words)
        self._total = len(words)
        listed = sum(word.lower() in _ONLY_ENGLISH for word in words)
        few = len(words) < FEW_WORDS and all(word.isascii() for word in words)
        self.english = bool(words) and (few or listed >= ENOUGH_ENGLISH * len(words))

    def __contains__(self, word: str) -> bool:
        if any(character.isdigit() for character in word):
            return False
        unspaced = is_unspaced(word)
        if self.english and not unspaced:
            return word.lower().replace("’", "'") in ENGLISH
        if unspaced:
            short = len(word) <= 2 and all("\u3040" <= character <= "\u309f" for character in word)
        else:
            short = len(word) <= SHORT and word.islower()
        count = self._counts[word.lower()]
        often = count >= FREQUENT and count >= FREQUENT_SHARE * self._total
        return short or (often and not word[:1].isupper())
