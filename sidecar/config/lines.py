"""Find the line of a TOML file that sets something, so that an error can point at it.

The standard library's parser does not report lines. This module only looks for headers and keys at the start of lines,
in a text that is known to be valid TOML; if it does not find the exact key, it returns the line of the nearest parent.
"""

from __future__ import annotations

import json
import re

Path = tuple[str | int, ...]

_KEY = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)"""
_KEYS = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_KEYS})\s*\]")
_SETTING = re.compile(rf"\s*({_KEYS})\s*=")
_LONG = re.compile("\"\"\"|'''")


class TomlLines:
    """The lines of one file, by what they set: ``("limits", "bytes")``, ``("webhooks", 0, "url")``."""

    def __init__(self, text: str) -> None:
        self._places: dict[Path, int] = {}
        section: Path = ()
        counts: dict[Path, int] = {}
        within = False
        for number, line in enumerate(text.split("\n"), 1):
            if not within and (header := _HEADER.match(line)):
                section = _split_keys(header[2])
                if header[1] == "[[":
                    counts[section] = counts.get(section, -1) + 1
                    section = (*section, counts[section])
                self._note_line(section, number)
            elif not within and (setting := _SETTING.match(line)):
                self._note_line((*section, *_split_keys(setting[1])), number)
            within ^= len(_LONG.findall(line)) % 2 == 1

    def _note_line(self, path: Path, number: int) -> None:
        for end in range(1, len(path) + 1):
            self._places.setdefault(path[:end], number)

    def of(self, path: Path) -> int:
        """Return the line that sets this, or else its nearest parent; 0 if the file has neither."""
        return next((self._places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self._places), 0)


def _split_keys(keys: str) -> Path:
    return tuple(_unquote(part) for part in re.findall(_KEY, keys))


def _unquote(part: str) -> str:
    if part.startswith('"'):
        try:
            return str(json.loads(part))
        except ValueError:  # an escape that TOML has and JSON does not
            return part[1:-1]
    return part.strip("'")
