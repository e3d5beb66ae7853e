"""The way without Python: shell scripts for an export and a restore, made from a layout's patterns.

They choose a little too much rather than too little (``find`` patterns are coarser); the sidecar applies the exact rules
to what arrives. Secrets, and files that would have to be cleared of them first, never leave.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any, NamedTuple

from sidecar.inside.rules import SECRET_ENDS, SECRET_NAMES, alternatives
from sidecar.layouts import Layout, Root


def named_roots(layouts: Iterable[Layout], projects: list[str] | None) -> list[tuple[str, Layout, Root, str]]:
    """Every root that an export by shell can bring: its name, its layout, and a shell word for where it is."""
    named = []
    numbers: dict[str, int] = {}
    for layout in layouts:
        for root in layout.roots:
            for place in _places(root, projects):
                number = numbers[root.name] = numbers.get(root.name, 0) + 1
                named.append((root.name if number == 1 else f"{root.name}-{number}", layout, root, place))
    return named


def export_script(request: dict[str, Any], layouts: list[Layout]) -> str:
    """The shell half of an export request."""
    roots = named_roots(layouts, request["projects"])
    lines = [*_common(request)]
    firsts: dict[str, int] = {}
    for number, (name, layout, _, place) in enumerate(roots, 1):
        first = firsts.setdefault(layout.name, number)
        lines += [f"name_{number}={shlex.quote(name)}", f"layout_{number}={layout.name}", f"folder_{number}={place}"]
        lines += [
            f"databases_{number}={shlex.quote(' '.join(_databases(layout)))}",
            _select(number, layout, exporting=True) if first == number else _as(number, first),
        ]
    lines.append(f"roots={shlex.quote(' '.join(str(number) for number in range(1, len(roots) + 1)))}")
    return "\n".join([tidy_script(request["snapshot"], ()), *lines, _script("export.sh")])


class Target(NamedTuple):
    """A root of a snapshot, and where it goes."""

    name: str
    place: str
    """As a shell word."""
    layout: Layout
    needed: list[str]
    """The files in it that its layout cannot do without."""


def restore_script(request: dict[str, Any], roots: list[Target], bundle: str, size: int) -> str:
    """The shell half of a restore into these places."""
    notes = json.dumps({**request["notes"], "reader": request["read_only"]})[:-1]
    lines = [
        *_common(request),
        f"notes={shlex.quote(notes)}",
        f"bundle={shlex.quote(bundle)}",
        f"bytes={size}",
        f"mode={request['mode']}",
    ]
    for name, value in (
        ("stored", " ".join(request["stored"][request["key"]])),
        ("heads", " ".join(request["heads"])),
        ("keep", " ".join(request["keep"])),
        ("saved", "yes" if request["saved"] else ""),
        ("discard", "yes" if request["discard"] else ""),
        ("reader", "yes" if request["read_only"] else ""),
        ("aside_bytes", str(request["set_aside_bytes"])),
        ("aside_name", f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{request['snapshot']}"),
    ):
        lines.append(f"{name}={shlex.quote(value)}")
    for number, root in enumerate(roots, 1):
        lines += [f"name_{number}={shlex.quote(root.name)}", f"folder_{number}={root.place}"]
        lines.append(f"needed_{number}={shlex.quote(chr(10).join(root.needed))}")
        lines.append(_select(number, root.layout, exporting=False))
    lines.append(f"roots={shlex.quote(' '.join(str(number) for number in range(1, len(roots) + 1)))}")
    return "\n".join([*lines, _script("restore.sh")])


def tidy_script(snapshot: str, uploads: Sequence[str], key: str = "", notes: str = "") -> str:
    """Remove the work folders kept for a snapshot nobody waits for any more, and what was uploaded for it; and write down
    the ``notes`` of the memory with this ``key``, if there are any."""
    lines = [
        'for keep in "${XDG_CACHE_HOME:-$HOME/.cache}"/memory-sidecar/work-*/keep; do',
        f'if [ -f "$keep" ] && [ "$(cat "$keep")" = {shlex.quote(snapshot)} ]; then rm -rf "${{keep%/keep}}"; fi',
        "done",
    ]
    if notes:
        place = f'"${{XDG_CACHE_HOME:-$HOME/.cache}}/memory-sidecar/"{shlex.quote(key)}/notes'
        lines.append(f"rm -f {place}.new; printf '%s' {shlex.quote(notes)} > {place}.new && mv -f {place}.new {place}")
    return "\n".join([*lines, *(f"rm -f {shlex.quote(path)}" for path in uploads)])


def place_of(root: Root, project: str | None, projects: Sequence[str] | None = None, *, exporting: bool = False) -> str:
    """A shell word for where a root is: by its variable or in a usual place, or below a project (``None``: the working
    folder)."""
    if root.project:
        base = _project(project)
        return f"{base}/{shlex.quote(root.below)}" if root.below else base
    words = []
    for entry in root.env:
        name, _, below = entry.partition("/")
        # A variable decides, unless an export looks for the place that holds the memory.
        mark = "" if root.holds and exporting else "!"
        words.append(f'"${{{name}:+{mark}${name}{"/" + below if below else ""}}}"')
    for path in root.paths:
        if path.startswith("./"):
            words += [
                f"{_project(base)}/{shlex.quote(path[2:])}" for base in ([None] if projects is None else projects)
            ]
        else:
            words.append(_project(path))
    return f'"$(first {shlex.quote(root.holds)} {shlex.quote(root.below)} {" ".join(words)})"'


def _project(path: str | None) -> str:
    if path is None:
        return '"$PWD"'
    if path.startswith("/"):
        return shlex.quote(path)
    return '"$HOME"' + shlex.quote(path[1:] if path.startswith("~") else f"/{path}")


NOTHING = "-name ''"
KNOWN_SECRET = " -o ".join(
    f"-iname {shlex.quote(name)}" for name in (*sorted(SECRET_NAMES), ".env.*", *(f"*{end}" for end in SECRET_ENDS))
)
"""What no layout brings out (``is_secret``)."""
SECRET_HERE = "@known-secret@"
FIND = f"""look() {{
left=$#
while [ "$left" -gt 0 ]; do
word=$1 left=$((left - 1))
shift
case "$word" in
{SECRET_HERE}) set -- "$@" {KNOWN_SECRET} ;;
*) set -- "$@" "$word" ;;
esac
done
find "$@"
}}"""
"""``find`` with a word for all that is known to be secret: every layout has it twice, and a command has only so much room."""

FIRST = """first() {
marker=$1 below=$2 chosen=""
shift 2
for place; do
[ -n "$place" ] || continue
case "$place" in !*) chosen=${place#!}; break ;; esac
[ -n "$chosen" ] || chosen=$place
if [ -d "$place/$marker" ]; then chosen=$place; break; fi
done
printf '%s' "$chosen${below:+/$below}"
}"""
"""Of the places given, the one that decides (``!``), else the first that holds the marker, else the first."""


def _places(root: Root, projects: list[str] | None) -> list[str]:
    if not root.project:
        return [place_of(root, None, projects, exporting=True)]
    return [place_of(root, project) for project in ([None, "~"] if projects is None else projects)]


def _common(request: dict[str, Any]) -> list[str]:
    echo = json.dumps({"memory": request["memory"], "snapshot": request["snapshot"]})[1:-1]
    key, snapshot = shlex.quote(request["key"]), request["snapshot"]
    wait = math.ceil(request.get("turn_wait", 0))
    return [f"echo_back={shlex.quote(echo)}", f"key={key}", f"snapshot={snapshot}", f"turn_wait={wait}", FIRST, FIND]


def _databases(layout: Layout) -> list[str]:
    """A layout's databases as shell patterns; one with a blank or an any-depth pattern is taken as a file."""
    names = [full for name in layout.databases for full in alternatives(name)]
    return [name for name in names if " " not in name and "**" not in name and name not in layout.emptied]


def _select(number: int, layout: Layout, *, exporting: bool) -> str:
    """Functions that find the files of one root that are memory (``select_N``), and what of them does not leave: what is
    secret (``secret_N``) or of no use elsewhere (``never_N``). They are given what ``find`` is to do with it."""
    apart = _databases(layout) if exporting else []
    wanted = [pattern for name in [*layout.keep, *layout.databases] for pattern in alternatives(name)]
    wanted = [pattern for pattern in wanted if pattern not in apart]
    cleared = [f"/{name}" for name in (*layout.filters, *layout.emptied)] if exporting else []
    never, secret, unsent = (_any(patterns) for patterns in (layout.never, layout.secrets, cleared))
    secret = f"{secret} -o -type f \\( {SECRET_HERE} \\)"
    starts = " ".join(dict.fromkeys(f"./{_glob(pattern.split('/')[0])}" for pattern in wanted))
    keep = " -o ".join(f"-path {way}" for pattern in wanted for way in _ways(pattern))
    left = f"\\( {never} -o {secret} -o {unsent} \\) -prune -o"
    finds = {
        "select": f'{left} \\( {keep} \\) \\( -type f -o -type l \\) "$@"',
        "never": f'\\( {never} \\) -prune "$@"',
        "secret": f'\\( {never} \\) -prune -o \\( {secret} \\) -prune "$@"',
    }
    there = '[ -e "$start" ] || [ -L "$start" ] || continue'
    return "\n".join(
        f'{name}_{number}() {{ for start in {starts}; do {there}; look "$start" {find} || return 1; done; }}'
        for name, find in finds.items()
    )


def _as(number: int, other: int) -> str:
    """The same functions for another root of the same layout: a command has only so much room."""
    return "\n".join(f'{name}_{number}() {{ {name}_{other} "$@"; }}' for name in ("select", "never", "secret"))


def _any(patterns: Iterable[str]) -> str:
    """A test for whatever any of the patterns leaves out."""
    left = [pattern for name in patterns for pattern in alternatives(name)]
    return " -o ".join(map(_left_out, left)) or NOTHING


def _glob(part: str) -> str:
    """A part of a pattern as a shell word that still expands."""
    return "".join(c if c in "*?" or c.isalnum() or c in "._-" else f"\\{c}" for c in part)


def _ways(pattern: str) -> list[str]:
    """A pattern as shell words for ``find -path``, whose ``*`` spans folders too; a ``**`` may stand for nothing."""
    plain = "./" + pattern.strip("/").replace("\\", "\\\\").replace("[", "\\[")
    ways = [plain, plain.replace("**/", "")] + [plain + "/*"] * pattern.endswith("/")
    return [shlex.quote(way.replace("**", "*")) for way in dict.fromkeys(ways)]


def _left_out(pattern: str) -> str:
    """A test for what one pattern leaves out, a file or a folder with all it holds; never for more than that."""
    parts = pattern.strip("/").split("/")
    name = f"-name {shlex.quote(parts[-1])}"
    if len(parts) == 1 and not pattern.startswith("/"):
        return name
    if "**" not in parts:
        return f"-path {_ways(pattern)[0]} ! -path './{'*/' * len(parts)}*'"
    return " -o ".join(f"-path {way}" + (f" {name}" if parts[-1] != "**" else "") for way in _ways(pattern))


def _script(name: str) -> str:
    """A script with what both have in common put in where it says so, and without its comments."""
    text = _text(name).replace("# <turn>\n", _text("turn.sh"))
    return "".join(line for line in text.splitlines(keepends=True) if not line.lstrip().startswith("#"))


def _text(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8")


__all__ = ["export_script", "named_roots", "place_of", "restore_script"]
