"""How many tokens a text has at most, without a tokenizer.

Tokenizers differ, and most need a vocabulary of megabytes. This counts what all of them have in common: a word that looks
like English is one token or a little more, any other word more, the rarer its letters follow each other; a digit, a sign
or a line break is one at most, and a letter of another script as many as a tokenizer with a small vocabulary needs for it.
It was fitted to six tokenizers (``tests/records/test_estimate.py`` compares it with those that are at hand): above all of
them for prose, code and data, by a tenth to a third for English, and by more for scripts that large vocabularies know.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

MARGIN = 1.02
"""For texts that are a little less like others of their kind."""
SPACES_TOGETHER = 16
"""So many blanks in a row are one token, also for a small vocabulary."""
SIGNS_TOGETHER = 14

JOINING = frozenset("/_.-")
PAIRS = frozenset(
    [
        "ab",
        "ac",
        "ad",
        "ag",
        "ai",
        "ak",
        "al",
        "am",
        "an",
        "ap",
        "ar",
        "as",
        "at",
        "au",
        "av",
        "ay",
        "ba",
        "be",
        "bl",
        "bo",
        "bu",
        "by",
        "ca",
        "ce",
        "ch",
        "ci",
        "ck",
        "cl",
        "co",
        "cr",
        "ct",
        "cu",
        "da",
        "db",
        "de",
        "di",
        "do",
        "ds",
        "ea",
        "ec",
        "ed",
        "ee",
        "ef",
        "el",
        "em",
        "en",
        "ep",
        "er",
        "es",
        "et",
        "ev",
        "ex",
        "ey",
        "fa",
        "fe",
        "ff",
        "fi",
        "fo",
        "fr",
        "ft",
        "ge",
        "gh",
        "gi",
        "gn",
        "gr",
        "gu",
        "ha",
        "he",
        "hi",
        "ho",
        "ht",
        "ia",
        "ic",
        "id",
        "ie",
        "if",
        "ig",
        "il",
        "im",
        "in",
        "io",
        "ip",
        "ir",
        "is",
        "it",
        "iv",
        "ke",
        "la",
        "ld",
        "le",
        "li",
        "ll",
        "lo",
        "ls",
        "lt",
        "lu",
        "ly",
        "ma",
        "me",
        "mi",
        "mm",
        "mo",
        "mp",
        "na",
        "nc",
        "nd",
        "ne",
        "nf",
        "ng",
        "ni",
        "nl",
        "no",
        "ns",
        "nt",
        "nv",
        "ny",
        "oc",
        "od",
        "of",
        "og",
        "ol",
        "om",
        "on",
        "oo",
        "op",
        "or",
        "os",
        "ot",
        "ou",
        "ov",
        "ow",
        "ox",
        "pa",
        "pe",
        "pi",
        "pl",
        "po",
        "pp",
        "pr",
        "ps",
        "pt",
        "pu",
        "py",
        "ra",
        "rc",
        "rd",
        "re",
        "ri",
        "rk",
        "rl",
        "rm",
        "ro",
        "rr",
        "rs",
        "rt",
        "ru",
        "rv",
        "ry",
        "sa",
        "se",
        "sh",
        "si",
        "so",
        "sp",
        "ss",
        "st",
        "su",
        "ta",
        "te",
        "th",
        "ti",
        "to",
        "tr",
        "ts",
        "tt",
        "tu",
        "tw",
        "ue",
        "ul",
        "um",
        "un",
        "up",
        "ur",
        "us",
        "ut",
        "va",
        "ve",
        "vi",
        "wa",
        "we",
        "wh",
        "wi",
        "wo",
        "wr",
        "xe",
        "xp",
        "yo",
        "yp",
        "ys",
        "yt",
    ]
)
"""Pairs of letters that are frequent in English. A word that has others is cut into more tokens."""

_RUN = re.compile(
    r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+|[\n\r\t\v\f]| +|([!-/:-@\[-`{-~])\1*|[^\x00-\x7f]|.", re.DOTALL | re.ASCII
)
_SCRIPTS = (
    # From, to, and the tokens of a letter: of the six tokenizers, the one that needs the most.
    (0x00C0, 0x0100, 1.5),
    (0x0100, 0x0250, 1.9),
    (0x0370, 0x0400, 1.35),
    (0x0400, 0x0530, 1.15),
    (0x0590, 0x0700, 1.3),
    (0x0900, 0x1000, 1.85),
    (0x2010, 0x2600, 2.0),
    (0x3000, 0x3100, 1.75),
    (0xFF00, 0xFFF0, 1.75),
)
_COMMON = (
    # Letters that an old national standard has among its first are frequent, and most vocabularies know them.
    (0x4E00, 0xA000, (("gb2312", 0xD8), ("euc_jp", 0xD0)), 2.0, 3.0),
    (0xAC00, 0xD7A4, (("euc_kr", 0x100),), 2.1, 3.0),
)


def estimate_tokens(text: str) -> int:
    """Return how many tokens a text has at most, for common tokenizers."""
    found, before = 0.0, ""
    for run in _RUN.finditer(text):
        word = run[0]
        # Vocabularies know words best as they stand in a sentence, after a blank.
        if before in JOINING and word[0].islower():
            found += 0.15
        before = word
        if word == " ":
            after = text[run.end() : run.end() + 1]
            # A blank belongs to the word or the sign after it, but not to a digit, a letter of another script or a line break.
            found += not (after.isascii() and after.isprintable() and after not in " 0123456789")
        else:
            found += _estimate_run(word)
    return math.ceil(found * MARGIN)


@lru_cache(maxsize=20_000)
def _estimate_run(run: str) -> float:
    """Return the tokens of a word, a number, a sign, blanks, or a single character of another script."""
    first, length = run[0], len(run)
    if not first.isascii():
        return _estimate_character(first)
    if first.isalpha():
        return _estimate_word(run)
    if first.isdigit():
        return length
    if first == " ":
        return 1 + length / SPACES_TOGETHER
    return 1.03 + (length - 1) / SIGNS_TOGETHER if first.isprintable() else 1.0


def _estimate_word(word: str) -> float:
    # Only the beginning of what is no word: it is as long as it likes, and all of it is alike.
    lower, length = word[:1000].lower(), len(word)
    rare = sum(lower[at : at + 2] not in PAIRS for at in range(len(lower) - 1)) * length / len(lower)
    if word[-1].isupper():
        return min(length, 0.4 + 0.6 * length + 0.3 * rare)
    # Few English words end so, and many of other languages that are written with these letters.
    foreign = 0.4 if length > 3 and word[-1] in "aiou" else 0.0
    return max(1.0, min(0.72 * length, 1.0 + 1.25 * rare + 0.15 * max(0, length - 6) + foreign))


def _estimate_character(character: str) -> float:
    code = ord(character)
    for start, end, tokens in _SCRIPTS:
        if start <= code < end:
            return tokens
    for start, end, standards, common, rare in _COMMON:
        if start <= code < end:
            return common if any(_is_common(character, *standard) for standard in standards) else rare
    return len(character.encode("utf-8", "replace"))


def _is_common(character: str, standard: str, below: int) -> bool:
    try:
        data = character.encode(standard)
    except UnicodeEncodeError:
        return False
    return len(data) == 2 and data[0] < below
