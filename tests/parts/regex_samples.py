"""Texts that a regular expression matches, made up at random: enough of the syntax for expressions of tokens."""

from __future__ import annotations

import random
import re._constants as constants  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from typing import Any


def make_sample(expression: str, chance: random.Random) -> str:
    """A text that the expression matches, if what it looks ahead to does not forbid it by chance."""
    return "".join(_make(operation, value, chance) for operation, value in parser.parse(expression))


def _make(operation: Any, value: Any, chance: random.Random) -> str:
    if operation is constants.LITERAL:
        return chr(value)
    if operation is constants.IN:
        return chance.choice([letter for part in value for letter in _letters(*part)])
    if operation is constants.MAX_REPEAT:
        least, most, body = value
        count = chance.randint(least, min(int(most), least + 8))
        return "".join(_make(part[0], part[1], chance) for _ in range(count) for part in body)
    if operation is constants.SUBPATTERN:
        return "".join(_make(part[0], part[1], chance) for part in value[-1])
    if operation is constants.BRANCH:
        return "".join(_make(part[0], part[1], chance) for part in chance.choice(value[1]))
    assert operation in (constants.ASSERT, constants.ASSERT_NOT), operation
    return ""


def _letters(operation: Any, value: Any) -> str:
    if operation is constants.RANGE:
        return "".join(map(chr, range(value[0], value[1] + 1)))
    assert operation is constants.LITERAL, operation
    return chr(value)
