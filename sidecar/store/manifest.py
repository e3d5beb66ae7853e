"""A snapshot's manifest and a memory's head, as they are stored.

A manifest also says what is missing from its snapshot: trimmed by a limit, or scrubbed because it is private.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, field, replace
from datetime import UTC, datetime
from json.encoder import encode_basestring_ascii
from typing import Any, Self, TypeVar

from sidecar.errors import SnapshotDamaged, UnknownFormat
from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.format.index import Entry
from sidecar.host.text import format_count
from sidecar.host.values import dataclass
from sidecar.ids import MemoryKeys, parse_snapshot_time
from sidecar.layouts import CoveredRules
from sidecar.layouts.earlier_rules import EARLIER
from sidecar.receipts import Scrubbed

FORMAT = 1
RAISED = 3
"""The format of a snapshot with files that the layouts of earlier versions did not know, and of a head that names one.
An earlier version would drop those files with its next export; a format number it does not know makes it refuse. (A
head of format 2 is the marker object of ``sidecar.store.folder_names``.)
"""
REVIEWED = 4
"""The format of a snapshot that was stored to wait for a review, and of the head of a memory that has or had one, or one
that was declined. An earlier version does not know that such a snapshot must not become the head, nor what grows out of it.
"""
NOT_KNOWN = "is in a format this version does not know."
READABLE = frozenset({FORMAT, RAISED, REVIEWED})
LONGEST_HISTORY = 500
LINES = 4096
EMPTY = '""'

Encoded = bytes  # the name of a field below hides the type's own
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A pack of a snapshot and its index: two objects, each with its size and hash."""

    id: str
    kind: str
    codec: str
    bytes: int
    sha256: str
    index_bytes: int
    index_sha256: str
    stored_bytes: int = 0
    """Its size in an encrypted store; 0: the same as ``bytes``."""
    stored_index_bytes: int = 0
    sealed: str = ""
    """Identifies the recipients it is encrypted for; empty if it is not encrypted."""

    @property
    def in_store(self) -> tuple[int, int]:
        """The sizes of the pack and of its index as a listing of the store shows them."""
        return self.stored_bytes or self.bytes, self.stored_index_bytes or self.index_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, without those that only encrypted packs have."""
        sealing = ("stored_bytes", "stored_index_bytes", "sealed")
        return {name: value for name, value in asdict(self).items() if value or name not in sealing}


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRoot:
    """A named root: its layout, and where it was."""

    name: str
    layout: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """A database of a snapshot and the result of its check."""

    path: str
    check: str
    schema: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One immutable version of a memory. ``tree`` is equal for equal contents, whatever the packs are."""

    memory: str
    snapshot: str
    created: str
    packs: list[Pack]
    roots: list[SnapshotRoot]
    files: int
    bytes: int
    tree: str
    parent: str = ""
    origin: str = "export"
    sandbox: str = ""
    conversation: str = ""
    label: str = ""
    rejected: str = ""
    pending: str = ""
    """Why it waits for a review, if it was stored for that: what it changes. What was decided is in the memory's reviews."""
    databases: list[Database] = field(default_factory=list)
    projects: list[str] = field(default_factory=list)
    """Where the projects of the export were."""
    keyed: dict[str, str] = field(default_factory=dict)
    """Folders named after a project's path, and where that project was."""
    versions: dict[str, str] = field(default_factory=dict)
    """The program version that each root's memory belongs to, if it was found."""
    hot_bytes: int = 0
    """Size of the files that a size limit never drops."""
    dropped: int = 0
    """How many files a size limit left out."""
    dropped_bytes: int = 0
    scrubbed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How many private passages and credentials were removed from each file before it left; under "": from others."""
    privacy: str = ""
    """The privacy policy under which all of it was scrubbed; "" if not all was, or it is not known."""
    covered: dict[str, CoveredRules] = field(default_factory=dict)
    """The rules by which it was made, by root; empty in snapshots of versions that did not record them."""
    generation: int = 0
    """The generation of the head it was made to become; 0 if it was not made for that, or there was no head before."""
    home: str = ""
    """The home it was exported from; "" if that was not an agent's, or is not known."""
    user: str = ""
    """The user it was exported as."""
    changes: dict[str, tuple[int, int, int]] | None = None
    """How many records were added, changed and removed since its parent, by kind; ``None`` if it is not known."""
    format: int = FORMAT

    @property
    def is_eligible(self) -> bool:
        """Whether it could be the head without a person's word: it was neither rejected nor stored for a review."""
        return not self.rejected and not self.pending

    @property
    def rules(self) -> dict[str, CoveredRules]:
        """The rules by which it was made. Without any recorded: those of the last version that did not record them."""
        return self.covered or dict(EARLIER)

    def encode(self) -> Encoded:
        covered = {
            name: {key: patterns for key, patterns in asdict(rules).items() if patterns}
            for name, rules in self.covered.items()
        }
        packs = [pack.as_dict() for pack in self.packs]
        told = {**asdict(self), "packs": packs, "covered": covered}
        if self.changes is None:
            del told["changes"]
        if not self.pending:
            del told["pending"]
        return encode_checksummed(told)

    @classmethod
    def decode(cls, data: Encoded, memory: str, snapshot: str) -> Self:
        """Parse a manifest. Raise ``SnapshotDamaged`` unless it is valid and belongs to this memory and snapshot."""
        manifest = _decode(data, cls, f"The manifest of snapshot {snapshot}")
        if (manifest.memory, manifest.snapshot) != (memory, snapshot):
            raise SnapshotDamaged(f"The manifest of snapshot {snapshot} says it belongs to another memory or snapshot.")
        return manifest

    @property
    def time(self) -> datetime:
        """When it was made. Ids continue from where a clock that was ahead left them; ``created`` does not."""
        by_id = parse_snapshot_time(self.snapshot)
        try:
            created = datetime.fromisoformat(self.created)
        except ValueError:
            return by_id
        return min(by_id, created if created.tzinfo else created.replace(tzinfo=UTC))

    @property
    def taken_out(self) -> tuple[int, int]:
        """Private passages and credentials that were removed from this snapshot."""
        counts = self.scrubbed.values()
        return sum(private for private, _ in counts), sum(credentials for _, credentials in counts)

    @property
    def packed_bytes(self) -> int:
        """The stored size of all its packs and indexes."""
        return sum(sum(pack.in_store) for pack in self.packs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The one mutable object of a memory: which snapshot a restore takes, and which it took before."""

    memory: str
    snapshot: str
    generation: int
    created: str
    files: int
    bytes: int
    history: list[tuple[str, str]]
    """(snapshot, since when), newest first."""
    hot_bytes: int = 0
    store: str = ""
    """The id of the store; "" in heads written by versions that did not know it."""
    format: int = FORMAT
    """The same as the format of its snapshot; ``REVIEWED`` once any snapshot of the memory waited for a review."""

    def encode(self) -> Encoded:
        return encode_checksummed(asdict(self))

    @classmethod
    def decode(cls, data: Encoded, memory: str) -> Self:
        """Parse a head. Raise ``SnapshotDamaged`` unless it is valid and belongs to this memory."""
        head = _decode(data, cls, f"The head of {memory}")
        if head.memory != memory:
            raise SnapshotDamaged(f"The head of {memory} says it belongs to {head.memory!r}.")
        return head

    @classmethod
    def at(cls, manifest: Manifest, now: datetime, before: Self | None, store: str = "") -> Self:
        """Return the head that names ``manifest``. ``store`` is the store's id, else it is taken from ``before``."""
        history = [(manifest.snapshot, now.isoformat(timespec="seconds")), *(before.history if before else ())]
        return cls(
            memory=manifest.memory,
            snapshot=manifest.snapshot,
            # A time in milliseconds: a memory that is deleted and created again has a higher generation than it ever
            # had.
            generation=before.generation + 1 if before else int(now.timestamp() * 1000),
            created=manifest.created,
            files=manifest.files,
            bytes=manifest.bytes,
            history=history[:LONGEST_HISTORY],
            hot_bytes=manifest.hot_bytes,
            store=store or (before.store if before else ""),
            format=REVIEWED if before is not None and before.format == REVIEWED else manifest.format,
        )

    @property
    def newest(self) -> str:
        """The latest of the snapshot ids it remembers."""
        return max([self.snapshot, *(snapshot for snapshot, _ in self.history)])

    def was_head(self, snapshot: str) -> bool:
        """Return whether a snapshot is in the head's history."""
        return any(snapshot == past for past, _ in self.history)

    def ahead(self, snapshot: str) -> bool:
        """Return whether a snapshot became head before the time in its id: then a clock was wrong, and its manifest has
        the right time."""
        since = next((since for past, since in reversed(self.history) if past == snapshot), "")
        return since != "" and parse_snapshot_time(snapshot).isoformat(timespec="seconds") > since


def _decode(data: bytes, kind: type[T], what: str) -> T:
    """Parse a checksummed object. Raise SnapshotDamaged, or UnknownFormat for a format of a later version."""
    import msgspec  # late: a command reads from the store before it has something to decode

    try:
        value = decode_checksummed(data)
    except ValueError as problem:
        raise SnapshotDamaged(f"{what} is damaged: {problem}.") from None
    form = value.get("format")
    if type(form) is not int or form not in READABLE:
        raise UnknownFormat(f"{what} {NOT_KNOWN}")
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as problem:
        raise SnapshotDamaged(f"{what} is not valid: {problem}.") from None


def decode_object(data: bytes, kind: type[T], form: int) -> T:
    """Parse one of the small objects beside manifests and heads. Raise ``ValueError`` if it is not valid, or not of this
    format."""
    import msgspec  # as above

    value = decode_checksummed(data)
    if value.pop("format", None) != form:
        raise ValueError("it is in a format this version does not know")
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as problem:
        raise ValueError(str(problem)) from None


def digest_tree(entries: dict[str, Entry]) -> str:
    """Return a digest of a snapshot's contents: paths, types, modes and contents, not times."""
    digest, text, paths = hashlib.sha256(), encode_basestring_ascii, sorted(entries)
    # The JSON is put together by hand, many lines at a time: memories have thousands of files, and each export digests
    # all of them.
    for start in range(0, len(paths), LINES):
        lines = [
            f'[{text(path)},"{kind}",{mode},{size},"{contents}",{text(target) if target else EMPTY}]\n'
            for path, kind, mode, size, _, contents, _, _, target, _ in map(
                entries.__getitem__, paths[start : start + LINES]
            )
        ]
        digest.update("".join(lines).encode())
    return digest.hexdigest()


def check_sizes(manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Raise ``SnapshotDamaged`` unless every object of a snapshot is listed with its size."""
    keys = MemoryKeys.of(manifest.memory)
    for pack in manifest.packs:
        for key, size in zip((keys.pack(pack.id, pack.codec), keys.index(pack.id)), pack.in_store, strict=True):
            if sizes.get(key) != size:
                raise SnapshotDamaged(f"Snapshot {manifest.snapshot} cannot be used: {key} is missing or cut short.")


def describe_trimmed(manifest: Manifest) -> str:
    """Return a message about a snapshot that a size limit has trimmed; "" if it is whole."""
    if not manifest.dropped:
        return ""
    files, size = format_count(manifest.dropped, "file"), format_count(manifest.dropped_bytes, "byte")
    return f"This snapshot was trimmed: {files} with {size} {'was' if manifest.dropped == 1 else 'were'} left out."


def count_scrubbed(manifest: Manifest) -> Scrubbed:
    """Return how many private passages and credentials were removed, for a receipt."""
    private, credentials = manifest.taken_out
    return Scrubbed(private=private, credentials=credentials)


def rebuild_head(
    manifests: Collection[Manifest], accepted: Mapping[str, datetime] | None = None, replaced: Collection[str] = ()
) -> Head | None:
    """Return a head with the history that the manifests tell, for when the head itself is damaged or missing; ``None`` if
    none of them was made to become the head.

    The manifests say what each was made for: one that was to become the head has the ``generation`` of that head, one
    that was refused, or waits for a review, says so, and the first of all has neither a parent nor a generation. A
    snapshot that was first stored beside the head and made the head later cannot be told from one that never was, except
    for those that were ``accepted`` in a review, each with the time, and the heads that these ``replaced``.

    Its snapshot is the latest of those. Whether that was still the head at the end is not known: there may have been a
    rollback.
    """
    times = accepted or {}
    good = [manifest for manifest in manifests if manifest.is_eligible and manifest.snapshot not in times]
    line = _list_heads(good, replaced if times else None)
    if times:
        line = [*line, *(manifest for manifest in manifests if manifest.snapshot in times)]
        line.sort(key=lambda one: (times.get(one.snapshot, one.time), one.snapshot))
    head: Head | None = None
    for manifest in line:
        generation = manifest.generation or (head.generation if head else 0)
        head = replace(Head.at(manifest, times.get(manifest.snapshot, manifest.time), head), generation=generation)
    return head


def _list_heads(good: Collection[Manifest], replaced: Collection[str] | None) -> list[Manifest]:
    """Return the manifests that were the head, the first one first. ``replaced``: those that are known to have been it;
    ``None`` if nothing was ever accepted in a review."""
    made = sorted((one for one in good if one.generation), key=lambda one: (one.generation, one.snapshot))
    parents = {one.parent for one in made}
    # Of two that were made for the same generation one lost the race: not the one that others grew out of.
    by_place: dict[int, list[Manifest]] = {}
    for one in made:
        by_place.setdefault(one.generation, []).append(one)
    made = [next((one for one in rivals if one.snapshot in parents), rivals[0]) for rivals in by_place.values()]
    return [*_list_first_heads(good, parents, replaced), *made]


def _list_first_heads(
    good: Collection[Manifest], parents: Collection[str], replaced: Collection[str] | None
) -> list[Manifest]:
    """Return those that became the head when there was none: others grew out of them, or replaced them; else the oldest
    without a parent."""
    without = sorted((one for one in good if not one.generation), key=lambda one: one.snapshot)
    grown = [one for one in without if one.snapshot in parents or one.snapshot in (replaced or ())]
    oldest = min(good, key=lambda one: one.snapshot, default=None)
    # Where the first head was accepted in a review, an export of a foreign sandbox has neither parent nor generation too.
    if replaced is None and not grown and oldest is not None and not oldest.generation and not oldest.parent:
        return [oldest]
    return grown
