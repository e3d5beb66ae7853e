"""Export, inside the sandbox: find the memory, copy what changed since the base into a pack, say what was found."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from typing import TYPE_CHECKING, Any

from . import cache, index, keys, reading
from .bundling import Bundle
from .fitting import Fit
from .refusal import Refusal
from .roots import Root, find_roots, keyed_here, projects_here
from .scratch import Scratch
from .steady import Steady
from .versions import version_here
from .walk import Found, Skipped, link_target, walk

if TYPE_CHECKING:
    from .trimming import Dropped

PERMISSIONS = 0o777


class Export:
    """One run. ``request`` is what the sidecar asked for; ``answer`` is what it is told."""

    def __init__(self, request: dict[str, Any], scratch: Scratch, home: str, fit: Fit) -> None:
        self.request = request
        self.scratch = scratch
        self.fit = fit
        self.home = home
        self.roots: list[Root] = [
            root._replace(keys=keys.recalled(scratch.memory, root.name, root.layout))
            for root in find_roots(request["layouts"], request["projects"], home)
        ]
        self.lineage = cache.lineage(scratch.memory, request["known"])
        usable = bool(self.lineage) and self.lineage[0] not in request.get("unusable", [])
        self.base = cache.load(scratch.memory, self.lineage) if usable else None
        self.rules = hashlib.sha256(json.dumps(request["layouts"], sort_keys=True).encode()).hexdigest()
        self.started = time.time_ns()
        self.entries: dict[str, cache.Row] = {}
        self.changes: list[index.Change] = []
        self.skipped = Skipped()
        self.warnings: list[str] = []
        self.databases: list[dict[str, Any]] = []
        self.dropped: dict[str, Dropped] = {}
        self.total = 0
        self.taken = (0, 0)
        self.refreshed = False
        self.bundle = Bundle(scratch, request.get("zstd", True))

    def run(self) -> dict[str, Any]:
        for root in self.roots:
            if "worker" in root.layout:
                from .drain import drained

                self.warnings += drained(root, self.request["worker_wait"])
        for one in self._found():
            if one.path not in self.dropped:
                self._take(one)
        gone = sorted(self._gone())
        if self.taken[1] or self.fit.layouts:
            sizes = {path: row[0][index.SIZE] for path, row in self.entries.items()}
            self.fit.check_all(sizes, {root.name: root.layout["name"] for root in self.roots}, self.taken)
        if self.base is not None and not self.changes and not gone:
            if self.refreshed:
                self._remember(self.base.snapshot)
            return self._answer("unchanged")
        answer = self._finish(gone)
        self._remember(self.request["snapshot"])
        return answer

    def _found(self) -> list[Found]:
        """What there is, but for what is as before, which is taken at once, and what there is no room for."""
        if self.base is not None and self.base.rules == self.rules and self.fit.plain:
            steady = Steady(self.base, self.fit.largest)
            found = self._walk(steady)
            if self.fit.holds(found, steady):
                self.entries, self.total = steady.rows, steady.bytes
                return found
            self.skipped = Skipped()
        self.refreshed = self.base is not None and self.base.rules != self.rules
        found = self._walk(None)
        if not self.fit.plain or not self.fit.holds(found, None):
            self.dropped = self.fit.dropped(found)
        return found

    def _walk(self, steady: Steady | None) -> list[Found]:
        return [one for root in self.roots for one in walk(root, self.skipped, self.fit.most_found, steady)]

    def _gone(self) -> list[str]:
        """What the base has and the sandbox has not. Roots of layouts that were not asked for stay as the base has them."""
        asked = {spec["name"] for layout in self.request["layouts"] for spec in layout["roots"]}
        gone = []
        for path, row in self.base.entries.items() if self.base is not None else ():
            if path in self.entries:
                continue
            root = path.split("/")[0]
            stem, _, number = root.rpartition("-")
            if root in asked or (number.isdigit() and stem in asked):
                gone.append(path)
            else:
                self.entries[path] = row
                self.total += row[0][index.SIZE]
                self.taken = self.taken[0] + row[0][index.SIZE], self.taken[1] + 1
        return gone

    def _remember(self, snapshot: str) -> None:
        cache.go_on(self.scratch.memory, cache.Base(snapshot, self.started, self.entries, rules=self.rules), self.base)

    def _take(self, found: Found) -> None:
        mode = found.status.st_mode
        if stat.S_ISDIR(mode):
            self._record(index.Entry(found.path, index.DIR, mode & PERMISSIONS), [])
        elif stat.S_ISLNK(mode):
            target = link_target(found.place, found.root, found.relative)
            if target is None:
                self.skipped.add(found.path, "link leads out of the memory")
            else:
                self._record(index.Entry(found.path, index.LINK, target=target), [])
        else:
            try:
                self._take_file(found)
            except FileNotFoundError:
                self.warnings.append("%s vanished while it was read." % found.path)
            except PermissionError:
                raise Refusal("unreadable", "%s may not be read by this user." % found.path) from None

    def _take_file(self, found: Found) -> None:
        known = self.base.known(found.path) if self.base is not None else None
        is_database = known.entry.database if known else False
        signature = _database_signature(found.place) if is_database else cache.signature(found.status)
        same = self.base.same(found.path, signature) if self.base is not None else None
        if same is not None:
            self._count(found, same.entry.size)
            self.entries[found.path] = same
            if is_database:
                self.databases.append({"path": found.path, "method": "unchanged", "check": "ok"})
                self._say_free(found, found.place)
            return
        if found.root.rules.careful(found.relative):
            self.warnings.append("%s is said to hold credentials; it is part of this memory." % found.path)
        drop = found.root.rules.filters.get(found.relative)
        if drop is not None:
            self._take_filtered(found, known, drop)
        elif found.root.rules.database(found.relative) or reading.is_database(found.place):
            self._take_database(found, known)
        else:
            contents = reading.read_file(found.place, known, self.scratch.work)
            self._count(found, contents.size)
            if not contents.steady:
                self.warnings.append("%s kept changing while it was read." % found.path)
            self._take_contents(found, known, contents, signature, mtime=found.status.st_mtime_ns)

    def _take_filtered(self, found: Found, known: cache.Known | None, drop: list[str]) -> None:
        from . import filters

        with open(found.place, "rb") as file:
            text = filters.filtered(file.read(self.fit.largest), drop)
        if text is None:
            self.skipped.add(found.path, "not valid JSON, so it could not be cleared of secrets")
            return
        self._count(found, len(text))
        contents = reading.read_bytes(text)
        self._take_contents(found, known, contents, cache.signature(found.status), _mtime(found, known, contents))

    def _take_database(self, found: Found, known: cache.Known | None) -> None:
        from . import databases

        signature = databases.signature(found.place)
        target = os.path.join(self.scratch.work, "database")
        emptied = found.root.rules.emptied(found.relative)
        copied = databases.copy_database(found.place, target, self.request["database_wait"], emptied)
        if emptied and copied.check != "ok":
            self.skipped.add(found.path, "damaged, so it could not be cleared of secrets")
            os.unlink(target)
            return
        row: dict[str, Any] = {"path": found.path, "method": "online-backup", "check": copied.check}
        schema = found.root.layout.get("schemas", {}).get(found.relative)
        if schema is not None and copied.check == "ok":
            row["schema"] = databases.ask(target, schema)
        self.databases.append(row)
        size = os.path.getsize(target)
        self._count(found, size)
        self._say_free(found, target)
        with open(target, "rb") as stream:
            first = hashlib.sha256(databases.without_counters(stream.read(copied.page))).hexdigest()
            stream.seek(0)
            contents = reading.read_stream(stream, size, known, self.scratch.work, copied.page)
            if contents.blocks == [0] and known is not None and first == known.first_page and size == known.entry.size:
                # Only counters moved (a checkpoint, a re-opened copy): nothing a reader of the data could tell.
                self._take_same(known, signature, first)
            else:
                self._take_contents(found, known, contents, signature, _mtime(found, known, contents), first)
        os.unlink(target)

    def _say_free(self, found: Found, place: str) -> None:
        from . import databases

        words = databases.mostly_free(found.path, place)
        self.warnings += [words] if words else []

    def _take_same(self, known: cache.Known, signature: list[Any], first_page: str) -> None:
        self.entries[known.entry.path] = cache.Known(known.entry, signature, first_page)
        self.refreshed = True

    def _take_contents(
        self,
        found: Found,
        known: cache.Known | None,
        contents: reading.Contents,
        signature: list[Any],
        mtime: int,
        first_page: str = "",
    ) -> None:
        entry = index.Entry(
            found.path,
            index.FILE,
            found.status.st_mode & PERMISSIONS,
            contents.size,
            mtime,
            contents.digest,
            contents.block,
            contents.sums,
            database=bool(first_page),
        )
        blocks = contents.blocks
        if (
            known is not None
            and entry[:2] + entry[3:4] + entry[5:] == known.entry[:2] + known.entry[3:4] + known.entry[5:]
        ):
            blocks = []
        if (
            self._record(entry, signature, blocks, contents.carried_sums() if blocks else b"", first_page)
            and blocks != []
        ):
            self.bundle.add(entry, blocks, contents.carried, contents.length)
        contents.carried.close()

    def _record(
        self,
        entry: index.Entry,
        signature: list[Any],
        blocks: list[int] | None = None,
        sums: bytes = b"",
        first_page: str = "",
    ) -> bool:
        """Note an entry; return whether it differs from the base. Folders and links are packed here, in a full pack."""
        known = self.base.known(entry.path) if self.base is not None else None
        self.entries[entry.path] = cache.Known(entry, signature, first_page)
        if known is not None and known.entry == entry:
            self.refreshed = self.refreshed or known.signature != signature or bool(signature)
            return False
        self.changes.append(index.Change(entry if blocks is None else entry._replace(sums=sums), blocks))
        if entry.type != index.FILE and self.base is None:
            self.bundle.packer.add(entry, None, 0)
        return True

    def _count(self, found: Found, size: int) -> None:
        self.total += size
        self.fit.count(found, size, self.total)

    def _finish(self, gone: list[str]) -> dict[str, Any]:
        kind = "delta" if self.base is not None else "full"
        told = self.bundle.finish(index.Index(kind, self.changes, gone))
        self.fit.check_pack(told["bundle"]["bytes"], self.bundle.carried)
        return dict(
            self._answer("changed"),
            projects=projects_here(self.request["projects"], self.home),
            keyed=keyed_here(self.roots, self.request["projects"], self.home, self.entries),
            versions={root.name: version_here(root.layout, self.home) for root in self.roots},
            **told,
        )

    def _answer(self, status: str) -> dict[str, Any]:
        return {
            "status": status,
            "base": self.base.snapshot if self.base is not None else "",
            "lineage": self.lineage,
            "files": sum(row[0][index.TYPE] == index.FILE for row in self.entries.values()),
            "bytes": self.total,
            "roots": [
                {"name": root.name, "layout": root.layout["name"], "hint": root.hint}
                for root in self.roots
                if any(path.startswith(root.name + "/") for path in self.entries)
            ],
            "databases": self.databases,
            "skipped": self.skipped.rows,
            "skipped_more": self.skipped.more,
            "warnings": self.warnings[:100],
            **self._left_out(),
        }

    def _left_out(self) -> dict[str, Any]:
        if not self.dropped:
            return {}
        from .trimming import report

        return report(self.dropped.values())


def _database_signature(place: str) -> list[Any]:
    from . import databases

    return databases.signature(place)


def _mtime(found: Found, known: cache.Known | None, contents: reading.Contents) -> int:
    """Databases and filtered files are rewritten without changing; then their time is no change either."""
    if known is not None and (known.entry.digest, known.entry.size) == (contents.digest, contents.size):
        return known.entry.mtime
    return found.status.st_mtime_ns
