"""Sandboxes without Python: their files travel as a plain tarball, and the sidecar runs the in-sandbox program here.

This is slower (all files travel every time) and gives fewer guarantees; the receipt's warnings say which.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import posixpath
import re
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.engine.archives.unpack import build_member, unpack_members
from sidecar.engine.core import CountedSandbox, Engine, new_upload_path
from sidecar.engine.limits import build_bounds
from sidecar.engine.sandbox import delivery
from sidecar.engine.sandbox.dialogue import ask, parse_answer, run_command
from sidecar.engine.sandbox.presence import SandboxRun, clean_up
from sidecar.engine.shell.scripts import Target, build_place, build_restore_script, list_roots
from sidecar.errors import BadAnswer, ProgramFailed, UnknownLayout, UnsafePath
from sidecar.format.index import DIR, FILE
from sidecar.format.packs import CHUNK
from sidecar.format.patterns import PathSet, compile_patterns, translate_to_extended
from sidecar.format.protocol import (
    ExportAnswer,
    ExportQuestion,
    FoundDatabase,
    FoundRoot,
    Identity,
    RestoreAnswer,
    RestoreQuestion,
    SkippedPath,
)
from sidecar.format.roots import get_root, make_hint, split_number
from sidecar.host.files import Spool, SpooledFile, read_chunks
from sidecar.host.values import dataclass
from sidecar.host.work import Deadline, NoProgress, run_in_thread
from sidecar.layouts import RootSpec, find_spec
from sidecar.program import notes
from sidecar.program.capture.export import OUTSIDE, PARTIAL
from sidecar.program.capture.walk import MOST_SKIPPED
from sidecar.program.restore.destinations import project_of
from sidecar.program.sqlite.backup import quick_check
from sidecar.store.fetch import FetchedSnapshot
from sidecar.store.fold import unpack_files
from sidecar.store.intake import check_hint

if TYPE_CHECKING:
    from sidecar.engine.exports.run import ExportRun
    from sidecar.engine.restores.placement import SnapshotUpload

EXPORTED = (
    "This sandbox has no usable python3: all of its memory was exported anew, with sh and tar, and its limits were checked"
    " only when it had arrived."
)
UNSEARCHED = "Without Python no projects are looked for but those that the memory has, the working folder and the home."
COPIED = "{path} was copied as a file while others may have been writing to it; its check is {check}, but rows may be missing."
LEFT_OUT = "{path} was left out: without Python it cannot be cleared of secrets in the sandbox."
LATE = (
    "What is private in it, and its credentials, left the sandbox: without Python they can only be looked for here, before"
    " anything is stored."
)
RESTORED = (
    "This sandbox has no usable python3: restored with sh and tar; a memory worker that runs there was not stopped."
)
UNNAMED = "Folders named after the paths of projects have the names they had where they were exported."
LEADS_OUT = "link leads out of the memory"
MOST_WARNINGS = 20
LONGEST_PART = 32_000
"""How long the patterns of a part may be: a command has them."""
UNIT = "\x1f"
"""Replaces newlines in file names where names are in line-based lists."""
_PLAIN = re.compile(r"[^\x00-\x1f\x7f\\]*\Z")
"""Names that every ``sha256sum`` reads without escapes."""
UNCOMPARED = "This sandbox has no sha256sum: the files were not compared after they were unpacked."


async def read_tarball(
    run: ExportRun, answer: ExportAnswer, question: ExportQuestion, known: dict[str, RootSpec], tarball: SpooledFile
) -> tuple[ExportAnswer, SpooledFile | None]:
    """Unpack the tarball of a sandbox, with the roots ``known``, into a folder of the sidecar's own, and let the real
    in-sandbox program export that.

    Return the merged answer and the bundle. The bundle is ``None`` if the program refused; the answer then says why.
    """
    engine, scratch, within = run.engine, run.scratch, build_bounds(run.engine.limits)
    answer = replace(answer, lineage=[snapshot for snapshot in answer.lineage if snapshot in question.known])
    answer = replace(answer, part=notes.parse_part("".join(answer.part[:1]).encode("ascii", "replace")))
    answer, recorded = _merge_notes(question.identity, answer)
    await clean_up(run, notes=recorded)
    home = scratch.new()
    numbers = {name: split_number(name)[1] or 1 for name, root in known.items() if root.project}
    places = {name: _choose_place(root, numbers.get(name, 0)) for name, root in known.items()}
    there = {
        root.name: [place for place in (root.hint, answer.folders.get(root.name, "")) if place.startswith("/")]
        for root in answer.roots
    }
    leaving = await run_in_thread(
        unpack_members, tarball.path, home, places, there, within, seconds=engine.timing.unpack
    )
    outside: list[str] = []
    if answer.part:
        outside = await run_in_thread(_remove_outside, PathSet(answer.part), home, places, seconds=engine.timing.unpack)
    ours = CountedSandbox(engine.open_home(home), NoProgress())
    projects = [str(home / f"projects/{number + 1}") for number in range(max(numbers.values(), default=0))]
    for project in projects:
        Path(project).mkdir(parents=True, exist_ok=True)
    here = replace(question, known=[], roots=[], projects=projects, inline_bytes=0)
    local, _ = await ask(ours, here, ExportAnswer, run.asking)
    skipped = [
        *answer.skipped,
        *(SkippedPath(path, OUTSIDE) for path in outside),
        *(SkippedPath(path, LEADS_OUT) for path in leaving),
        *local.skipped,
    ]
    if local.bundle is None and local.status != "refused":
        raise BadAnswer("The tarball that the sandbox brought holds no memory.")
    bundle = await scratch.take(ours.download(local.bundle.path)) if local.bundle is not None else None
    methods = {row.path: row.method for row in answer.databases}
    return replace(
        local,
        lineage=answer.lineage,
        reader=answer.reader,
        part=answer.part,
        notes=answer.notes,
        others=answer.others,
        folders=answer.folders,
        home=answer.home,
        user=answer.user,
        roots=[replace(root, hint=_find_hint(answer, places, root)) for root in local.roots],
        projects=[],
        skipped=skipped[:MOST_SKIPPED],
        skipped_more=answer.skipped_more + local.skipped_more + max(0, len(skipped) - MOST_SKIPPED),
        keyed={path: make_hint(hint, answer.home) for path, hint in local.keyed.items() if hint.startswith("/")},
        databases=[replace(row, method=_name_method(methods.get(row.path, ""))) for row in local.databases],
        warnings=[
            EXPORTED,
            *([UNSEARCHED] if question.projects is None else []),
            *_describe_late(local),
            *([PARTIAL % len(outside)] if outside else []),
            *answer.warnings[:MOST_WARNINGS],
            *local.warnings,
            *_describe_losses(engine, local, methods),
        ],
    ), bundle


def _remove_outside(part: PathSet, home: Path, places: dict[str, str], deadline: Deadline) -> list[str]:
    """Remove what is outside of the part from an unpacked tarball, and return its paths in the memory. Raise
    ``UnpackTimeout``."""
    removed = []
    for place, _, files in os.walk(home):
        for file in files:
            deadline.check()
            inside = Path(place, file).relative_to(home).as_posix()
            paths = [f"{name}/{inside[len(top) + 1 :]}" for name, top in places.items() if inside.startswith(f"{top}/")]
            if not any(map(part.has, paths)):
                os.unlink(home / inside)
                removed.append(min(paths, default=inside))
    return sorted(removed)


def _describe_late(local: ExportAnswer) -> list[str]:
    return [LATE] if any(local.found.values()) else []


def match_roots(engine: Engine, answer: ExportAnswer, question: ExportQuestion) -> dict[str, RootSpec]:
    """Return the root specs, by name, for the roots that the sandbox claims to send.

    Their names become paths on this machine: raise ``BadAnswer`` or ``UnsafePath`` unless each root was requested and
    is named once.
    """
    layouts = [engine.layouts[name] for name in question.layouts]
    asked = {
        (name, layout.name): root for name, layout, root, _ in list_roots(layouts, question.projects, question.roots)
    }
    known: dict[str, RootSpec] = {}
    for found in answer.roots:
        root = asked.get((found.name, found.layout))
        if root is None or found.name in known:
            raise BadAnswer(f"The sandbox brings a root {found.name[:80]!r} that was not asked for, or twice.")
        _check_place(f"The root {found.name!r}", found.hint)
        known[found.name] = root
    if answer.home:
        _check_place("The home", answer.home)
    if not known:
        raise BadAnswer("The sandbox brings a tarball without any root.")
    return known


def _merge_notes(told: Identity, answer: ExportAnswer) -> tuple[ExportAnswer, str]:
    """Parse the raw notes of a sandbox without Python. Return the answer with the typed notes, and the text that the
    sandbox is to record; empty if none.

    ``told`` is what the sandbox was asked to record.
    """
    found = [one for text in answer.noted if (one := notes.parse(text.encode("utf-8", "replace"))) is not None]
    own = next((one for one in found if one.memory == told.memory), None)
    others = notes.find_owners(told, found, answer.folders)[: notes.MOST_TOLD]
    answer = replace(
        answer,
        notes=own.tell() if own else None,
        others=[one.tell() for one in others],
    )
    objection = notes.find_objection(told, own, others, answer.folders, answer.lineage)
    refused = bool(objection) and objection not in told.allow
    if refused and own:
        return answer, ""
    # Which of the earlier folders still exist is not known here, so only the folders that were found are recorded.
    before = own._replace(roots={}) if own else None
    now = notes.build_after_export(told, before, answer.folders)
    return answer, json.dumps(now._replace(current=not refused).as_dict())


def _check_place(what: str, hint: str) -> None:
    """Raise ``UnsafePath`` for a path that is not absolute or has control characters. The shell script removes control
    characters from its answer, so an answer that has any does not come from it."""
    check_hint(what, hint)
    if not hint.startswith("/") or any(ord(c) < 32 or ord(c) == 127 for c in hint):
        raise UnsafePath(f"{what} is said to be at {hint[:200]!r}.")


def _choose_place(root: RootSpec, number: int) -> str:
    top = f"projects/{number}" if root.project else root.paths[0].removeprefix("~/")
    return posixpath.join(top, root.below).rstrip("/")


def _find_hint(answer: ExportAnswer, places: dict[str, str], root: FoundRoot) -> str:
    """Return the path that a root of the local folder has in the sandbox."""
    there = (found.hint for found in answer.roots if root.hint == f"~/{places[found.name]}")
    return make_hint(next(there, root.hint), answer.home)


def _name_method(shell: str) -> str:
    return {"sqlite3": "sqlite3-program"}.get(shell, "file-copy")


def _describe_losses(engine: Engine, local: ExportAnswer, methods: dict[str, str]) -> list[str]:
    """Return warnings about databases that were copied as files, and files that were left out."""
    copied = [
        COPIED.format(path=row.path, check=row.check) for row in local.databases if methods.get(row.path) != "sqlite3"
    ]
    filtered = [
        LEFT_OUT.format(path=f"{root.name}/{name}")
        for root in local.roots
        if root.layout in engine.layouts
        for name in (*engine.layouts[root.layout].filters, *engine.layouts[root.layout].emptied)
    ]
    return copied + filtered


@dataclass(frozen=True, slots=True)
class PlainTarball:
    """A snapshot as a plain tarball, with what SQLite says of its databases."""

    file: Path
    checks: list[FoundDatabase]


async def write_tarball(fetched: FetchedSnapshot, part: list[str], spool: Spool) -> PlainTarball:
    """Write a snapshot, or a ``part`` of one, as a plain tarball. Raise ``ProgramFailed`` if it cannot be restored from
    one."""
    if part and len(notes.encode_part(part)) > LONGEST_PART:
        raise ProgramFailed(
            "So many single paths can only be restored as a part where there is a python3. Name folders instead.",
            code="name-needs-python",
        )
    target = spool.new()
    return PlainTarball(target, await run_in_thread(_write_tarball, fetched, part, spool.new(), target))


async def send_tarball(run: SandboxRun, question: RestoreQuestion, parcel: SnapshotUpload) -> RestoreAnswer:
    """Restore a snapshot with a plain tarball and a shell script: one more upload and one more command. The tarball is
    uploaded again only if it is no longer in the sandbox."""
    engine, sandbox, fetched = run.engine, run.sandbox, parcel.fetched
    tarball = await parcel.ready.write_tarball()
    size, path = tarball.file.stat().st_size, parcel.tarball
    parcel.tarball = ""
    if not path:
        run.uploads.append(path := new_upload_path())
        engine.progress.step("sending", size)
        await sandbox.upload(path, read_chunks(tarball.file))
    script = build_restore_script(question, _plan_targets(engine, question, fetched), path, size)
    value, _ = await run_command(run.sandbox, delivery.build_shell_command(script), run.asking)
    checked = value.pop("checked", True)
    answer = parse_answer(value, RestoreAnswer, question)
    files = {path: entry for path, entry in fetched.entries.items() if entry.type == FILE}
    counts = Counter(map(get_root, files))
    answer = replace(answer, withheld=[replace(row, files=counts[row.name]) for row in answer.withheld])
    if answer.status == "unsaved":
        parcel.tarball = path
    if answer.status != "complete":
        return answer
    apart = {row.name for row in answer.withheld}
    left = {row.path for row in answer.skipped}
    return replace(
        answer,
        bytes=sum(entry.size for path, entry in files.items() if get_root(path) not in apart and path not in left),
        databases=tarball.checks,
        warnings=[RESTORED, *([] if checked else [UNCOMPARED]), *([UNNAMED] if fetched.manifest.keyed else [])],
    )


def _plan_targets(engine: Engine, question: RestoreQuestion, fetched: FetchedSnapshot) -> list[Target]:
    """Decide where each root of the snapshot goes, by the same rules as the in-sandbox program."""
    targets = []
    rules = fetched.manifest.rules
    for root in fetched.manifest.roots:
        layout = engine.layouts[root.layout]
        known, number = find_spec(root.name, layout)
        if known is None:
            raise UnknownLayout(
                f"This memory has a root {root.name[:80]!r} that its layout {root.layout!r} does not have here.",
                hint="Use the config file with which this memory was exported.",
            )
        project: str | None = None
        waits_for = ""
        if known.project and root.hint.startswith("~"):
            project = root.hint.removesuffix(f"/{known.below}") if known.below else root.hint
            waits_for = build_place(replace(known, below="", marked=False), project) if question.withhold else ""
        top = project_of(known.paths, known.below, root.hint) if question.projects is None else ""
        if top and not known.project:
            was = root.hint.removesuffix(f"/{known.below}") if known.below else root.hint
            known = replace(known, paths=(was, *known.paths))
            waits_for = build_place(RootSpec(name=known.name, project=True), top) if question.withhold else ""
        place = build_place(replace(known, marked=False), project, question.projects)
        # Its path is in a settings file, which a shell cannot parse: use the path in the manifest.
        if not known.project and (known.file or not known.paths):
            place = build_place(RootSpec(name=known.name, project=True), root.hint)
        is_needed = compile_patterns(f"{root.name}/{pattern}" for pattern in layout.required).match
        targets.append(
            Target(
                name=root.name,
                place=place,
                layout=layout,
                root=known,
                needed=[path.partition("/")[2] for path in fetched.entries if is_needed(path)],
                covered=rules.get(known.name),
                waits_for=waits_for,
                hint=root.hint,
                number=number if known.project else 0,
            )
        )
    return targets


def _build_filter(root: str, part: list[str]) -> list[str]:
    """Return the script for ``sed`` that leaves of the names in a root, one a line, those in the part."""
    mark = "\x01"
    tests = [
        f"\\{mark}^{text}${mark}b keep"
        for pattern in part
        for text in translate_to_extended(pattern.replace("\n", UNIT))
    ]
    return [f"s{mark}^\\./{mark}{root}/{mark}", *tests, "d", ":keep", f"s{mark}^{root}/{mark}./{mark}"]


def _write_tarball(fetched: FetchedSnapshot, part: list[str], folder: Path, target: Path) -> list[FoundDatabase]:
    """Write the files as ``new/<root>/…``, and the lists that ``restore.sh`` reads. Return the SQLite checks of its
    databases. Raise ``ProgramFailed`` for a damaged database, or a name that cannot be restored without Python."""
    staged = unpack_files(fetched.list_pack_files(), fetched.entries, folder)
    lists: dict[str, list[str]] = {
        "sums": [],
        "odd": [],
        **{f"{root.name}.wanted": [] for root in fetched.manifest.roots},
        **({f"{root.name}.part": _build_filter(root.name, part) for root in fetched.manifest.roots} if part else {}),
    }
    checks = []
    with (
        gzip.open(target, "wb", compresslevel=1) as plain,
        # Every tar reads the GNU format; with pax, some tars misread names.
        tarfile.open(fileobj=plain, mode="w|", bufsize=CHUNK, format=tarfile.GNU_FORMAT) as tar,
    ):
        for path in sorted(fetched.entries):
            entry = fetched.entries[path]
            if UNIT in path:
                raise ProgramFailed(
                    f"{path!r} can only be restored where there is a python3.", code="name-needs-python"
                )
            member = build_member(entry, f"new/{path}")
            line = path.replace("\n", UNIT)
            if entry.type == DIR:
                root, _, relative = line.partition("/")
                lists[f"{root}.wanted"].append(f"./{relative} {entry.mode:o}")
                member.mode = 0o700  # its contents are moved out of it
            if entry.type != FILE:
                tar.addfile(member)
                continue
            with open(staged[path].place, "rb") as contents:
                digest = hashlib.file_digest(contents, "sha256").hexdigest()
                if _PLAIN.match(path):
                    lists["sums"].append(f"{digest}  {path}")
                else:
                    lists["odd"].append(f"{digest} {line}")
                contents.seek(0)
                tar.addfile(member, contents)
            if entry.database:
                check = quick_check(staged[path].place)
                checks.append(FoundDatabase(path=path, method="staged", check=check))
                if check != "ok":
                    raise ProgramFailed(
                        f"The database {path} is damaged in this snapshot: {check}", code="database-damaged"
                    )
        for name, lines in lists.items():
            text = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
            listing = tarfile.TarInfo(name)
            listing.size = len(text)
            tar.addfile(listing, io.BytesIO(text))
    return checks
