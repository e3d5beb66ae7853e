"""``export``, ``restore``, ``import`` and ``download``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidecar.cli.result import Result, Table, format_size
from sidecar.engine.core import Engine
from sidecar.errors import SidecarError, UsageError
from sidecar.host.files import write_whole
from sidecar.host.text import format_count
from sidecar.host.work import gather_few
from sidecar.policy.limits import REASONS
from sidecar.receipts import ExportOutcome, ExportReceipt, RestoreOutcome, RestoreReceipt

if TYPE_CHECKING:
    from sidecar.engine.restores.source import SnapshotSource

EXPORT_EXITS = {ExportOutcome.DIVERGED: 3, ExportOutcome.REJECTED: 3, ExportOutcome.PENDING: 3}
RESTORE_EXITS = {RestoreOutcome.INCOMPLETE: 4}
MOST_SHOWN = 20


async def run_export(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``export``."""
    from sidecar.engine import ExportRequest, export

    sandbox = engine.open_sandbox(args.sandbox, wake=args.wake, user=args.user, local=engine.local)
    try:
        request = ExportRequest(
            memory=args.memory,
            layouts=tuple(args.layout),
            projects=_list_projects(args),
            conversation=args.conversation,
            label=args.label,
            force=args.force,
            allow=tuple(args.allow),
        )
        return build_export_result(await export(engine, sandbox, request))
    finally:
        await sandbox.close()


async def run_restore(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``restore``, into one sandbox or into several."""
    from sidecar.engine import RestoreRequest, restore

    request = RestoreRequest(
        memory=args.memory,
        snapshot=args.snapshot,
        mode=args.mode,
        projects=_list_projects(args),
        force=args.force,
        withhold_projects=args.withhold_projects,
        must_exist=args.must_exist,
        discard=args.discard,
        read_only=args.read_only,
        label=args.label,
        only=tuple(args.only),
        brief=_choose_budget(args),
        brief_path=args.brief,
    )

    async def restore_into(ref: str, source: SnapshotSource | None = None) -> RestoreReceipt:
        sandbox = engine.open_sandbox(ref, wake=args.wake, user=args.user, local=engine.local)
        try:
            return await restore(engine, sandbox, request, source)
        finally:
            await sandbox.close()

    refs = list(args.sandbox)
    if len(refs) == 1:
        return build_restore_result(await restore_into(refs[0]))
    if twice := {ref for ref in refs if refs.count(ref) > 1}:
        raise UsageError(f"The sandbox {min(twice)} is named twice.", hint="Name each sandbox once.")
    from sidecar.engine.restores.source import MOST_AT_ONCE, open_source

    await engine.repository.check_new_memory(args.memory)

    async def try_restore(ref: str) -> RestoreReceipt | SidecarError:
        try:
            return await restore_into(ref, source)
        except SidecarError as problem:
            return problem

    async with open_source(engine, request) as source:
        results = await gather_few(try_restore, refs, MOST_AT_ONCE)
    return build_restores_result(args.memory, dict(zip(refs, results, strict=True)))


def build_restores_result(memory: str, results: dict[str, RestoreReceipt | SidecarError]) -> Result:
    """Return the result of a restore into several sandboxes. Exit code 4 if one is incomplete, else 1 if one failed."""
    words: list[str | Table] = []
    rows: list[dict[str, Any]] = []
    codes = set()
    for ref, result in results.items():
        if isinstance(result, SidecarError):
            codes.add(1)
            rows.append({"sandbox": ref, "receipt": None, "error": result.as_dict()})
            words.append(f"{memory}: NOT restored into {ref}: {result.message} [{result.code}]")
            words += [f"  {result.hint}"] if result.hint else []
            continue
        one = build_restore_result(result)
        codes.add(one.exit_code)
        rows.append({"sandbox": ref, "receipt": one.document, "error": None})
        words += one.words
    done = sum(row["error"] is None and row["receipt"]["outcome"] != RestoreOutcome.INCOMPLETE for row in rows)
    words.append(f"{done:,} of {len(rows):,} sandboxes have it.")
    outcome = RestoreOutcome.COMPLETE if done == len(rows) else RestoreOutcome.INCOMPLETE
    document = {"outcome": outcome, "memory": memory, "complete": done == len(rows), "sandboxes": rows}
    return Result(document, words, next((code for code in (4, 1) if code in codes), 0))


def _choose_budget(args: argparse.Namespace) -> int:
    """Return how many tokens the brief of a restore has at most; 0 without one. Raise ``UsageError``."""
    if args.tokens is not None and not args.brief:
        raise UsageError("--tokens is about the brief of a restore.", hint="Say where it goes: --brief PATH")
    return (2000 if args.tokens is None else args.tokens) if args.brief else 0


async def run_import(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``import``."""
    from sidecar.engine import ExportRequest
    from sidecar.engine.archives.tarballs import adopt

    archive = Path(args.file)
    if not archive.is_file():
        raise UsageError(f"There is no file {archive}.")
    request = ExportRequest(
        memory=args.memory,
        layouts=tuple(args.layout),
        label=args.label,
        force=args.force,
        allow=tuple(args.allow),
    )
    return build_export_result(await adopt(engine, archive, request))


async def run_download(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``download``: write a tarball to a file, or with ``-o -`` to stdout."""
    from sidecar.engine.archives.tarballs import download

    if args.output == "-":
        if args.json:
            raise UsageError("The tarball and the JSON document cannot both go to stdout.", hint="Name a file with -o.")
        await download(engine, args.memory, args.snapshot, sys.stdout.buffer, "gz")
        return Result({})
    target = Path(args.output)
    codec = {".zst": "zst", ".tar": ""}.get(target.suffix, "gz")
    with write_whole(target) as file:
        manifest = await download(engine, args.memory, args.snapshot, file, codec)
    written = target.stat().st_size
    document = {
        "memory": args.memory,
        "snapshot": manifest.snapshot,
        "file": str(target),
        "bytes": manifest.bytes,
        "files": manifest.files,
        "packed_bytes": written,
    }
    words = f"{target}: {format_count(manifest.files, 'file')} of {manifest.snapshot}, {format_size(written)} packed."
    return Result(document, [words, f"Unpack it with: tar -xf {target} -C HOME"])


def _list_projects(args: argparse.Namespace) -> tuple[str, ...] | None:
    return None if args.project is None else tuple(args.project)


def build_export_result(receipt: ExportReceipt) -> Result:
    """Return the result of an export for people and as JSON, with its exit code."""
    name, contents = receipt.memory, f"{format_count(receipt.files, 'file')}, {format_size(receipt.bytes)}"
    added = (
        f"{format_size(receipt.packed_bytes)} added to the store ({receipt.kind})"
        if receipt.packed_bytes
        else "nothing added"
    )
    kept = f"Kept as {receipt.snapshot}" if receipt.snapshot else "Nothing kept"
    beside = f"beside the head ({receipt.head})" if receipt.head else "as there is no head that can be read"
    still = f"the head did not move ({receipt.head or 'there is none that can be read'})"
    first = {
        ExportOutcome.COMMITTED: f"{name}: committed {receipt.snapshot}; {contents}; {added}.",
        ExportOutcome.UNCHANGED: f"{name}: unchanged since {receipt.snapshot}; {contents}; nothing added.",
        ExportOutcome.DIVERGED: f"{name}: diverged. {kept}, {beside}.",
        ExportOutcome.REJECTED: f"{name}: rejected. {kept}; {still}.",
        ExportOutcome.PENDING: f"{name}: pending. {kept}; {still} until somebody accepts it.",
    }[receipt.outcome]
    words: list[str | Table] = [first]
    if receipt.snapshot and receipt.outcome in EXPORT_EXITS:
        if receipt.may_be_accepted:
            words.append(f"To make it the head: memory-sidecar accept {receipt.memory} {receipt.snapshot}")
        else:
            words.append("The decision stays. To go on from the head, restore it into this sandbox.")
        if receipt.outcome is ExportOutcome.PENDING:
            words.append(f"To keep it from that: memory-sidecar decline {receipt.memory} {receipt.snapshot}")
    if receipt.reason is not None and receipt.reason.code in REASONS:
        words.append(f"To let this be next time: --allow {receipt.reason.code}")
    words += _describe_dropped(receipt) + _describe_findings(receipt)
    return Result(
        _build_document(receipt.as_dict()), words + _describe_receipt(receipt), EXPORT_EXITS.get(receipt.outcome, 0)
    )


def _describe_dropped(receipt: ExportReceipt) -> list[str]:
    shown = [
        f"Dropped: {row.path} ({format_size(row.bytes)}, {row.tier}, {row.reason})"
        for row in receipt.dropped[:MOST_SHOWN]
    ]
    more = receipt.dropped_files - sum(not row.path.endswith("/") for row in receipt.dropped[:MOST_SHOWN])
    lists = f"lists up to {len(receipt.dropped):,} paths" if receipt.dropped_more else "lists them"
    return shown + ([f"Dropped: {format_count(more, 'more file')}; --json {lists}."] if more > 0 else [])


def _describe_findings(receipt: ExportReceipt) -> list[str]:
    """Describe where private passages or credentials were found; never their contents."""
    shown = [
        f"{row.action.capitalize()}: {row.name} in {row.path} {row.position}" for row in receipt.findings[:MOST_SHOWN]
    ]
    more = sum(receipt.found.values()) - len(shown)
    told = [f"And {more:,} more; --json lists up to {len(receipt.findings)}."] if more > 0 else []
    return shown + told + ([receipt.scrubbed.words] if receipt.scrubbed.words else [])


def build_restore_result(receipt: RestoreReceipt) -> Result:
    """Return the result of a restore for people and as JSON, with its exit code."""
    contents = f"{format_count(receipt.files, 'file')}, {format_size(receipt.bytes)}"
    done = f"{receipt.memory}: restored {receipt.snapshot} into {receipt.sandbox}; {contents}."
    if receipt.kept:
        done = (
            f"{receipt.memory}: {receipt.sandbox} holds {receipt.snapshot} already and was left as it is; {contents}."
        )
    first = {
        RestoreOutcome.COMPLETE: done,
        RestoreOutcome.INCOMPLETE: f"{receipt.memory}: NOT restored into {receipt.sandbox}; what it had is kept.",
        RestoreOutcome.EMPTY: f"{receipt.memory}: nothing to restore yet; a first start.",
    }[receipt.outcome]
    words: list[str | Table] = [first]
    if receipt.saved_first:
        memory = receipt.saved_first_memory or receipt.memory
        words.append(
            f"Saved first: {receipt.saved_first} of {memory}. To see it: memory-sidecar diff {memory} {receipt.saved_first}"
        )
    if receipt.set_aside:
        aside = receipt.set_aside
        words.append(
            f"Set aside in the sandbox: {format_count(aside.files, 'file')}, {format_size(aside.bytes)}, in {aside.path}"
        )
    if receipt.only:
        words.append(f"Only a part of it: {', '.join(receipt.only)}. What else is in the sandbox was left as it is.")
    if receipt.brief and receipt.brief.path:
        words.append(f"What to read first is in {receipt.brief.path}, at most {receipt.brief.tokens:,} tokens.")
    if receipt.read_only:
        words.append("To be read only: what this sandbox exports is stored beside the head.")
    return Result(
        _build_document(receipt.as_dict()), [*words, *_describe_receipt(receipt)], RESTORE_EXITS.get(receipt.outcome, 0)
    )


def _build_document(receipt: dict[str, Any]) -> dict[str, Any]:
    """Return a receipt as a JSON document, the outcome first. A reason appears as ``error`` too, as in a failed
    command."""
    document = {"outcome": receipt.pop("outcome"), **receipt}
    if receipt["reason"]:
        document["error"] = receipt["reason"]
    return document


def _describe_receipt(receipt: ExportReceipt | RestoreReceipt) -> list[str | Table]:
    words: list[str | Table] = []
    if receipt.home:
        words.append(f"In the home {receipt.home}{f', as {receipt.user}' if receipt.user else ''}.")
    if receipt.reason is not None:
        words.append(f"Why: {receipt.reason.headline} [{receipt.reason.code}]")
        words += [f"    {line}" for line in receipt.reason.message.split("\n")[1:]]
    words += [f"Warning: {warning}" for warning in receipt.warnings]
    words += [f"Database {row.path}: {row.method}, check {row.check}" for row in receipt.databases]
    if receipt.skipped:
        shown = ", ".join(f"{skip.path} ({skip.reason})" for skip in receipt.skipped[:5])
        words.append(f"Left out: {shown}{f' and {len(receipt.skipped) - 5} more' if len(receipt.skipped) > 5 else ''}")
    if isinstance(receipt, ExportReceipt) and receipt.not_taken:
        counts = ", ".join(f"{count:,} in {root}" for root, count in receipt.not_taken.items())
        words.append(f"Seen there and not part of the layout: {counts}.")
    if isinstance(receipt, ExportReceipt) and receipt.databases_not_taken:
        words.append(
            f"Databases among it: {', '.join(receipt.databases_not_taken)}. A layout in the config can take them."
        )
    words.append(
        f"{format_count(receipt.round_trips, 'round trip')}, {format_size(receipt.transferred_bytes)} transferred,"
        f" {receipt.duration_ms} ms"
    )
    return words
