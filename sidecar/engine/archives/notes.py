"""Notes in a tarball: what a manifest knows and files cannot say, as JSON in the ``comment`` of pax headers, which
other programs skip."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import field, replace

import msgspec

from sidecar.engine.archives.homes import Layouts, assign_project_places
from sidecar.format.index import Entry
from sidecar.format.protocol import ExportAnswer, FoundRoot
from sidecar.format.roots import get_root
from sidecar.host.values import dataclass
from sidecar.layouts import find_spec
from sidecar.store.manifest import Manifest

BEGIN = "memory-sidecar: "


@dataclass(frozen=True, slots=True, kw_only=True)
class TarballNotes:
    """The notes, as in a manifest: the paths of the projects, in order; the project of each folder that is named after
    one; and the versions of the programs whose memory it is."""

    projects: list[str] | None = None
    keyed: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def build_header(manifest: Manifest, projects: list[str]) -> dict[str, str]:
    """Build the pax header of a whole tarball with these projects."""
    return _encode_comment({"projects": projects, "versions": manifest.versions})


def build_member_headers(manifest: Manifest, entries: Mapping[str, Entry]) -> dict[str, dict[str, str]]:
    """Build the pax headers of single members, by path: one for the first member in each folder that is named after a
    project."""
    keyed, headers = dict(manifest.keyed), {}
    for path in sorted(entries) if keyed else ():
        folder = "/".join(path.split("/")[:3])
        if folder in keyed:
            headers[path] = _encode_comment({"keyed": {folder: keyed.pop(folder)}})
    return headers


def _encode_comment(note: dict[str, object]) -> dict[str, str]:
    return {"comment": BEGIN + json.dumps(note)} if any(note.values()) else {}


def pick_comments(headers: Mapping[str, str]) -> dict[str, None]:
    """Return the sidecar's comment in a member's headers, if there is one. A member without a comment of its own has
    that of the whole tarball."""
    comment = headers.get("comment", "")
    return {comment: None} if comment.startswith(BEGIN) else {}


def parse_comments(comments: Iterable[str]) -> TarballNotes:
    """Merge the notes of all comments. Comments that cannot be parsed are ignored."""
    projects: list[str] | None = None
    keyed: dict[str, str] = {}
    versions: dict[str, str] = {}
    for comment in comments:
        try:
            # Not msgspec's own decoder: it refuses lone surrogates, which paths that are not UTF-8 contain.
            more = msgspec.convert(json.loads(comment.removeprefix(BEGIN)), TarballNotes, strict=True)
        except (ValueError, RecursionError):  # msgspec.ValidationError is a ValueError
            continue
        projects = projects if more.projects is None else more.projects
        keyed.update(more.keyed)
        versions.update(more.versions)
    return TarballNotes(projects=projects, keyed=keyed, versions=versions)


def apply_notes(answer: ExportAnswer, noted: TarballNotes, layouts: Layouts) -> ExportAnswer:
    """Rewrite the answer about a folder that a tarball was unpacked into, as the original machine would have answered."""
    projects = {
        f"~/{place}".rstrip("/"): project for project, place in assign_project_places(noted.projects or []).items()
    }

    def moved(root: FoundRoot) -> FoundRoot:
        spec, _ = find_spec(root.name, layouts.get(root.layout))
        below = f"/{spec.below}" if spec and spec.below else ""
        was = projects.get(root.hint.removesuffix(below)) if spec and spec.project else None
        return root if was is None else replace(root, hint=was.rstrip("/") + below or was)

    names = {root.name for root in answer.roots}
    return replace(
        answer,
        roots=[moved(root) for root in answer.roots],
        projects=answer.projects if noted.projects is None else noted.projects,
        keyed=answer.keyed | {path: hint for path, hint in noted.keyed.items() if get_root(path) in names},
        versions=answer.versions | noted.versions,
    )
