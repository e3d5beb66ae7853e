"""Which names are memory: a layout's patterns, compiled.

``*`` and ``?`` stay within one part of a path, ``**`` spans any number of parts, ``{a,b}`` is either. A ``keep`` pattern is
anchored at the root. A pattern of one part under ``never`` or ``secrets`` matches at any depth unless it begins with a
slash, and one that ends in a slash is a folder with all it holds.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, Callable, Iterable, Pattern

# Known by their names alone, wherever they are and whatever a layout says. A note is none (credentials.md).
SECRET_NAMES = frozenset(
    (".envrc .netrc _netrc .pgpass .my.cnf .npmrc .pypirc .git-credentials .htpasswd .credentials.json .dockercfg"
     " .vault-token .s3cfg .boto auth.json mcp-auth.json oauth.json oauth_creds.json oauth-token token.json secrets.json"
     " secrets.toml secrets.yaml secrets.yml credentials credentials.json credentials.toml cookies cookies.sqlite cookies.txt"
     " logins.json key4.db"
     " id_rsa id_dsa id_ecdsa id_ed25519 id_ecdsa_sk id_ed25519_sk").split()
)  # fmt: skip
SECRET_ENDS = (".env", ".p12", ".pfx", ".kdbx", ".keystore", ".jks", ".ppk", ".pem", ".key")
SECRET_PATHS = ("/.git/config", "/.kube/config", "/.docker/config.json")
COPY_ENDS = ("~", ".bak", ".old")


def is_secret(path: str) -> bool:
    """Whether a file is known to hold secrets by its name, or is a copy of one."""
    path = "/" + path.lower()
    for end in COPY_ENDS:
        if path.endswith(end):
            path = path[: -len(end)]
    name = path.rpartition("/")[2]
    return name in SECRET_NAMES or name.startswith(".env.") or path.endswith(SECRET_ENDS + SECRET_PATHS)


def expand_braces(pattern: str) -> list[str]:
    """A pattern's braces written out: "a{b,c}" -> ["ab", "ac"]."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [full for choice in found.group(1).split(",") for full in expand_braces(head + choice + tail)]


def _translate_part(pattern: str) -> str:
    return "".join("[^/]*" if c == "*" else "[^/]" if c == "?" else re.escape(c) for c in pattern)


def _translate_pattern(pattern: str, anywhere: bool) -> str:
    folder = pattern.endswith("/")
    parts = pattern.strip("/").split("/")
    out = "(?:.*/)?" if anywhere and len(parts) == 1 and not pattern.startswith("/") else ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            out += ".+" if last else "(?:.*/)?"
        else:
            out += _translate_part(part) + ("" if last else "/")
    return out + ("(?:/.*)?" if folder else "")


def compile_patterns(patterns: Iterable[str], anywhere: bool = False) -> Pattern[str]:
    """One expression that fully matches whatever any of the patterns names (nothing, when there are none)."""
    texts = [_translate_pattern(full, anywhere) for pattern in patterns for full in expand_braces(pattern)]
    return re.compile("(?:" + "|".join(texts) + r")\Z" if texts else r"(?!)", re.DOTALL)


Match = Callable[[str], Any]


EVERYTHING = "**"


class Rules:
    """The patterns of one layout, as they are for one of its roots, each compiled when it is first asked: most layouts are
    not there, and compiling is slow. What yields is not memory in a project that has no marker."""

    def __init__(self, layout: dict[str, Any], root: dict[str, Any] | None = None, marked: bool = True) -> None:
        self._layout = layout
        self.patterns: list[str] = list((root or {}).get("keep") or layout["keep"] + layout["databases"])
        self._owned = root is not None and bool(root.get("owned"))
        if self._owned:
            self.patterns.append(EVERYTHING)
        if not marked:
            self.patterns = [pattern for pattern in self.patterns if pattern not in layout.get("yields", [])]
        self._keep = [full for pattern in self.patterns for full in expand_braces(pattern)]
        self.filters: dict[str, list[str]] = layout.get("filters", {})

    @cached_property
    def keep(self) -> Match:
        return compile_patterns(self._keep).match

    @cached_property
    def names(self) -> Match:
        """Whether its layout knows a file by name, and does not only take it for what lies in a folder of its own."""
        return compile_patterns(self._keep[:-1] if self._owned else self._keep).match

    @cached_property
    def keeps_all_below(self) -> Match:
        """Whether one pattern keeps whatever lies below a folder."""
        if EVERYTHING in self._keep:
            return re.compile(".").match
        return compile_patterns(pattern[:-3] + "/" for pattern in self._keep if pattern.endswith("/**")).match

    @cached_property
    def database(self) -> Match:
        return compile_patterns(self._layout["databases"]).match

    @cached_property
    def never(self) -> Match:
        return compile_patterns(self._layout["never"], anywhere=True).match

    @cached_property
    def secret(self) -> Match:
        return compile_patterns(self._layout["secrets"], anywhere=True).match

    @cached_property
    def leaves_out(self) -> Match:
        """Whether it is never exported, or secret."""
        return compile_patterns(self._layout["never"] + self._layout["secrets"], anywhere=True).match

    @cached_property
    def careful(self) -> Match:
        return compile_patterns(self._layout.get("careful", []), anywhere=True).match

    @cached_property
    def yields(self) -> Match:
        """Whether it never replaces what is there."""
        return compile_patterns(self._layout.get("yields", [])).match

    @cached_property
    def _folders(self) -> list[list[Pattern[str] | None]]:
        return [
            [
                re.compile(_translate_part(part) + r"\Z", re.DOTALL) if part != "**" else None
                for part in pattern.split("/")
            ]
            for pattern in self._keep
        ]

    def allows(self, relative: str, folder: bool) -> bool:
        """Whether a path is memory: kept, and neither it nor a folder it is in ever forbidden."""
        parts = relative.split("/")
        ways = ["/".join(parts[: number + 1]) for number in range(len(parts))]
        if any(self.never(way) or self.secret(way) for way in ways):
            return False
        return bool(self.keep(relative + "/x" if folder else relative))

    def takes(self, relative: str) -> bool:
        """Whether a file, in folders that are not left out, is memory."""
        return bool(self.keep(relative)) and not self.leaves_out(relative)

    def emptied(self, relative: str) -> list[str]:
        """The tables of a database that hold secrets."""
        emptied = self._layout.get("emptied", {})
        return [table for name in emptied if compile_patterns([name]).match(relative) for table in emptied[name]]

    def may_hold(self, folder: str) -> bool:
        """Whether anything kept can lie below this folder: a walk need not enter others."""
        parts = folder.split("/")
        return any(self._may_lead(wanted, parts) for wanted in self._folders)

    @staticmethod
    def _may_lead(wanted: list[Pattern[str] | None], parts: list[str]) -> bool:
        for number, part in enumerate(parts):
            if number >= len(wanted) - 1:
                return number < len(wanted) and wanted[number] is None
            expression = wanted[number]
            if expression is None:
                return True
            if not expression.match(part):
                return False
        return True
