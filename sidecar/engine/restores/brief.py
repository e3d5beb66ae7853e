"""The brief of a restore: what is to be read first of the snapshot, for the receipt and for a file in the sandbox."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator

from sidecar.engine.core import Engine, new_upload_path
from sidecar.engine.restores.run import RestoreRequest, RestoreRun
from sidecar.errors import SidecarError, UnsafePath
from sidecar.format.patterns import Rules
from sidecar.format.protocol import RestoreAnswer
from sidecar.ids import build_memory_key
from sidecar.program.brief import NOTE, SIGNATURE, find_taker, is_suitable
from sidecar.receipts import RestoreBrief
from sidecar.store.fetch import FetchedSnapshot

NOT_MADE = "There is no brief of {snapshot}: {problem} The memory itself is not affected."
NOT_PUT = "The brief could not be put into the sandbox: {problem}"
SECONDS = 30.0
MOST_OUTPUT = 1 << 16
# Folder by folder from the home on, and never through a link. Exit codes say what was in the way. ``moved`` tells whether
# the place that a variable names is one of these below the home, where a root would take the brief, or has all of it.
PUT = """upload={upload} signature={signature} cache="${{XDG_CACHE_HOME:-$HOME/.cache}}/memory-sidecar"
{resolved}
moved() {{
    [ -n "$1" ] || return 1
    case "$1" in
    /*) root=$1 ;;
    "~" | "~/"*) root=$HOME${{1#"~"}} ;;
    *) root=$HOME/$1 ;;
    esac
    root=$(resolved "$(printf %s "$root$2" | sed 's,//*,/,g; s,/[.]/,/,g; s,/[.]$,,; s,/$,,')")
    shift 2
    case "$(resolved "$HOME")/" in "${{root%/}}"/?*) return 0 ;; esac
    for below; do
        [ "$root" != "$(resolved "$HOME$below")" ] || return 0
    done
    return 1
}}
put() {{
{moved}
    cd "$HOME" || return 3
    for part in {folders}; do
        [ ! -L "$part" ] || return 4
        [ -d "$part" ] || mkdir "$part" || return 3
        cd "./$part" || return 3
        [ "$(pwd -P)" != "$(cd "$cache" 2>/dev/null && pwd -P)" ] || return 6
    done
    if [ -L {name} ] || [ -e {name} ]; then
        [ -f {name} ] && [ ! -L {name} ] && [ "$(head -n 1 {name})" = "$signature" ] || return 5
    fi
    [ ! -L {name}.new ] || return 4
    umask 077
    cat "$upload" > {name}.new && mv -f {name}.new {name} || return 3
    mkdir -p "$cache"/{key} && rm -f "$cache"/{key}/{note} && printf '%s\\n' {path} > "$cache"/{key}/{note}
}}
( put )
code=$?
rm -f "$upload"
exit $code
"""
CODES = {
    4: "a link is in the way.",
    5: "a file is there already that is no brief.",
    6: "that is the sidecar's own folder.",
    7: "it would be memory there, as a variable of the sandbox says.",
}


def check_brief(engine: Engine, request: RestoreRequest) -> None:
    """Raise ``UsageError`` for a budget that no brief can have, or ``UnsafePath`` for a path at which it cannot be: one
    that leads out of the home, or where it would be memory."""
    if request.brief:
        from sidecar.engine.briefs import check_budget  # late: few restores have one

        check_budget(request.brief)
    path = request.brief_path
    if not path:
        return
    if not is_suitable(path):
        raise UnsafePath(f"A brief cannot be at {path[:200]!r}.", hint="Name a file below the sandbox's home: BRIEF.md")
    taker = find_taker(path, [layout.for_sandbox() for layout in engine.layouts.values()])
    if taker:
        raise UnsafePath(f"At {path!r} a brief would become memory, of the layout {taker}.", hint="Name another file.")


async def prepare_brief(run: RestoreRun, fetched: FetchedSnapshot | None = None) -> None:
    """Make the brief that a restore was asked for. If that fails, there is a warning instead."""
    if not run.request.brief or (run.brief is not None and run.brief.snapshot == run.chosen.snapshot):
        return
    run.brief = None
    from sidecar.engine.briefs import describe_snapshot

    run.engine.progress.step("choosing what to read first")
    try:
        found = await describe_snapshot(run.engine, run.chosen, run.request.brief, fetched=fetched)
    except Exception as problem:  # whatever a hostile memory brings about: the restore goes on
        words = problem.message if isinstance(problem, SidecarError) else f"{type(problem).__name__}."
        run.warnings.append(NOT_MADE.format(snapshot=run.chosen.snapshot, problem=words))
        return
    run.brief = RestoreBrief(
        snapshot=found.snapshot,
        tokens=found.tokens,
        budget=found.budget,
        text=found.text,
        skipped=len(found.skipped) + found.more,
    )


def _build_moved(engine: Engine, path: str) -> str:
    """Build the lines that refuse a brief where a root would take it that a variable of the sandbox moves."""
    parts, lines = path.split("/"), []
    for layout in (layout.for_sandbox() for layout in engine.layouts.values()):
        for root in layout["roots"]:
            rules = Rules(layout, root)
            if root.get("file"):
                tops = [f"/{path}"]
            else:
                ways = [("".join(f"/{part}" for part in parts[:at]), "/".join(parts[at:])) for at in range(len(parts))]
                tops = [top for top, way in ways if rules.takes(way)]
            for entry in root.get("env", []) if tops else []:
                name, _, inner = entry.partition("/")
                below = "".join(f"/{part}" for part in (inner, root.get("below", "")) if part)
                words = " ".join(shlex.quote(word) for word in (below, *tops))
                lines.append(f'moved "${{{name}:-}}" {words} && return 7')
    return "\n".join(dict.fromkeys(lines))


async def put_by_shell(run: RestoreRun, answer: RestoreAnswer) -> None:
    """Put the brief into a sandbox without Python: one more upload and one more command."""
    if run.brief is None or not run.request.brief_path or not run.sandbox.without_python:
        return
    from sidecar.engine.shell.scripts import RESOLVED  # late: most sandboxes have Python

    *folders, name = run.request.brief_path.split("/")
    upload, text = new_upload_path(), run.brief.text

    async def chunks() -> AsyncIterator[bytes]:
        yield text.encode("utf-8", "replace")

    command = PUT.format(
        resolved=RESOLVED,
        moved=_build_moved(run.engine, run.request.brief_path),
        upload=shlex.quote(upload),
        signature=shlex.quote(SIGNATURE),
        folders=" ".join(map(shlex.quote, folders)),
        name=shlex.quote(f"./{name}"),
        key=shlex.quote(build_memory_key(run.request.memory)),
        note=NOTE,
        path=shlex.quote(run.request.brief_path),
    )
    try:
        await run.sandbox.upload(upload, chunks())
        done = await run.sandbox.run(command, timeout=SECONDS, output_limit=MOST_OUTPUT)
    except SidecarError as problem:
        answer.warnings.append(NOT_PUT.format(problem=problem.message))
        return
    answer.brief = done.exit_code == 0
    if done.exit_code:
        why = CODES.get(done.exit_code, f"{done.complaint.strip()[:200]}.")
        answer.warnings.append(NOT_PUT.format(problem=why))
