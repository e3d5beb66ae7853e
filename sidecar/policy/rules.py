"""Rules of one's own: kinds of secrets that a config adds, ``[[privacy.rules]]``.

A rule runs inside sandboxes on texts that others write, so its pattern must not take long on any of them. Refused is
what could: repeats without an end, repeats within repeats, alternatives within repeats, references to other groups. What
is left has only so many ways to match at one place, and they are counted.
"""

from __future__ import annotations

import re
import re._constants as operations  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Mapping
from typing import Any

from sidecar.errors import BadConfig
from sidecar.host.sections import check_known, format_setting
from sidecar.policy.privacy import Rules
from sidecar.program.privacy.kinds import TOKENS

At = tuple[str | int, ...]

KEYS = ("name", "keyword", "pattern")
MOST = 50
LONGEST_PATTERN = 500
SHORTEST_KEYWORD, LONGEST_KEYWORD = 3, 64
NARROWEST, WIDEST = 4, 1000
"""How long what a pattern matches may be: shorter, and it would match anywhere."""
MOST_WAYS = 100_000
_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_REPEATS = (operations.MAX_REPEAT, operations.MIN_REPEAT)
_NEWER = {operations.POSSESSIVE_REPEAT, operations.ATOMIC_GROUP}
_TAKEN = {"private", "private-unclosed", "setting", *(name for kinds in TOKENS.values() for name, _ in kinds)}


def check_rules(rules: Rules) -> tuple[dict[str, str], ...]:
    """Return the rules as they are to be used. Raise ``BadConfig``."""
    if len(rules) > MOST:
        raise BadConfig(f"There are more than {MOST} rules in [[privacy.rules]].", at=("privacy", "rules", MOST))
    checked = tuple(_check_rule(rule, ("privacy", "rules", place)) for place, rule in enumerate(rules))
    for place, rule in enumerate(checked):
        at: At = ("privacy", "rules", place, "name")
        if rule["name"] in {one["name"] for one in checked[:place]}:
            raise BadConfig(f"{format_setting(at)}: there is another rule called {rule['name']!r}.", at=at)
        for other in checked:
            if re.search(other["pattern"].encode(), f"[redacted:{rule['name']}]".encode()):
                raise BadConfig(
                    f"{format_setting(at)}: [redacted:{rule['name']}] would be found by the rule {other['name']!r} again.",
                    hint="Choose a name that no pattern fits.",
                    at=at,
                )
    return checked


def describe_rules(rules: Rules) -> list[list[str]]:
    """Return checked rules as the program in the sandbox reads them: name, keyword, pattern, and the longest match."""
    return [
        [rule["name"], rule["keyword"], rule["pattern"], str(_Pattern(rule["pattern"], ("privacy", "rules")).check())]
        for rule in rules
    ]


def _check_rule(rule: Mapping[str, str], at: At) -> dict[str, str]:
    """Return one rule, with its keyword. Raise ``BadConfig``."""
    check_known(rule, KEYS, at)
    for key in ("name", "pattern"):
        if not rule.get(key):
            raise BadConfig(f"{format_setting((*at, key))} is missing.", at=at)
    name, pattern, keyword = rule["name"], rule["pattern"], rule.get("keyword", "")
    if not _NAME.fullmatch(name) or len(name) > 40 or name in _TAKEN:
        raise BadConfig(
            f"{format_setting((*at, 'name'))} {name!r} cannot be used.",
            hint="A name has small letters, digits and hyphens, at most 40, and no kind that is known has it.",
            at=(*at, "name"),
        )
    _Pattern(pattern, (*at, "pattern")).check()
    keyword = keyword or _find_literal(pattern)
    plain = pattern.replace("\\", "").lower()
    if (
        not (SHORTEST_KEYWORD <= len(keyword) <= LONGEST_KEYWORD)
        or keyword.lower() not in plain
        or not keyword.isascii()
    ):
        raise BadConfig(
            f"{format_setting((*at, 'keyword'))} must be {SHORTEST_KEYWORD} to {LONGEST_KEYWORD} letters that are in all that"
            " the pattern matches, and in the pattern as they are.",
            hint="Texts are searched for the keyword first, which is quick; the pattern is tried only where it is.",
            at=(*at, "keyword") if "keyword" in rule else at,
        )
    return {"name": name, "keyword": keyword, "pattern": pattern}


class _Pattern:
    """A pattern being checked, and where it is in the config."""

    def __init__(self, text: str, at: At) -> None:
        self._text = text
        self._at = at

    def check(self) -> int:
        """Return the length of the longest text that it matches. Raise ``BadConfig`` if it may not be used."""
        if len(self._text) > LONGEST_PATTERN or not self._text.isascii():
            raise self._refuse(f"must be plain ASCII, and no longer than {LONGEST_PATTERN} characters")
        try:
            re.compile(self._text.encode())
            parsed = parser.parse(self._text)
        except (re.error, RecursionError, OverflowError) as problem:
            raise self._refuse(f"is no regular expression: {problem}") from None
        self._check_sequence(parsed, within_repeat=False)
        least, most = (int(width) for width in parsed.getwidth())
        if most > WIDEST:
            raise self._refuse(f"matches more than {WIDEST} bytes", "Give its repeats smaller ranges.")
        if least < NARROWEST:
            raise self._refuse(f"matches fewer than {NARROWEST} bytes", "It would match in the middle of anything.")
        # What begins with a letter is tried where that is, and all else at each place around the keyword.
        places = 1 if len(parsed) and parsed[0][0] is operations.LITERAL else 2 * most
        if places * _count_ways(parsed) > MOST_WAYS:
            hint = "Give its repeats smaller ranges, or let it begin with a letter."
            raise self._refuse("could match in too many ways", hint)
        return most

    def _refuse(self, reason: str, hint: str = "") -> BadConfig:
        return BadConfig(f"{format_setting(self._at)} {reason}.", hint=hint, at=self._at)

    def _check_sequence(self, sequence: Any, *, within_repeat: bool) -> None:
        """Raise ``BadConfig`` for what could take long, or what an older Python does not know."""
        for operation, value in sequence:
            if operation in _NEWER:
                hint = "Older Pythons, which sandboxes may have, do not know them."
                raise self._refuse("has a possessive repeat or an atomic group", hint)
            if operation in (operations.GROUPREF, operations.GROUPREF_EXISTS):
                raise self._refuse("refers to another group")
            if operation is operations.BRANCH and within_repeat:
                raise self._refuse("has alternatives in a repeat", "Write them out, or use [a-z] and the like.")
            if operation in _REPEATS:
                least, most, body = value
                if most == operations.MAXREPEAT:
                    raise self._refuse("has a repeat without an end", "Write {1,64} instead of + or *.")
                if within_repeat and least != most:
                    raise self._refuse("has a repeat in a repeat", "Write it out.")
                self._check_sequence(body, within_repeat=within_repeat or most > 1)
            for part in _list_parts(operation, value):
                self._check_sequence(part, within_repeat=within_repeat)


def _count_ways(sequence: Any) -> int:
    """Count in how many ways a sequence can match at one place, at most."""
    ways = 1
    for operation, value in sequence:
        if operation in _REPEATS:
            ways *= max(1, (int(value[1]) - int(value[0]) + 1)) * _count_ways(value[2])
        elif operation is operations.BRANCH:
            ways *= sum(_count_ways(part) for part in value[1])
        else:
            for part in _list_parts(operation, value):
                ways *= _count_ways(part)
    return ways


def _list_parts(operation: Any, value: Any) -> list[Any]:
    """Return the sequences within an operation, other than a repeat's."""
    if operation is operations.SUBPATTERN:
        return [value[-1]]
    if operation is operations.BRANCH:
        return list(value[1])
    return [value[1]] if operation in (operations.ASSERT, operations.ASSERT_NOT) else []


def _find_literal(pattern: str) -> str:
    """Return the longest text that is in all that a pattern matches, as far as that is easily told."""
    runs, run = [], ""
    for operation, value in parser.parse(pattern):
        run = run + chr(value) if operation is operations.LITERAL else ""
        runs.append(run)
    return max(runs, key=len, default="")
