"""The audit as it is read: the lines of all chains, from the store or a file, as calls and what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from datetime import datetime
from pathlib import Path

import msgspec

from sidecar.audit.lines import Kind, Line, decode_latest, decode_line
from sidecar.audit.verification import ChainCheck, Finding, Piece, Tail, find_cuts
from sidecar.errors import ObjectRefused, UsageError
from sidecar.format.checksums import decode_checksummed
from sidecar.host.values import dataclass
from sidecar.host.work import gather_few
from sidecar.ids import AUDIT_LATEST, AUDIT_LINES, AUDIT_TAILS, AuditKeys
from sidecar.ports import ObjectInfo, Store

PARALLEL = 8
MOST_TRIES = 10
MAYBE = "may have happened"
"""The outcome of a call that was begun and of which nothing more is told: the process died, or it is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRow:
    """A call, from its intent and its outcome."""

    at: str
    who: str
    by: str
    what: str
    memory: str
    also: str
    snapshot: str
    sandbox: str
    source: str
    request: str
    call: str
    outcome: str
    status: int
    chain: str


@dataclass(slots=True)
class AuditFound:
    """What was read."""

    lines: list[Line] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    chains: int = 0


@dataclass(slots=True)
class ChainObjects:
    """The objects of one chain, as they are listed."""

    lines: list[ObjectInfo] = field(default_factory=list)
    tail: ObjectInfo | None = None

    @property
    def written(self) -> float:
        """When it was last written, by the store's clock."""
        return max((info.modified for info in [*self.lines, *([self.tail] if self.tail else [])]), default=0.0)


async def list_chains(store: Store) -> tuple[dict[str, ChainObjects], list[Finding]]:
    """Return the chains of an audit in the store, and findings about objects that do not belong there."""
    chains: dict[str, ChainObjects] = {}
    async for info in store.list(AUDIT_TAILS):
        chains.setdefault(AuditKeys.parse_tail(info.key), ChainObjects()).tail = info
    findings: list[Finding] = []
    async for info in store.list(AUDIT_LINES):
        try:
            chains.setdefault(AuditKeys.parse_lines(info.key)[0], ChainObjects()).lines.append(info)
        except ValueError:
            chain = info.key.removeprefix(AUDIT_LINES).partition("/")[0]
            findings.append(Finding(chain=chain, problem="It is no object of an audit.", where=info.key))
    return chains, findings


async def read_store(store: Store, *, since: float = 0.0) -> AuditFound:
    """Read and check the audit in a store. ``since``: chains that were last written before that time are left out.

    Processes may write to it meanwhile, and put a large object in the place of small ones. So, if something seems wrong,
    all of it is read once more.
    """
    found = await _StoreRead(store).read(since)
    return await _StoreRead(store).read(since) if found.findings else found


class _StoreRead:
    """One pass over an audit. What says that there are more lines is read before the lines."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._checks: dict[str, ChainCheck] = {}
        self._tails: dict[str, Tail | None] = {}

    async def read(self, since: float) -> AuditFound:
        findings: list[Finding] = []
        latest = await _read_latest(self._store, findings)
        tails = [AuditKeys.parse_tail(info.key) async for info in self._store.list(AUDIT_TAILS)]
        await gather_few(self._read_tail, tails, PARALLEL)
        chains, strange = await list_chains(self._store)
        wanted = {chain: objects for chain, objects in chains.items() if objects.written >= since}
        await gather_few(self._read_tail, [chain for chain in wanted if chain not in self._tails], PARALLEL)
        await gather_few(lambda chain: self._read_chain(chain, wanted[chain].lines), wanted, PARALLEL)
        whole, found = len(wanted) == len(chains), AuditFound(chains=len(wanted))
        # Which lines may be missing is told by lines of other chains.
        cuts = find_cuts(line for check in self._checks.values() for line in check.known)
        for chain in sorted(wanted):
            check = self._check(chain)
            found.lines += check.finish(self._tails[chain], cuts.get(chain), needs_tail=True, whole=whole)
            found.findings += check.findings
        missing = _find_missing(found.lines, latest, chains) if whole else []
        found.findings = [*findings, *strange, *missing, *found.findings]
        return found

    def _check(self, chain: str) -> ChainCheck:
        return self._checks.setdefault(chain, ChainCheck(chain))

    async def _read_tail(self, chain: str) -> None:
        try:
            self._tails[chain] = await _read_tail(self._store, chain)
        except (ValueError, ObjectRefused) as problem:
            self._check(chain).report(f"Its tail was altered: {problem}.", AuditKeys(chain).tail)
            self._tails[chain] = Tail(0, "")

    async def _read_chain(self, chain: str, listed: Sequence[ObjectInfo]) -> None:
        """Read the lines of a chain. If some are gone since they were listed, another object has taken their place."""
        read: set[str] = set()
        for _ in range(MOST_TRIES):
            keys = [info.key for info in listed if info.key not in read]
            there = await gather_few(lambda key: self._read_lines(chain, key), keys, PARALLEL)
            read |= {key for key, found in zip(keys, there, strict=True) if found}
            if all(there):
                return
            listed = [info async for info in self._store.list(f"{AUDIT_LINES}{chain}/") if _is_lines(info.key)]

    async def _read_lines(self, chain: str, key: str) -> bool:
        """Read the lines in one object. Return whether it is there."""
        _, first, last, digest = AuditKeys.parse_lines(key)
        try:
            stored = await self._store.get(key)
        except ObjectRefused as problem:
            self._check(chain).report(problem.message, key, first)
            return True
        if stored is not None:
            self._check(chain).add_piece(Piece(key, stored.data, first, last, digest))
        return stored is not None


def _is_lines(key: str) -> bool:
    try:
        return bool(AuditKeys.parse_lines(key))
    except ValueError:
        return False


async def _read_latest(store: Store, findings: list[Finding]) -> str:
    """Return the chain that was begun last, as the store says; empty if it does not."""
    try:
        stored = await store.get(AUDIT_LATEST)
        return "" if stored is None else decode_latest(stored.data)
    except (ValueError, ObjectRefused) as problem:
        findings.append(Finding(chain="", problem=f"It was altered: {problem}.", where=AUDIT_LATEST))
        return ""


def _find_missing(lines: Sequence[Line], latest: str, chains: Mapping[str, ChainObjects]) -> list[Finding]:
    """Return chains that others name and of which nothing is there, though none was cut off."""
    cuts = find_cuts(lines)
    if not latest and any(line.after for line in lines):
        return [
            Finding(chain="", problem="It is missing, which names the chain that was begun last.", where=AUDIT_LATEST)
        ]
    named = {line.after: f"chain {line.chain} followed it" for line in lines if line.after}
    if latest:
        named[latest] = f"{AUDIT_LATEST} names it"
    return [
        Finding(chain=chain, problem=f"All of it is missing: {why}.")
        for chain, why in named.items()
        if chain not in chains and chain not in cuts
    ]


async def _read_tail(store: Store, chain: str) -> Tail | None:
    """Return the tail of a chain; ``None`` if it is gone. Raise ``ValueError`` or ``ObjectRefused``."""
    stored = await store.get(AuditKeys(chain).tail)
    if stored is None:
        return None
    value = decode_checksummed(stored.data)
    if value.pop("chain", None) != chain:
        raise ValueError("it belongs to another chain")
    try:
        return msgspec.convert(value, Tail)
    except msgspec.ValidationError as problem:
        raise ValueError(str(problem)) from None


async def read_file(path: Path) -> AuditFound:
    """Read and check the audit in a file, to which several processes may have written. Raise ``UsageError`` if it
    cannot be read."""
    try:
        data = await asyncio.to_thread(path.read_bytes)
    except OSError as problem:
        raise UsageError(f"The audit {path} cannot be read: {problem.strerror}.") from None
    found = AuditFound()
    checks: dict[str, ChainCheck] = {}
    rows = data.split(b"\n")
    for place, row in enumerate(rows, 1):
        if not row:
            continue
        where = f"{path}:{place}"
        try:
            chain = decode_line(row).chain
        except ValueError as problem:
            found.findings.append(Finding(chain="", problem=f"It is {problem}.", where=where))
            continue
        checks.setdefault(chain, ChainCheck(chain)).add_line(row, where)
    cuts = find_cuts(line for check in checks.values() for line in check.known)
    for chain, check in checks.items():
        found.lines += check.finish(None, cuts.get(chain), needs_tail=False)
        found.findings += check.findings
    found.chains = len(checks)
    return found


def list_calls(lines: Iterable[Line], *, memory: str = "", since: datetime | None = None) -> list[CallRow]:
    """Return the calls in these lines, by time: each once, with its outcome or ``MAYBE``."""
    begun: dict[tuple[str, str], Line] = {}
    ended: dict[tuple[str, str], Line] = {}
    for line in lines:
        if line.kind == Kind.INTENT:
            begun[line.chain, line.call] = line  # a later intent of the same call knows more
        elif line.kind == Kind.OUTCOME:
            ended[line.chain, line.call] = line
    rows = [
        (first.at, first.chain, first.n, _build_row(first, ended.get(key))) for key, first in {**ended, **begun}.items()
    ]
    return [
        row
        for at, _, _, row in sorted(rows, key=lambda found: found[:3])
        if (not memory or memory in (row.memory, row.also)) and (since is None or datetime.fromisoformat(at) >= since)
    ]


def _build_row(first: Line, outcome: Line | None) -> CallRow:
    """Return a call from its first line, which may be its outcome, and its outcome."""
    last = outcome or first
    same = {name: getattr(last, name) for name in CallRow.__dataclass_fields__ if name not in ("at", "outcome")}
    return CallRow(**same, at=first.at, outcome=outcome.outcome if outcome else MAYBE)
