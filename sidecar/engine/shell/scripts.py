"""Shell scripts for exports and restores in sandboxes without Python, made from a layout's patterns.

``find`` patterns are coarser than a layout's, so the scripts select rather too much than too little; the sidecar
applies the exact rules to what arrives. Secrets, and files that would have to be cleared of secrets first, never leave
the sandbox.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources

from sidecar.format.patterns import EVERYTHING, SECRET_ENDS, SECRET_NAMES, SECRET_PARTS, SECRET_PATHS, expand_braces
from sidecar.format.protocol import Answer, ExportQuestion, RestoreQuestion, RootHint, TidyQuestion, encode
from sidecar.format.roots import split_number, strip_below
from sidecar.host.values import dataclass
from sidecar.layouts import CoveredRules, Layout, RootSpec
from sidecar.program.capture.walk import SQLITE_TAILS
from sidecar.program.notes import encode_part

MOST_KNOWN = 40
"""How many projects of the head are looked for at most, since the length of a command is limited."""


def list_roots(
    layouts: Iterable[Layout], projects: list[str] | None, known: Sequence[RootHint] = ()
) -> list[tuple[str, Layout, RootSpec, str]]:
    """List every root that an export by shell can find: its name, its layout, its spec, and a shell word for its path.

    Projects are those named; otherwise those of the head (``known``), the working folder and the home, because a shell
    script does not search for others. If two names lead to one folder, the first counts.
    """
    named = []
    for layout in layouts:
        for root in layout.roots:
            if not root.project:
                if root.paths:
                    named.append((root.name, layout, root, build_place(root, None, projects, exporting=True)))
                continue
            places = _find_known_places(root, known) if projects is None else {}
            for place in (_build_project_place(root, _quote_project(project)) for project in _list_projects(projects)):
                number = next(number for number in range(1, len(places) + 2) if number not in places)
                places[number] = place
            for number, place in places.items():
                named.append((root.name if number == 1 else f"{root.name}-{number}", layout, root, place))
    return named


def _list_projects(projects: list[str] | None) -> list[str | None]:
    return [None, "~"] if projects is None else [*projects]


def _find_known_places(root: RootSpec, known: Sequence[RootHint]) -> dict[int, str]:
    """Return shell words for the paths of the head's roots of this kind, by their number. A root outside of the home
    that no longer exists is looked for in the working folder."""
    places: dict[int, str] = {}
    for row in known[:MOST_KNOWN]:
        base, number = split_number(row.name)
        if row.name == root.name or (number and base == root.name):
            project = strip_below(row.hint, root.below)
            word = _quote_project(project)
            if not project.startswith("~"):
                word = f'"$(if [ -d {word} ]; then printf %s {word}; else printf %s "$PWD"; fi)"'
            places[number or 1] = _build_project_place(root, word)
    return places


def build_export_script(question: ExportQuestion, layouts: list[Layout]) -> str:
    """Build the script for an export."""
    roots = list_roots(layouts, question.projects, question.roots)
    lines = [*_build_common_lines(question)]
    firsts: dict[str, int] = {}
    for number, (name, layout, root, place) in enumerate(roots, 1):
        first = firsts.setdefault(root.name, number)
        lines += [f"name_{number}={shlex.quote(name)}", f"layout_{number}={layout.name}", f"folder_{number}={place}"]
        if databases := _list_databases(layout):
            lines.append(f"databases_{number}={shlex.quote(' '.join(databases))}")
        # Reuse the words of the first root of the same kind, since the length of a command is limited.
        lines.append(
            _build_selection(number, layout, root, exporting=True) if first == number else f"as_{number}={first}"
        )
    lines.append(f"roots={shlex.quote(' '.join(str(number) for number in range(1, len(roots) + 1)))}")
    return "\n".join([_build_removal(question.snapshot), *lines, _load_script("export.sh")])


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A root that a restore by shell places."""

    name: str
    place: str
    """A shell word for its path."""
    layout: Layout
    root: RootSpec
    needed: Sequence[str]
    """The files in it that its layout requires."""
    covered: CoveredRules | None
    """The rules that the snapshot was made by."""
    waits_for: str = ""
    """A shell word for the folder without which the root is withheld."""
    hint: str = ""
    number: int = 0
    """The number of its project. A folder that is named for this number takes precedence over all other paths."""


def build_restore_script(question: RestoreQuestion, roots: list[Target], bundle: str, size: int) -> str:
    """Build the script for a restore to these targets."""
    lines = [
        *_build_common_lines(question),
        f"notes={shlex.quote(_begin_notes(question))}",
        f"sandbox={shlex.quote(question.identity.sandbox)}",
        f"conversation={shlex.quote(question.identity.conversation)}",
        f"bundle={shlex.quote(bundle)}",
        f"bytes={size}",
        f"mode={question.mode}",
    ]
    for name, value in (
        ("stored", " ".join(question.stored[question.key])),
        ("heads", " ".join(question.heads)),
        ("keep", " ".join(question.keep)),
        ("saved", "yes" if question.saved else ""),
        ("discard", "yes" if question.discard else ""),
        ("reader", "yes" if question.read_only else ""),
        ("only", encode_part(question.part) if question.part else ""),
        ("aside_bytes", str(question.set_aside_bytes)),
        ("aside_name", f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{question.snapshot}"),
    ):
        lines.append(f"{name}={shlex.quote(value)}")
    lines += _build_assignments(question.projects or [], roots)
    for number, target in enumerate(roots, 1):
        lines += [f"name_{number}={shlex.quote(target.name)}", f"folder_{number}={target.place}"]
        lines.append(f"needed_{number}={shlex.quote(chr(10).join(target.needed))}")
        if target.waits_for:
            told = json.dumps({"name": target.name, "hint": target.hint})
            lines += [f"waits_{number}={target.waits_for}", f"waiting_{number}={shlex.quote(told)}"]
        if target.number:
            place = _build_project_place(replace(target.root, marked=False), f'"$project_{target.number}"')
            lines.append(f'[ -z "$project_{target.number}" ] || {{ folder_{number}={place}; waits_{number}=""; }}')
        yields = [f"./{name}" for name in target.layout.yields]
        lines.append(f"yields_{number}={shlex.quote(' '.join(yields))}")
        lines.append(_build_selection(number, target.layout, target.root, target.covered, exporting=False))
    lines.append(f"roots={shlex.quote(' '.join(str(number) for number in range(1, len(roots) + 1)))}")
    return "\n".join([*lines, _load_script("restore.sh")])


def _begin_notes(question: RestoreQuestion) -> str:
    """Return the beginning of the notes: a JSON object to which the script adds the folders of the roots."""
    told = question.identity
    notes = {
        "store": told.store,
        "memory": told.memory,
        "sandbox": told.sandbox,
        "machine": told.machine,
        "conversation": told.conversation,
        "reader": question.read_only,
        "label": told.label,
    }
    return json.dumps(notes)[:-1]


def _build_assignments(given: Sequence[str], roots: Sequence[Target]) -> list[str]:
    """Build the lines that set ``project_n`` to the folder named for the n-th project, if there is one."""
    numbers = sorted({target.number for target in roots if target.number})
    lines = [f'project_{number}=""' for number in numbers]
    if not given or not numbers:
        return lines
    lines += [ASSIGN, *(f"give {_quote_project(path)}" for path in given)]
    for number in numbers:
        hints = {
            _strip_below(target.hint, target.root.below): None
            for target in roots
            if target.number == number and target.hint.startswith(("~", "/"))
        }
        lines += [f"same {number} {_quote_project(hint)}" for hint in hints]
    return [*lines, *(f"next_one {number}" for number in numbers)]


def _strip_below(hint: str, below: str) -> str:
    return hint.removesuffix(f"/{below}") if below else hint


def build_tidy_script(question: TidyQuestion, notes: str = "") -> str:
    """Build the script that removes the work folders and uploads of a snapshot that is no longer waited for, and that
    records ``notes``, if any, about the memory."""
    lines = [_build_removal(question.snapshot)]
    if notes:
        place = f'"${{XDG_CACHE_HOME:-$HOME/.cache}}/memory-sidecar/"{shlex.quote(question.key)}/notes'
        lines.append(f"rm -f {place}.new; printf '%s' {shlex.quote(notes)} > {place}.new && mv -f {place}.new {place}")
    answer = encode(Answer("tidy", question.memory, question.snapshot)).decode()
    frame = "'\\nmemory-sidecar %s begin\\n%s\\nmemory-sidecar %s end\\n'"
    return "\n".join(
        [
            *lines,
            *(f"rm -f {shlex.quote(path)}" for path in question.uploads),
            f'printf {frame} "$nonce" {shlex.quote(answer)} "$nonce"',
        ]
    )


def _build_removal(snapshot: str) -> str:
    """Build the lines that remove the work folders of a snapshot that is no longer waited for."""
    return "\n".join(
        [
            'for keep in "${XDG_CACHE_HOME:-$HOME/.cache}"/memory-sidecar/work-*/keep; do',
            f'if [ -f "$keep" ] && [ "$(cat "$keep")" = {shlex.quote(snapshot)} ]; then rm -rf "${{keep%/keep}}"; fi',
            "done",
        ]
    )


def build_place(
    root: RootSpec, project: str | None, projects: Sequence[str] | None = None, *, exporting: bool = False
) -> str:
    """Build a shell word for the path of a root: by its environment variable or in a usual path, or below a project
    (``None``: the working folder)."""
    if root.project:
        return _build_project_place(root, _quote_project(project))
    words = []
    for entry in () if root.file else root.env:
        name, _, below = entry.partition("/")
        # A variable decides, except that an export prefers the path that actually contains the memory.
        mark = "" if root.holds and exporting else "!"
        words.append(f'"${{{name}:+{mark}${name}{"/" + below if below else ""}}}"')
    for path in root.paths:
        if path.startswith("./"):
            words += [
                f"{_quote_project(base)}/{shlex.quote(path[2:])}" for base in ([None] if projects is None else projects)
            ]
        else:
            words.append(_quote_project(path))
    return f'"$(first {shlex.quote(root.holds)} {shlex.quote(root.below)} {" ".join(words)})"'


def _build_project_place(root: RootSpec, project: str) -> str:
    if root.marked:
        marks = " ".join(shlex.quote(marker) for marker in root.markers)
        return f'"$(marked {project} {marks})"'
    return f"{project}/{shlex.quote(root.below)}" if root.below else project


def _quote_project(path: str | None) -> str:
    if path is None:
        return '"$PWD"'
    if path.startswith("/"):
        return shlex.quote(path)
    return '"$HOME"' + shlex.quote(path[1:] if path.startswith("~") else f"/{path}")


def _escape_word(text: str) -> str:
    """Escape a text as one shell word without quotes: quotes would have to be escaped in the variable, and again on the
    way."""
    return "".join(c if c.isalnum() or c in "._-/%+:@" else f"\\{c}" for c in text)


NOTHING = '-name ""'
KNOWN_SECRET = " -o ".join(
    [
        *(
            f"-iname {_escape_word(name)}"
            for name in (*sorted(SECRET_NAMES), ".env.*", *(f"*{end}" for end in SECRET_ENDS))
        ),
        *(f"-ipath {_escape_word(f'*{path}')}" for path in SECRET_PATHS),
        *(f"-ipath {_escape_word(f'*{part}*')}" for part in SECRET_PARTS),
    ]
)
"""A ``find`` test for files that no layout may take (``is_secret``). Copies of such files are removed on arrival,
because the length of a command is limited."""
LOOK = f"""look() {{
what=$1
eval "as=\\${{as_$2:-$2}}"
eval "starts=\\$starts_$as keep=\\$keep_$as hold=\\$hold_$as lead=\\$lead_$as"
eval "never=\\$never_$as secret=\\$secret_$as unsent=\\$unsent_$as"
shift 2
secret="$secret -o -type f \\( $known_secret \\)"
left="\\( $never -o $secret -o $unsent \\) -prune"
case "$what" in
select) test="$left -o \\( $keep \\) \\( -type f -o -type l \\)" ;;
others) test="$left -o \\( $keep \\) ! -type f ! -type l ! -type d" ;;
folders) test="$left -o -type d \\( $hold \\)" ;;
leads) test="$left -o -type l \\( $lead \\) ! \\( $keep \\)" ;;
never) test="\\( $never \\) -prune" ;;
secret) test="\\( $never \\) -prune -o \\( $secret \\) -prune" ;;
esac
eval "for start in $starts; do "'[ -e "$start" ] || [ -L "$start" ] || continue
find "$start" '"$test"' "$@" || return 1
done'
}}
known_secret={shlex.quote(KNOWN_SECRET)}"""
"""``look WHAT ROOT ACTION…``: run ``find`` in the working folder for a part of a root. WHAT is ``select`` (files and
links that are memory), ``folders`` (folders that are), ``secret`` (what must not leave), ``never`` (what is of no use
elsewhere), ``others`` (sockets and the like) or ``leads`` (links in the place of folders). The tests of a root are
words for ``eval``."""

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
"""Print one of the given paths: the one that decides (``!``), else the first that contains the marker, else the first.
"""


MARKED = """marked() {
base=$1
shift
for marker; do
if [ -e "$base/$marker" ]; then printf '%s' "$base"; return; fi
done
}"""
"""Print the folder if it contains any of the markers."""


RESOLVED = """resolved() {
path=$1 rest=""
while [ ! -d "${path:-/}" ]; do rest=/${path##*/}$rest path=${path%/*}; done
path=$(CDPATH='' cd "${path:-/}" && pwd -P)
path=${path%/}$rest
printf '%s' "${path:-/}"
}"""
"""Print the real path of a folder, which need not be there."""


ASSIGN = (
    RESOLVED
    + """
given=0
give() {
one=$(resolved "${1%/}") number=1
while [ "$number" -le "$given" ]; do
eval "other=\\$given_$number"
[ "$other" != "$one" ] || return 0
number=$((number + 1))
done
given=$number
eval "given_$number=\\$one"
}
same() {
eval "[ -z \\"\\$project_$1\\" ]" || return 0
one=$(resolved "${2%/}") number=1
while [ "$number" -le "$given" ]; do
eval "other=\\$given_$number"
if [ -n "$other" ] && [ "$other" = "$one" ]; then eval "project_$1=\\$one given_$number=''"; return; fi
number=$((number + 1))
done
}
next_one() {
eval "[ -z \\"\\$project_$1\\" ]" && [ "$1" -le "$given" ] || return 0
eval "other=\\$given_$1" number=$1 later=0
while [ -z "$other" ] && [ "$later" -lt "$given" ]; do
number=$((later + 1)) later=$((later + 1))
eval "other=\\$given_$number"
done
eval "project_$1=\\$other given_$number=''"
}"""
)
"""Decide which of the given folders is the n-th project, by the same rules as the in-sandbox program: the one with the
project's former path (``same``), else the n-th, else the next one left (``next_one``)."""


def _build_common_lines(question: ExportQuestion | RestoreQuestion) -> list[str]:
    """Build the lines that the scripts of an export and a restore have in common."""
    echo = json.dumps({"memory": question.memory, "snapshot": question.snapshot})[1:-1]
    return [
        f"echo_back={shlex.quote(echo)}",
        f"key={shlex.quote(question.key)}",
        f"snapshot={question.snapshot}",
        f"turn_wait={math.ceil(question.turn_wait)}",
        FIRST,
        MARKED,
        LOOK,
    ]


def _list_databases(layout: Layout) -> list[str]:
    """Return a layout's databases as shell patterns. Those with a blank or an any-depth pattern are left out, and
    copied as files."""
    names = [full for name in layout.databases for full in expand_braces(name)]
    return [name for name in names if " " not in name and "**" not in name and name not in layout.emptied]


def _build_selection(
    number: int, layout: Layout, root: RootSpec, covered: CoveredRules | None = None, *, exporting: bool
) -> str:
    """Build the words by which ``look`` finds the parts of a root."""
    apart = _list_databases(layout) if exporting else []
    patterns = covered.keep if covered is not None else layout.covered(root).keep
    wanted = [pattern for name in patterns for pattern in expand_braces(name) if pattern not in apart]
    unsent = [f"/{name}" for name in (*layout.filters, *layout.emptied)] if exporting else []
    if exporting:  # SQLite's logs contain the rows that must not leave, too
        unsent += [f"/{name}{tail}" for name in layout.emptied for tail in SQLITE_TAILS]
    if EVERYTHING in wanted:  # otherwise databases would be taken as plain files
        unsent += [f"/{name}" for name in apart]
    if not exporting:
        unsent += [*(f"/{name}" for name in layout.yields), *(covered.left if covered is not None else ())]
    starts = dict.fromkeys(f"./{_quote_glob(pattern.split('/')[0])}" for pattern in wanted)
    if EVERYTHING in wanted:
        wanted, starts = [EVERYTHING], {".": None}
    words = {
        "starts": " ".join(starts),
        "keep": " -o ".join(f"-path {way}" for pattern in wanted for way in _list_path_patterns(pattern)),
        "hold": _build_folder_test(wanted),
        "lead": _build_any_test(dict.fromkeys(f"/{folder}" for pattern in wanted for folder in _list_parents(pattern))),
        "never": _build_any_test(layout.never),
        "secret": _build_any_test(layout.secrets),
        "unsent": _build_any_test(unsent),
    }
    return "\n".join(f"{name}_{number}={shlex.quote(value)}" for name, value in words.items())


def _build_folder_test(wanted: Sequence[str]) -> str:
    """Build a test for folders that are memory even when they are empty: those whose whole contents are."""
    tops = [pattern for pattern in wanted if pattern.endswith("**")]
    within = [f"-path {way}" for pattern in tops for way in _list_path_patterns(pattern)]
    return (
        " -o ".join([*within, *(_build_left_out_test(f"/{pattern[:-3]}") for pattern in tops if pattern[:-3])])
        or NOTHING
    )


def _list_parents(pattern: str) -> list[str]:
    """Return the parent folders of a pattern, as patterns."""
    parts = pattern.split("/")
    return ["/".join(parts[:number]) for number in range(1, len(parts))]


def _build_any_test(patterns: Iterable[str]) -> str:
    """Build a test for everything that any of the patterns leaves out: anchored patterns grouped by depth, then the
    others."""
    left = [pattern for name in patterns for pattern in expand_braces(name)]
    rooted: dict[int, list[str]] = {}
    others = []
    for pattern in left:
        parts = pattern.strip("/").split("/")
        if "**" in parts or (len(parts) == 1 and not pattern.startswith("/")):
            others.append(_build_left_out_test(pattern))
        else:  # ``*`` in ``-path`` also matches slashes, so the depth is tested too
            rooted.setdefault(len(parts), []).append(f"-path {_list_path_patterns(pattern)[0]}")
    groups = [
        f"\\( {' -o '.join(tests)} \\) ! -path {_escape_word('./' + '*/' * depth + '*')}"
        for depth, tests in rooted.items()
    ]
    return " -o ".join([*groups, *others]) or NOTHING


def _quote_glob(part: str) -> str:
    """Quote a part of a pattern as a shell word that still expands."""
    return "".join(c if c in "*?" or c.isalnum() or c in "._-" else f"\\{c}" for c in part)


def _list_path_patterns(pattern: str) -> list[str]:
    """Return a pattern as shell words for ``find -path``, whose ``*`` also matches slashes; a ``**`` may match nothing."""
    plain = "./" + pattern.strip("/").replace("\\", "\\\\").replace("[", "\\[")
    ways = [plain, plain.replace("**/", "")] + [plain + "/*"] * pattern.endswith("/")
    return [_escape_word(way.replace("**", "*")) for way in dict.fromkeys(ways)]


def _build_left_out_test(pattern: str) -> str:
    """Build a test for what a pattern of any depth leaves out, a file or a folder with its contents, and never more
    than that."""
    last = pattern.strip("/").rpartition("/")[2]
    name = f"-name {_escape_word(last)}"
    if "/" not in pattern.rstrip("/"):
        return name
    return " -o ".join(f"-path {way}" + (f" {name}" if last != "**" else "") for way in _list_path_patterns(pattern))


def _load_script(name: str) -> str:
    """Return a script without its comments, with the shared part inserted at its mark."""
    text = _read_text(name).replace("# <turn>\n", _read_text("turn.sh"))
    return "".join(line for line in text.splitlines(keepends=True) if not line.lstrip().startswith("#"))


def _read_text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


__all__ = ["Target", "build_export_script", "build_place", "build_restore_script", "list_roots"]
