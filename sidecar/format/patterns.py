"""A layout's patterns, compiled: which paths are memory.

``*`` and ``?`` match within one part of a path, ``**`` matches any number of parts, ``{a,b}`` is either. A ``keep``
pattern is anchored at the root. A pattern of one part under ``never`` or ``secrets`` matches at any depth unless it
begins with a slash; a pattern that ends in a slash is a folder with everything in it.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, Callable, Iterable, List, Pattern, Sequence

# Files known to contain secrets by their names alone, in any folder and whatever a layout says. A note about
# credentials (credentials.md) is not one of them.
SECRET_NAMES = frozenset(
    (".envrc .netrc _netrc .pgpass .my.cnf .npmrc .pypirc .git-credentials .htpasswd .credentials.json .dockercfg"
     " .vault-token .s3cfg .boto auth.json mcp-auth.json oauth.json oauth_creds.json oauth-token token.json secrets.json"
     " secrets.toml secrets.yaml secrets.yml credentials credentials.json credentials.toml cookies cookies.sqlite cookies.txt"
     " logins.json key4.db .mylogin.cnf .databrickscfg .terraformrc credentials.tfrc.json .dockerconfigjson secring.gpg"
     " application_default_credentials.json service-account.json service_account.json client_secret.json"
     " client_secrets.json kaggle.json accesstokens.json msal_token_cache.json"
     " id_rsa id_dsa id_ecdsa id_ed25519 id_ecdsa_sk id_ed25519_sk").split()
)  # fmt: skip
SECRET_ENDS = (".env", ".p12", ".pfx", ".p8", ".kdbx", ".keystore", ".jks", ".ppk", ".pem", ".key", ".ovpn")
SECRET_PATHS = (
    "/.git/config", "/.kube/config", "/.docker/config.json", "/gh/hosts.yml", "/huggingface/token", "/.fly/config.yml",
)  # fmt: skip
SECRET_PARTS = ("/.ssh/id_", "/.gnupg/private-keys")
"""In any place of a path. A public key in ``.ssh`` stays behind with the private one."""
COPY_ENDS = ("~", ".bak", ".old")


def is_secret(path: str) -> bool:
    """Return whether a file is known by its name to contain secrets, or is a backup copy of such a file."""
    path = "/" + path.lower()
    for end in COPY_ENDS:
        if path.endswith(end):
            path = path[: -len(end)]
    name = path.rpartition("/")[2]
    if name in SECRET_NAMES or name.startswith(".env.") or path.endswith(SECRET_ENDS + SECRET_PATHS):
        return True
    return "/." in path and any(part in path for part in SECRET_PARTS)


def expand_braces(pattern: str) -> list[str]:
    """Write out a pattern's braces: "a{b,c}" becomes ["ab", "ac"]."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [full for choice in found.group(1).split(",") for full in expand_braces(head + choice + tail)]


def _translate_part(pattern: str) -> str:
    """Translate one part of a pattern into a regular expression that does not cross a slash."""
    return "".join("[^/]*" if c == "*" else "[^/]" if c == "?" else re.escape(c) for c in pattern)


def _translate_pattern(pattern: str, anywhere: bool) -> str:
    """Translate a pattern into a regular expression; ``anywhere``: a pattern of one part matches at any depth."""
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
    """Return one expression that fully matches every path that any of the patterns names; without patterns it matches
    nothing."""
    texts = [_translate_pattern(full, anywhere) for pattern in patterns for full in expand_braces(pattern)]
    return re.compile("(?:" + "|".join(texts) + r")\Z" if texts else r"(?!)", re.DOTALL)


Match = Callable[[str], Any]


EVERYTHING = "**"
WILD = re.compile(r"[*?]")
SPECIAL = "\\.*^$+?()[]{}|"


class PathSet:
    """Paths of a memory, named by patterns that begin with a root's name, without braces. Most may be plain paths.

    A sandbox says by which patterns a part was restored there, so they are matched in a time that grows with their length
    only, whatever they are: not as regular expressions, which can be made to go on for ever.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = list(patterns)
        self._plain = frozenset(pattern for pattern in self.patterns if not WILD.search(pattern))
        wild = [pattern for pattern in self.patterns if WILD.search(pattern)]
        tops = [pattern[:-2] for pattern in wild if pattern.endswith("/**") and not WILD.search(pattern[:-3])]
        self._tops = tuple(tops)
        self._wild = [_split_pattern(pattern) for pattern in wild if pattern[:-2] not in tops]

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def has(self, path: str) -> bool:
        """Return whether a path is named."""
        if path in self._plain or (self._tops and path.startswith(self._tops) and path not in self._tops):
            return True
        parts = path.split("/") if self._wild else []
        return any(_match_items(wanted, parts, EVERYTHING, _match_part) for wanted in self._wild)


def _split_pattern(pattern: str) -> List[str]:
    """Return a pattern's parts; at its end, ``**`` stands for at least one part."""
    parts = pattern.split("/")
    return parts[:-1] + ["*", EVERYTHING] if parts[-1] == EVERYTHING else parts


def _match_part(wanted: str, part: str) -> bool:
    """Return whether one part of a path is as a part of a pattern says."""
    if not WILD.search(wanted):
        return wanted == part
    return _match_items(wanted, part, "*", lambda one, other: one == "?" or one == other)


def _match_items(
    wanted: Sequence[str], given: Sequence[str], any_number: str, fits: Callable[[str, str], bool]
) -> bool:
    """Return whether all items fit, where ``any_number`` stands for any number of them. When some do not, only the last
    such one is tried again with one more: that is enough, and never takes longer than all pairs do."""
    at = other = 0
    star = tried = -1
    while other < len(given):
        if at < len(wanted) and wanted[at] == any_number:
            star, tried = at, other
            at += 1
        elif at < len(wanted) and fits(wanted[at], given[other]):
            at, other = at + 1, other + 1
        elif star >= 0:
            tried += 1
            at, other = star + 1, tried
        else:
            return False
    return all(one == any_number for one in wanted[at:])


def translate_to_extended(pattern: str) -> List[str]:
    """Return the regular expressions, as POSIX has them, of what a pattern names."""
    texts = [_translate_pattern(full, False).replace("(?:", "(") for full in expand_braces(pattern)]
    # Python escapes more than POSIX knows of.
    return [re.sub(r"\\(.)", lambda m: m[0] if m[1] in SPECIAL else m[1], text, flags=re.DOTALL) for text in texts]


class Rules:
    """The patterns of one layout for one of its roots.

    Each is compiled when it is first used: most layouts are not present in a sandbox, and compiling is slow. In a
    project without a marker, what matches ``yields`` is not memory.
    """

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
        """Match what the layout keeps."""
        return compile_patterns(self._keep).match

    @cached_property
    def names(self) -> Match:
        """Match files that the layout knows by name, not only because they are in a folder that it owns."""
        return compile_patterns(self._keep[:-1] if self._owned else self._keep).match

    @cached_property
    def keeps_all_below(self) -> Match:
        """Match folders below which one pattern keeps everything."""
        if EVERYTHING in self._keep:
            return re.compile(".").match
        return compile_patterns(pattern[:-3] + "/" for pattern in self._keep if pattern.endswith("/**")).match

    @cached_property
    def database(self) -> Match:
        """Match files that the layout declares to be SQLite databases."""
        return compile_patterns(self._layout["databases"]).match

    @cached_property
    def never(self) -> Match:
        """Match paths that are never exported."""
        return compile_patterns(self._layout["never"], anywhere=True).match

    @cached_property
    def secret(self) -> Match:
        """Match paths that the layout declares secret."""
        return compile_patterns(self._layout["secrets"], anywhere=True).match

    @cached_property
    def leaves_out(self) -> Match:
        """Match paths that are never exported, or secret."""
        return compile_patterns(self._layout["never"] + self._layout["secrets"], anywhere=True).match

    @cached_property
    def careful(self) -> Match:
        """Match files that may contain credentials but are exported, with a warning."""
        return compile_patterns(self._layout.get("careful", []), anywhere=True).match

    @cached_property
    def yields(self) -> Match:
        """Match files that never replace one that is already in the sandbox."""
        return compile_patterns(self._layout.get("yields", [])).match

    @cached_property
    def _folders(self) -> list[list[Pattern[str] | None]]:
        """The keep patterns, part by part; ``None`` stands for ``**``."""
        return [
            [
                re.compile(_translate_part(part) + r"\Z", re.DOTALL) if part != "**" else None
                for part in pattern.split("/")
            ]
            for pattern in self._keep
        ]

    def allows(self, relative: str, folder: bool) -> bool:
        """Return whether a path is memory: it is kept, and neither it nor a folder above it is forbidden."""
        parts = relative.split("/")
        ways = ["/".join(parts[: number + 1]) for number in range(len(parts))]
        if any(self.never(way) or self.secret(way) for way in ways):
            return False
        return bool(self.keep(relative + "/x" if folder else relative))

    def takes(self, relative: str) -> bool:
        """Return whether a file is memory, given that its folders are not left out."""
        return bool(self.keep(relative)) and not self.leaves_out(relative)

    def emptied(self, relative: str) -> list[str]:
        """Return the tables of a database whose rows are secret and are not exported."""
        emptied = self._layout.get("emptied", {})
        return [table for name in emptied if compile_patterns([name]).match(relative) for table in emptied[name]]

    def may_hold(self, folder: str) -> bool:
        """Return whether anything below this folder can be kept; a walk need not enter other folders."""
        parts = folder.split("/")
        return any(self._may_lead(wanted, parts) for wanted in self._folders)

    @staticmethod
    def _may_lead(wanted: list[Pattern[str] | None], parts: list[str]) -> bool:
        """Return whether a folder with these parts can be on the way to what the pattern matches."""
        for number, part in enumerate(parts):
            if number >= len(wanted) - 1:
                return number < len(wanted) and wanted[number] is None
            expression = wanted[number]
            if expression is None:
                return True
            if not expression.match(part):
                return False
        return True
