"""The commands that read a store, or change it without a sandbox."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from sidecar.cli.result import Result, Table, format_size, format_time
from sidecar.engine import Engine
from sidecar.engine.queries import (
    build_not_found_error,
    list_memories,
    list_snapshots,
    read_contents,
)
from sidecar.errors import UsageError
from sidecar.host.text import format_count
from sidecar.ids import check_memory_id, escape_id
from sidecar.models.answers import Deleted, Entry, Review, Snapshot
from sidecar.models.counts import describe_counts
from sidecar.store.manifest import count_scrubbed, describe_trimmed


async def run_list(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``list``: the memories of the store."""
    found = await list_memories(engine.repository)
    table = Table(
        ("MEMORY", "HEAD", "CREATED (UTC)", "SNAPSHOTS", "FILES", "SIZE", "STORED"),
        [
            (
                escape_id(row.memory),
                row.head or ("damaged" if row.problem else "none"),
                format_time(row.created) if row.created else "",
                f"{row.snapshots} ({row.pending} pending)" if row.pending else str(row.snapshots),
                f"{row.files:,}",
                format_size(row.bytes),
                format_size(row.stored_bytes),
            )
            for row in found.memories
        ],
        f"There are no memories in {found.store}.",
    )
    return Result(asdict(found), [table])


async def run_log(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``log``: the snapshots of a memory."""
    found = await list_snapshots(engine.repository, args.memory)
    table = Table(
        (
            *("SNAPSHOT", "CREATED (UTC)", "STANDING", "FILES", "SIZE", "STORED", "PACKS"),
            *("CONVERSATION", "SANDBOX", "WHAT CHANGED", "LABEL"),
        ),
        [
            (
                row.snapshot,
                format_time(row.created) if row.created else "",
                _describe_standing(row, found.head),
                f"{row.files:,}",
                format_size(row.bytes),
                format_size(row.stored_bytes),
                str(row.packs),
                row.conversation,
                row.sandbox,
                describe_counts(row.changes) if row.standing != "damaged" else "",
                " ".join(
                    filter(
                        None,
                        [
                            row.problem or row.label or _describe_objection(row),
                            _describe_pin(row),
                            _describe_scrubbed(row),
                        ],
                    )
                ),
            )
            for row in found.snapshots
        ],
    )
    words: list[str | Table] = []
    if found.problem:
        words = [f"{found.problem} `memory-sidecar verify {args.memory}` says what to do."]
    return Result(asdict(found), [*words, table])


def _describe_standing(row: Snapshot, head: str | None) -> str:
    was = ["head"] if row.standing == "damaged" and row.snapshot == head else []
    return ", ".join([*was, row.standing, *(["pinned"] if row.pinned else [])])


def _describe_pin(row: Snapshot) -> str:
    return f"({row.pinned_because})" if row.pinned_because else ""


def _describe_objection(row: Snapshot) -> str:
    """Return why a snapshot was rejected, or what was decided about it; empty for one that became the head anyway."""
    if row.review is not None:
        return _describe_review(row.review)
    told = {"rejected": row.rejected, "pending": row.pending}.get(row.standing, "")
    return told.partition("\n")[0]


def _describe_review(review: Review) -> str:
    by = f" by {review.by}" if review.by else ""
    why = f": {review.because}" if review.because else ""
    return f"{review.decision}{f' with {review.within}' if review.within else ''}{by}{why}"


def _describe_scrubbed(row: Snapshot) -> str:
    return f"({row.scrubbed:,} private passages or credentials taken out)" if row.scrubbed else ""


async def run_show(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``show``: a snapshot and its entries."""
    contents = await read_contents(engine.repository, args.memory, args.snapshot)
    manifest = contents.manifest
    words: list[str | Table] = [
        f"{manifest.memory} {manifest.snapshot} ({_describe_standing(contents.row, contents.head)})",
        f"Made {format_time(manifest.created)} UTC from {manifest.sandbox or manifest.origin}",
        f"{format_count(manifest.files, 'file')}, {format_size(manifest.bytes)}",
        f"{format_count(len(manifest.packs), 'pack')}, {format_size(manifest.packed_bytes)}",
        *(
            f"{name}: {value}"
            for name, value in (("Label", manifest.label), ("Conversation", manifest.conversation))
            if value
        ),
        *([f"Damaged: {contents.row.problem}"] if contents.row.problem else []),
        *_describe_standing_fully(contents.row),
        *([f"Pinned because {contents.row.pinned_because}"] if contents.row.pinned_because else []),
        *([trimmed] if (trimmed := describe_trimmed(manifest)) else []),
        *([scrubbed] if (scrubbed := count_scrubbed(manifest).words) else []),
        Table(
            ("MODE", "SIZE", "PATH"),
            [
                (f"{row.mode:o}" if row.type != "link" else "link", format_size(row.size), _format_path(row))
                for row in contents.entries
            ],
        ),
    ]
    entries = [asdict(row) for row in contents.entries]
    own = ("standing", "problem", "pinned", "pinned_because", "pending")
    standing = {name: getattr(contents.row, name) for name in own}
    standing["review"] = asdict(contents.row.review) if contents.row.review else None
    return Result({**asdict(manifest), **standing, "entries": entries}, words)


def _describe_standing_fully(row: Snapshot) -> list[str]:
    """Return the lines about a review, and why a snapshot was rejected, or waits or waited."""
    words = []
    if row.review is not None:
        when = f" at {format_time(row.review.at)} UTC" if row.review.at else ""
        words = [f"Review: {_describe_review(row.review)}{when}"]
    elif row.standing == "rejected":
        words = [f"Rejected: {row.rejected.partition(chr(10))[0]}"]
        words += [f"    {line}" for line in row.rejected.split("\n")[1:]]
    if row.pending:
        first, *rest = row.pending.split("\n")
        told = first.replace("It waits", "It waited", 1) if row.review is not None else first
        words += [told, *(f"    {line}" for line in rest)]
    return words


def _format_path(row: Entry) -> str:
    suffix = {"dir": "/", "link": f" -> {row.target}"}.get(row.type, "")
    return f"{row.path}{suffix}"


async def run_fork(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``fork``."""
    from sidecar.engine.heads import fork

    done = await fork(engine.repository, args.memory, args.new, args.snapshot, engine.review)
    return Result({**asdict(done), "from": args.memory}, [f"{done.memory}: {done.snapshot}, a {done.origin}."])


async def run_rollback(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``rollback``."""
    from sidecar.engine.heads import rollback

    done = await rollback(engine.repository, args.memory, args.snapshot, engine.review)
    was = done.previous or "unreadable"
    return Result(asdict(done), [f"{args.memory}: the head is {done.head} now; it was {was}. Nothing was removed."])


async def run_accept(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``accept``."""
    from sidecar.cli.audit import find_user_name
    from sidecar.engine.reviews import Word, accept

    word = Word(by=find_user_name(), because=args.because)
    done = await accept(engine.repository, args.memory, args.snapshot, word)
    replaced = f"It replaces {done.previous}" if done.previous else "There was no head that could be read"
    kept = ", which is pinned" if done.pinned else ""
    return Result(
        asdict(done),
        [
            f"{done.memory}: the head is {done.head} now, which was {done.standing}. {replaced}{kept}. Nothing was removed.",
            f"Accepted: {done.reason.headline} [{done.reason.code}]",
            *([f"With it: {', '.join(done.included)}"] if done.included else []),
            *([f"To go back: memory-sidecar rollback {done.memory} {done.previous}"] if done.previous else []),
        ],
    )


async def run_decline(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``decline``."""
    from sidecar.cli.audit import find_user_name
    from sidecar.engine.reviews import Word, decline

    word = Word(by=find_user_name(), because=args.because)
    done = await decline(engine.repository, args.memory, args.snapshot, word)
    return Result(
        asdict(done),
        [
            f"{done.memory}: {done.snapshot} is declined. The head is {done.head or 'not there yet'}, as before. Nothing was"
            " removed.",
            "What grows out of it is rejected. A restore of latest sets the sandbox that it is from back to the head.",
        ],
    )


async def run_delete(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``delete``. Raise ``UsageError`` without ``--yes``."""
    check_memory_id(args.memory)
    if not args.yes:
        raise UsageError(
            f"This removes every snapshot of {args.memory} for good.", hint="Say --yes if that is what you want."
        )
    if not await engine.repository.exists(args.memory):
        raise build_not_found_error(engine.repository, args.memory)
    from sidecar.service.attachments.attachment import Attachments

    await Attachments(engine.repository.store).remove_all(args.memory)
    removed = await engine.repository.delete_memory(args.memory)
    from sidecar.engine.briefs import forget_briefs  # late: other commands here do without it

    forget_briefs(args.memory)
    return Result(
        asdict(Deleted(memory=args.memory, removed=removed)),
        [f"{args.memory}: every byte removed ({format_count(removed, 'object')})."],
    )
